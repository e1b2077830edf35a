"""The receipt: what was done, from which bytes and on which evidence, so that anyone can replay one tensor.

The same source, options and version give the same receipt: no times, no absolute paths.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.config import parse_json
from qwen35conv.facts.header import TensorInfo, build_header
from qwen35conv.generation.convention import Generation, Verdict
from qwen35conv.planning.pieces import Fix, Write
from qwen35conv.planning.plan import Plan, PlanShard
from qwen35conv.planning.sidecar import RECEIPT, ConfigEdit, SideFiles, build_config, build_json
from qwen35conv.version import __version__

SCHEMA = "qwen35/receipt/1"
_MAX_PAIRS = 5_000_000


@dataclass(frozen=True, slots=True)
class ShardRecord:
    """One shard as it was written: its file, the whole file's bytes, and its SHA-256 where that was asked for."""

    file: str
    n_bytes: int
    sha256: str | None


def build_receipt(
    plan: Plan,
    records: Sequence[ShardRecord],
    edits: Sequence[ConfigEdit],
    files: SideFiles,
) -> dict[str, Any]:
    """The receipt as a JSON document."""
    checkpoint = plan.checkpoint
    return {
        "schema": SCHEMA,
        "tool": {"name": "qwen35conv", "version": __version__},
        "source": _source(checkpoint),
        "options": options_document(plan),
        "verdict": verdict_document(plan.verdicts.trunk),
        "head_verdict": verdict_document(plan.verdicts.head) if plan.verdicts.head is not None else None,
        "gain_shift": plan.shift,
        "head_gain_shift": plan.head_shift,
        "rules": rule_counts(plan),
        "dropped": {skip.name: skip.reason for skip in plan.skips},
        "findings": [{"code": found.code, "text": found.text} for found in plan.findings],
        "config_edits": [
            {"key": edit.key, "before": edit.before, "after": edit.after}
            | ({"moved_from": edit.moved_from} if edit.moved_from is not None else {})
            for edit in edits
        ],
        "config_sha256": hashlib.sha256(build_json(build_config(plan))).hexdigest(),
        "files_copied": list(files.copied),
        "files_left": dict(files.left),
        "shards": {
            record.file: {"n_bytes": record.n_bytes} | ({"sha256": record.sha256} if record.sha256 else {})
            for record in records
        },
        "tensors": {
            write.name: _tensor(shard, write) for shard in (*plan.shards, *plan.sidecar) for write in shard.writes
        },
    }


def parse_receipt(where: str, raw: bytes) -> dict[str, Any]:
    """A receipt, which has four numbers and more for each of a source's experts. Raises SourceError where it is none.

    Pieces of 400,000 tensors, each with scales, are the most there can be.
    """
    return parse_json(where, raw, max_pairs=_MAX_PAIRS)


def read_assumption(raw: bytes) -> Generation | None:
    """The generation that the user vouched for, by a receipt; None where nobody did, or where it is no receipt."""
    try:
        option = parse_receipt(RECEIPT, raw)["options"]["assume"]
    except (SourceError, KeyError, TypeError):
        return None
    return next((g for g in (Generation.RAW, Generation.CANONICAL) if g.value == option), None)


def _source(checkpoint: Checkpoint) -> dict[str, Any]:
    """What was read: a name, or a repository at a commit with the ETags of its shards."""
    document: dict[str, Any] = {
        "name": PurePath(checkpoint.label).name or checkpoint.label,
        "shards": {shard.file: shard.header.n_bytes for shard in checkpoint.shards},
    }
    origin = checkpoint.origin
    if origin is not None:
        etags = {shard.file: origin.etags.get(shard.file) for shard in checkpoint.shards}
        document |= {"repo": origin.repo, "revision": origin.revision, "commit": origin.commit, "etags": etags}
    return document


def rule_counts(plan: Plan) -> dict[str, dict[str, int]]:
    """Tensors and bytes by what happens to them, skipped ones by their reason."""
    tensors: Counter[str] = Counter()
    n_bytes: Counter[str] = Counter()
    for shard in (*plan.shards, *plan.sidecar):
        for write in shard.writes:
            tensors[write.rule.value] += 1
            n_bytes[write.rule.value] += write.n_bytes
    for skip in plan.skips:
        tensors[f"dropped: {skip.reason}"] += 1
        n_bytes[f"dropped: {skip.reason}"] += skip.n_bytes
    return {rule: {"tensors": n, "n_bytes": n_bytes[rule]} for rule, n in tensors.items()}


def verdict_document(verdict: Verdict) -> dict[str, Any]:
    """A verdict with what it rests on."""
    return {
        "generation": verdict.generation.value,
        "by": verdict.by,
        "reasons": list(verdict.reasons),
        "warnings": list(verdict.warnings),
        "outliers": list(verdict.outliers),
        "facts": None
        if verdict.facts is None
        else {
            "naming": verdict.facts.naming.value,
            "conv": verdict.facts.conv.value,
            "has_mtp": verdict.facts.has_mtp,
            "metadata_format": verdict.facts.metadata_format,
            "markers": [list(marker) for marker in verdict.facts.markers],
        },
    }


def options_document(plan: Plan) -> dict[str, Any]:
    """The options of a plan under their long names."""
    options = plan.options
    return {
        "keep-vision": options.keep_vision,
        "mtp": options.mtp.value,
        "assume": options.assume.value if options.assume is not None else None,
        "repair": options.repair,
        "norm-dtype": options.norm_dtype.value,
        "max-shard-size": options.max_shard_bytes,
        "tie-embeddings": options.tie,
        "dequantize": options.dequantize,
        "quantize": None if options.quantize is None else asdict(options.quantize),
        "ignore-index": plan.checkpoint.ignored_index,
    }


def computed_gains(plan: Plan) -> tuple[Write, ...]:
    """The writes whose source bytes can't be had back from the result: folding in bfloat16 loses bits."""
    return tuple(write for shard in (*plan.shards, *plan.sidecar) for write in shard.writes if is_computed_gain(write))


def is_computed_gain(write: Write) -> bool:
    """Whether a write changes the values or the dtype of a gain."""
    return write.fix in (Fix.ADD_ONE, Fix.SUBTRACT_ONE, Fix.CAST)


def build_source_gains(gains: Mapping[str, tuple[Write, bytes]]) -> bytes:
    """A safetensors file that holds the stored bytes of each computed gain under its name in the source."""
    infos, end = [], 0
    for name, (write, raw) in gains.items():
        begin, end = end, end + len(raw)
        infos.append(TensorInfo(name, write.source_dtype, write.source_shape, begin, end))
    return build_header(infos, {"holds": "source gains"}) + b"".join(raw for _, raw in gains.values())


def _tensor(shard: PlanShard, write: Write) -> dict[str, Any]:
    found: dict[str, Any] = {
        "file": shard.file,
        "dtype": write.dtype.value,
        "shape": list(write.shape),
        "pieces": [[piece.file, piece.begin, piece.end] for piece in write.pieces],
    }
    if write.fix is not Fix.NONE:
        found |= {"fix": write.fix.value, "source_dtype": write.source_dtype.value}
    if write.fix in (Fix.DEQUANTIZE, Fix.QUANTIZE):
        found["n_columns"] = write.n_columns
    if (blocks := write.blocks) is not None:
        found["blocks"] = {
            "pieces": [[piece.file, piece.begin, piece.end] for piece in blocks.pieces],
            "first_rows": list(blocks.first_rows),
            "dtype": blocks.dtype.value,
            "shape": [blocks.n_rows, blocks.n_columns],
        }
    if (packed := write.packed) is not None:
        found["packed"] = {"from": packed.dtype.value, "part": packed.part.value, **asdict(packed.quantization)}
    return found
