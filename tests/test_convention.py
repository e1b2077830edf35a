"""The verdict on drawn, built and real gains."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gain_draws import (
    BEYOND,
    CANONICAL_FACTS,
    HEADS,
    PLAIN,
    RAW_FACTS,
    SIZES,
    Storage,
    Trunk,
    cast,
    draw,
    draw_head,
    draw_trunk,
    make_gains,
    make_head,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.generation.convention import (
    ConvLayout,
    Facts,
    Gain,
    GainLabel,
    Generation,
    Naming,
    Verdict,
    judge,
    judge_head,
    measure,
    repair_shift,
)
from qwen35conv.generation.gains import measure_all, median_of

ORACLE = Path(os.environ.get("QWEN35_ORACLE", Path(__file__).parents[2] / "shared" / "oracle" / "data"))
R, C, N = Naming.RAW, Naming.CANONICAL, Naming.NEUTRAL


def facts(
    naming: Naming,
    conv: ConvLayout,
    size: str = "27B",
    *,
    said: str | None = None,
    markers: tuple[tuple[str, str], ...] = (),
    has_mtp: bool = False,
) -> Facts:
    return Facts(naming, conv, has_mtp, said, markers, n_layers=SIZES[size][0])


def trunk_like(rng: np.random.Generator, size: str, inner: float = -0.03, post: float = -0.22) -> Trunk:
    """A trunk drawn to the published figures, with a modest spread over layers."""
    trunk = draw_trunk(rng, size)
    n_layers, n = SIZES[size]
    means = np.empty((2 * n_layers, 1))
    means[0::2, 0] = inner + 0.03 * rng.standard_normal(n_layers)
    means[1::2, 0] = post + 0.03 * rng.standard_normal(n_layers)
    trunk.anchors[...] = np.maximum(means + 0.1 * rng.standard_normal((2 * n_layers, n)), -0.75)
    return trunk


def judged(
    trunk: Trunk,
    shifts: int | np.ndarray,
    naming: Naming,
    conv: ConvLayout,
    storage: Storage = PLAIN,
    said: str | None = None,
    markers: tuple[tuple[str, str], ...] = (),
) -> Verdict:
    each = np.full(len(trunk.anchors), shifts) if isinstance(shifts, int) else shifts
    return judge(facts(naming, conv, trunk.size, said=said, markers=markers), make_gains(trunk, storage, each, naming))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


# --- layout against values -------------------------------------------------------------------------------------------

RAW, MOVED = ConvLayout.RAW, ConvLayout.CANONICAL


@pytest.mark.parametrize("size", ["0.8B", "27B", "35B-A3B", "tiny-4", "tiny-2"])
@pytest.mark.parametrize(
    ("shift", "naming", "conv", "generation"),
    [
        (0, R, RAW, Generation.RAW),
        (0, N, RAW, Generation.RAW),
        (0, C, RAW, Generation.RAW),
        (0, C, MOVED, Generation.NEVER_SHIFTED),
        (0, N, MOVED, Generation.NEVER_SHIFTED),
        (0, R, MOVED, Generation.NEVER_SHIFTED),
        (1, C, MOVED, Generation.CANONICAL),
        (1, N, MOVED, Generation.CANONICAL),
        (1, R, MOVED, Generation.CANONICAL),
        (1, R, RAW, Generation.SHIFTED_RAW),
        (1, N, RAW, Generation.SHIFTED_RAW),
        (1, C, RAW, Generation.SHIFTED_RAW),
        (2, C, MOVED, Generation.DOUBLE_SHIFTED),
        (2, R, RAW, Generation.DOUBLE_SHIFTED),
        (2, N, RAW, Generation.DOUBLE_SHIFTED),
    ],
)
def test_clear_values_and_a_layout_make_a_verdict(
    rng: np.random.Generator, size: str, shift: int, naming: Naming, conv: ConvLayout, generation: Generation
) -> None:
    verdict = judged(trunk_like(rng, size), shift, naming, conv)
    assert verdict.generation is generation, verdict.reasons
    assert verdict.converts == (generation in (Generation.RAW, Generation.CANONICAL))
    assert verdict.by.startswith("values")


@pytest.mark.parametrize(("shift", "naming", "conv"), [(0, C, RAW), (1, R, MOVED)])
def test_a_mere_rename_converts_with_a_warning(
    rng: np.random.Generator, shift: int, naming: Naming, conv: ConvLayout
) -> None:
    verdict = judged(trunk_like(rng, "4B"), shift, naming, conv)
    assert verdict.converts
    assert verdict.shift == 1 - shift
    assert any("only the names" in w for w in verdict.warnings)


@pytest.mark.parametrize("conv", [ConvLayout.FLAT, ConvLayout.NONE])
def test_without_a_conv_clear_values_still_decide(rng: np.random.Generator, conv: ConvLayout) -> None:
    assert judged(trunk_like(rng, "4B"), 0, R, conv).generation is Generation.RAW
    assert judged(trunk_like(rng, "4B"), 1, N, conv).generation is Generation.CANONICAL
    assert judged(trunk_like(rng, "4B"), 1, R, conv).generation is Generation.SHIFTED_RAW


def test_conv_layouts_that_disagree_stop(rng: np.random.Generator) -> None:
    assert judged(trunk_like(rng, "4B"), 1, C, ConvLayout.MIXED).generation is Generation.MIXED


@pytest.mark.parametrize("shift", [0, 1])
def test_metadata_and_markers_that_lie_are_outvoted_and_named(rng: np.random.Generator, shift: int) -> None:
    naming, conv = (RAW_FACTS, CANONICAL_FACTS)[shift]
    markers = (("norm_convention", ("gamma", "raw")[shift]),)
    verdict = judged(trunk_like(rng, "4B"), shift, naming, conv, said=("mlx", "pt")[shift], markers=markers)
    assert verdict.shift == 1 - shift
    assert sum("the values say" in w for w in verdict.warnings) == 2


def test_an_unknown_marker_is_no_evidence(rng: np.random.Generator) -> None:
    verdict = judged(trunk_like(rng, "4B"), 0, *RAW_FACTS, markers=(("norm_convention", "zorb-7"),))
    assert verdict.generation is Generation.RAW
    assert any("zorb-7" in w for w in verdict.warnings)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("head", [0, 1])
def test_an_mtp_head_never_votes_on_the_trunk(rng: np.random.Generator, shift: int, head: int) -> None:
    trunk, layout = trunk_like(rng, "0.8B"), (RAW_FACTS, CANONICAL_FACTS)[shift]
    gains = make_gains(trunk, PLAIN, np.full(len(trunk.anchors), shift), layout[0]) + make_head(rng, "27B", head) * 9
    with_head = judge(facts(*layout, "0.8B", has_mtp=True), gains)
    assert with_head.shift == 1 - shift
    assert with_head.stats == judged(trunk, shift, *layout).stats


def test_q_k_and_final_norms_never_vote(rng: np.random.Generator) -> None:
    for shift, layout in ((0, RAW_FACTS), (1, CANONICAL_FACTS)):
        trunk = trunk_like(rng, "0.8B")
        trunk.qk[...] += 1 - 2 * shift  # look like the other generation
        trunk.final[...] += 1 - 2 * shift
        assert judged(trunk, shift, *layout).shift == 1 - shift


# --- the fixtures that fooled simpler rules --------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("step", [12, 13])
def test_one_layer_norm_of_twelve_at_a_mean_of_0_7_does_not_stop(
    rng: np.random.Generator, shift: int, step: int
) -> None:
    trunk = trunk_like(rng, "27B")
    trunk.anchors[5::step] = 0.7 + 0.12 * rng.standard_normal(trunk.anchors[5::step].shape)
    verdict = judged(trunk, shift, *(RAW_FACTS, CANONICAL_FACTS)[shift])
    assert verdict.shift == 1 - shift, verdict.reasons


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("size", ["tiny-4", "tiny-8"])
def test_one_odd_input_norm_of_a_small_model_does_not_stop(rng: np.random.Generator, shift: int, size: str) -> None:
    trunk = trunk_like(rng, size)
    trunk.anchors[4] = 0.7 + 0.12 * rng.standard_normal(trunk.anchors.shape[1])
    verdict = judged(trunk, shift, *(RAW_FACTS, CANONICAL_FACTS)[shift])
    assert verdict.shift == 1 - shift, verdict.reasons


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("rows", [slice(20, 21), slice(20, 22)], ids=["one norm", "both norms"])
def test_a_layer_whose_gamma_averages_0_3_does_not_stop(rng: np.random.Generator, shift: int, rows: slice) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[rows] = np.maximum(-0.7 + 0.08 * rng.standard_normal(trunk.anchors[rows].shape), -0.97)
    assert judged(trunk, shift, *(RAW_FACTS, CANONICAL_FACTS)[shift]).shift == 1 - shift


def test_a_rotated_build_with_layer_0_constant_is_canonical(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[0] = 0
    assert judged(trunk, 1, *CANONICAL_FACTS).generation is Generation.CANONICAL


@pytest.mark.parametrize(
    ("shift", "layout", "generation"),
    [
        (0, RAW_FACTS, Generation.RAW),
        (1, CANONICAL_FACTS, Generation.CANONICAL),
        (0, CANONICAL_FACTS, Generation.UNKNOWN),
        (1, RAW_FACTS, Generation.UNKNOWN),
        (2, CANONICAL_FACTS, Generation.DOUBLE_SHIFTED),
    ],
)
def test_constant_gains_need_a_layout_that_agrees(
    rng: np.random.Generator, shift: int, layout: tuple[Naming, ConvLayout], generation: Generation
) -> None:
    trunk = trunk_like(rng, "0.8B")
    for rows in (trunk.anchors, trunk.qk, trunk.final):
        rows[...] = 0
    assert judged(trunk, shift, *layout).generation is generation


@pytest.mark.parametrize("shift", [0, 1, 2])
@pytest.mark.parametrize("size", ["4B", "tiny-4"])
@pytest.mark.parametrize("disk", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("total", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("source", ["BF16", "F32"])
def test_types_and_casts_do_not_change_the_verdict(
    rng: np.random.Generator, shift: int, size: str, disk: str, total: str, source: str
) -> None:
    layout = RAW_FACTS if shift == 0 else CANONICAL_FACTS
    verdict = judged(trunk_like(rng, size), shift, *layout, Storage(source, total, disk))
    wanted = (Generation.RAW, Generation.CANONICAL, Generation.DOUBLE_SHIFTED)[shift]
    assert verdict.generation is wanted, verdict.reasons


def test_a_raw_file_made_from_a_converted_one_is_raw_though_all_of_it_is_on_the_grid(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[...] = PLAIN.store(trunk.anchors, 1) - 1
    verdict = judged(trunk, 0, *RAW_FACTS)
    assert verdict.generation is Generation.RAW
    assert max(s.off_grid_share for s in verdict.stats if "layernorm" in s.name) == 0


def test_gains_of_a_4b_like_trunk_well_above_zero_are_raw(rng: np.random.Generator) -> None:
    assert judged(trunk_like(rng, "4B", 0.3, 0.25), 0, *RAW_FACTS).generation is Generation.RAW


@pytest.mark.parametrize(
    ("layout", "generation"), [(CANONICAL_FACTS, Generation.CANONICAL), (RAW_FACTS, Generation.SHIFTED_RAW)]
)
def test_a_gamma_that_was_never_a_sum_is_told_by_its_signs(
    rng: np.random.Generator, layout: tuple[Naming, ConvLayout], generation: Generation
) -> None:
    trunk = trunk_like(rng, "4B")
    gains = make_gains(trunk, PLAIN, np.ones(64, int), layout[0])
    trained = [
        replace(g, values=cast(np.abs(g.values + 0.02 * rng.standard_normal(g.values.shape)), "BF16")) for g in gains
    ]
    verdict = judge(facts(*layout, "4B"), trained)
    assert verdict.generation is generation, verdict.reasons


def test_a_gain_of_zeros_in_a_converted_file_stops(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[6] = 0
    shifts = np.ones(64, int)
    shifts[6] = 0
    assert judged(trunk, shifts, *CANONICAL_FACTS).generation is Generation.MIXED


def test_weak_values_let_facts_decide_and_say_so(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "0.8B", 0.42, 0.42)
    trunk.anchors[...] = np.maximum(trunk.anchors, 0.05)  # no negatives, off the grid: raw far up, or gamma rescaled
    verdict = judged(trunk, 0, *RAW_FACTS)
    assert (verdict.generation, verdict.by) == (Generation.RAW, "facts")
    assert any("weak" in w for w in verdict.warnings)


def test_weak_values_and_facts_that_conflict_stop(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "0.8B", 0.42, 0.42)
    trunk.anchors[...] = np.maximum(trunk.anchors, 0.05)
    assert judged(trunk, 0, *CANONICAL_FACTS).generation is Generation.UNKNOWN
    assert judged(trunk, 0, *RAW_FACTS, said="mlx").generation is Generation.UNKNOWN


@pytest.mark.parametrize("width", [0.1, 0.4])
def test_gains_rescaled_by_a_quantiser_stay_canonical(rng: np.random.Generator, width: float) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[...] = (trunk.anchors + 1) * np.exp(width * rng.standard_normal(trunk.anchors.shape)) - 1
    assert judged(trunk, 1, *CANONICAL_FACTS, Storage("F32", "BF16", "BF16")).generation is Generation.CANONICAL


# --- half-converted files --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("cut", ["in order", "interleaved"])
def test_one_shard_of_twelve_in_another_generation_stops_and_is_named(
    rng: np.random.Generator, low: int, high: int, cut: str
) -> None:
    trunk = trunk_like(rng, "27B")
    n = len(trunk.anchors)
    of = np.arange(n) * 12 // n if cut == "in order" else np.arange(n) % 12
    trunk.files = [f"model-{s + 1:05d}-of-00012.safetensors" for s in of]
    verdict = judged(trunk, np.where(of == 4, high, low), *CANONICAL_FACTS)
    assert verdict.generation is Generation.MIXED
    assert any("model-00005-of-00012" in reason for reason in verdict.reasons)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1, 0), (1, 2)])
@pytest.mark.parametrize("layers", [(7, 8), (40, 43), (0, 32)])
def test_whole_layers_in_another_generation_stop_and_are_named(
    rng: np.random.Generator, low: int, high: int, layers: tuple[int, int]
) -> None:
    trunk = trunk_like(rng, "27B")
    shifts = np.full(len(trunk.anchors), low)
    shifts[2 * layers[0] : 2 * layers[1]] = high
    verdict = judged(trunk, shifts, *RAW_FACTS)
    assert verdict.generation is Generation.MIXED
    assert any("layer" in reason for reason in verdict.reasons)


def test_a_suffix_that_the_converter_missed_stops(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    shifts = np.ones(len(trunk.anchors), int)
    shifts[1::2] = 0
    assert judged(trunk, shifts, *CANONICAL_FACTS).generation is Generation.MIXED


def test_a_single_plainly_raw_gain_in_a_converted_file_stops(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "27B")
    shifts = np.ones(len(trunk.anchors), int)
    shifts[31] = 0
    verdict = judged(trunk, shifts, *CANONICAL_FACTS)
    assert verdict.generation is Generation.MIXED
    assert verdict.outliers == ("language_model.model.layers.15.post_attention_layernorm.weight",)


@pytest.mark.parametrize("training", ["as published", "spread over layers"])
def test_one_layer_shifted_among_many_stops_though_one_of_its_norms_is_odd(
    rng: np.random.Generator, training: str
) -> None:
    trunk = trunk_like(rng, "2B")
    if training == "spread over layers":
        trunk.anchors[25] -= 0.15  # further from its role than the others lie
    shifts = np.zeros(len(trunk.anchors), int)
    shifts[24:26] = 1
    for layout in (RAW_FACTS, CANONICAL_FACTS):
        assert judged(trunk, shifts, *layout, Storage("F32", "F16", "F16")).generation is Generation.MIXED


@pytest.mark.parametrize("rows", [[24], [25], [24, 25]], ids=["input", "post", "both"])
def test_a_low_sum_among_gains_that_are_none_stops_though_its_mean_fits_them(
    rng: np.random.Generator, rows: list[int]
) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[rows] -= 0.7  # gamma of 0.3 and less: no further from raw means than an outlier may lie
    trunk.anchors[rows] = np.maximum(trunk.anchors[rows], -0.95)
    shifts = np.zeros(len(trunk.anchors), int)
    shifts[rows] = 1
    for layout in (RAW_FACTS, CANONICAL_FACTS):
        verdict = judged(trunk, shifts, *layout)
        assert verdict.generation is Generation.MIXED
        assert any("is a sum 1 + x" in reason for reason in verdict.reasons)


def test_a_layer_shifted_again_stops_where_one_of_its_norms_fits_and_the_other_is_odd(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "35B-A3B")
    trunk.anchors[[8, 20, 25]] += 0.7  # scattered outliers, as trained models have them
    trunk.anchors[59] += 0.9
    shifts = np.ones(len(trunk.anchors), int)
    assert judged(trunk, shifts, *CANONICAL_FACTS).generation is Generation.CANONICAL
    shifts[58:60] = 2
    verdict = judged(trunk, shifts, *CANONICAL_FACTS)
    assert verdict.generation is Generation.MIXED
    assert any("layer 29" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("size", ["2B", "27B"])
def test_a_low_layer_shifted_twice_stops_though_its_means_are_those_of_a_high_one(
    rng: np.random.Generator, size: str
) -> None:
    trunk = trunk_like(rng, size)
    trunk.anchors[20:22] = np.clip(-0.7 + 0.08 * rng.standard_normal(trunk.anchors[20:22].shape), -0.95, None)
    shifts = np.ones(len(trunk.anchors), int)
    assert judged(trunk, shifts, *CANONICAL_FACTS).generation is Generation.CANONICAL
    shifts[20:22] = 2
    verdict = judged(trunk, shifts, *CANONICAL_FACTS)
    assert verdict.generation is Generation.MIXED
    assert any("layer 10" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("shift", [1, 2])
def test_a_low_layer_shifted_without_a_grid_stops_in_a_raw_file(rng: np.random.Generator, shift: int) -> None:
    trunk = trunk_like(rng, "2B")
    trunk.anchors[20:22] = np.clip(-0.7 + 0.08 * rng.standard_normal(trunk.anchors[20:22].shape), -0.95, None)
    shifts = np.zeros(len(trunk.anchors), int)
    assert judged(trunk, shifts, *RAW_FACTS, Storage("F32", "F32", "F16")).generation is Generation.RAW
    shifts[20:22] = shift
    verdict = judged(trunk, shifts, *RAW_FACTS, Storage("F32", "F32", "F16"))
    assert verdict.generation is Generation.MIXED
    assert any("layer 10" in reason for reason in verdict.reasons)


# --- few layers: what a single norm cannot show -----------------------------------------------------------------------


def odd_one_left_raw(rng: np.random.Generator, size: str, n_files: int) -> tuple[Trunk, np.ndarray]:
    """A model whose one norm at 0.7 was left raw in a file of its own: its numbers are those of a sound gamma."""
    trunk = trunk_like(rng, size)
    n = len(trunk.anchors)
    trunk.files = [f"model-{i * n_files // n + 1:05d}-of-{n_files:05d}.safetensors" for i in range(n)]
    trunk.anchors[-1] = 0.75 + 0.04 * rng.standard_normal(trunk.anchors.shape[1])
    shifts = np.ones(n, int)
    shifts[-1] = 0
    return trunk, shifts


@pytest.mark.parametrize(("size", "n_files"), [("tiny-2", 4), ("tiny-4", 8), ("tiny-8", 16)])
@pytest.mark.parametrize("layout", [RAW_FACTS, CANONICAL_FACTS])
def test_a_norm_alone_in_its_file_decides_nothing_in_a_small_model(
    rng: np.random.Generator, size: str, n_files: int, layout: tuple[Naming, ConvLayout]
) -> None:
    trunk, shifts = odd_one_left_raw(rng, size, n_files)
    verdict = judged(trunk, shifts, *layout)
    assert not verdict.converts
    assert verdict.generation in (Generation.MIXED, Generation.UNKNOWN)


@pytest.mark.parametrize(
    ("said", "markers", "generation"),
    [
        (None, (), Generation.UNKNOWN),
        ("mlx", (), Generation.CANONICAL),
        (None, (("norm_convention", "gamma"),), Generation.CANONICAL),
        ("mlx", (("norm_convention", "raw"),), Generation.UNKNOWN),
        ("pt", (("norm_convention", "gamma"),), Generation.UNKNOWN),
        (None, (("norm_convention", "whatever"),), Generation.UNKNOWN),
    ],
)
def test_gammas_alone_in_their_files_amid_the_others_need_someones_word(
    rng: np.random.Generator, said: str | None, markers: tuple[tuple[str, str], ...], generation: Generation
) -> None:
    trunk = trunk_like(rng, "tiny-4")
    trunk.anchors[0::2] -= trunk.anchors[0::2].mean(axis=1, keepdims=True) + 0.03
    trunk.anchors[1::2] -= trunk.anchors[1::2].mean(axis=1, keepdims=True) + 0.2
    trunk.files = [f"model-{i + 1:05d}-of-00008.safetensors" for i in range(8)]
    verdict = judged(trunk, 1, *CANONICAL_FACTS, said=said, markers=markers)
    assert verdict.generation is generation, verdict.reasons
    assert verdict.generation is Generation.UNKNOWN or verdict.by == "facts"


def test_a_gamma_alone_in_its_file_and_off_the_others_stops_whatever_is_said(rng: np.random.Generator) -> None:
    trunk, _ = odd_one_left_raw(rng, "tiny-4", 8)
    trunk.anchors[-1] -= 0.12
    assert not judged(trunk, np.array([1] * 7 + [0]), *CANONICAL_FACTS, said="mlx").converts


@pytest.mark.parametrize(("inner", "by"), [(0.33, "values and facts"), (0.42, "facts")])
@pytest.mark.parametrize("said", [None, "mlx"])
def test_a_raw_gain_alone_in_its_file_stops_where_all_lie_so_high_that_it_looks_like_a_low_gamma(
    rng: np.random.Generator, said: str | None, inner: float, by: str
) -> None:
    trunk = trunk_like(rng, "4B", inner, 0.2)
    trunk.files = [f"model-{i + 1:05d}-of-00064.safetensors" for i in range(64)]
    shifts = np.ones(64, int)
    whole = judged(trunk, shifts, *CANONICAL_FACTS, said=said)
    assert (whole.generation, whole.by) == (Generation.CANONICAL, by)
    trunk.anchors[36] = 0.68 + 0.05 * rng.standard_normal(trunk.anchors.shape[1])
    shifts[36] = 0
    verdict = judged(trunk, shifts, *CANONICAL_FACTS, said=said)
    assert not verdict.converts
    assert any("model-00037-of-00064" in reason for reason in verdict.reasons)


@pytest.mark.parametrize("shift", [0, 1, 2])
def test_a_small_model_in_files_of_whole_layers_is_told(rng: np.random.Generator, shift: int) -> None:
    trunk = trunk_like(rng, "tiny-4")
    trunk.files = [f"model-{i // 4 + 1:05d}-of-00002.safetensors" for i in range(8)]
    wanted = (Generation.RAW, Generation.CANONICAL, Generation.DOUBLE_SHIFTED)[shift]
    layout = RAW_FACTS if shift == 0 else CANONICAL_FACTS
    assert judged(trunk, shift, *layout).generation is wanted


@pytest.mark.parametrize("layout", [RAW_FACTS, CANONICAL_FACTS])
def test_a_role_missed_in_a_model_of_two_layers_stops(
    rng: np.random.Generator, layout: tuple[Naming, ConvLayout]
) -> None:
    trunk = trunk_like(rng, "tiny-2", 0.2, -0.3)
    trunk.anchors[0::2] = np.array([[0.17], [0.72]]) + 0.04 * rng.standard_normal((2, trunk.anchors.shape[1]))
    assert not judged(trunk, np.array([0, 1, 0, 1]), *layout).converts


@pytest.mark.parametrize("size", ["0.8B", "27B"])
def test_a_low_layer_shifted_twice_is_told_among_many(rng: np.random.Generator, size: str) -> None:
    trunk = trunk_like(rng, size)
    trunk.anchors[6:8] = -0.7 + 0.08 * rng.standard_normal((2, trunk.anchors.shape[1]))
    assert judged(trunk, 2, *CANONICAL_FACTS).generation is Generation.DOUBLE_SHIFTED


@pytest.mark.parametrize("size", ["0.8B", "27B"])
@pytest.mark.parametrize(
    ("shift", "layout", "generation"),
    [(0, CANONICAL_FACTS, Generation.NEVER_SHIFTED), (1, RAW_FACTS, Generation.SHIFTED_RAW)],
)
def test_a_low_layer_hides_no_broken_file_among_many(
    rng: np.random.Generator, size: str, shift: int, layout: tuple[Naming, ConvLayout], generation: Generation
) -> None:
    trunk = trunk_like(rng, size)
    trunk.anchors[6:8] = -0.7 + 0.08 * rng.standard_normal((2, trunk.anchors.shape[1]))
    assert judged(trunk, shift, *layout).generation is generation


# --- what stops by itself --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("control", "word"), [(-0.13, "zero-centred"), (1.87, "shifted")])
def test_a_gated_norm_off_its_place_stops(rng: np.random.Generator, control: float, word: str) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.control[...] = control + 0.03 * rng.standard_normal(trunk.control.shape)
    verdict = judged(trunk, 0, *RAW_FACTS)
    assert verdict.generation is Generation.UNKNOWN
    assert word in verdict.reasons[0]


def test_gains_shifted_down_once_too_often_stop(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[...] -= 1
    assert judged(trunk, 0, *RAW_FACTS).generation is Generation.UNKNOWN


def test_a_gain_that_is_not_finite_stops(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "4B")
    trunk.anchors[9, 3] = np.nan
    verdict = judged(trunk, 0, *RAW_FACTS)
    assert verdict.generation is Generation.UNKNOWN
    assert "layers.4.post_attention_layernorm" in verdict.reasons[0]


@pytest.mark.parametrize("layout", [RAW_FACTS, CANONICAL_FACTS])
def test_without_gains_names_and_conv_prove_nothing(layout: tuple[Naming, ConvLayout]) -> None:
    assert judge(facts(*layout), []).generation is Generation.UNKNOWN


def test_missing_gains_are_counted(rng: np.random.Generator) -> None:
    gains = make_gains(trunk_like(rng, "4B"), PLAIN, np.zeros(64, int), R)
    verdict = judge(replace(facts(*RAW_FACTS, "4B"), n_layers=40), gains)
    assert any("64 of 80" in w for w in verdict.warnings)


# --- the head --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("like", list(HEADS))
@pytest.mark.parametrize(("shift", "trunk"), [(0, Generation.RAW), (1, Generation.CANONICAL), (2, None)])
def test_each_known_head_is_told_by_its_own_values(
    rng: np.random.Generator, like: str, shift: int, trunk: Generation | None
) -> None:
    wanted = (Generation.RAW, Generation.CANONICAL, Generation.DOUBLE_SHIFTED)[shift]
    assert judge_head(make_head(rng, like, shift), trunk).generation is wanted


def test_a_raw_head_beside_a_converted_trunk_is_raw(rng: np.random.Generator) -> None:
    assert judge_head(make_head(rng, "27B", 0), Generation.CANONICAL).generation is Generation.RAW


@pytest.mark.parametrize("like", list(HEADS))
def test_raw_layer_norms_with_a_gamma_final_norm_are_mixed(rng: np.random.Generator, like: str) -> None:
    shifts = dict.fromkeys(HEADS[like], 0) | {"norm": 1}
    verdict = judge_head(make_head(rng, like, shifts), Generation.CANONICAL)
    assert verdict.generation is Generation.MIXED
    assert verdict.outliers == ("mtp.norm.weight",)


def test_pre_fc_norms_shifted_twice_alone_are_mixed(rng: np.random.Generator) -> None:
    shifts = dict.fromkeys(HEADS["35B-A3B"], 1) | {"pre_fc_norm_embedding": 2, "pre_fc_norm_hidden": 2}
    assert judge_head(make_head(rng, "35B-A3B", shifts)).generation is Generation.MIXED


def test_a_head_without_norms_or_with_constants_is_unknown(rng: np.random.Generator) -> None:
    assert judge_head([]).generation is Generation.UNKNOWN
    ones = [replace(g, values=np.ones_like(g.values)) for g in make_head(rng, "27B", 1)]
    assert judge_head(ones).generation is Generation.UNKNOWN


# --- measuring -------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.floats(-3, 4).map(lambda x: round(x, 4)), min_size=9, max_size=40),
    st.sampled_from(["BF16", "F16", "F32"]),
)
@settings(deadline=None, max_examples=60)
def test_measures_agree_with_float64_one_value_at_a_time(numbers: list[float], dtype: str) -> None:
    values = cast(np.array(numbers, np.float32), dtype)
    found = measure(Gain("x", "layers.2.input_layernorm.weight", "f", dtype, values))
    exact = values.astype(np.float64)
    assert found.mean == pytest.approx(exact.mean(), abs=1e-6)
    assert (found.minimum, found.maximum, found.n) == (exact.min(), exact.max(), len(numbers))
    assert found.negative_share == pytest.approx((exact < 0).mean())
    bins = np.histogram(np.clip(exact, -1, 3 - 1e-9), bins=16, range=(-1, 3))[0]
    assert found.histogram == tuple(bins)
    if dtype == "BF16":
        assert found.off_grid_share == pytest.approx(np.mean([x * 256 != round(x * 256) for x in exact.tolist()]))
    assert found.layer == 2


@given(st.lists(st.floats(-0.9375, 2, width=32), min_size=30, max_size=60), st.sampled_from(["BF16", "F16"]))
@settings(deadline=None, max_examples=60)
def test_a_sum_in_the_stored_type_is_always_on_its_grid(numbers: list[float], dtype: str) -> None:
    delta = cast(np.array(numbers, np.float32), dtype)
    gamma = cast(delta + np.float32(1), dtype)
    assert measure(Gain("x", "norm.weight", "f", dtype, gamma)).off_grid_share == 0
    assert measure(Gain("x", "norm.weight", "f", "F32", gamma)).label is not GainLabel.DELTA


def test_gains_are_measured_together_as_one_by_one(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "tiny-8")
    gains = make_gains(trunk, PLAIN, np.zeros(16, int), R) + make_head(rng, "4B", 1)
    assert measure_all(gains) == tuple(measure(g) for g in gains)


def test_the_order_of_gains_does_not_matter(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "0.8B")
    gains = make_gains(trunk, PLAIN, np.zeros(48, int), R)
    there, back = judge(facts(*RAW_FACTS, "0.8B"), gains), judge(facts(*RAW_FACTS, "0.8B"), gains[::-1])
    assert (there.generation, there.reasons) == (back.generation, back.reasons)


def test_a_27b_is_judged_in_a_blink(rng: np.random.Generator) -> None:
    trunk = trunk_like(rng, "27B")
    gains = make_gains(trunk, PLAIN, np.zeros(128, int), R)
    times = []
    for _ in range(8):
        begin = time.process_time()
        judge(facts(*RAW_FACTS), gains)
        times.append(time.process_time() - begin)
    assert min(times) < 0.06


def test_repairs_go_where_they_should() -> None:
    assert [repair_shift(g) for g in Generation] == [None, None, -1, 1, 0, None, None]


# --- draws and real files --------------------------------------------------------------------------------------------


def test_no_drawn_checkpoint_is_called_another_clean_generation() -> None:
    rng = np.random.default_rng(2024)
    stops = (Generation.MIXED, Generation.UNKNOWN)
    wrong, stopped, clean = [], 0, 0
    for _ in range(150):
        d = draw(rng)
        if d.kind.startswith(BEYOND):
            continue
        verdict = judge(d.facts, d.gains)
        if verdict.generation is not d.truth and verdict.generation not in stops:
            wrong.append((d.kind, d.size, d.truth, verdict))
        if d.kind == "published":
            clean += 1
            stopped += verdict.generation in stops
    assert not wrong
    assert stopped <= 0.15 * clean


def test_no_drawn_head_is_called_another_clean_generation() -> None:
    rng = np.random.default_rng(2024)
    for _ in range(200):
        kind, truth, trunk, gains = draw_head(rng)
        found = judge_head(gains, trunk).generation
        assert found in (truth, Generation.MIXED, Generation.UNKNOWN), kind


EXPECTED = {
    "broken-double-shifted": Generation.DOUBLE_SHIFTED,
    "broken-never-shifted": Generation.NEVER_SHIFTED,
    "broken-raw-names-gamma": Generation.SHIFTED_RAW,
}


def oracle_cases() -> list[Path]:
    return sorted(p.parent for p in ORACLE.glob("*/src")) if ORACLE.is_dir() else []


@pytest.mark.skipif(not oracle_cases(), reason="no oracle checkpoints here (set QWEN35_ORACLE)")
@pytest.mark.parametrize("case", oracle_cases(), ids=lambda p: p.name)
def test_each_oracle_checkpoint_gets_the_right_verdict(case: Path) -> None:
    torch = pytest.importorskip("torch")
    safetensors = pytest.importorskip("safetensors")
    gains, prefixes, convs, formats = [], set(), set(), set()
    for file in sorted((case / "src").glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as opened:
            formats.add((opened.metadata() or {}).get("format"))
            for name in opened.keys():  # noqa: SIM118  (not a dict)
                rest = name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
                if rest.startswith("visual") or ("norm" not in rest and "conv1d" not in rest):
                    continue
                value = opened.get_tensor(name)
                if "mtp." not in name:
                    prefixes.add(name.removesuffix(rest))
                if "conv1d" in rest:
                    convs.add(tuple(value.shape)[-1] == 1)
                elif value.ndim == 1:
                    dtype = {torch.bfloat16: "BF16", torch.float32: "F32", torch.float16: "F16"}[value.dtype]
                    gains.append(Gain(name, rest, file.name, dtype, value.float().numpy()))
    assert len(prefixes) == len(convs) == 1
    naming = {"model.language_model.": R, "language_model.model.": C, "model.": N}[prefixes.pop()]
    config = json.loads((case / "src" / "config.json").read_text())
    n_layers = config.get("text_config", config)["num_hidden_layers"]
    has_mtp = any(g.canonical_name.startswith("mtp.") for g in gains)
    conv = ConvLayout.CANONICAL if convs.pop() else ConvLayout.RAW
    said = Facts(naming, conv, has_mtp, formats.pop(), (), n_layers)

    verdict = judge(said, gains)
    default = Generation.RAW if case.name.startswith("raw") else Generation.CANONICAL
    assert verdict.generation is EXPECTED.get(case.name, default), verdict.reasons
    if has_mtp:
        assert judge_head(gains, verdict.generation).generation is Generation.RAW


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=1, max_size=40))
def test_a_median_is_numpys_bit_for_bit(values: list[float]) -> None:
    np.testing.assert_array_equal(median_of(values), np.median(values))
