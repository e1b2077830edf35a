"""What can be said of a checkpoint before a byte of it is written, and the command that comes next."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from qwen35conv.errors import CheckpointError, ConventionError, Qwen35ConvError
from qwen35conv.facts.checkpoint import Checkpoint, Finding, SourceTensor
from qwen35conv.facts.config import LayerKind, ModelConfig
from qwen35conv.facts.layout import (
    KEPT_MTP_PREFIX,
    VISION_PREFIX,
    Region,
    Role,
    canonical_modules,
    is_known,
    parse_name,
)
from qwen35conv.generation.convention import ConvLayout, Generation, Naming, repair_shift
from qwen35conv.generation.loaders import Artifact, Forecast, Outcome, Stored, forecast, stored_gains
from qwen35conv.planning.pieces import Rule, Skip, Write
from qwen35conv.planning.plan import Mtp, NormDtype, Options, Plan, make_plan
from qwen35conv.planning.scheme import ForeignScheme, SchemeError, find_schemes
from qwen35conv.planning.sidecar import ConfigEdit, SideFiles, build_config, config_edits, side_files
from qwen35conv.planning.verdicts import Verdicts, conv_layout, judge_checkpoint

# Layers, hidden size and experts of the published models.
_SHAPES = {
    (24, 1024, 0): "0.8B",
    (24, 2048, 0): "2B",
    (32, 2560, 0): "4B",
    (32, 4096, 0): "9B",
    (64, 5120, 0): "27B",
    (40, 2048, 256): "35B-A3B",
    (48, 3072, 256): "122B-A10B",
    (60, 4096, 512): "397B-A17B",
}


@dataclass(frozen=True, slots=True)
class Inspection:
    """One checkpoint, judged: either a plan or the problem that forbids one."""

    checkpoint: Checkpoint
    verdicts: Verdicts
    options: Options
    plan: Plan | None
    problem: Qwen35ConvError | None
    remedy: Plan | None  # what --repair or --dequantize would do, where that is all that is missing
    schemes: tuple[ForeignScheme, ...]  # quantisations that MLX loaders cannot read
    edits: tuple[ConfigEdit, ...]
    files: SideFiles
    forecasts: tuple[Forecast, ...]  # each known loader, given the source as it is
    result_forecasts: tuple[Forecast, ...]  # ... and given the result; empty without a plan

    @property
    def shown_plan(self) -> Plan | None:
        """The plan, or what the option that is missing would make of it."""
        return self.plan or self.remedy

    @property
    def is_repair(self) -> bool:
        """Whether --repair is what is missing."""
        return self.remedy is not None and isinstance(self.problem, ConventionError)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is odd, as far as the plan came."""
        plan = self.shown_plan
        return plan.findings if plan is not None else self.checkpoint.findings


@dataclass(frozen=True, slots=True)
class Tally:
    """So many tensors and bytes that share a fate."""

    what: str
    n_tensors: int
    n_bytes: int


def inspect_checkpoint(checkpoint: Checkpoint, options: Options | None = None) -> Inspection:
    """The inspection of a checkpoint. What forbids a plan is kept in `problem`, not raised."""
    options = options or Options()
    verdicts = judge_checkpoint(checkpoint)
    plan, problem = _try_plan(checkpoint, options, verdicts)
    remedy = None
    if isinstance(problem, ConventionError) and repair_shift(verdicts.trunk.generation) is not None:
        remedy, _ = _try_plan(checkpoint, replace(options, repair=True), verdicts)
    if isinstance(problem, SchemeError) and problem.can_dequantize:
        remedy, _ = _try_plan(checkpoint, replace(options, dequantize=True), verdicts)
    edits: tuple[ConfigEdit, ...] = ()
    planned = plan or remedy
    if planned is not None:
        try:
            edits = config_edits(checkpoint.config.document, build_config(planned))
        except CheckpointError as error:
            plan, remedy, problem = None, None, error
    return Inspection(
        checkpoint=checkpoint,
        verdicts=verdicts,
        options=options,
        plan=plan,
        problem=problem,
        remedy=remedy,
        schemes=find_schemes(checkpoint.tensors, checkpoint.config),
        edits=edits,
        files=side_files(checkpoint),
        forecasts=forecast(artifact_of(checkpoint, verdicts)),
        result_forecasts=() if planned is None else forecast(artifact_of_result(planned)),
    )


def _try_plan(
    checkpoint: Checkpoint, options: Options, verdicts: Verdicts
) -> tuple[Plan | None, CheckpointError | None]:
    try:
        return make_plan(checkpoint, options, verdicts), None
    except CheckpointError as error:
        return None, error


def artifact_of(checkpoint: Checkpoint, verdicts: Verdicts) -> Artifact:
    """What a loader sees of a checkpoint as it is."""
    facts = verdicts.trunk.facts
    assert facts is not None
    places = [tensor.place for tensor in checkpoint.tensors if tensor.place is not None]
    quantization = checkpoint.config.quantization
    return Artifact(
        naming=facts.naming,
        conv=facts.conv,
        has_mtp=facts.has_mtp,
        gains=stored_gains(verdicts.trunk.generation),
        per_expert=any(p.region is Region.TRUNK and p.role in (Role.EXPERT, Role.FUSED_EXPERT) for p in places),
        unreadable=any(not scheme.is_integer for scheme in find_schemes(checkpoint.tensors, checkpoint.config)),
        raw_quantization_keys=quantization is not None and not all(map(_is_canonical_module, quantization.modules)),
    )


def artifact_of_result(plan: Plan) -> Artifact:
    """What a loader will see of a plan's result."""
    kernel = plan.checkpoint.config.conv_kernel
    writes = tuple(plan.writes())
    convs = {conv_layout(write.shape, kernel) for write in writes if write.name.endswith(".conv1d.weight")}
    text = [write.name for write in writes if not write.name.startswith(VISION_PREFIX)]
    is_canonical = all(name.startswith("language_model.") for name in text)
    return Artifact(
        naming=Naming.CANONICAL if is_canonical else Naming.MIXED,
        conv=convs.pop() if len(convs) == 1 else ConvLayout.MIXED if convs else ConvLayout.NONE,
        has_mtp=any("mtp." in write.name for write in writes),
        gains=_result_gains(plan),
    )


_ADDED = {Stored.DELTA: 0, Stored.GAMMA: 1, Stored.TWICE: 2}


def _result_gains(plan: Plan) -> Stored | None:
    """What the written gains will be, by the verdict; by the word of --assume where that says nothing."""
    stored = stored_gains(plan.verdict.generation)
    if stored is None:
        return Stored.GAMMA if plan.options.assume is not None else None
    added = _ADDED[stored] + plan.shift
    return next((kind for kind, n in _ADDED.items() if n == added), None)


def _is_canonical_module(name: str) -> bool:
    place = parse_name(f"{name}.weight")
    return place is not None and name in canonical_modules(place)


def sketch(config: ModelConfig) -> str:
    """What a model is, in a few words, by its sizes."""
    n_full = sum(kind is LayerKind.FULL for kind in config.layer_kinds)
    shape = _SHAPES.get((config.n_layers, config.hidden_size, config.n_experts))
    parts = [
        f"Qwen3.5 {'MoE' if config.n_experts else 'dense'}{f', the shape of {shape}' if shape else ''}",
        f"{config.n_layers} layers ({config.n_layers - n_full} linear + {n_full} full attention)",
        f"hidden {config.hidden_size}",
        f"{config.n_heads} heads, {config.n_kv_heads} kv",
    ]
    if config.n_experts:
        parts.append(f"{config.n_experts} experts, {config.n_experts_per_token} a token")
    return " · ".join(parts)


def dtype_shares(checkpoint: Checkpoint) -> tuple[Tally, ...]:
    """Tensors and bytes of each dtype, the largest first."""
    return _tally((tensor.dtype.value, tensor.n_bytes) for tensor in checkpoint.tensors)


def write_tallies(plan: Plan) -> tuple[Tally, ...]:
    """Written tensors by what is done to them, the largest first."""
    signs = {1: "+ 1", -1: "- 1", 0: "+ 0"}

    def what(write: Write, shift: int | None) -> str:
        return f"{write.rule.value}: {signs[shift or 0]}" if write.rule is Rule.GAIN else write.rule.value

    kept = [(what(write, _shift_of(plan, write)), write.n_bytes) for write in plan.writes()]
    aside = [
        (f"{what(write, plan.head_shift)}, into the sidecar", write.n_bytes)
        for shard in plan.sidecar
        for write in shard.writes
    ]
    return _tally([*kept, *aside])


def _shift_of(plan: Plan, write: Write) -> int | None:
    return plan.head_shift if write.name.startswith(KEPT_MTP_PREFIX) else plan.shift


def skip_tallies(skips: Sequence[Skip]) -> tuple[Tally, ...]:
    """Tensors that are left out by reason, the largest first."""
    return _tally((skip.reason, skip.n_bytes) for skip in skips)


def _tally(pairs: Iterable[tuple[str, int]]) -> tuple[Tally, ...]:
    counts: dict[str, tuple[int, int]] = {}
    for what, n_bytes in pairs:
        n, total = counts.get(what, (0, 0))
        counts[what] = (n + 1, total + n_bytes)
    rows = [Tally(what, n, total) for what, (n, total) in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.n_bytes))


def is_named(tensor: SourceTensor) -> bool:
    """Whether a rule knows the tensor's name; the vision tower's are all known, as a whole."""
    place = tensor.place
    return place is not None and (place.region is Region.VISION or is_known(place))


def next_command(inspection: Inspection) -> str | None:
    """The command line that converts the checkpoint; None where none would do, or none is needed."""
    plan = inspection.shown_plan
    if plan is None or (inspection.problem is None and not needs_conversion(inspection)):
        return None
    source = inspection.checkpoint.label
    name = source.rstrip("/").rpartition("/")[2]
    if name in (".", ".."):  # beside it, as inside it is no place
        target = posixpath.normpath(f"{source}/../converted-mlx")
    else:
        target = f"{name.removesuffix('.safetensors').lstrip('.-') or 'converted'}-mlx"
    origin = inspection.checkpoint.origin
    at = [] if origin is None or origin.revision == "main" else ["--revision", origin.revision]
    more = ["--ignore-index"] if inspection.checkpoint.ignored_index else []
    end = ["--"] if source.startswith("-") else []
    return shlex.join(["qwen35", "convert", *_flags(plan.options), *more, *at, *end, source, target])


def needs_conversion(inspection: Inspection) -> bool:
    """Whether a conversion would change a tensor, or a name that a loader looks at."""
    plan = inspection.plan
    return (
        plan is None
        or not plan.is_identity
        or any(found.outcome is not Outcome.RIGHT for found in inspection.forecasts)
    )


def _flags(options: Options) -> list[str]:
    """The options that differ from the defaults, as they are given to `convert`."""
    flags = []
    if options.keep_vision:
        flags.append("--keep-vision")
    if options.mtp is not Mtp.DROP:
        flags += ["--mtp", options.mtp.value]
    if options.assume is not None:
        flags += ["--assume", "raw" if options.assume is Generation.RAW else "canonical"]
    if options.repair:
        flags.append("--repair")
    if options.norm_dtype is not NormDtype.SOURCE:
        flags += ["--norm-dtype", options.norm_dtype.value]
    if options.max_shard_bytes is not None:
        flags += ["--max-shard-size", str(options.max_shard_bytes)]
    if options.tie:
        flags.append("--tie-embeddings")
    if options.dequantize:
        flags.append("--dequantize")
    if (asked := options.quantize) is not None:
        flags += ["--quantize", str(asked.bits), "--group-size", str(asked.group_size), "--mode", asked.mode]
    return flags
