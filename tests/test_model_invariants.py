"""Each invariant of the forward pass fails once what it guards is broken."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from model_draws import EXPERTS, FULL, LINEAR, draw_config, draw_ids
from test_model import held

from qwen35conv.model.delta_rule import DeltaRule
from qwen35conv.model.paged_cache import PagedKVCache
from qwen35conv.model.quantized_cache import QuantizedKVCache
from qwen35conv.model.rollback import DeltaRound
from qwen35conv.model.rope import RotaryEmbedding
from qwen35conv.model.span import Span, span_of
from qwen35conv.verify.check import Check
from qwen35conv.verify.invariants import check_invariants

CONFIG: dict[str, Any] = {
    "head_dim": 64,
    "rope_parameters": {"partial_rotary_factor": 0.25},
    "num_hidden_layers": 2,
    "layer_types": [LINEAR, FULL],
}


def found(dtype: mx.Dtype = mx.float32, **changes: Any) -> Check:
    config = draw_config(**CONFIG, **changes)
    return check_invariants(held(config, dtype), draw_ids(config, 1, 13))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_a_sound_model_passes_them_all(dtype: mx.Dtype, experts: dict[str, Any]) -> None:
    check = found(dtype, **experts)
    assert check.passed is True, check.summary
    exact = ("appended", "rollback", "rows apart", "put in its place", "outlive", "text positions", "second run")
    for word in exact:
        assert [value for name, value in check.details if word in name] == [0.0]
    assert sum("bits" in name for name, _ in check.details) == 2


def last_places(self: DeltaRule, window: mx.array, lengths: tuple[int, ...]) -> mx.array:
    return mx.take(window, mx.arange(window.shape[1] - self.n_kept, window.shape[1]), axis=1)


def a_slice(self: DeltaRule, window: mx.array, lengths: tuple[int, ...]) -> mx.array:
    if len(set(lengths)) > 1:
        return TAIL(self, window, lengths)
    return window[:, lengths[0] : lengths[0] + self.n_kept]


def no_mask(self: Span) -> None:
    return None


def stepping(self: Span, t: int) -> Span:
    return span_of(1, [begin + t + 1 for begin in self.begins])


def squared(self: RotaryEmbedding, positions: mx.array) -> mx.array:
    return ANGLES(self, positions) ** 2


def turned_pages(self: PagedKVCache, pool: mx.array, table: mx.array, n_keys: int) -> mx.array:
    return GATHERED(self, pool, table[:, ::-1], n_keys)


def sharper(self: QuantizedKVCache, queries: mx.array, scale: float, span: Span) -> mx.array:
    return ATTEND(self, queries, 1.5 * scale, span)


TAIL, ANGLES, GATHERED = DeltaRule.tail, RotaryEmbedding.angles, PagedKVCache._gathered
ATTEND, KEPT = QuantizedKVCache.attend, DeltaRound.kept


@pytest.mark.parametrize(
    ("owner", "name", "broken", "words"),
    [
        (DeltaRound, "kept", lambda self, lengths: KEPT(self, (max(lengths),) * len(lengths)), "after a rollback"),
        (DeltaRound, "kept", lambda self, _: (self.tail, self.state), "after a rollback"),
        (DeltaRule, "tail", last_places, "padded on the right"),
        (DeltaRule, "tail", last_places, "padded on the left"),
        (DeltaRule, "tail", a_slice, "bytes that outlive"),
        (Span, "mask", no_mask, "padded on the right"),
        (Span, "step", stepping, "in appended tokens"),
        (RotaryEmbedding, "angles", squared, "by the rotary of three axes"),
        (PagedKVCache, "_gathered", turned_pages, "over pages"),
        (QuantizedKVCache, "attend", sharper, "of 8 bits"),
        (QuantizedKVCache, "attend", sharper, "of 4 bits"),
    ],
)
def test_what_is_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, broken: object, words: str
) -> None:
    monkeypatch.setattr(owner, name, broken)
    monkeypatch.setattr("qwen35conv.verify.invariants._SLACK", 800)  # a window of this model has 12 KB
    check = found()
    assert check.passed is False
    value = next(value for label, value in check.details if words in label)
    assert isinstance(value, float)
    assert value > 1e-3


@pytest.mark.parametrize(
    ("place", "broken", "words"),
    [
        ("verify.invariants.swiglu", lambda gate, up: gate * up, "SwiGLU"),
        ("verify.invariants.plain_convolution", lambda w, t: mx.conv1d(w, t, groups=w.shape[-1]), "put in its place"),
        ("verify.invariants.plain_convolution", lambda w, t: mx.conv1d(w, t, groups=w.shape[-1]), "sum over"),
        ("verify.invariants.rows_apart", lambda _, rows, *__: [mx.abs(row) for row in rows], "rows apart"),
    ],
)
def test_what_is_put_in_a_wrong_place_is_named(
    monkeypatch: pytest.MonkeyPatch, place: str, broken: object, words: str
) -> None:
    monkeypatch.setattr(f"qwen35conv.{place}", broken)
    check = found()
    assert check.passed is False
    assert next(value for label, value in check.details if words in label) != 0


def test_a_number_that_is_none_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeltaRound, "kept", lambda self, _: (self.tail * np.nan, self.state * np.nan))
    check = found()
    assert check.passed is False
    assert "after a rollback" in check.summary
