"""The plan: every canonical tensor as byte ranges of the source and at most one fix, every other tensor with a reason.

Pure: made from a Checkpoint and Options alone, and it reads nothing. The writer, the view, the report and the receipt
all follow it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby

from qwen35conv.errors import CheckpointError, ConventionError
from qwen35conv.facts.checkpoint import Checkpoint, Finding, Severity, SourceTensor, few
from qwen35conv.facts.config import MLX_MODES, ModelConfig, ModuleQuantization
from qwen35conv.facts.header import Dtype, TensorInfo, shown
from qwen35conv.facts.layout import (
    KEPT_MTP_PREFIX,
    SIDECAR_MTP_PREFIX,
    VISION_PREFIX,
    Region,
    Role,
    canonical_module,
    canonical_modules,
    is_known,
)
from qwen35conv.generation.convention import ConvLayout, Generation, Verdict, repair_shift
from qwen35conv.planning.blocks import dequantized, pair_scales
from qwen35conv.planning.experts import split_fused, stack_experts
from qwen35conv.planning.inventory import check_head_inventory, check_inventory
from qwen35conv.planning.packing import is_packable, quantized
from qwen35conv.planning.pieces import Fix, Rule, Skip, Write, copy_of, piece_of
from qwen35conv.planning.scheme import check_scheme, packing
from qwen35conv.planning.verdicts import Verdicts, conv_layout, judge_checkpoint


class Mtp(str, Enum):
    """What becomes of the draft head."""

    DROP = "drop"
    KEEP = "keep"
    SIDECAR = "sidecar"


class NormDtype(str, Enum):
    """How shifted gains are stored: as the source does, or exactly."""

    SOURCE = "source"
    FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may ask of a conversion."""

    keep_vision: bool = False
    mtp: Mtp = Mtp.DROP
    assume: Generation | None = None  # RAW or CANONICAL
    repair: bool = False
    norm_dtype: NormDtype = NormDtype.SOURCE
    max_shard_bytes: int | None = None
    tie: bool = False  # a missing head is the embeddings
    dequantize: bool = False  # FP8 in blocks becomes bfloat16
    quantize: ModuleQuantization | None = None


@dataclass(frozen=True, slots=True)
class PlanShard:
    """One file of the result: its tensors in the order of their bytes."""

    file: str
    writes: tuple[Write, ...]

    def tensors(self) -> tuple[TensorInfo, ...]:
        """The header's entries."""
        infos, end = [], 0
        for write in self.writes:
            begin, end = end, end + write.n_bytes
            infos.append(TensorInfo(write.name, write.dtype, write.shape, begin, end))
        return tuple(infos)

    @property
    def n_bytes(self) -> int:
        """Bytes of the data area."""
        return sum(write.n_bytes for write in self.writes)


@dataclass(frozen=True, slots=True)
class Plan:
    """What becomes of a checkpoint. `sidecar` holds the draft head's own shards where it gets a folder."""

    checkpoint: Checkpoint
    verdicts: Verdicts
    options: Options
    shift: int  # what is added to each trunk gain: 1, 0 or -1
    head_shift: int | None  # the same for the draft head's; None where it is not written
    tied: bool
    shards: tuple[PlanShard, ...]
    sidecar: tuple[PlanShard, ...]
    skips: tuple[Skip, ...]
    packing: Mapping[str, ModuleQuantization | None]
    findings: tuple[Finding, ...]

    @property
    def verdict(self) -> Verdict:
        """The verdict on the trunk."""
        return self.verdicts.trunk

    def writes(self) -> Iterable[Write]:
        """Every tensor of the result, without the sidecar."""
        return (write for shard in self.shards for write in shard.writes)

    @property
    def is_identity(self) -> bool:
        """Whether every tensor stays as it is."""
        return not self.skips and not self.sidecar and all(write.rule is Rule.KEEP for write in self.writes())


def make_plan(checkpoint: Checkpoint, options: Options | None = None, verdicts: Verdicts | None = None) -> Plan:
    """The plan for a checkpoint.

    Raises ConventionError where its generation is broken, mixed or unknown and no option says what to do, and
    CheckpointError for a name without a rule, a missing expert or tensor, or a scheme that MLX cannot read.
    """
    options = options or Options()
    verdicts = verdicts or judge_checkpoint(checkpoint)
    label, config = checkpoint.label, checkpoint.config
    check_scheme(label, checkpoint.tensors, config, dequantize=options.dequantize)
    modes = packing(config, checkpoint.tensors)
    _check_names(checkpoint, options, modes)
    _check_values(checkpoint)
    weights, scales = pair_scales(label, checkpoint.tensors, config)
    shift = _shift(label, "trunk", verdicts.trunk, options)
    regions = {region: [t for t in weights if t.place and t.place.region is region] for region in Region}
    head_shift = None
    if regions[Region.MTP] and options.mtp is not Mtp.DROP:
        head_shift = _head_shift(label, verdicts, options)

    skips: list[Skip] = []
    findings = list(checkpoint.findings)
    tied = _decide_head(checkpoint, regions[Region.HEAD], options, skips, findings)
    dropped_heads = {skip.name for skip in skips}
    text = [t for t in regions[Region.TRUNK] + regions[Region.HEAD] if t.name not in dropped_heads]
    writes = _text_writes(text, config, shift, options, "")
    if options.keep_vision:
        writes += [_vision_write(tensor, config) for tensor in regions[Region.VISION]]
    else:
        skips += [_skip(tensor, "vision tower: not part of the text model") for tensor in regions[Region.VISION]]
    heads: list[Write] = []
    prefix = KEPT_MTP_PREFIX if options.mtp is Mtp.KEEP else SIDECAR_MTP_PREFIX
    if head_shift is None:
        skips += [_skip(tensor, "draft head (mtp): not part of the base model") for tensor in regions[Region.MTP]]
    else:
        heads = _text_writes(regions[Region.MTP], config, head_shift, options, prefix)
    skips += [_skip(t, "rotary buffer: computed anew") for t in text if t.place and t.place.role is Role.BUFFER]
    skips += [_skip(scales[skip.name], skip.reason) for skip in skips if skip.name in scales]
    if scales:
        assert config.fp8_block is not None
        writes, heads = (dequantized(group, weights, scales, config.fp8_block) for group in (writes, heads))
    if options.quantize is not None:
        writes, modes = _quantized(label, writes, config, modes, options.quantize)
        findings += _unpacked(writes, modes, options.quantize)

    _check_unique(label, writes + heads)
    check_inventory(label, writes, config, tied=tied, modes=modes)
    if heads:
        check_head_inventory(label, heads, config, prefix=prefix, modes=modes)
    findings += _findings(checkpoint, verdicts, regions, options)
    findings += _dtype_findings(writes + heads)
    order = {shard.file: i for i, shard in enumerate(checkpoint.shards)}
    kept, aside = (writes + heads, []) if options.mtp is Mtp.KEEP else (writes, heads)
    return Plan(
        checkpoint=checkpoint,
        verdicts=verdicts,
        options=options,
        shift=shift,
        head_shift=head_shift,
        tied=tied,
        shards=_cut(kept, order, options.max_shard_bytes, "model"),
        sidecar=_cut(aside, order, options.max_shard_bytes, "mtp"),
        skips=tuple(skips),
        packing=modes,
        findings=tuple(findings),
    )


def _quantized(
    label: str,
    writes: list[Write],
    config: ModelConfig,
    modes: Mapping[str, ModuleQuantization | None],
    asked: ModuleQuantization,
) -> tuple[list[Write], Mapping[str, ModuleQuantization | None]]:
    if modes:
        raise CheckpointError(
            f"{label}: packed already: {few(modes)}",
            hint="quantise the BF16 release instead; without --quantize what is packed rides through",
        )
    return quantized(label, writes, config, asked)


def _unpacked(
    writes: Iterable[Write], modes: Mapping[str, ModuleQuantization | None], asked: ModuleQuantization
) -> list[Finding]:
    odd = [write.name for write in writes if is_packable(write) and write.name.removesuffix(".weight") not in modes]
    if not odd:
        return []
    text = f"weights whose rows do not divide into groups of {asked.group_size} are not packed: {few(odd)}"
    return [Finding("not-packed", text, Severity.WARNING)]


def _check_names(checkpoint: Checkpoint, options: Options, modes: Mapping[str, ModuleQuantization | None]) -> None:
    """Raises CheckpointError for tensors that no rule knows, and for empty ones that a partitioned save leaves."""
    unknown = []
    for tensor in checkpoint.tensors:
        place = tensor.place
        if place is None:
            unknown.append(tensor.name)
            continue
        if place.region is Region.VISION or (place.region is Region.MTP and options.mtp is Mtp.DROP):
            continue
        if not is_known(place) and not _is_opaque(tensor, modes):
            unknown.append(tensor.name)
        if tensor.n_bytes == 0:
            raise CheckpointError(
                f"{tensor.file}: {shown(tensor.name)}: no elements ({list(tensor.shape)}): a partitioned save",
                hint="gather the partitions when saving (ZeRO-3: save the 16-bit model on one rank), then convert that",
            )
    if unknown:
        raise CheckpointError(
            f"{checkpoint.label}: {len(unknown)} of {len(checkpoint.tensors)} tensors have names that no rule knows: "
            f"{few(unknown)}",
            hint="nothing is dropped in silence; `qwen35 inspect --tensors` lists them all",
        )


def _is_opaque(tensor: SourceTensor, modes: Mapping[str, ModuleQuantization | None]) -> bool:
    """Whether the tensor belongs to a module packed in a mode of its own, which rides through byte for byte."""
    if tensor.place is None or tensor.place.role is None:
        return False
    mode = modes.get(canonical_modules(tensor.place)[0])
    return mode is not None and mode.mode not in MLX_MODES


def _check_values(checkpoint: Checkpoint) -> None:
    bad = checkpoint.not_finite
    if bad:
        raise CheckpointError(
            f"{checkpoint.label}: NaN or infinity in {len(bad)} gains or decay parameters: {few(bad)}",
            hint="the checkpoint is damaged: fetch or export it again",
        )


def _shift(label: str, what: str, verdict: Verdict, options: Options) -> int:
    """What to add to the gains of a group. Raises ConventionError where the verdict allows none."""
    if options.assume is not None:
        return 1 if options.assume is Generation.RAW else 0
    if verdict.shift is not None:
        return verdict.shift
    repair = repair_shift(verdict.generation)
    if options.repair and repair is not None:
        return repair
    reason = verdict.reasons[0] if verdict.reasons else "no evidence"
    raise ConventionError(
        f"{label}: the {what}'s norm gains are {verdict.generation.value}: {reason}",
        hint=(
            "--repair fixes this; `qwen35 inspect` shows the gains"
            if repair is not None
            else "`qwen35 inspect` shows the gains; --assume raw|canonical overrides, if you know better"
        ),
    )


def _head_shift(label: str, verdicts: Verdicts, options: Options) -> int:
    """The draft head's shift, from its own verdict; --assume speaks for it only where that says nothing."""
    assert verdicts.head is not None or options.assume is not None
    if verdicts.head is not None and verdicts.head.shift is not None:
        return verdicts.head.shift
    if verdicts.head is None:
        return 1 if options.assume is Generation.RAW else 0
    return _shift(label, "draft head", verdicts.head, options)


def _decide_head(
    checkpoint: Checkpoint,
    heads: Sequence[SourceTensor],
    options: Options,
    skips: list[Skip],
    findings: list[Finding],
) -> bool:
    """Whether the model is tied; a head that equals the embeddings of a tied model is skipped."""
    declared = checkpoint.config.tied
    if not heads:
        if declared is False and not options.tie:
            raise CheckpointError(
                f"{checkpoint.label}: lm_head.weight is missing, and config.json says that it is not tied",
                hint="the checkpoint is incomplete; --tie-embeddings uses the embeddings, if that is what was trained",
            )
        if declared is None:
            findings.append(Finding("tie-inferred", "config.json has no tie_word_embeddings; no head is stored: tied"))
        return True
    if not declared:
        if declared is None:
            findings.append(Finding("tie-inferred", "config.json has no tie_word_embeddings; a head is stored: untied"))
        return False
    if checkpoint.head_equals_embeddings:
        skips += [_skip(tensor, "head: equal to the embeddings it is tied to") for tensor in heads]
        return True
    findings.append(
        Finding(
            "tied-head-differs",
            "config.json says tied, but the stored head differs from the embeddings: it is kept, and the result untied",
            Severity.WARNING,
        )
    )
    return False


def _text_writes(
    tensors: Sequence[SourceTensor], config: ModelConfig, shift: int, options: Options, mtp_prefix: str
) -> list[Write]:
    """The writes of the trunk and head, or with `mtp_prefix` those of the draft head."""
    writes: list[Write] = []
    experts = []
    for tensor in tensors:
        place = tensor.place
        assert place is not None
        assert place.role is not None
        module = mtp_prefix + place.module if mtp_prefix else canonical_module(place)
        name = f"{module}.{place.parameter}" if place.parameter else module
        match place.role:
            case Role.BUFFER:
                continue
            case Role.EXPERT | Role.FUSED_EXPERT:
                experts.append(tensor)
            case Role.FUSED_EXPERTS:
                writes += split_fused(tensor, module, config)
            case Role.CONV:
                writes.append(copy_of(tensor, name, _conv_shape(tensor, config)))
            case Role.GAIN if len(tensor.shape) == 1:
                writes.append(_gain_write(tensor, name, shift, options))
            case _:
                writes.append(copy_of(tensor, name))
    return writes + list(stack_experts(experts, config, prefix=mtp_prefix))


def _conv_shape(tensor: SourceTensor, config: ModelConfig) -> tuple[int, ...]:
    """[C, 1, K], [C, K] and [C, K, 1] hold the same bytes; the last is canonical."""
    if conv_layout(tensor.shape, config.conv_kernel) is ConvLayout.NONE:
        raise CheckpointError(
            f"{shown(tensor.name)}: expected [C, 1, {config.conv_kernel}] or [C, {config.conv_kernel}, 1], "
            f"found {list(tensor.shape)}",
            hint="linear_conv_kernel_dim in config.json may belong to another checkpoint",
        )
    return (tensor.shape[0], config.conv_kernel, 1)


_SHIFTS = {1: Fix.ADD_ONE, -1: Fix.SUBTRACT_ONE, 0: Fix.NONE}


def _gain_write(tensor: SourceTensor, name: str, shift: int, options: Options) -> Write:
    if tensor.dtype not in (Dtype.BF16, Dtype.F16, Dtype.F32):
        raise CheckpointError(f"{shown(tensor.name)}: a gain stored as {tensor.dtype.value}; expected BF16, F16 or F32")
    dtype = Dtype.F32 if options.norm_dtype is NormDtype.FLOAT32 else tensor.dtype
    fix = _SHIFTS[shift]
    if fix is Fix.NONE and dtype is not tensor.dtype:
        fix = Fix.CAST
    if fix is Fix.NONE:
        return copy_of(tensor, name)
    rule = Rule.CAST if fix is Fix.CAST else Rule.GAIN
    return Write(name, dtype, tensor.shape, (piece_of(tensor),), fix, rule, tensor.dtype, tensor.shape, (tensor.name,))


def _vision_write(tensor: SourceTensor, config: ModelConfig) -> Write:
    """A kept vision tensor; the patch embedding [O, C, T, H, W] becomes [O, T, H, W, C]."""
    assert tensor.place is not None
    name = VISION_PREFIX + tensor.place.module
    if len(tensor.shape) != 5 or not tensor.place.module.endswith("patch_embed.proj.weight"):
        return copy_of(tensor, name)
    out, channels, *rest = tensor.shape
    if tensor.shape[-1] == config.vision_channels and channels != config.vision_channels:
        return copy_of(tensor, name)
    if channels != config.vision_channels:
        raise CheckpointError(
            f"{shown(tensor.name)}: no axis of {list(tensor.shape)} has the {config.vision_channels} channels that "
            "config.json gives the vision tower"
        )
    shape = (out, *rest, channels)
    return Write(
        name, tensor.dtype, shape, (piece_of(tensor),), Fix.PATCH_AXES, Rule.PATCH, tensor.dtype, tensor.shape,
        (tensor.name,),
    )  # fmt: skip


def _skip(tensor: SourceTensor, reason: str) -> Skip:
    return Skip(tensor.name, tensor.file, tensor.n_bytes, reason)


def _check_unique(label: str, writes: Sequence[Write]) -> None:
    counts = Counter(write.name for write in writes)
    twice = [name for name, n in counts.items() if n > 1]
    if twice:
        sources = [source for write in writes if write.name == twice[0] for source in write.sources]
        raise CheckpointError(
            f"{label}: {len(twice)} canonical tensors have two sources each: {twice[0]} from {few(sources)}",
            hint="two exports were merged into one folder; keep one of them",
        )


def _cut(writes: list[Write], order: Mapping[str, int], max_bytes: int | None, stem: str) -> tuple[PlanShard, ...]:
    """The writes in the order of their first byte in the source, cut where the source's files end, or by size."""
    ordered = sorted(writes, key=lambda write: (order[write.pieces[0].file], write.pieces[0].begin))
    groups: list[list[Write]] = []
    n_bytes, file = 0, ""
    for _, one in groupby(ordered, key=lambda write: write.pieces[0]):  # the parts of a packed weight stay together
        together = list(one)
        n_more, first = sum(write.n_bytes for write in together), together[0].pieces[0]
        starts_new = first.file != file if max_bytes is None else n_bytes + n_more > max_bytes
        if starts_new or not groups:
            groups.append([])
            n_bytes, file = 0, first.file
        groups[-1] += together
        n_bytes += n_more
    n = len(groups)
    return tuple(
        PlanShard(f"{stem}-{i:05d}-of-{n:05d}.safetensors", _aligned(group)) for i, group in enumerate(groups, 1)
    )


def _aligned(writes: list[Write]) -> tuple[Write, ...]:
    """The same order, unless that leaves an element at an odd offset: then wide dtypes first, which aligns all."""
    offset = 0
    for write in writes:
        if offset % write.dtype.n_align:
            return tuple(sorted(writes, key=lambda write: -write.dtype.n_bits))
        offset += write.n_bytes
    return tuple(writes)


def _findings(
    checkpoint: Checkpoint, verdicts: Verdicts, regions: Mapping[Region, Sequence[SourceTensor]], options: Options
) -> list[Finding]:
    """What is odd about names, config and groups, though the conversion survives it."""
    config = checkpoint.config
    found: list[Finding] = []
    places = [tensor.place for tensor in checkpoint.tensors if tensor.place is not None]
    if n := sum(place.n_wrappers > 0 for place in places):
        found.append(Finding("wrapped-names", f"{n} names carried segments of a training wrapper; they are stripped"))
    if n := sum(place.collapsed for place in places):
        found.append(Finding("stacked-prefix", f"{n} names carried a doubled or mixed prefix; it is collapsed"))
    if config.n_mtp_layers and not regions[Region.MTP]:
        found.append(Finding("mtp-declared", "config.json promises a draft head (mtp), but no tensor of one is stored"))
    if options.mtp is not Mtp.DROP and not regions[Region.MTP]:
        found.append(Finding("mtp-none", "no draft head (mtp) stands in the shards: none is kept", Severity.WARNING))
    if options.mtp is Mtp.KEEP and regions[Region.MTP]:
        text = "the draft head stays in the result: mlx-lm up to 0.31, mlx-bun 0.4 and mlx-swift-lm before mid-2026 " \
               "will shift the trunk's gains a second time"  # fmt: skip
        found.append(Finding("mtp-kept", text, Severity.WARNING))
    if options.mtp is not Mtp.DROP and verdicts.head is not None:
        found += [Finding("mtp-gains", text, Severity.WARNING) for text in verdicts.head.warnings]
    if config.has_vision and options.keep_vision and not regions[Region.VISION]:
        found.append(Finding("vision-declared", "config.json promises a vision tower, but no tensor of one is stored"))
    if not config.rope.theta_given:
        text = f"config.json has no rope_theta; the family's {config.rope.theta:.0f} is written"
        found.append(Finding("rope-theta", text, Severity.WARNING))
    rows = next((t.shape[0] for t in regions[Region.TRUNK] if t.place and t.place.role is Role.EMBEDDING), None)
    if rows is not None and rows != config.vocab_size:
        text = f"the embeddings have {rows} rows, vocab_size is {config.vocab_size}; config.json follows the tensor"
        found.append(Finding("vocab-size", text, Severity.WARNING))
    if any("gguf" in text.lower() for text in _told_origins(checkpoint)):
        text = "metadata or config speaks of GGUF: value heads that came through it may stand in another order"
        found.append(Finding("gguf-origin", text, Severity.WARNING))
    for file, verdict in verdicts.sidecars.items():
        found.append(Finding("mtp-sidecar", f"{file}: a draft head beside the shards, {verdict.generation.value}"))
    if checkpoint.strays:
        n, files = len(checkpoint.strays), few(checkpoint.strays)
        found.append(Finding("stray-files", f"{n} safetensors files take no part: {files}"))
    return found


def _told_origins(checkpoint: Checkpoint) -> Iterator[str]:
    """What metadata and config say of where the weights came from."""
    for shard in checkpoint.shards:
        for pair in shard.header.metadata:
            yield from pair
    document = checkpoint.config.document
    for level in (document, *(document.get(key) for key in ("text_config", "quantization_config"))):
        if isinstance(level, Mapping):
            yield from (value for value in level.values() if isinstance(value, str))


_FLOATS = (Dtype.BF16, Dtype.F16, Dtype.F32)


def _dtype_findings(writes: Sequence[Write]) -> list[Finding]:
    """Dtypes that are kept as they are, but that a loader may trip over."""
    found: list[Finding] = []
    sizes: Counter[Dtype] = Counter()
    for write in writes:
        if write.dtype in _FLOATS and not write.name.endswith((".scales", ".biases")):
            sizes[write.dtype] += write.n_bytes
    main = sizes.most_common(1)[0][0] if sizes else None
    odd = [w for w in writes if w.name.endswith(".scales") and w.dtype in _FLOATS and w.dtype is not main]
    if odd and main is not None:
        text = f"{len(odd)} scales are {odd[0].dtype.value} in a {main.value} model: some loaders then leave out " \
               f"what they belong to: {few(write.name for write in odd)}"  # fmt: skip
        found.append(Finding("scales-dtype", text, Severity.WARNING))
    decays = Counter(write.dtype for write in writes if write.name.endswith(".A_log"))
    if decays.keys() - {Dtype.F32}:
        kinds = ", ".join(f"{dtype.value} in {n} layers" for dtype, n in decays.most_common())
        text = f"A_log is stored as {kinds}; most releases have F32, which a re-save may have lost; it stays as it is"
        found.append(Finding("a-log-dtype", text))
    return found
