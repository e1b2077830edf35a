"""What the stored numbers of one RMSNorm gain look like: a label for each, from its signs, its grid and its mean.

A gain is stored as delta (gamma - 1, the raw export), as gamma, or, by a loader's mistake, shifted twice. Three
things tell them apart, none of them alone:

* signs: gamma is positive in this family, so delta lies above -1, gamma above 0 and a gain shifted twice above 1
* the grid: a sum 1 + x computed in a type whose step at 0.5 is 2**-p is a multiple of 2**-p (p: 8 for bfloat16,
  11 for float16, 24 for float32), whatever type it is stored in later. A delta below 0.5 in size mostly is not.
  Only entries below 0.5 tell: above, every number of the type is on the grid
* the mean: near 0, 1 or 2. Weakest: some layers average 0.7 in a raw file, 0.3 in a converted one
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

import numpy as np

HISTOGRAM_RANGE = (-1.0, 3.0)
HISTOGRAM_BINS = 16

CACHED = 1 << 15  # numbers measured at once: what the many passes over them can keep in the cache

MIN_ENTRIES = 8  # fewer say nothing
MIN_INFORMATIVE = 16  # so many entries below 0.5 must all be on the grid before that is taken for a sum 1 + x
NEGATIVE = 0.005  # the share from which negatives are no accident
NEGATIVE_CLEAR = 0.1  # ... and from which no gamma of any training explains them
OFF_GRID = 0.001  # the share up to which a sum 1 + x may be off its grid (an edit, a wider sum rounded late)
EXACT = 0.98  # the share of bfloat16-exact entries that marks what was bfloat16 once
TWICE_FLOOR = 1.4  # a gain shifted twice averages more, and lies above 1

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class GainLabel(str, Enum):
    """What one gain looks like by itself."""

    DELTA = "delta"
    GAMMA = "gamma"
    TWICE = "twice"
    UNDER = "under"  # one shift too few: gamma - 2
    CONST0 = "const0"
    CONST1 = "const1"
    CONST2 = "const2"
    POSITIVE = "positive"  # no negatives, yet off the grid of a sum: a raw layer far from 0, or a rescaled gamma
    UNCLEAR = "unclear"
    BROKEN = "broken"  # holds NaN or infinity


class Role(str, Enum):
    """Where a gain sits."""

    INPUT = "input_layernorm"
    POST = "post_attention_layernorm"
    CONTROL = "linear_attn.norm"  # the gated norm: stored as gamma in both generations
    Q = "q_norm"
    K = "k_norm"
    FINAL = "norm"
    PRE_FC_EMBEDDING = "pre_fc_norm_embedding"
    PRE_FC_HIDDEN = "pre_fc_norm_hidden"
    OTHER = "other"


ANCHORS = (Role.INPUT, Role.POST)


@dataclass(frozen=True, slots=True)
class Gain:
    """One stored gain. `canonical_name` has no prefix: "layers.3.input_layernorm.weight", "mtp.norm.weight"."""

    name: str
    canonical_name: str
    file: str
    dtype: str  # "BF16", "F16" or "F32"
    values: np.ndarray  # [n] float32


@dataclass(frozen=True, slots=True)
class GainStats:
    """What was measured on one gain."""

    name: str
    canonical_name: str
    file: str
    dtype: str
    n: int
    mean: float
    minimum: float
    maximum: float
    negative_share: float
    below_one_share: float
    below_minus_one_share: float
    off_grid_share: float  # not a multiple of the step that a sum 1 + x has in the type these numbers came from
    n_informative: int  # entries below 0.5 in size: only these can be off the grid
    histogram: tuple[int, ...]  # 16 bins over [-1, 3); what lies outside is in the first or the last
    label: GainLabel

    @property
    def layer(self) -> int | None:
        """The layer's number; None for a norm outside the layers."""
        return layer_of(self.canonical_name)

    @property
    def role(self) -> Role:
        """Where this gain sits, by its name."""
        return role_of(self.canonical_name)

    @property
    def in_head(self) -> bool:
        """Whether this gain belongs to a multi-token-prediction head."""
        return self.canonical_name.startswith("mtp.")


@lru_cache(maxsize=4096)
def layer_of(canonical_name: str) -> int | None:
    """The number of the layer a gain belongs to, by its canonical name; None outside the layers."""
    found = _LAYER.search(canonical_name)
    return int(found.group(1)) if found else None


@lru_cache(maxsize=4096)
def role_of(canonical_name: str) -> Role:
    """Where a gain sits, by its canonical name."""
    stem = canonical_name.removesuffix(".weight")
    if stem.endswith(".linear_attn.norm"):
        return Role.CONTROL
    if stem in ("norm", "mtp.norm"):
        return Role.FINAL
    last = stem.rpartition(".")[2]
    return next((role for role in Role if role.value == last and role is not Role.FINAL), Role.OTHER)


def measure(gain: Gain) -> GainStats:
    """What one gain looks like."""
    return measure_all([gain])[0]


def measure_all(gains: Sequence[Gain]) -> tuple[GainStats, ...]:
    """What each gain looks like, in the order given; gains of one length and type are measured together."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for i, gain in enumerate(gains):
        groups[gain.values.size, gain.dtype].append(i)
    found: dict[int, GainStats] = {}
    for (n, dtype), members in groups.items():
        if n == 0:
            found.update((i, _empty(gains[i])) for i in members)
            continue
        at_once = max(1, CACHED // n)
        for begin in range(0, len(members), at_once):
            part = members[begin : begin + at_once]
            rows = np.stack([gains[i].values for i in part]).astype(np.float32, copy=False)
            found.update(zip(part, _measure_rows([gains[i] for i in part], rows, n, dtype), strict=True))
    return tuple(found[i] for i in range(len(gains)))


def median_of(values: Sequence[float] | np.ndarray) -> float:
    """The median of one number or more; NaN where one of them is.

    As `np.median`, which loads all of NumPy's masked arrays: no small part of the time that a short command takes.
    """
    ordered = np.sort(np.asarray(values, np.float64))  # NaN last
    middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
    return float(ordered[-1] if np.isnan(ordered[-1]) else middle)


def _empty(gain: Gain) -> GainStats:
    return GainStats(
        name=gain.name,
        canonical_name=gain.canonical_name,
        file=gain.file,
        dtype=gain.dtype,
        n=0,
        mean=0.0,
        minimum=0.0,
        maximum=0.0,
        negative_share=0.0,
        below_one_share=0.0,
        below_minus_one_share=0.0,
        off_grid_share=0.0,
        n_informative=0,
        histogram=(0,) * HISTOGRAM_BINS,
        label=GainLabel.UNCLEAR,
    )


def _measure_rows(
    gains: Sequence[Gain],
    rows: np.ndarray,  # [G, n] float32
    n: int,
    dtype: str,
) -> list[GainStats]:
    minimum, maximum = rows.min(axis=1), rows.max(axis=1)
    finite = np.isfinite(minimum) & np.isfinite(maximum)  # NaN spreads into both
    if not finite.all():
        rows = np.where(np.isfinite(rows), rows, np.float32(0))
        minimum, maximum = rows.min(axis=1), rows.max(axis=1)
    exact = np.stack([_bf16_exact(rows - np.float32(k)) for k in range(3)]) if dtype == "F32" else None  # [3, G]
    low = np.abs(rows) < 0.5
    scaled = rows * _steps(rows, dtype)[:, None]
    off = (scaled != np.rint(scaled)).mean(axis=1)
    mean = rows.mean(axis=1, dtype=np.float64)
    negative = (rows < 0).mean(axis=1)
    below_one = (rows < 1).mean(axis=1)
    below_minus_one = (rows < -1).mean(axis=1)
    n_low = low.sum(axis=1)
    bins = _histograms(rows)
    stats = []
    for i, g in enumerate(gains):
        label = (
            GainLabel.BROKEN
            if not finite[i]
            else _label(
                n=n,
                mean=float(mean[i]),
                minimum=float(minimum[i]),
                maximum=float(maximum[i]),
                negative=float(negative[i]),
                below_one=float(below_one[i]),
                below_minus_one=float(below_minus_one[i]),
                off=float(off[i]),
                n_low=int(n_low[i]),
                exact=None if exact is None else (float(exact[0, i]), float(exact[1, i]), float(exact[2, i])),
            )
        )
        stats.append(
            GainStats(
                name=g.name,
                canonical_name=g.canonical_name,
                file=g.file,
                dtype=dtype,
                n=n,
                mean=float(mean[i]),
                minimum=float(minimum[i]),
                maximum=float(maximum[i]),
                negative_share=float(negative[i]),
                below_one_share=float(below_one[i]),
                below_minus_one_share=float(below_minus_one[i]),
                off_grid_share=float(off[i]),
                n_informative=int(n_low[i]),
                histogram=tuple(bins[i].tolist()),
                label=label,
            )
        )
    return stats


def _label(
    *,
    n: int,
    mean: float,
    minimum: float,
    maximum: float,
    negative: float,
    below_one: float,
    below_minus_one: float,
    off: float,
    n_low: int,
    exact: tuple[float, float, float] | None,
) -> GainLabel:
    if minimum == maximum:
        constants = {0.0: GainLabel.CONST0, 1.0: GainLabel.CONST1, 2.0: GainLabel.CONST2}
        return constants.get(minimum, GainLabel.UNCLEAR)
    if n < MIN_ENTRIES:
        return GainLabel.UNCLEAR
    if exact is not None and exact[0] < 0.5:  # a float32 sum of bfloat16 numbers gives its summands away
        if exact[1] >= EXACT:
            return GainLabel.GAMMA
        if exact[1] < 0.5 and exact[2] >= EXACT:
            return GainLabel.TWICE
    if mean < -0.6 and below_minus_one >= 0.25:
        return GainLabel.UNDER
    if mean >= TWICE_FLOOR and below_one <= NEGATIVE:
        return GainLabel.TWICE
    if mean < 0:
        return GainLabel.DELTA
    if negative >= NEGATIVE and (off >= 0.01 or (negative >= NEGATIVE_CLEAR and mean < 0.2)):
        return GainLabel.DELTA
    on_grid = off == 0 and n_low >= MIN_INFORMATIVE and negative < NEGATIVE_CLEAR
    if mean >= 0.2 and (on_grid or (negative <= NEGATIVE and off <= OFF_GRID and n - n_low > n // 2)):
        return GainLabel.GAMMA
    return GainLabel.POSITIVE if negative < NEGATIVE and off > OFF_GRID else GainLabel.UNCLEAR


def _steps(
    rows: np.ndarray,  # [G, n] float32
    dtype: str,
) -> np.ndarray:
    """1 / step of a sum 1 + x in the type each row came from, float32 [G]: a cast up leaves the old grid behind."""
    bf16, f16, f32 = np.float32(2**8), np.float32(2**11), np.float32(2**24)
    if dtype == "BF16":
        return np.full(len(rows), bf16)
    narrow = _bf16_exact(rows) >= 0.95
    if dtype == "F16":
        return np.where(narrow, bf16, f16)
    if narrow.all():
        return np.full(len(rows), bf16)
    with np.errstate(over="ignore"):
        half = (rows.astype(np.float16).astype(np.float32) == rows).mean(axis=1) >= 0.95
    return np.where(narrow, bf16, np.where(half, f16, f32))


def _bf16_exact(
    rows: np.ndarray,  # [G, n] float32
) -> np.ndarray:
    """The share of entries that bfloat16 holds exactly, [G]."""
    return np.asarray(((np.ascontiguousarray(rows).view(np.uint32) & 0xFFFF) == 0).mean(axis=1))


def _histograms(
    rows: np.ndarray,  # [G, n] float32
) -> np.ndarray:
    """Counts per row, [G, HISTOGRAM_BINS]."""
    begin, end = HISTOGRAM_RANGE
    scale = np.float32(HISTOGRAM_BINS / (end - begin))
    places = np.clip(np.floor((rows - np.float32(begin)) * scale), 0, HISTOGRAM_BINS - 1).astype(np.int32)
    places += np.arange(len(rows), dtype=np.int32)[:, None] * HISTOGRAM_BINS
    return np.bincount(places.ravel(), minlength=len(rows) * HISTOGRAM_BINS).reshape(len(rows), HISTOGRAM_BINS)
