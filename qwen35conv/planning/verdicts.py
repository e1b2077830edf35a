"""The verdicts on one checkpoint: its trunk, its draft head and each sidecar, every group from its own gains."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.layout import Region, Role
from qwen35conv.generation.convention import MARKER_KEYS, ConvLayout, Facts, Naming, Verdict, judge, judge_head


@dataclass(frozen=True, slots=True)
class Verdicts:
    """One verdict for each group of gains that is judged alone."""

    trunk: Verdict
    head: Verdict | None  # the draft head inside the shards
    sidecars: Mapping[str, Verdict]  # by file


def judge_checkpoint(checkpoint: Checkpoint) -> Verdicts:
    """The verdicts on a checkpoint. The draft head never votes on the trunk."""
    trunk = [gain for gain in checkpoint.gains if not gain.canonical_name.startswith("mtp.")]
    head = [gain for gain in checkpoint.gains if gain.canonical_name.startswith("mtp.")]
    verdict = judge(facts_of(checkpoint), trunk)
    return Verdicts(
        trunk=verdict,
        head=judge_head(head, verdict.generation) if head else None,
        sidecars={
            sidecar.file: judge_head(sidecar.gains, verdict.generation)
            for sidecar in checkpoint.sidecars
            if sidecar.gains
        },
    )


def facts_of(checkpoint: Checkpoint) -> Facts:
    """The facts beside the values: naming style, conv layout, draft head, metadata, markers."""
    config = checkpoint.config
    places = [(tensor, tensor.place) for tensor in checkpoint.tensors if tensor.place is not None]
    namings = {place.naming for _, place in places if place.region is Region.TRUNK}
    convs = {
        conv_layout(tensor.shape, config.conv_kernel)
        for tensor, place in places
        if place.region is Region.TRUNK and place.role is Role.CONV and place.parameter == "weight"
    } - {ConvLayout.NONE}  # the plan refuses such a shape by name
    levels = (config.document, config.document.get("text_config"), checkpoint.metadata)
    return Facts(
        naming=namings.pop() if len(namings) == 1 else Naming.MIXED,
        conv=convs.pop() if len(convs) == 1 else ConvLayout.MIXED if convs else ConvLayout.NONE,
        has_mtp=any(place.region is Region.MTP for _, place in places),
        metadata_format=checkpoint.metadata.get("format"),
        markers=tuple(
            (key, str(level[key])[:80])
            for level in levels
            for key in MARKER_KEYS
            if isinstance(level, Mapping) and key in level
        ),
        n_layers=config.n_layers,
    )


def conv_layout(shape: tuple[int, ...], kernel: int) -> ConvLayout:
    """How a conv1d weight of `kernel` taps is stored; NONE for a shape that is no such weight."""
    match shape:
        case (_, taps, 1) if taps == kernel:
            return ConvLayout.CANONICAL
        case (_, 1, taps) if taps == kernel:
            return ConvLayout.RAW
        case (_, taps) if taps == kernel:
            return ConvLayout.FLAT
        case _:
            return ConvLayout.NONE
