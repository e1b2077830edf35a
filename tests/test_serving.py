"""The calls of a serving engine give the same on a sound model, and each fails once what it guards is broken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from model_draws import EXPERTS, FULL, LINEAR, draw_config, draw_ids
from test_model import held

from qwen35conv.model.cache import Cache
from qwen35conv.model.decoder import Block, Decoder
from qwen35conv.model.lora import LoraTarget
from qwen35conv.model.profile import Profile
from qwen35conv.verify.check import Check
from qwen35conv.verify.serving import check_serving, first_layers

CONFIG: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [LINEAR, FULL, LINEAR]}
HIDDEN, SHIFTED, MOVE = Decoder.hidden, Block.__call__, Cache.move


def decoder_of(dtype: mx.Dtype = mx.float32, **changes: Any) -> Decoder:
    return held(draw_config(**CONFIG, **changes), dtype)


def targets_of(decoder: Decoder) -> list[LoraTarget]:
    hidden, inner = decoder.config.hidden_size, decoder.config.intermediate_size
    layer = "language_model.model.layers.1"
    found = [
        LoraTarget(f"{layer}.self_attn.k_proj", hidden, decoder.config.n_kv_heads * decoder.config.head_dim, 0, None)
    ]
    if not decoder.config.n_experts:
        found.append(LoraTarget(f"{layer}.mlp.down_proj", inner, hidden, 0, None))
    return found


def found(decoder: Decoder, targets: Sequence[LoraTarget] | None = None) -> Check:
    ids = draw_ids(decoder.config, 1, 13)
    return check_serving(decoder, ids, targets_of(decoder) if targets is None else targets)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_a_sound_model_passes_them_all(dtype: mx.Dtype, experts: dict[str, Any]) -> None:
    check = found(decoder_of(dtype, **experts))
    assert check.passed is True, check.summary
    assert all(value == 0 for name, value in check.details if name.endswith("size") and "prefill" not in name)


def forgetful_keep(self: Cache, kept: Sequence[int]) -> None:
    self.lengths = [n - 1 for n in self.lengths]


def states_kept(self: Cache, kept: Sequence[int]) -> None:
    assert self.last is not None
    self.lengths = [begin + n for begin, n in zip(self.last.begins, kept, strict=True)]


def unstepped(self: Decoder, ids: np.ndarray, cache: Cache | None = None, *args: Any, **options: Any) -> mx.array:
    y = HIDDEN(self, ids, cache, *args, **options)
    return y + 1e-3 if options.get("stepwise") else y


def stuck(self: Cache, span: Any) -> None:
    MOVE(self, span)
    if span.n_steps > 4:
        self.lengths = [n - 1 for n in self.lengths]


@pytest.mark.parametrize(
    ("place", "broken", "words"),
    [
        ("model.cache.Cache.keep", forgetful_keep, "a rollback's state"),
        ("model.cache.Cache.keep", states_kept, "the token after a rollback"),
        ("model.decoder.Decoder.hidden", unstepped, "append against single tokens"),
        ("model.cache.Cache.move", stuck, "row 0's length"),
        ("verify.serving.independent_rows", lambda _, rows, __: [mx.ones((1, len(r), 1)) for r in rows], "rows apart"),
        ("verify.serving.prefill", lambda d, ids, cache, **_: d.hidden(ids, cache)[:, :1], "prefill of row 1"),
        ("model.capture.Capture.__call__", lambda self, i, x: self.states.update({i: 2 * x + 1}), "captures"),
        ("verify.serving.profile", lambda *_, **__: Profile(1, 1, ()), "a profiled run"),
    ],
)
def test_what_is_broken_is_named(monkeypatch: pytest.MonkeyPatch, place: str, broken: object, words: str) -> None:
    monkeypatch.setattr(f"qwen35conv.{place}", broken)
    check = found(decoder_of())
    assert check.passed is False
    assert any(words in name and value != 0 for name, value in check.details)


def test_a_listed_target_of_another_width_is_found() -> None:
    decoder = decoder_of()
    targets = [replace(target, n_outputs=target.n_outputs + 1) for target in targets_of(decoder)]
    assert "LoRA targets" in found(decoder, targets).summary
    assert "without a LoRA target" in found(decoder, []).summary


def test_a_streamed_model_is_asked_as_far_as_its_first_attention() -> None:
    decoder = replace(decoder_of(), keep=False)
    assert first_layers(decoder, 3000, 1000).config.layer_kinds == decoder.config.layer_kinds[:2]
    assert [first_layers(decoder, 3000, allowed).keep for allowed in (1999, 2000)] == [False, True]
    assert first_layers(replace(decoder, keep=True), 3000, 0).config is decoder.config
    assert found(first_layers(decoder, 3000, 0)).passed is True
