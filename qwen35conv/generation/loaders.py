"""What each public loader would make of an artifact: its rule as data, and the forecast.

Loaders decide by flags whether to add 1 to every norm gain, and shapes never show a wrong guess. The rules here were
read in the loaders' sources and pull requests; `versions` says for which releases, `confidence` how sure that is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from qwen35conv.generation.convention import ConvLayout, Generation, Naming


class Stored(str, Enum):
    """What the gains on disk are."""

    DELTA = "gamma - 1"
    GAMMA = "gamma"
    TWICE = "gamma + 1"


class Outcome(str, Enum):
    """What becomes of an artifact in a loader."""

    RIGHT = "loads right"
    SHIFTS_TWICE = "would shift twice"
    SHIFTS_NOT = "would not shift"
    SHIFTS_SOME = "would shift some gains and not others"
    STAYS_TWICE = "would keep gains that were shifted twice"
    CANNOT = "cannot load"
    UNKNOWN = "cannot tell"


class Confidence(str, Enum):
    """How sure a rule is."""

    TESTED = "compared with the loader itself"
    READ = "read in the loader's source"
    REPORTED = "read in the pull request that brought it"


@dataclass(frozen=True, slots=True)
class Artifact:
    """What a loader can see of a checkpoint, and what its gains really are. Only tensors in the files it reads count:
    `has_mtp` speaks of the shards, not of a sidecar in another folder.
    """

    naming: Naming
    conv: ConvLayout
    has_mtp: bool
    gains: Stored | None  # None: mixed, or not known
    per_expert: bool = False  # mlp.experts.<e>.gate_proj.weight
    unreadable: bool = False  # weights in a scheme that no MLX loader reads
    raw_quantization_keys: bool = False  # MLX-quantised, with per-module settings under names that are not canonical


@dataclass(frozen=True, slots=True)
class Loader:
    """A loader's rules. `shifts`: whether it adds 1 to the gains. `stacks_experts`: under which names it loads experts
    that are one tensor each. `foreign_widths`: what comes of quantization settings keyed by other names.
    """

    name: str
    versions: str
    shifts: Callable[[Artifact], bool]
    rule: str
    confidence: Confidence
    stacks_experts: tuple[Naming, ...] = ()
    foreign_widths: Outcome = Outcome.UNKNOWN
    shifts_by_name: bool = False  # each gain by its own name, so that mixed names part them


@dataclass(frozen=True, slots=True)
class Forecast:
    """What one loader would do with an artifact."""

    loader: str
    versions: str
    outcome: Outcome
    text: str


def _conv_is_raw(artifact: Artifact) -> bool:
    """Whether any conv1d.weight has a last axis other than 1."""
    return artifact.conv in (ConvLayout.RAW, ConvLayout.MIXED, ConvLayout.FLAT)


def _mtp_or_conv(artifact: Artifact) -> bool:
    return artifact.has_mtp or _conv_is_raw(artifact)


def _names_or_conv(artifact: Artifact) -> bool:
    return artifact.naming is not Naming.CANONICAL or _conv_is_raw(artifact)


_BY_MTP_OR_CONV = "shifts if any mtp.* is there or any conv1d.weight does not end in an axis of 1"
_BY_CONV = "shifts if any conv1d.weight does not end in an axis of 1"
_BY_NAMES = (
    "leaves mtp.* out, then shifts if the conv is raw, or each gain whose name does not start with language_model."
)

LOADERS: tuple[Loader, ...] = (
    Loader("mlx-lm", "up to 0.31", _mtp_or_conv, _BY_MTP_OR_CONV, Confidence.READ, foreign_widths=Outcome.CANNOT),
    Loader("mlx-lm", "from 0.32", _conv_is_raw, _BY_CONV, Confidence.TESTED, foreign_widths=Outcome.RIGHT),
    Loader(
        "mlx-vlm",
        "0.7",
        _names_or_conv,
        _BY_NAMES,
        Confidence.READ,
        stacks_experts=(Naming.RAW,),
        foreign_widths=Outcome.CANNOT,
        shifts_by_name=True,
    ),
    Loader("mlx-bun", "0.4", _mtp_or_conv, _BY_MTP_OR_CONV, Confidence.READ),
    Loader("mlx-swift-lm", "before September 2026", _mtp_or_conv, _BY_MTP_OR_CONV, Confidence.READ),
    Loader("mlx-swift-lm", "from September 2026", _conv_is_raw, _BY_CONV, Confidence.REPORTED),
)

_STORED = {
    Generation.RAW: Stored.DELTA,
    Generation.NEVER_SHIFTED: Stored.DELTA,
    Generation.CANONICAL: Stored.GAMMA,
    Generation.SHIFTED_RAW: Stored.GAMMA,
    Generation.DOUBLE_SHIFTED: Stored.TWICE,
}


def stored_gains(generation: Generation) -> Stored | None:
    """What the gains on disk are under a verdict; None for mixed and unknown."""
    return _STORED.get(generation)


def forecast(artifact: Artifact) -> tuple[Forecast, ...]:
    """What each known loader would do with an artifact, in the order of LOADERS."""
    found = []
    for loader in LOADERS:
        outcome, text = _foresee(loader, artifact)
        found.append(Forecast(loader.name, loader.versions, outcome, text))
    return tuple(found)


def _foresee(loader: Loader, artifact: Artifact) -> tuple[Outcome, str]:
    if artifact.per_expert and artifact.naming not in loader.stacks_experts:
        return Outcome.CANNOT, f"{Outcome.CANNOT.value}: per-expert names"
    if artifact.unreadable:
        return Outcome.CANNOT, f"{Outcome.CANNOT.value}: a quantisation that is not MLX's"
    if artifact.conv is ConvLayout.FLAT:
        return Outcome.CANNOT, f"{Outcome.CANNOT.value}: conv1d.weight has two axes"
    if artifact.raw_quantization_keys and loader.foreign_widths is not Outcome.RIGHT:
        return loader.foreign_widths, f"{loader.foreign_widths.value}: quantization settings under other names"
    if loader.shifts_by_name and artifact.naming is Naming.MIXED and not _conv_is_raw(artifact):
        return Outcome.SHIFTS_SOME, Outcome.SHIFTS_SOME.value
    if artifact.gains is None:
        return Outcome.UNKNOWN, Outcome.UNKNOWN.value
    outcome = _OUTCOMES[artifact.gains, loader.shifts(artifact)]
    return outcome, outcome.value


_OUTCOMES = {
    (Stored.DELTA, True): Outcome.RIGHT,
    (Stored.DELTA, False): Outcome.SHIFTS_NOT,
    (Stored.GAMMA, True): Outcome.SHIFTS_TWICE,
    (Stored.GAMMA, False): Outcome.RIGHT,
    (Stored.TWICE, True): Outcome.SHIFTS_TWICE,
    (Stored.TWICE, False): Outcome.STAYS_TWICE,
}
