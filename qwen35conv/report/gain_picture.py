"""The gains as a picture in text: one strip for each kind of norm, one cell for each layer, and a histogram.

A cell's height is the mean of one gain, so that a layer that was shifted once more or less than the others stands out
without colour; its tone is what the gain looks like by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum

from qwen35conv.generation.evidence import CONTROL_HIGH, CONTROL_LOW
from qwen35conv.generation.gains import ANCHORS, HISTOGRAM_BINS, HISTOGRAM_RANGE, GainLabel, GainStats, Role

HEIGHTS = "▁▂▃▄▅▆▇█"
ABSENT = "·"
NOT_FINITE = "!"
ODD_MARK = "^"


class Tone(Enum):
    """What a cell says, for its colour."""

    DELTA = "gamma - 1"
    GAMMA = "gamma"
    TWICE = "gamma + 1"
    DOUBT = "unclear"
    BROKEN = "not finite"
    QUIET = "no vote"


@dataclass(frozen=True, slots=True)
class Cell:
    """One gain of one layer; `odd` where it looks otherwise than most."""

    glyph: str
    tone: Tone
    odd: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """The gains of one role over all layers, and the least, the median and the greatest of their means."""

    label: str
    cells: tuple[Cell, ...]
    n_gains: int
    lowest: float
    median: float
    highest: float


@dataclass(frozen=True, slots=True)
class Histogram:
    """Two lines of equal scale: bars, and an axis from -1 to 3 with 0 and 1 marked; the number of values in it."""

    bars: str
    axis: str
    n_values: int


_TONES = {
    GainLabel.DELTA: Tone.DELTA,
    GainLabel.CONST0: Tone.DELTA,
    GainLabel.GAMMA: Tone.GAMMA,
    GainLabel.CONST1: Tone.GAMMA,
    GainLabel.TWICE: Tone.TWICE,
    GainLabel.CONST2: Tone.TWICE,
    GainLabel.BROKEN: Tone.BROKEN,
}
_ROWS = ((Role.INPUT, "input"), (Role.POST, "post"), (Role.Q, "q"), (Role.K, "k"), (Role.CONTROL, "control"))
_EMPTY = Cell(ABSENT, Tone.QUIET)


def make_strips(stats: Sequence[GainStats], n_layers: int, odd: Collection[str] = ()) -> tuple[Strip, ...]:
    """A strip for each role that the trunk's layers have; `odd` names the gains to mark."""
    by_role: dict[Role, list[GainStats]] = {}
    for s in stats:
        if not s.in_head:
            by_role.setdefault(s.role, []).append(s)
    strips = []
    for role, label in _ROWS:
        members = [(s, s.layer) for s in by_role.get(role, ()) if s.layer is not None and s.layer < n_layers]
        if not members:
            continue
        cells = [_EMPTY] * n_layers
        for s, layer in members:
            tone = _tone(s, role)
            cells[layer] = Cell(glyph_of(s.mean) if tone is not Tone.BROKEN else NOT_FINITE, tone, s.name in odd)
        means = sorted(s.mean for s, _ in members)
        middle = (means[len(means) // 2] + means[(len(means) - 1) // 2]) / 2
        strips.append(Strip(label, tuple(cells), len(members), means[0], middle, means[-1]))
    return tuple(strips)


def glyph_of(mean: float) -> str:
    """A bar for a mean, in steps of a half: -1 and below is the lowest, 0 the third, 1 the fifth, 2 the seventh."""
    return HEIGHTS[min(max(round(2 * mean) + 2, 0), len(HEIGHTS) - 1)]


def _tone(s: GainStats, role: Role) -> Tone:
    if s.label is GainLabel.BROKEN:
        return Tone.BROKEN
    if role is Role.CONTROL:
        return Tone.QUIET if CONTROL_LOW <= s.mean <= CONTROL_HIGH else Tone.DOUBT
    return _TONES.get(s.label, Tone.DOUBT) if role in ANCHORS else Tone.QUIET


def folds(n_layers: int, n_columns: int) -> tuple[range, ...]:
    """The layers cut into rows of at most `n_columns` cells, of tens where that is possible."""
    n = max(1, n_columns)
    if n_layers > n >= 10:
        n -= n % 10
    return tuple(range(begin, min(begin + n, n_layers)) for begin in range(0, n_layers, n))


def ruler(layers: range) -> str:
    """Numbers above the first cell and above every tenth layer, as far as they fit."""
    line = ""
    for layer in layers:
        column = layer - layers.start
        text = str(layer)
        if (layer == layers.start or layer % 10 == 0) and column >= len(line) + (1 if line else 0):
            line = line.ljust(column) + text
    return line


def odd_marks(strips: Sequence[Strip], layers: range) -> str:
    """A mark under each layer that holds an odd gain; empty where none does."""
    marks = "".join(ODD_MARK if any(strip.cells[i].odd for strip in strips) else " " for i in layers)
    return marks.rstrip()


def histogram(stats: Sequence[GainStats], bin_columns: int = 2) -> Histogram | None:
    """All values of the trunk's anchors in one histogram; None where there are none."""
    anchors = [s for s in stats if s.role in ANCHORS and not s.in_head]
    counts = [sum(s.histogram[i] for s in anchors) for i in range(HISTOGRAM_BINS)]
    most = max(counts)
    if not most:
        return None
    top = len(HEIGHTS) - 1
    bars = "".join(bin_columns * (HEIGHTS[round(n / most * top)] if n else " ") for n in counts)
    begin, end = (int(edge) for edge in HISTOGRAM_RANGE)
    axis = ""
    for value in range(begin, end + 1):
        column = (value - begin) * HISTOGRAM_BINS * bin_columns // (end - begin)
        axis = axis.ljust(column) + str(value)
    return Histogram(bars, axis, sum(counts))
