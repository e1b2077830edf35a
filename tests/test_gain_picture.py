"""The picture of the gains, against numbers drawn for it and NumPy's own histogram."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.generation.gains import Gain, measure_all
from qwen35conv.report.gain_picture import (
    ABSENT,
    HEIGHTS,
    NOT_FINITE,
    Tone,
    folds,
    glyph_of,
    histogram,
    make_strips,
    odd_marks,
    ruler,
)

N_LAYERS, N = 12, 40


def gain(name: str, mean: float, seed: int = 0, n: int = N) -> Gain:
    values = (mean + 0.1 * np.random.default_rng(seed).standard_normal(n)).astype(np.float32)
    return Gain(name, name, "a.safetensors", "F32", values)


def trunk(mean: float, odd: dict[int, float] | None = None) -> list[Gain]:
    """Input norms on every layer, q norms on every fourth, controls on the others."""
    gains = []
    for i in range(N_LAYERS):
        gains.append(gain(f"layers.{i}.input_layernorm.weight", (odd or {}).get(i, mean), seed=i))
        last = "self_attn.q_norm" if i % 4 == 3 else "linear_attn.norm"
        gains.append(gain(f"layers.{i}.{last}.weight", 0.87, seed=i + 100, n=16))
    return gains


@pytest.mark.parametrize(
    ("mean", "glyph"), [(-9.0, "▁"), (-0.2, "▃"), (0.0, "▃"), (0.2, "▃"), (1.0, "▅"), (1.97, "▇"), (9.0, "█")]
)
def test_a_mean_near_a_whole_number_has_that_numbers_height(mean: float, glyph: str) -> None:
    assert glyph_of(mean) == glyph


@given(st.floats(-5, 5), st.floats(-5, 5))
@settings(deadline=None)
def test_a_greater_mean_is_never_drawn_lower(a: float, b: float) -> None:
    low, high = sorted((a, b))
    assert HEIGHTS.index(glyph_of(low)) <= HEIGHTS.index(glyph_of(high))


def test_a_layer_that_was_shifted_by_itself_stands_out_in_height_and_mark() -> None:
    name = "layers.7.input_layernorm.weight"
    strips = make_strips(measure_all(trunk(-0.05, odd={7: 0.95})), N_LAYERS, [name])
    assert "".join(cell.glyph for cell in strips[0].cells) == "▃▃▃▃▃▃▃▅▃▃▃▃"
    assert [cell.odd for cell in strips[0].cells].index(True) == 7
    assert odd_marks(strips, range(4, 12)) == "   ^"
    assert odd_marks(strips, range(4)) == ""
    assert strips[0].lowest < 0 < 0.9 < strips[0].highest


def test_a_strip_has_a_cell_only_where_the_layer_has_such_a_norm() -> None:
    strips = {strip.label: strip for strip in make_strips(measure_all(trunk(0.0)), N_LAYERS)}
    assert list(strips) == ["input", "q", "control"]
    assert [cell.glyph == ABSENT for cell in strips["q"].cells] == [i % 4 != 3 for i in range(N_LAYERS)]
    assert [cell.glyph == ABSENT for cell in strips["control"].cells] == [i % 4 == 3 for i in range(N_LAYERS)]
    assert strips["control"].n_gains == 9


def test_only_norms_that_vote_are_coloured_and_a_control_out_of_range_is_doubted() -> None:
    gains = [*trunk(-0.05), gain("layers.0.post_attention_layernorm.weight", 1.9)]
    gains[1] = gain("layers.0.linear_attn.norm.weight", -0.13, n=16)
    strips = {strip.label: strip for strip in make_strips(measure_all(gains), N_LAYERS)}
    assert {cell.tone for cell in strips["input"].cells} == {Tone.DELTA}
    assert strips["post"].cells[0].tone is Tone.TWICE
    assert {cell.tone for cell in strips["q"].cells} == {Tone.QUIET}
    assert [cell.tone for cell in strips["control"].cells[:2]] == [Tone.DOUBT, Tone.QUIET]


def test_a_gain_that_is_not_finite_is_drawn_as_such_and_the_draft_head_not_at_all() -> None:
    broken = gain("layers.2.input_layernorm.weight", 0.0)
    broken.values[5] = np.nan
    gains = [broken, gain("mtp.layers.0.input_layernorm.weight", 2.0)]
    (strip,) = make_strips(measure_all(gains), 5)
    assert [cell.glyph for cell in strip.cells] == [ABSENT, ABSENT, NOT_FINITE, ABSENT, ABSENT]
    assert strip.cells[2].tone is Tone.BROKEN


@given(st.integers(1, 300), st.integers(-3, 200))
@settings(deadline=None)
def test_folds_hold_each_layer_once_in_order_and_fit(n_layers: int, n_columns: int) -> None:
    rows = folds(n_layers, n_columns)
    assert [layer for row in rows for layer in row] == list(range(n_layers))
    assert all(len(row) <= max(n_columns, 1) for row in rows)
    if n_columns >= 10:
        assert all(row.start % 10 == 0 for row in rows)


@given(st.integers(0, 400), st.integers(1, 200))
@settings(deadline=None)
def test_each_number_of_the_ruler_stands_above_its_layer(begin: int, n: int) -> None:
    line = ruler(range(begin, begin + n))
    assert line.startswith(str(begin))
    column = 0
    for word in line.split():
        column = line.index(word, column)
        assert int(word) == begin + column
        column += len(word)


@pytest.mark.parametrize("bin_columns", [1, 2])
def test_the_histogram_counts_as_numpy_does_and_marks_0_and_1_where_they_are(bin_columns: int) -> None:
    gains = [g for g in trunk(-0.05, odd={3: 0.95}) if "input" in g.name]
    drawn = histogram(measure_all(gains), bin_columns)
    assert drawn is not None
    counts, _ = np.histogram(np.concatenate([g.values for g in gains]), bins=16, range=(-1, 3))
    cells = drawn.bars[::bin_columns]
    assert [cell != " " for cell in cells] == [n > 0 for n in counts]
    assert cells[int(np.argmax(counts))] == "█"
    assert drawn.n_values == counts.sum() == N * N_LAYERS
    assert drawn.axis.index("0") == 4 * bin_columns
    assert drawn.axis.index("1", 2) == 8 * bin_columns


def test_without_anchors_there_is_no_histogram() -> None:
    assert histogram(measure_all([gain("layers.3.self_attn.q_norm.weight", 0.8)])) is None
    assert histogram([]) is None
