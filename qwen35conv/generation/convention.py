"""Which generation a checkpoint is: the facts of its layout against the values of its gains, and the verdict.

No loader's flag decides alone. Shapes and names never change when a gain is shifted once too often, so the values
speak first; facts (names, conv layout, metadata, markers) must agree with them, or the verdict says what is broken.
Only where the values are weak and all facts agree do the facts decide. An mtp head is never evidence on the trunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from qwen35conv.generation.draft_head import weigh_head
from qwen35conv.generation.evidence import Weighed, check_control, weigh
from qwen35conv.generation.gains import Gain, GainLabel, GainStats, Role, measure, measure_all
from qwen35conv.generation.groups import Values

__all__ = [
    "MARKER_KEYS",
    "ConvLayout",
    "Facts",
    "Gain",
    "GainLabel",
    "GainStats",
    "Generation",
    "Naming",
    "Role",
    "Verdict",
    "judge",
    "judge_head",
    "measure",
    "read_markers",
    "repair_shift",
]


class Generation(str, Enum):
    """What a checkpoint is. Only RAW and CANONICAL convert without being told to."""

    RAW = "raw"
    CANONICAL = "canonical"
    DOUBLE_SHIFTED = "double-shifted"
    NEVER_SHIFTED = "never-shifted"  # moved, gains still gamma - 1
    SHIFTED_RAW = "shifted-raw"  # conv still raw, gains already gamma
    MIXED = "mixed"
    UNKNOWN = "unknown"


class Naming(str, Enum):
    """How the trunk's tensors are named."""

    RAW = "raw"  # model.language_model.*
    CANONICAL = "canonical"  # language_model.*
    NEUTRAL = "neutral"  # model.layers.*, or bare: text-only exports
    MIXED = "mixed"


class ConvLayout(str, Enum):
    """How conv1d.weight is laid out."""

    RAW = "[C, 1, K]"
    CANONICAL = "[C, K, 1]"
    FLAT = "[C, K]"
    MIXED = "mixed"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Facts:
    """What names, shapes, metadata and config say. `markers` are (key, value) pairs that name a norm convention."""

    naming: Naming
    conv: ConvLayout
    has_mtp: bool
    metadata_format: str | None
    markers: tuple[tuple[str, str], ...]
    n_layers: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which generation, and what led there."""

    generation: Generation
    reasons: tuple[str, ...]
    facts: Facts | None  # None for an mtp head, which is judged by its values alone
    stats: tuple[GainStats, ...]
    by: str  # "values", "facts" or "values and facts"
    outliers: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def converts(self) -> bool:
        """Whether this converts without being told to."""
        return self.generation in (Generation.RAW, Generation.CANONICAL)

    @property
    def shift(self) -> int | None:
        """What to add to each gain to get gamma; None where this can't convert."""
        return {Generation.RAW: 1, Generation.CANONICAL: 0}.get(self.generation)


def repair_shift(generation: Generation) -> int | None:
    """What to add to each gain of a cleanly broken checkpoint to get gamma; None where there is no such number."""
    return {Generation.DOUBLE_SHIFTED: -1, Generation.NEVER_SHIFTED: 1, Generation.SHIFTED_RAW: 0}.get(generation)


class Layout(str, Enum):
    """What names and conv say together."""

    RAW = "raw names and conv"
    CANONICAL = "canonical names and conv"
    RENAMED = "canonical names, raw conv"
    MOVED = "raw names, canonical conv"
    NONE = "no conv to go by"
    BROKEN = "conv layouts that disagree"


_R, _C, _N, _M = Naming.RAW, Naming.CANONICAL, Naming.NEUTRAL, Naming.MIXED

# The conv axis moves together with the shift in every loader; names are changed by many tools. So where names are
# neutral or mixed the conv decides, and where there is no conv (or a squeezed one) the names do.
LAYOUTS: dict[tuple[Naming, ConvLayout], Layout] = {
    **{(n, ConvLayout.RAW): Layout.RAW for n in (_R, _N, _M)},
    **{(n, ConvLayout.CANONICAL): Layout.CANONICAL for n in (_C, _N, _M)},
    (_C, ConvLayout.RAW): Layout.RENAMED,
    (_R, ConvLayout.CANONICAL): Layout.MOVED,
    **{(_R, c): Layout.RAW for c in (ConvLayout.FLAT, ConvLayout.NONE)},
    **{(_C, c): Layout.CANONICAL for c in (ConvLayout.FLAT, ConvLayout.NONE)},
    **{(n, c): Layout.NONE for n in (_N, _M) for c in (ConvLayout.FLAT, ConvLayout.NONE)},
    **{(n, ConvLayout.MIXED): Layout.BROKEN for n in Naming},
}

_RENAMED = "only the names were changed: the conv and the gains are raw"
_UNRENAMED = "only the names are raw: the conv was moved and the gains were shifted"
_CONV_LEFT = "the gains were shifted and the conv was not moved: loaders would shift again"
_CONV_ONLY = "the conv was moved and the gains were not shifted: loaders would not shift"
_NO_LAYOUT = "neither names nor a conv confirm it"

# What clear values and a layout make together, and why it is worth a word.
OUTCOMES: dict[tuple[Values, Layout], tuple[Generation, str | None]] = {
    (Values.DELTA, Layout.RAW): (Generation.RAW, None),
    (Values.DELTA, Layout.RENAMED): (Generation.RAW, _RENAMED),
    (Values.DELTA, Layout.NONE): (Generation.RAW, _NO_LAYOUT),
    (Values.DELTA, Layout.CANONICAL): (Generation.NEVER_SHIFTED, _CONV_ONLY),
    (Values.DELTA, Layout.MOVED): (Generation.NEVER_SHIFTED, _CONV_ONLY),
    (Values.GAMMA, Layout.CANONICAL): (Generation.CANONICAL, None),
    (Values.GAMMA, Layout.MOVED): (Generation.CANONICAL, _UNRENAMED),
    (Values.GAMMA, Layout.NONE): (Generation.CANONICAL, _NO_LAYOUT),
    (Values.GAMMA, Layout.RAW): (Generation.SHIFTED_RAW, _CONV_LEFT),
    (Values.GAMMA, Layout.RENAMED): (Generation.SHIFTED_RAW, _CONV_LEFT),
    **{(Values.TWICE, layout): (Generation.DOUBLE_SHIFTED, None) for layout in Layout},
}

# Markers that public tools write, and what each says of the gains. Any other value is no marker.
MARKERS: dict[tuple[str, str], Values] = {
    **{("norm_convention", v): Values.DELTA for v in ("raw", "hf", "delta", "gamma-1", "zero-centered")},
    **{("norm_convention", v): Values.GAMMA for v in ("gamma", "canonical", "mlx", "runtime_plus1_applied")},
    ("preshifted_norm_weights", "true"): Values.GAMMA,
    ("preshifted_norm_weights", "false"): Values.DELTA,
    ("jang_norms_pre_shifted", "true"): Values.GAMMA,
    ("language_norms", "mlx-pre-shifted"): Values.GAMMA,
    ("language_norms", "zero-centered-runtime-plus-one"): Values.DELTA,
}
_HEAD_MARKERS = ("mtp_norm_encoding", "mtplx_mtp_norm_encoding")  # they speak of the mtp head alone
MARKER_KEYS = tuple(dict.fromkeys((*(key for key, _ in MARKERS), *_HEAD_MARKERS)))
_FORMATS = {"mlx": Values.GAMMA, "pt": Values.DELTA}


def read_markers(facts: Facts) -> tuple[tuple[tuple[str, Values], ...], tuple[str, ...]]:
    """What markers and metadata claim of the trunk's gains, as (text, values); then warnings on unknown markers."""
    claims, warnings = [], []
    for key, value in facts.markers:
        if key in _HEAD_MARKERS:
            continue
        said = MARKERS.get((key, value.strip().lower()))
        if said is None:
            warnings.append(f"{key} = {value!r} is not known: ignored")
        else:
            claims.append((f"{key} = {value!r}", said))
    if facts.metadata_format in _FORMATS:
        claims.append((f"metadata format {facts.metadata_format!r}", _FORMATS[facts.metadata_format]))
    return tuple(claims), tuple(warnings)


def judge(facts: Facts, gains: Sequence[Gain]) -> Verdict:
    """Which generation the trunk is. Gains of an mtp head may be among `gains`: they are left out."""
    stats = measure_all([g for g in gains if not g.canonical_name.startswith("mtp.")])
    layout = LAYOUTS[facts.naming, facts.conv]
    weighed = weigh(stats)
    stop, control_warnings = check_control(stats)
    claims, warnings = read_markers(facts)
    notes = [*weighed.warnings, *control_warnings, *warnings]
    if 0 < weighed.n_anchors < 2 * facts.n_layers:
        notes.append(f"{weighed.n_anchors} of {2 * facts.n_layers} layer norm gains are here")
    told = f"layout: {layout.value} ({facts.naming.value} names, conv {facts.conv.value})"

    def verdict(generation: Generation, *reasons: str, by: str, more: Sequence[str] = ()) -> Verdict:
        return Verdict(
            generation=generation,
            reasons=(*reasons, *weighed.reasons, told),
            facts=facts,
            stats=stats,
            by=by,
            outliers=weighed.outliers,
            warnings=(*notes, *more),
        )

    if weighed.values in (Values.BROKEN, Values.UNDER):
        return verdict(Generation.UNKNOWN, by="values")
    if stop:
        return verdict(Generation.UNKNOWN, stop, by="values")
    if weighed.values is Values.MIXED:
        return verdict(Generation.MIXED, by="values")
    if layout is Layout.BROKEN:
        return verdict(Generation.MIXED, "some conv1d.weight are moved and some are not", by="facts")
    if weighed.values is Values.WEAK:
        generation, why, by = _by_facts(layout, claims, weighed)
        return verdict(generation, why, by=by, more=(why,) if generation is not Generation.UNKNOWN else ())
    generation, remark = OUTCOMES[weighed.values, layout]
    if weighed.constant and remark is not None:
        why = f"every gain is one number throughout, and the layout does not agree: {remark}"
        return verdict(Generation.UNKNOWN, why, by="values")
    if weighed.doubted and repair_shift(generation) is not None:
        why = f"the layer norms look like {weighed.values.value}, against the layout and against some norms"
        return verdict(Generation.UNKNOWN, why, by="values")
    denied = [f"{text} says {said.value}, the values say {weighed.values.value}" for text, said in claims]
    more = [d for d, (_, said) in zip(denied, claims, strict=True) if said is not weighed.values]
    if remark is not None and generation in (Generation.RAW, Generation.CANONICAL):
        more.append(remark)
    by = "values and facts" if remark is None and weighed.values is not Values.TWICE else "values"
    return verdict(generation, *([remark] if remark else []), by=by, more=more)


def _by_facts(layout: Layout, claims: Sequence[tuple[str, Values]], weighed: Weighed) -> tuple[Generation, str, str]:
    """The verdict where the values are weak, why, and what decided."""
    says = {Layout.RAW: Values.DELTA, Layout.CANONICAL: Values.GAMMA}.get(layout)
    if says is None:
        return Generation.UNKNOWN, f"the values are weak and the layout is unclear: {layout.value}", "facts"
    against = [text for text, said in claims if said is not says]
    if against:
        return Generation.UNKNOWN, f"the values are weak and {', '.join(against)} contradicts the layout", "facts"
    if weighed.n_anchors == 0:
        return Generation.UNKNOWN, "there are no layer norm gains: names and conv alone prove nothing", "facts"
    lean = weighed.backed_lean if claims else weighed.lean
    if lean is not says:
        looks = f"look more like {lean.value}" if lean else "could be anything"
        return Generation.UNKNOWN, f"the values are weak and {looks}; the layout says {says.value}", "values"
    generation = Generation.RAW if says is Values.DELTA else Generation.CANONICAL
    return generation, f"the values are weak: they allow {says.value}, and names and conv decided", "facts"


_HEAD = {
    Values.DELTA: Generation.RAW,
    Values.GAMMA: Generation.CANONICAL,
    Values.TWICE: Generation.DOUBLE_SHIFTED,
    Values.MIXED: Generation.MIXED,
}


def judge_head(gains: Sequence[Gain], trunk: Generation | None = None) -> Verdict:
    """Which generation an mtp head is: RAW, CANONICAL, DOUBLE_SHIFTED, MIXED or UNKNOWN. Other gains are left out."""
    stats = measure_all([g for g in gains if g.canonical_name.startswith("mtp.")])
    weighed = weigh_head(stats, trunk_is_raw=trunk is Generation.RAW)
    return Verdict(
        generation=_HEAD.get(weighed.values, Generation.UNKNOWN),
        reasons=weighed.reasons,
        facts=None,
        stats=stats,
        by="values",
        outliers=weighed.outliers,
        warnings=weighed.warnings,
    )
