"""How the anchors of a trunk lie together: which files, layers or roles hold another generation than the rest, and what
a few anchors cannot prove.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import TypeVar

import numpy as np

from qwen35conv.generation.gains import (
    ANCHORS,
    MIN_INFORMATIVE,
    NEGATIVE,
    NEGATIVE_CLEAR,
    GainLabel,
    GainStats,
    Role,
    median_of,
)

K = TypeVar("K")

NEARLY = 0.01  # the share off the grid of a sum that was cast more than once; of no sum more than a quarter is
LIFTED = 0.25  # how far above its role's middle a gain lies that a shift has lifted; a sound layer mostly does not
HIGH = 1.1  # a gamma trunk whose median anchor lies above this is of no published training
FAR = 0.5  # how far from its role's middle a gain lies that may be of another generation, a shift away
AGREE = 0.9  # the share of anchors that must carry one label
GAMMA_RANGE = (0.5, 1.4)  # where the median anchor of a gamma trunk lies (published: 0.78 to 1.03)


class Values(str, Enum):
    """What the anchors say together."""

    DELTA = "gamma - 1"
    GAMMA = "gamma"
    TWICE = "gamma + 1"
    MIXED = "mixed"
    UNDER = "gamma - 2"
    WEAK = "no clear sign"
    BROKEN = "not finite"


SHIFTS = {
    GainLabel.DELTA: 0,
    GainLabel.CONST0: 0,
    GainLabel.GAMMA: 1,
    GainLabel.CONST1: 1,
    GainLabel.TWICE: 2,
    GainLabel.CONST2: 2,
}
BY_SHIFT = (Values.DELTA, Values.GAMMA, Values.TWICE)
CONSTANTS = (GainLabel.CONST0, GainLabel.CONST1, GainLabel.CONST2)


def find_parts(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int) -> list[str]:
    """Sentences that name the files, layers or roles which hold another generation than most anchors."""
    moved, near = (_moved(anchors, shifts, main, slack) for slack in (1, 1.5))
    foreign = {i for i, s in enumerate(shifts) if s is not None and s != main}
    apart = foreign | moved
    far = apart | {i for i, a in enumerate(anchors) if a.label is GainLabel.POSITIVE and main == 0 and a.mean >= 0.5}

    found = []
    files = grouped(anchors, lambda a: a.file)
    middles = middles_by_role(anchors)
    off = {i for i, a in enumerate(anchors) if abs(a.mean - middles[a.role]) >= FAR}
    lifted = _lifted(anchors, main, middles)
    for file, members in sorted(files.items()) if len(files) > 1 else ():
        is_lone = len(members) == 1 and main != 2
        held = (lifted | (moved | off if is_lone else apart)).intersection(members)
        other = [i for i in members if shifts[i] != main or i in lifted]
        n_moved = len(moved.intersection(members))
        if len(other) == len(members) and len(held) >= len(members) / 2:
            found.append(f"{file}: all {len(members)} of its anchors look like {_looks(shifts, members, main)}")
        elif n_moved >= max(3, 0.75 * len(members)):
            found.append(f"{file}: {n_moved} of its {len(members)} anchors look like {_looks(shifts, members, main)}")
    layers = {k: v for k, v in grouped(anchors, lambda a: a.layer).items() if k is not None}
    whole = sorted(k for k, v in layers.items() if len(v) > 1 and all(shifts[i] != main for i in v))
    for run in _runs(whole):
        members = [i for layer in run for i in layers[layer]]
        n_moved = len(moved.intersection(members))
        twice = main == 1 and all(shifts[i] == 2 for i in members)
        as_one = far.issuperset(members) if len(run) > 1 else n_moved and (twice or near.issuperset(members))
        if as_one or n_moved >= max(2, len(members) / 2):
            where = f"layers {run[0]} to {run[-1]}" if len(run) > 1 else f"layer {run[0]}"
            found.append(f"{where}: both norms look like {_looks(shifts, members, main)}")
    above = "all of both norms lies above 1, and far from the others, as a gain shifted twice does"
    if main == 0:
        above = "all of both norms lies above 0, and far from the others, as gamma does"
    found += [f"layer {k}: {above}" for k, v in sorted(layers.items()) if len(v) > 1 and lifted.issuperset(v)]
    for role, members in grouped(anchors, lambda a: a.role).items():
        if len(members) > 1 and len(apart.intersection(members)) >= AGREE * len(members):
            found.append(f"every {role.value} looks like {_looks(shifts, members, main)}")
    found += _two_groups(anchors)
    if main == 0:
        found += [f"{a.name} is a sum 1 + x, most others are none (mean {a.mean:.2f})" for a in _sums(anchors, shifts)]
    return found + [
        f"{a.name} looks like {_looks(shifts, [i], main)} (mean {a.mean:.2f})"
        for i, a in enumerate(anchors)
        if i in apart and _is_proof(a, main, i in moved)
    ]


def why_unproven(
    anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int, *, is_backed: bool = False
) -> str | None:
    """Why the anchors of a small model prove nothing: one norm at 0.7 among few is gamma, or an odd raw one left
    behind. Where nothing beside it in its file or layer shows which, no number tells. With `is_backed`, where someone
    has written down what the gains hold, a gamma amid the others of its role is taken for one.
    """
    files = grouped(anchors, lambda a: a.file)
    if len(files) > 1:
        odd = [a.name for a, s in zip(anchors, shifts, strict=True) if s != main]
        if odd:
            return f"few layers in several files, and {count(odd, 'norm')} not sure to be as the others: {some(odd)}"
        lone = [anchors[m[0]] for m in files.values() if len(m) == 1]
        names = [a.name for a in lone if not (_shows_itself(a) or (is_backed and main == 1 and _is_amid(a, anchors)))]
        if names:
            return f"few layers, and {count(names, 'norm')} alone in a file, with no sign of its own: {some(names)}"
    middles = middles_by_role(anchors)
    for layer, members in grouped(anchors, lambda a: a.layer).items():
        low = [i for i in members if anchors[i].label is GainLabel.POSITIVE and anchors[i].mean < GAMMA_RANGE[0]]
        if main == 1 and 0 < len(low) < len(members):  # raw, where a layer is low both of its norms are
            return f"few layers, and {anchors[low[0]].name} is low and off the grid of a sum"
        if all(shifts[i] != main and abs(anchors[i].mean - middles[anchors[i].role]) >= 0.5 for i in members):
            return f"few layers, and both norms of layer {layer} look otherwise"
    return None


def find_files_apart(anchors: Sequence[GainStats]) -> list[str]:
    """Sentences on files all of whose anchors lie half a shift or more from the others of their roles, whatever they
    are labelled: where gains are far from the published ones, a raw gain looks like a low gamma.
    """
    middles = middles_by_role(anchors)
    return [
        f"{file}: all {len(members)} of its anchors lie far from the others of their roles"
        for file, members in sorted(grouped(anchors, lambda a: a.file).items())
        if all(abs(anchors[i].mean - middles[anchors[i].role]) >= FAR for i in members)
    ]


def _two_groups(anchors: Sequence[GainStats]) -> list[str]:
    """Sentences on roles whose layers fall into two groups one apart: a fifth of one role, or a tenth of both."""
    found = []
    for role, members in grouped(anchors, lambda a: a.role).items():
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
    return min(cut, n - cut) / n, median_of(means[cut:]) - median_of(means[:cut])


def _moved(anchors: Sequence[GainStats], shifts: Sequence[int | None], main: int, slack: float) -> set[int]:
    """Anchors that lie one or two off the others of their role, as another generation's copy would."""
    centres = _centres(anchors, shifts, main)
    found = set()
    for i, a in enumerate(anchors):
        middle, reach = centres[a.role]
        step = round(a.mean - middle)
        target = main + step
        fallen = main == 2 and step < 0  # one at 1.45 among others at 2.4 is labelled as they are
        if (
            step == 0
            or (shifts[i] == main and not fallen)
            or not 0 <= target <= 2
            or abs(a.mean - middle - step) > slack * reach
        ):
            continue
        if (target == 0 or a.negative_share < NEGATIVE) and (target < 2 or a.below_one_share <= NEGATIVE):
            found.add(i)
    return found


def _lifted(anchors: Sequence[GainStats], main: int, middles: Mapping[Role, float]) -> set[int]:
    """Gains, no constants, that lie where a shift would lift them to, well above the others of their role: in a gamma
    trunk above 1 throughout, in a raw one above 0, where most gains do not.
    """
    if main == 1 and median_of([a.below_one_share for a in anchors]) >= 0.25:
        floor = 1
    elif main == 0 and median_of([a.negative_share for a in anchors]) >= 0.25:
        floor = 0
    else:
        return set()
    return {i for i, a in enumerate(anchors) if floor < a.minimum < a.maximum and a.mean - middles[a.role] >= LIFTED}


def _sums(anchors: Sequence[GainStats], shifts: Sequence[int | None]) -> list[GainStats]:
    """Anchors of a raw trunk that lie on the grid of a sum 1 + x with nearly all entries, where the others do not."""
    off = [a.off_grid_share for a, s in zip(anchors, shifts, strict=True) if s == 0]
    if not off or median_of(off) < 0.05:  # a converted file carried back is on the grid throughout
        return []
    return [
        a
        for a in anchors
        if a.off_grid_share <= NEARLY
        and a.negative_share == 0
        and a.n_informative >= 2 * MIN_INFORMATIVE
        and a.minimum < a.maximum
    ]


def _is_proof(anchor: GainStats, main: int, moved: bool) -> bool:
    """Whether a single anchor, alone among others, cannot be what they are."""
    if main == 2:
        return anchor.below_one_share > NEGATIVE or moved
    if main == 0:  # a delta of one and more throughout is a gain shifted twice
        return anchor.label is GainLabel.TWICE
    if anchor.label is GainLabel.CONST0:
        return True
    if anchor.label is GainLabel.DELTA:
        plain = anchor.negative_share >= 0.2 and (anchor.off_grid_share >= 0.2 or anchor.mean < 0.1)
        return plain or moved
    return False


def _is_amid(anchor: GainStats, anchors: Sequence[GainStats]) -> bool:
    """Whether a gain lies amid several of its role: one of another generation would by chance alone."""
    means = [a.mean for a in anchors if a.role is anchor.role]
    return len(means) >= 4 and abs(anchor.mean - median_of(means)) <= 0.05


def _shows_itself(anchor: GainStats) -> bool:
    """Whether signs or the grid leave an anchor one reading, whatever its mean."""
    if anchor.label is GainLabel.DELTA:
        return anchor.negative_share >= NEGATIVE_CLEAR
    on_grid = anchor.off_grid_share == 0 and anchor.n_informative >= MIN_INFORMATIVE
    return anchor.label in CONSTANTS or (anchor.label is GainLabel.GAMMA and on_grid)


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
        middle = median_of(means) if means.size else float(main)
        spread = median_of(np.abs(means - middle)) if means.size else 0.0
        centres[role] = (middle, min(0.4, max(0.15, 5 * spread)))
    return centres


def middles_by_role(anchors: Sequence[GainStats]) -> dict[Role, float]:
    """The median of the means of each role."""
    return {role: median_of([anchors[i].mean for i in at]) for role, at in grouped(anchors, lambda a: a.role).items()}


def grouped(anchors: Sequence[GainStats], key: Callable[[GainStats], K]) -> dict[K, list[int]]:
    """The places of the anchors, by a key of each."""
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
    return " or ".join(BY_SHIFT[s].value for s in seen) or "another generation"


def count(things: Sequence[object], noun: str) -> str:
    """How many, as "3 gains"."""
    return f"{len(things)} {noun}{'' if len(things) == 1 else 's'}"


def some(names: Sequence[str]) -> str:
    """The first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
