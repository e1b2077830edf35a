"""Rotary positions of three axes, and the places where others plug in: convolutions, hooks, a profile, adapters."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from model_draws import EXPERTS, Held, draw_config, draw_ids, draw_tensors, oracle
from safetensors.numpy import load_file
from test_model import decoder_of, distance, held, mlx_lm_of, opened, same

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import LayerKind
from qwen35conv.model.capture import Capture
from qwen35conv.model.decoder import load_decoder
from qwen35conv.model.delta_rule import plain_convolution
from qwen35conv.model.feed_forward import swiglu
from qwen35conv.model.gated_delta_net import GatedDeltaNet
from qwen35conv.model.lora import lora_targets
from qwen35conv.model.profile import Phase, profile
from qwen35conv.model.rope import RotaryEmbedding
from qwen35conv.model.span import CallError, span_of
from qwen35conv.model.weights import Weights

DATA = Path(__file__).parent / "data"
CASES: dict[str, dict[str, Any]] = json.loads((DATA / "mrope.json").read_text())["cases"]
ROTARY = RotaryEmbedding(16, 1e4, (3, 3, 2), interleaved=True)


def text_positions(*begins: int, n_steps: int) -> np.ndarray:
    rows = np.array(begins)[:, None] + np.arange(n_steps)
    return np.broadcast_to(rows, (3, *rows.shape))


def image_positions(n_steps: int) -> np.ndarray:
    """Two rows: text, then an image of 2 by 3 that shares one time, then text."""
    positions = text_positions(0, 0, n_steps=n_steps).copy()
    places = np.arange(6)
    for row, at in enumerate((2, 1)):
        positions[:, row, at : at + 6] = at + np.stack([0 * places, places // 3, places % 3])
        positions[:, row, at + 6 :] = at + 3 + np.arange(n_steps - at - 6)
    return positions


@pytest.mark.parametrize("case", CASES)
def test_angles_are_those_of_transformers(case: str) -> None:
    sizes, judge = CASES[case], load_file(DATA / "mrope.safetensors")
    dims = int(sizes["head_dim"] * sizes["partial_rotary_factor"])
    rotary = RotaryEmbedding(dims, sizes["rope_theta"], tuple(sizes["mrope_section"]), interleaved=True)
    angles = rotary.angles(mx.array(judge["positions"]))
    for name, found in (("cos", mx.cos(angles)), ("sin", mx.sin(angles))):
        wanted = judge[f"{case}.{name}"]
        assert np.abs(np.concatenate([found, found], axis=-1) - wanted).max() < 2e-5
    other = replace(rotary, section=(dims // 2, 0, 0)).angles(mx.array(judge["positions"]))
    assert distance(other, angles) > 1


@pytest.mark.parametrize("case", CASES)
def test_heads_are_turned_as_transformers_turns_them(case: str) -> None:
    sizes, judge = CASES[case], load_file(DATA / "mrope.safetensors")
    cos, sin = (judge[f"{case}.{name}"][:, None] for name in ("cos", "sin"))
    dims = cos.shape[-1]
    rotary = RotaryEmbedding(dims, sizes["rope_theta"], tuple(sizes["mrope_section"]), interleaved=True)
    x = np.random.default_rng(0).standard_normal((2, 3, 7, sizes["head_dim"])).astype(np.float32)
    first, second = x[..., : dims // 2], x[..., dims // 2 : dims]
    turned = x[..., :dims] * cos + np.concatenate([-second, first], axis=-1) * sin
    wanted = np.concatenate([turned, x[..., dims:]], axis=-1)
    y = rotary(mx.array(x), span_of(7, [0, 0], positions=judge["positions"]))
    assert np.abs(np.array(y) - wanted).max() < 1e-4


def test_sections_that_are_not_interleaved_follow_each_other() -> None:
    assert replace(ROTARY, interleaved=False).axes().tolist() == [0, 0, 0, 1, 1, 1, 2, 2]
    assert ROTARY.axes().tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    with pytest.raises(CheckpointError, match="mrope_section"):
        replace(ROTARY, interleaved=False, section=(3, 3, 3)).axes()


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
def test_text_positions_in_three_axes_have_the_bits_of_the_plain_rotary(dtype: mx.Dtype) -> None:
    x = mx.random.normal((2, 3, 9, 40), key=mx.random.key(0)).astype(dtype)
    for begins in ((0, 0), (5, 5), (3, 11)):
        span = span_of(9, begins, positions=text_positions(*begins, n_steps=9))
        assert span.positions is None
        plain = mx.fast.rope(x, 16, traditional=False, base=1e4, scale=1.0, offset=mx.array(begins))
        assert same(ROTARY(x, span), plain)
        apart = replace(span, positions=mx.array(text_positions(*begins, n_steps=9)))  # by the other way
        assert distance(ROTARY(x, apart), plain) < {mx.float32: 1e-5}.get(dtype, 3e-2)


def test_text_positions_in_three_axes_have_the_bits_of_a_run_without() -> None:
    decoder = held(draw_config())
    ids = draw_ids(decoder.config, 2, 8)
    assert same(decoder(ids, positions=text_positions(0, 0, n_steps=8)), decoder(ids))
    shifted = decoder(ids, positions=text_positions(40, 40, n_steps=8))
    assert not same(shifted, decoder(ids))
    assert distance(shifted, decoder(ids)) < 1e-3  # distances between positions are all that counts


def test_positions_of_images_go_on_at_decode_and_in_any_padding() -> None:
    decoder = held(draw_config())
    ids, positions = draw_ids(decoder.config, 2, 11), image_positions(11)
    whole = decoder(ids, positions=positions)
    assert distance(whole, decoder(ids)) > 1e-2
    cache = decoder.make_cache(batch=2)
    parts = [decoder(ids[:, :9], cache, positions=positions[..., :9])]
    assert cache.rotary_shifts == [-3, -3]
    parts += [decoder(ids[:, t : t + 1], cache) for t in (9, 10)]  # positions follow from what came before
    assert distance(mx.concatenate(parts, axis=1), whole) < 1e-4
    mask = np.array([[False] * 2 + [True] * 11, [True] * 11 + [False] * 2])
    pad = [np.zeros((*x.shape[:-2], 1, 2), x.dtype) for x in (ids, positions)]
    ids, positions = (
        np.concatenate([np.concatenate([p, x[..., :1, :]], -1), np.concatenate([x[..., 1:, :], p], -1)], -2)
        for p, x in zip(pad, (ids, positions), strict=True)
    )
    padded = decoder(ids, mask=mask, positions=positions)
    assert distance(padded[0, 2:], whole[0]) < 1e-4
    assert distance(padded[1, :11], whole[1]) < 1e-4
    stepped = decoder(ids, mask=mask, positions=positions, stepwise=True)
    assert distance(stepped[0, 2:], whole[0]) < 1e-4


def test_positions_and_lengths_of_another_shape_are_refused() -> None:
    with pytest.raises(CallError, match=r"positions: expected \[3, 2, 4\]"):
        span_of(4, [0, 0], positions=np.zeros((2, 4), int))
    for lengths in ([5, 0], [1], [-1, 2]):
        with pytest.raises(CallError, match="lengths"):
            span_of(4, [0, 0], lengths)


def by_taps(window: mx.array, taps: mx.array) -> mx.array:
    """The convolution as a sum over its taps, in float32."""
    n_steps = window.shape[1] - taps.shape[1] + 1
    wide = window.astype(mx.float32)
    parts = [wide[:, k : k + n_steps] * taps[:, k, 0].astype(mx.float32) for k in range(taps.shape[1])]
    y = mx.stack(parts).sum(axis=0)
    return (y * mx.sigmoid(y)).astype(window.dtype)


def test_a_convolution_is_replaced_in_the_layers_that_are_named() -> None:
    config = draw_config()
    tensors = Held(draw_tensors(config))
    seen: list[tuple[int, ...]] = []

    def counted(window: mx.array, taps: mx.array) -> mx.array:
        seen.append(window.shape)
        return by_taps(window, taps)

    ids = draw_ids(config, 2, 6)
    plain = load_decoder(config, Weights(tensors, {}), tied=False, backend="ops")
    other = load_decoder(config, Weights(tensors, {}), tied=False, backend="ops", convolutions={2: counted})
    cache = other.make_cache(batch=2)
    assert distance(other(ids, cache), plain(ids)) < 1e-4
    assert seen == [(2, 9, config.conv_size)]
    cache.record()
    other(ids[:, :3], cache)
    cache.keep([1, 2])
    assert seen[1:] == [(2, 6, config.conv_size), (2, 5, config.conv_size)]  # a rollback takes it too


def test_a_replaced_convolution_must_return_the_new_positions_alone() -> None:
    net = held(draw_config()).block(0).mixer
    assert isinstance(net, GatedDeltaNet)
    x = mx.random.normal((1, 5, 96), key=mx.random.key(0))
    for wrong in (lambda w, _: w, lambda w, t: plain_convolution(w, t).astype(mx.float16)):
        with pytest.raises(CallError, match="convolution: expected"):
            net.with_convolution(wrong)(x, span_of(5, [0]))


def test_a_capture_keeps_what_leaves_the_chosen_layers() -> None:
    config = draw_config()
    decoder, capture = held(config), Capture([0, 2])
    everything: dict[int, mx.array] = {}
    ids = draw_ids(config, 1, 6)
    hidden = decoder.hidden(ids, on_layer=capture)
    decoder.hidden(ids, on_layer=everything.__setitem__)
    assert sorted(capture.states) == [0, 2]
    assert all(same(capture.states[i], everything[i]) for i in (0, 2))
    assert same(decoder.final_norm(capture.states[2]), hidden)


@pytest.mark.parametrize("experts", [{}, EXPERTS])
def test_a_profile_times_each_phase_of_each_kind_and_moves_the_cache(experts: dict[str, Any]) -> None:
    config = draw_config(**experts)
    decoder = held(config)
    ids = draw_ids(config, 2, 12)
    cache, plain = decoder.make_cache(batch=2), decoder.make_cache(batch=2)
    found = profile(decoder, ids, cache, n_repeats=2)
    phases = {(entry.kind, entry.phase): entry for entry in found.times}
    full = {(LayerKind.FULL, phase) for phase in Phase if phase is not Phase.CONV}
    assert set(phases) == full | {(LayerKind.LINEAR, phase) for phase in Phase}
    assert phases[LayerKind.LINEAR, Phase.KERNEL].n_layers == 2
    assert all(entry.seconds > 0 for entry in found.times)
    assert sum(found.share(entry) for entry in found.times) == pytest.approx(1)
    decoder.hidden(ids, plain)
    further = draw_ids(config, 2, 1, seed=3)
    assert same(decoder(further, cache), decoder(further, plain))


def test_a_profile_sees_where_the_time_goes() -> None:
    config = draw_config()
    fast, slow = (
        load_decoder(config, Weights(Held(draw_tensors(config)), {}), tied=False, backend="ops", keep=True)
        for _ in range(2)
    )

    def heavy(window: mx.array, taps: mx.array) -> mx.array:
        time.sleep(0.03)
        return plain_convolution(window, taps)

    slow.convolutions = {0: heavy, 2: heavy}
    ids = draw_ids(config, 1, 3)
    shares = [
        sum(p.share(entry) for entry in p.times if entry.phase is Phase.CONV)
        for p in (profile(fast, ids), profile(slow, ids))
    ]
    assert shares[1] > 0.5 > shares[0]


@pytest.mark.parametrize("case", ["raw-dense-text-tied", "raw-moe-vl-mtp", "raw-names-quantised-mtp"])
def test_adapters_may_target_every_linear_module_of_mlx_lm(case: str) -> None:
    folder = oracle(case) / "src"
    config, plan, _ = opened(folder)
    found = {target.module: target for target in lora_targets(plan)}
    wanted = {
        name: module
        for name, module in mlx_lm_of(folder).named_modules()  # type: ignore[no-untyped-call]
        if "Linear" in type(module).__name__  # plain, quantised, and both stacked for experts
    }
    assert set(found) == set(wanted)
    for name, target in found.items():
        module = wanted[name]
        assert (target.packing is not None) == ("Quantized" in type(module).__name__)
        assert (target.n_experts > 0) == ("Switch" in type(module).__name__)
        weight = module["weight"]
        if target.packing is None:
            assert weight.shape[-2:] == (target.n_outputs, target.n_inputs)
        else:
            assert weight.shape[-1] * 32 == target.n_inputs * target.packing.bits
    assert ("language_model.lm_head" in found) is not plan.tied
    assert config.n_layers > 1


def test_opaque_modules_are_no_targets() -> None:
    _, plan, _ = opened(oracle("raw-names-quantised-mtp") / "src")
    module = next(name for name, packing in plan.packing.items() if packing is not None and name.endswith("q_proj"))
    packing = plan.packing[module]
    assert packing is not None
    foreign = replace(plan, packing={**plan.packing, module: replace(packing, mode="trellis")})
    before, after = ({target.module for target in lora_targets(p)} for p in (plan, foreign))
    assert before - after == {module}


def test_silu_and_swiglu_are_compiled_and_have_the_bits_of_mlx_lm() -> None:
    activations = pytest.importorskip("mlx_lm.models.activations", reason="mlx-lm is not installed (extra: judges)")
    x, y = (mx.random.normal((5, 33), key=mx.random.key(i)) for i in range(2))
    for dtype in (mx.float32, mx.bfloat16, mx.float16):
        gate, up = x.astype(dtype), y.astype(dtype)
        assert same(swiglu(gate, up), activations.swiglu(gate, up))
    for f, inputs in ((swiglu, (x, y)), (nn.silu, (x,))):
        graph = f(*inputs)
        names = exported(graph)
        assert "Compiled" in names
        assert "Sigmoid" not in names.replace("CompiledSigmoid", "")


def exported(y: mx.array) -> str:
    """The operations that lead to an array, as MLX draws them."""
    drawn = io.StringIO()
    mx.export_to_dot(drawn, y)
    return drawn.getvalue()


def test_a_decoder_of_a_real_export_keeps_its_bits_with_every_seam_in_place() -> None:
    folder = oracle("raw-moe-vl-mtp") / "src"
    plain, seamed = decoder_of(folder, mx.float32), decoder_of(folder, mx.float32)
    kinds = plain.config.layer_kinds
    seamed.convolutions = {i: plain_convolution for i, kind in enumerate(kinds) if kind is LayerKind.LINEAR}
    ids = np.arange(5, 25)[None]
    capture = Capture(range(len(kinds)))
    ours = seamed.hidden(ids, on_layer=capture, positions=text_positions(0, n_steps=20))
    assert same(ours, plain.hidden(ids))
    assert len(capture.states) == len(kinds)
