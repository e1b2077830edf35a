"""What the gains of a trunk say together: delta, gamma, shifted twice, two of them in one file, or too little.

Anchors are the two layer norms of every layer: the raw and gamma ranges of q, k and final norms overlap, so those
never vote (they can only cast doubt where the anchors contradict every other fact). A label needs nine anchors of
ten. Scattered others are outliers, as trained models have them; others that fill a file, whole layers or one of the
two roles are the mark of a half-converted checkpoint, however few they are. Toy models of few layers must prove more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwen35conv.generation.gains import ANCHORS, NEGATIVE, GainLabel, GainStats, Role, median_of
from qwen35conv.generation.groups import (
    AGREE,
    BY_SHIFT,
    CONSTANTS,
    GAMMA_RANGE,
    HIGH,
    SHIFTS,
    Values,
    count,
    find_files_apart,
    find_parts,
    grouped,
    middles_by_role,
    some,
    why_unproven,
)

LOWEST = 0.002  # the share of entries below -1 that a raw trunk may have: gamma is positive
SMALL = 16  # a model of eight layers or fewer has so many anchors: no published one, and one odd layer is a big share
TINY = 8  # ... of four layers or fewer
FEW = 3  # fewer anchors than this decide nothing without the layout
DELTA_CEILING = 0.35  # a raw trunk's median anchor averages less (published: -0.22 to 0.03)
ROLES_APART = 0.7  # the medians of the two roles lie closer (published: 0.19)
TWICE_CENTRE = (1.55, 2.6)  # where the median anchor of a trunk shifted twice lies
CONTROL_LOW, CONTROL_HIGH = 0.3, 1.6  # outside, someone stored the gated norm zero-centred, or shifted it


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the anchors say, and how."""

    values: Values
    lean: Values | None  # where they are weak: what they look like none the less
    constant: bool  # every anchor is one number throughout: only the number speaks
    doubted: bool  # q, k or final norms look otherwise
    n_anchors: int
    reasons: tuple[str, ...]
    outliers: tuple[str, ...]  # names of anchors that look otherwise than most
    warnings: tuple[str, ...]
    backed_lean: Values | None = None  # as `lean`, where someone has written down what they hold


def weigh(stats: Sequence[GainStats]) -> Weighed:
    """What the trunk's gains say together."""
    anchors = [s for s in stats if s.role in ANCHORS and not s.in_head]
    broken = [s.name for s in anchors if s.label is GainLabel.BROKEN]
    if broken:
        return _weighed(Values.BROKEN, anchors, f"{count(broken, 'gain')} not finite: {some(broken)}")
    if not anchors:
        return _weighed(Values.WEAK, anchors, "no layer norm gains to judge by")
    n = len(anchors)
    shifts = [SHIFTS.get(a.label) for a in anchors]
    counts = [sum(s == k for s in shifts) for k in range(3)]
    positive = sum(a.label is GainLabel.POSITIVE for a in anchors)
    under = sum(a.label is GainLabel.UNDER for a in anchors)
    median = median_of([a.mean for a in anchors])
    summary = _summary(anchors, counts, positive, median)
    if under >= n / 2:
        return _weighed(
            Values.UNDER, anchors, summary, "most gains lie one below a raw export: shifted down once too often"
        )

    main = int(np.argmax(counts))
    if counts[main] < n / 2:
        main = int(np.searchsorted((GAMMA_RANGE[0], TWICE_CENTRE[0]), median, side="right"))
    parts = find_parts(anchors, shifts, main)
    if parts:
        others = [a.name for a, s in zip(anchors, shifts, strict=True) if s is not None and s != main]
        return _weighed(Values.MIXED, anchors, summary, *parts, outliers=others)

    supports = [_supports(a, s, main, counts) for a, s in zip(anchors, shifts, strict=True)]
    outliers = [a.name for a, ok in zip(anchors, supports, strict=True) if not ok]
    agreed = sum(supports) >= _quorum(n)
    doubts = _doubts(stats, main)
    unproven = why_unproven(anchors, shifts, main) if n <= SMALL else None
    strays = [f"{count(outliers, 'anchor')} of {n} look otherwise, scattered: {some(outliers)}"] if outliers else []
    middles = middles_by_role(anchors).values()
    close = max(middles) - min(middles) <= ROLES_APART
    close = close and (n > TINY or (n >= 6 and main < 2) or _spread(anchors) < 0.55)
    looks = _lean(anchors, main, counts, median) if close else None
    apart = find_files_apart(anchors)  # layout and claims are of some files: they can't speak for these
    if apart:
        looks = None
    lean = None if unproven else looks
    odd = bool(apart) and main == 1 and median > HIGH
    firm = agreed and close and not unproven and not odd and n >= FEW and _is_firm(anchors, main, counts, median)
    return _weighed(
        BY_SHIFT[main] if firm else Values.WEAK,
        anchors,
        summary,
        *([unproven] if unproven else []),
        *([] if firm else apart),
        outliers=outliers,
        warnings=strays + doubts,
        lean=lean,
        backed_lean=looks if unproven and not why_unproven(anchors, shifts, main, is_backed=True) else lean,
        doubted=bool(doubts),
    )


def check_control(stats: Sequence[GainStats]) -> tuple[str | None, tuple[str, ...]]:
    """Why the gated norms (never shifted by anyone right) forbid a verdict, or None; then warnings."""
    control = [s for s in stats if s.role is Role.CONTROL]
    if not control:
        return None, ()
    means = np.array([s.mean for s in control])
    middle = median_of(means)
    if middle < CONTROL_LOW:
        return (
            f"the gated norms (linear_attn.norm) average {middle:.2f}, healthy files have about 0.87: "
            "they are stored zero-centred",
            (),
        )
    if middle > CONTROL_HIGH:
        return (
            f"the gated norms (linear_attn.norm) average {middle:.2f}, healthy files have about 0.87: "
            "someone shifted the one norm that never is",
            (),
        )
    moved = [
        s.name
        for s in control
        if min(abs(s.mean - middle - 1), abs(s.mean - middle + 1)) < 0.2 and abs(middle - 1) < 0.5
    ]
    if moved:
        return f"{count(moved, 'gated norm')} of {len(control)} lie one off the others: {some(moved)}", ()
    odd = [s.name for s in control if not 0.5 <= s.mean <= 1.3]
    return None, (f"{count(odd, 'gated norm')} outside 0.5 to 1.3: {some(odd)}",) if odd else ()


def _supports(anchor: GainStats, shift: int | None, main: int, counts: Sequence[int]) -> bool:
    """Whether an anchor is what the main label expects to see."""
    if shift == main:
        return True
    if anchor.label is not GainLabel.POSITIVE:
        return False
    if main == 0:  # a raw layer without negatives, still off the grid of a sum
        return True
    return main == 1 and counts[0] == 0  # a rescaled gamma; raw layers would have negatives somewhere


def _quorum(n: int) -> float:
    """How many anchors must agree: nine of ten; in a small model all but one, as one odd layer is no rarity there."""
    return min(AGREE * n, n - 1) if n >= 6 else n


def _spread(anchors: Sequence[GainStats]) -> float:
    """How far the means lie apart, within a role or between the two: a few layers show two generations only so."""
    by_role = [[anchors[i].mean for i in members] for members in grouped(anchors, lambda a: a.role).values()]
    middles = middles_by_role(anchors).values()
    return max(max(middles) - min(middles), *(max(means) - min(means) for means in by_role))


def _is_firm(anchors: Sequence[GainStats], main: int, counts: Sequence[int], median: float) -> bool:
    n = len(anchors)
    negative = float(np.mean([a.negative_share for a in anchors]))
    if main == 0:  # gamma is positive, so delta stays above -1
        below = float(np.mean([a.below_minus_one_share for a in anchors]))
        return counts[0] >= 0.6 * n and median <= DELTA_CEILING and below <= LOWEST
    if main == 1:
        like = sum(a.label is GainLabel.POSITIVE and a.mean >= 0.6 and a.off_grid_share <= 0.05 for a in anchors)
        return (
            counts[1] + like * (counts[0] == 0) >= _quorum(n)
            and negative <= NEGATIVE
            and GAMMA_RANGE[0] <= median <= GAMMA_RANGE[1]
        )
    strays = counts[0] + counts[1] if n <= SMALL else counts[0]  # among many, a low layer may look like gamma
    return counts[2] >= _quorum(n) and strays == 0 and TWICE_CENTRE[0] <= median <= TWICE_CENTRE[1]


def _lean(anchors: Sequence[GainStats], main: int, counts: Sequence[int], median: float) -> Values | None:
    """What weak anchors could be none the less: the one thing that signs and means allow; None if nothing is."""
    negative = float(np.mean([a.negative_share for a in anchors]))
    below = float(np.mean([a.below_minus_one_share for a in anchors]))
    n = len(anchors)
    highest = max(a.mean for a in anchors)
    if main == 2:
        return Values.TWICE
    if main == 1:
        twice = counts[2] <= (0.45 * n if n > TINY else 1) and median <= GAMMA_RANGE[1]
        plain = median >= 0.6 and highest < 2 and negative <= NEGATIVE and counts[0] <= 0.1 * n
        return Values.GAMMA if plain and twice else None
    low = median < (GAMMA_RANGE[0] if n > TINY else DELTA_CEILING) and highest < 1.1 and below <= LOWEST
    return Values.DELTA if low and counts[1] + counts[2] < 0.25 * n else None


def _doubts(stats: Sequence[GainStats], main: int) -> list[str]:
    """What q, k and final norms say against gamma or twice."""
    witnesses = [s for s in stats if s.role in (Role.Q, Role.K, Role.FINAL) and not s.in_head]
    if main == 1:
        against = [s for s in witnesses if s.negative_share >= NEGATIVE]
        text = "have negative entries, as only gamma - 1 has"
    elif main == 2:
        against = [s for s in witnesses if s.below_one_share > NEGATIVE]
        text = "have entries below 1, as no gain shifted twice has"
    else:
        against, text = [], ""
    names = [s.name for s in against]
    return [f"{count(names, 'q, k or final norm')} {text}: {some(names)}"] if names else []


def _summary(anchors: Sequence[GainStats], counts: Sequence[int], positive: int, median: float) -> str:
    negative = float(np.mean([a.negative_share for a in anchors]))
    off = float(np.mean([a.off_grid_share for a in anchors]))
    rest = len(anchors) - sum(counts) - positive
    told = ", ".join(f"{counts[k]} {BY_SHIFT[k].value}" for k in range(3) if counts[k])
    told += (f", {positive} positive but off the grid" if positive else "") + (f", {rest} unclear" if rest else "")
    return (
        f"{count(anchors, 'anchor')}: {told.removeprefix(', ')}; median of means {median:.3f}, "
        f"{negative:.1%} negative, {off:.1%} off the grid of a sum"
    )


def _weighed(
    values: Values,
    anchors: Sequence[GainStats],
    *reasons: str,
    outliers: Sequence[str] = (),
    warnings: Sequence[str] = (),
    lean: Values | None = None,
    backed_lean: Values | None = None,
    doubted: bool = False,
) -> Weighed:
    return Weighed(
        values=values,
        lean=lean,
        constant=bool(anchors) and all(a.label in CONSTANTS for a in anchors),
        doubted=doubted,
        n_anchors=len(anchors),
        reasons=reasons,
        outliers=tuple(outliers),
        warnings=tuple(warnings),
        backed_lean=backed_lean,
    )
