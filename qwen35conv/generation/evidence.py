"""What the gains of a trunk say together: delta, gamma, shifted twice, two of them in one file, or too little.

Anchors are the two layer norms of every layer: the raw and gamma ranges of q, k and final norms overlap, so those
never vote (they can only cast doubt where the anchors contradict every other fact). A label needs nine anchors of
ten. Scattered others are outliers, as trained models have them; others that fill a file, whole layers or one of the
two roles are the mark of a half-converted checkpoint, however few they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np

from qwen35conv.generation.gains import ANCHORS, MIN_INFORMATIVE, NEGATIVE, NEGATIVE_CLEAR, GainLabel, GainStats, Role

K = TypeVar("K")

LOWEST = 0.002  # the share of entries below -1 that a raw trunk may have: gamma is positive
AGREE = 0.9  # the share of anchors that must carry one label
SMALL = 16  # a model of eight layers or fewer has so many anchors: no published one, and one odd layer is a big share
TINY = 8  # ... of four layers or fewer
FEW = 3  # fewer anchors than this decide nothing without the layout
DELTA_CEILING = 0.35  # a raw trunk's median anchor averages less (published: -0.22 to 0.03)
GAMMA_RANGE = (0.5, 1.45)  # where the median anchor of a gamma trunk lies (published: 0.78 to 1.03)
TWICE_CENTRE = (1.55, 2.6)  # where the median anchor of a trunk shifted twice lies
CONTROL_LOW, CONTROL_HIGH = 0.3, 1.6  # outside, someone stored the gated norm zero-centred, or shifted it


class Values(str, Enum):
    """What the anchors say together."""

    DELTA = "gamma - 1"
    GAMMA = "gamma"
    TWICE = "gamma + 1"
    MIXED = "mixed"
    UNDER = "gamma - 2"
    WEAK = "no clear sign"
    BROKEN = "not finite"


@dataclass(frozen=True, slots=True)
class Weighed:
    """What the anchors say, and how."""

    values: Values
    lean: Values | None  # where they are weak: what they look like none the less
    constant: bool  # every anchor is one number throughout: only the number speaks
    doubted: bool  # q, k or final norms, or both norms of some layer, look otherwise
    n_anchors: int
    reasons: tuple[str, ...]
    outliers: tuple[str, ...]  # names of anchors that look otherwise than most
    warnings: tuple[str, ...]


_SHIFTS = {
    GainLabel.DELTA: 0,
    GainLabel.CONST0: 0,
    GainLabel.GAMMA: 1,
    GainLabel.CONST1: 1,
    GainLabel.TWICE: 2,
    GainLabel.CONST2: 2,
}
_BY_SHIFT = (Values.DELTA, Values.GAMMA, Values.TWICE)
_CONSTANTS = (GainLabel.CONST0, GainLabel.CONST1, GainLabel.CONST2)


def weigh(stats: Sequence[GainStats]) -> Weighed:
    """What the trunk's gains say together."""
    anchors = [s for s in stats if s.role in ANCHORS and not s.in_head]
    broken = [s.name for s in anchors if s.label is GainLabel.BROKEN]
    if broken:
        return _weighed(Values.BROKEN, anchors, f"{_count(broken, 'gain')} not finite: {_some(broken)}")
    if not anchors:
        return _weighed(Values.WEAK, anchors, "no layer norm gains to judge by")
    n = len(anchors)
    shifts = [_SHIFTS.get(a.label) for a in anchors]
    counts = [sum(s == k for s in shifts) for k in range(3)]
    positive = sum(a.label is GainLabel.POSITIVE for a in anchors)
    under = sum(a.label is GainLabel.UNDER for a in anchors)
    median = float(np.median([a.mean for a in anchors]))
    summary = _summary(anchors, counts, positive, median)
    if under >= n / 2:
        return _weighed(
            Values.UNDER, anchors, summary, "most gains lie one below a raw export: shifted down once too often"
        )

    main = int(np.argmax(counts))
    if counts[main] < n / 2:
        main = int(np.searchsorted((GAMMA_RANGE[0], TWICE_CENTRE[0]), median, side="right"))
    parts = _clusters(anchors, shifts, main)
    if parts:
        others = [a.name for a, s in zip(anchors, shifts, strict=True) if s is not None and s != main]
        return _weighed(Values.MIXED, anchors, summary, *parts, outliers=others)

    supports = [_supports(a, s, main, counts, n) for a, s in zip(anchors, shifts, strict=True)]
    outliers = [a.name for a, ok in zip(anchors, supports, strict=True) if not ok]
    agreed = sum(supports) >= _quorum(n)
    doubts = _doubts(stats, main)
    unproven = _unproven(anchors, shifts, main) if n <= SMALL else None
    strays = [f"{_count(outliers, 'anchor')} of {n} look otherwise, scattered: {_some(outliers)}"] if outliers else []
    close = n > TINY or (n >= 6 and main < 2) or _spread(anchors) < 0.55
    lean = _lean(anchors, main, counts, median) if close and not unproven else None
    firm = agreed and close and not unproven and n >= FEW and _is_firm(anchors, main, counts, median)
    return _weighed(
        _BY_SHIFT[main] if firm else Values.WEAK,
        anchors,
        summary,
        *([unproven] if unproven else []),
        outliers=outliers,
        warnings=strays + doubts,
        lean=lean,
        doubted=bool(doubts),
    )


def check_control(stats: Sequence[GainStats]) -> tuple[str | None, tuple[str, ...]]:
    """Why the gated norms (never shifted by anyone right) forbid a verdict, or None; then warnings."""
    control = [s for s in stats if s.role is Role.CONTROL]
    if not control:
        return None, ()
    means = np.array([s.mean for s in control])
    middle = float(np.median(means))
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
        return f"{_count(moved, 'gated norm')} of {len(control)} lie one off the others: {_some(moved)}", ()
    odd = [s.name for s in control if not 0.5 <= s.mean <= 1.3]
    return None, (f"{_count(odd, 'gated norm')} outside 0.5 to 1.3: {_some(odd)}",) if odd else ()


def _supports(anchor: GainStats, shift: int | None, main: int, counts: Sequence[int], n: int) -> bool:
    """Whether an anchor is what the main label expects to see."""
    if shift == main:
        return True
    if anchor.label is not GainLabel.POSITIVE:
        return False
    if main == 0:  # a raw layer without negatives, still off the grid of a sum
        return True
    return main == 1 and counts[0] == 0  # a rescaled gamma; raw layers would have negatives somewhere


def _unproven(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int) -> str | None:
    """Why the anchors of a small model prove nothing: one norm at 0.7 among few is gamma, or an odd raw one left
    behind. Where nothing beside it in its file or layer shows which, no number tells.
    """
    files = _grouped(anchors, lambda a: a.file)
    if len(files) > 1:
        odd = [a.name for a, s in zip(anchors, shifts, strict=True) if s != main]
        if odd:
            return f"few layers in several files, and {_count(odd, 'norm')} not sure to be as the others: {_some(odd)}"
        lone = [anchors[m[0]] for m in files.values() if len(m) == 1]
        names = [a.name for a in lone if not _shows_itself(a)]
        if names:
            return f"few layers, and {_count(names, 'norm')} alone in a file, with no sign of its own: {_some(names)}"
    for layer, members in _grouped(anchors, lambda a: a.layer).items():
        if all(shifts[i] != main for i in members):
            return f"few layers, and both norms of layer {layer} look otherwise"
    return None


def _shows_itself(anchor: GainStats) -> bool:
    """Whether signs or the grid leave an anchor one reading, whatever its mean."""
    if anchor.label is GainLabel.DELTA:
        return anchor.negative_share >= NEGATIVE_CLEAR
    on_grid = anchor.off_grid_share == 0 and anchor.n_informative >= MIN_INFORMATIVE
    return anchor.label in _CONSTANTS or (anchor.label is GainLabel.GAMMA and on_grid)


def _quorum(n: int) -> float:
    """How many anchors must agree: nine of ten; in a small model all but one, as one odd layer is no rarity there."""
    return min(AGREE * n, n - 1) if n >= 6 else n


def _spread(anchors: Sequence[GainStats]) -> float:
    """How far the means lie apart, within a role or between the two: a few layers show two generations only so."""
    by_role = [[anchors[i].mean for i in members] for members in _grouped(anchors, lambda a: a.role).values()]
    middles = [float(np.median(means)) for means in by_role]
    return max(max(middles) - min(middles), *(max(means) - min(means) for means in by_role))


def _is_firm(anchors: Sequence[GainStats], main: int, counts: Sequence[int], median: float) -> bool:
    n = len(anchors)
    if main == 0:  # gamma is positive, so delta stays above -1
        below = float(np.mean([a.below_minus_one_share for a in anchors]))
        return counts[0] >= 0.6 * n and median <= DELTA_CEILING and below <= LOWEST
    if main == 1:
        like = sum(a.label is GainLabel.POSITIVE and a.mean >= 0.6 and a.off_grid_share <= 0.05 for a in anchors)
        return counts[1] + like * (counts[0] == 0) >= _quorum(n) and GAMMA_RANGE[0] <= median <= GAMMA_RANGE[1]
    strays = counts[0] + counts[1] if n <= SMALL else counts[0]
    return counts[2] >= _quorum(n) and strays == 0 and TWICE_CENTRE[0] <= median <= TWICE_CENTRE[1]


def _lean(anchors: Sequence[GainStats], main: int, counts: Sequence[int], median: float) -> Values | None:
    """What weak anchors could be none the less: the one thing that signs and means allow; None if nothing is."""
    negative = float(np.mean([a.negative_share for a in anchors]))
    below = float(np.mean([a.below_minus_one_share for a in anchors]))
    n = len(anchors)
    roles = [float(np.median([a.mean for a in anchors if a.role is role] or [median])) for role in ANCHORS]
    highest = max(a.mean for a in anchors)
    if abs(roles[0] - roles[1]) > 0.7:  # published: 0.19
        return None
    if main == 2:
        return Values.TWICE
    if main == 1:
        twice = counts[2] <= (0.45 * n if n > TINY else 1) and median <= GAMMA_RANGE[1]
        plain = median >= 0.6 and highest < 2 and negative <= NEGATIVE and counts[0] <= 0.1 * n
        return Values.GAMMA if plain and twice else None
    low = median < GAMMA_RANGE[0] and highest < 1.1 and below <= LOWEST
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
    return [f"{_count(names, 'q, k or final norm')} {text}: {_some(names)}"] if names else []


def _clusters(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int) -> list[str]:
    """Sentences that name the files, layers or roles which hold another generation than most anchors."""
    moved = _moved(anchors, shifts, main)
    foreign = {i for i, s in enumerate(shifts) if s is not None and s != main}
    apart = foreign | moved
    far = apart | {i for i, a in enumerate(anchors) if a.label is GainLabel.POSITIVE and main == 0 and a.mean >= 0.5}

    found = []
    files = _grouped(anchors, lambda a: a.file)
    for file, members in sorted(files.items()) if len(files) > 1 else ():
        held = (apart if len(members) > 1 or main == 2 else moved).intersection(members)
        if all(shifts[i] != main for i in members) and len(held) >= len(members) / 2:
            found.append(f"{file}: all {len(members)} of its anchors look like {_looks(shifts, members, main)}")
    layers = {k: v for k, v in _grouped(anchors, lambda a: a.layer).items() if k is not None}
    whole = sorted(k for k, v in layers.items() if len(v) > 1 and all(shifts[i] != main for i in v))
    for run in _runs(whole):
        members = [i for layer in run for i in layers[layer]]
        n_moved = len(moved.intersection(members))
        if (len(run) > 1 and far.issuperset(members)) or n_moved >= max(2, len(members) / 2):
            where = f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}"
            found.append(f"{where}: both norms look like {_looks(shifts, members, main)}")
    for role, members in _grouped(anchors, lambda a: a.role).items():
        if len(members) > 1 and len(apart.intersection(members)) >= AGREE * len(members):
            found.append(f"every {role.value} looks like {_looks(shifts, members, main)}")
    found += _two_groups(anchors)
    return found + [
        f"{a.name} looks like {_looks(shifts, [i], main)} (mean {a.mean:.2f})"
        for i, a in enumerate(anchors)
        if i in foreign and _is_proof(a, main, i in moved)
    ]


def _two_groups(anchors: Sequence[GainStats]) -> list[str]:
    """Sentences on roles whose layers fall into two groups one apart: a fifth of one role, or a tenth of both."""
    found = []
    for role, members in _grouped(anchors, lambda a: a.role).items():
        means = np.sort([anchors[i].mean for i in members])
        share, step = _split(means)
        if abs(step - 1) < 0.2 and share >= 0.1:
            text = f"{role.value}: two groups of layers that differ by one, {means[0]:.2f} to {means[-1]:.2f}"
            found.append((share, text))
    return [text for share, text in found if share >= 0.2 or len(found) > 1]


def _split(
    means: np.ndarray,  # [layers], sorted
) -> tuple[float, float]:
    """The smaller group's share and the step between the two groups that means fall into best (Otsu's cut); 0 and 0
    where either group is so wide that a step of one means nothing.
    """
    n = len(means)
    if n < 2:
        return 0.0, 0.0
    at = np.arange(1, n)
    sums, squares = np.cumsum(means)[:-1], np.cumsum(means**2)
    low = squares[:-1] - sums**2 / at
    rest = means.sum() - sums
    high = squares[-1] - squares[:-1] - rest**2 / (n - at)
    cut = int(np.argmin(low + high)) + 1
    if np.sqrt(max(float((low + high)[cut - 1]), 0.0) / n) > 0.25:
        return 0.0, 0.0
    return min(cut, n - cut) / n, float(np.median(means[cut:]) - np.median(means[:cut]))


def _moved(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int) -> set[int]:
    """Anchors that lie one or two off the others of their role, as another generation's copy would."""
    centres = _centres(anchors, shifts, main)
    found = set()
    for i, a in enumerate(anchors):
        middle, reach = centres[a.role]
        step = round(a.mean - middle)
        target = main + step
        if step == 0 or shifts[i] == main or not 0 <= target <= 2 or abs(a.mean - middle - step) > reach:
            continue
        if (target == 0 or a.negative_share < NEGATIVE) and (target < 2 or a.below_one_share <= NEGATIVE):
            found.add(i)
    return found


def _is_proof(anchor: GainStats, main: int, moved: bool) -> bool:
    """Whether a single anchor, alone among others, cannot be what they are."""
    if main == 2:
        return anchor.below_one_share > NEGATIVE
    if main == 0:  # a delta of one and more throughout is a gain shifted twice
        return anchor.label is GainLabel.TWICE
    if anchor.label is GainLabel.CONST0:
        return True
    if anchor.label is GainLabel.DELTA:
        plain = anchor.negative_share >= 0.2 and (anchor.off_grid_share >= 0.2 or anchor.mean < 0.1)
        return plain or moved
    return False


def _centres(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int) -> dict[Role, tuple[float, float]]:
    """Per role, the median of the main label's means and how far from it a layer may lie."""
    centres = {}
    for role in ANCHORS:
        means = np.array(
            [
                a.mean
                for a, s in zip(anchors, shifts, strict=True)
                if a.role is role and (s == main or (s is None and abs(a.mean - main) < 0.5))
            ]
        )
        middle = float(np.median(means)) if means.size else float(main)
        spread = float(np.median(np.abs(means - middle))) if means.size else 0.0
        centres[role] = (middle, min(0.4, max(0.15, 5 * spread)))
    return centres


def _grouped(anchors: Sequence[GainStats], key: Callable[[GainStats], K]) -> dict[K, list[int]]:
    groups: dict[K, list[int]] = defaultdict(list)
    for i, anchor in enumerate(anchors):
        groups[key(anchor)].append(i)
    return groups


def _runs(layers: Sequence[int]) -> list[list[int]]:
    """Runs of consecutive numbers."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return runs


def _looks(shifts: Sequence[int | None], members: Sequence[int], main: int) -> str:
    seen = sorted({s for i in members if (s := shifts[i]) is not None and s != main})
    return " or ".join(_BY_SHIFT[s].value for s in seen) or "another generation"


def _summary(anchors: Sequence[GainStats], counts: Sequence[int], positive: int, median: float) -> str:
    negative = float(np.mean([a.negative_share for a in anchors]))
    off = float(np.mean([a.off_grid_share for a in anchors]))
    rest = len(anchors) - sum(counts) - positive
    told = ", ".join(f"{counts[k]} {_BY_SHIFT[k].value}" for k in range(3) if counts[k])
    told += (f", {positive} positive but off the grid" if positive else "") + (f", {rest} unclear" if rest else "")
    return (
        f"{_count(anchors, 'anchor')}: {told.removeprefix(', ')}; median of means {median:.3f}, "
        f"{negative:.1%} negative, {off:.1%} off the grid of a sum"
    )


def _weighed(
    values: Values,
    anchors: Sequence[GainStats],
    *reasons: str,
    outliers: Sequence[str] = (),
    warnings: Sequence[str] = (),
    lean: Values | None = None,
    doubted: bool = False,
) -> Weighed:
    return Weighed(
        values=values,
        lean=lean,
        constant=bool(anchors) and all(a.label in _CONSTANTS for a in anchors),
        doubted=doubted,
        n_anchors=len(anchors),
        reasons=reasons,
        outliers=tuple(outliers),
        warnings=tuple(warnings),
    )


def _count(things: Sequence[object], noun: str) -> str:
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
