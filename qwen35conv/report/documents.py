"""What is reported, as JSON documents with keys that scripts can rely on: added to within a schema, never renamed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from qwen35conv.errors import Qwen35ConvError
from qwen35conv.facts.checkpoint import Checkpoint, Finding, Origin, SourceTensor
from qwen35conv.facts.config import LayerKind
from qwen35conv.generation.convention import GainStats, Verdict
from qwen35conv.generation.loaders import Forecast, stored_gains
from qwen35conv.inspection import Inspection, dtype_shares, is_named, next_command
from qwen35conv.planning.pieces import Write
from qwen35conv.planning.plan import Plan, PlanShard
from qwen35conv.planning.receipt import options_document, rule_counts, verdict_document
from qwen35conv.planning.sidecar import ConfigEdit, SideFiles

if TYPE_CHECKING:
    from qwen35conv.comparison import Comparison, Side
    from qwen35conv.convert import Outcome, Preparation
    from qwen35conv.verify import Verification


def schema(command: str) -> str:
    """The name and version of a command's document."""
    return f"qwen35/{command}/1"


def inspection_document(inspection: Inspection, *, all_tensors: bool) -> dict[str, Any]:
    """An inspection. `problem` is null and `plan` an object where the checkpoint converts; else the other way round."""
    plan, problem = inspection.plan, inspection.problem
    document = {
        "schema": schema("inspect"),
        "verdict": inspection.verdicts.trunk.generation.value,
        "converts": plan is not None,
        "changes": None if plan is None else not plan.is_identity,
        "checkpoint": checkpoint_document(inspection.checkpoint),
        "verdicts": {
            "trunk": _verdict(inspection.verdicts.trunk),
            "head": None if inspection.verdicts.head is None else _verdict(inspection.verdicts.head),
            "sidecars": {file: _verdict(verdict) for file, verdict in inspection.verdicts.sidecars.items()},
        },
        "problem": None if problem is None else _problem(problem),
        "plan": None if plan is None else plan_document(plan, all_tensors=all_tensors),
        "schemes": [
            {
                "name": scheme.name,
                "n_modules": len(scheme.modules),
                "modules": list(scheme.modules) if all_tensors else list(scheme.modules[:3]),
                "bits": list(scheme.bits),
                "can_dequantize": scheme.can_dequantize,
                "advice": scheme.advice,
            }
            for scheme in inspection.schemes
        ],
        "repair": _remedy(inspection, all_tensors) if inspection.is_repair else None,
        "dequantize": None if inspection.is_repair else _remedy(inspection, all_tensors),
        "config_edits": edits_document(inspection.edits),
        "side_files": files_document(inspection.files),
        "findings": findings_document(inspection.findings),
        "loaders": {
            "source": [_forecast(found) for found in inspection.forecasts],
            "result": [_forecast(found) for found in inspection.result_forecasts],
        },
        "next": next_command(inspection),
    }
    if all_tensors and inspection.shown_plan is None:
        document["tensors"] = [_stored(tensor) for tensor in inspection.checkpoint.tensors]
    return document


def _remedy(inspection: Inspection, all_tensors: bool) -> dict[str, Any] | None:
    return None if inspection.remedy is None else plan_document(inspection.remedy, all_tensors=all_tensors)


def preparation_document(preparation: Preparation, *, all_tensors: bool = False) -> dict[str, Any]:
    """What `convert` would do, with `dry_run` true."""
    flight = preparation.preflight
    return {
        "schema": schema("convert"),
        "dry_run": True,
        "source": preparation.plan.checkpoint.label,
        "origin": origin_document(preparation.plan.checkpoint.origin),
        "destination": str(preparation.destination),
        "sidecar": None if preparation.sidecar is None else str(preparation.sidecar),
        "plan": plan_document(preparation.plan, all_tensors=all_tensors),
        "config_edits": edits_document(preparation.edits),
        "side_files": files_document(preparation.files),
        "findings": findings_document(preparation.plan.findings),
        "preflight": {
            "n_bytes_read": flight.n_read,
            "n_bytes_written": flight.n_written,
            "n_bytes_shared": flight.n_shared,
            "n_bytes_memory": flight.n_memory,
            "n_bytes_free": flight.n_free,
        },
    }


def outcome_document(outcome: Outcome) -> dict[str, Any]:
    """What `convert` did, with `dry_run` false."""
    preparation = outcome.preparation
    plan = preparation.plan
    return {
        "schema": schema("convert"),
        "dry_run": False,
        "source": plan.checkpoint.label,
        "origin": origin_document(plan.checkpoint.origin),
        "destination": str(preparation.destination),
        "sidecar": None if preparation.sidecar is None else str(preparation.sidecar),
        "seconds": round(outcome.seconds, 3),
        "n_bytes": outcome.n_bytes,
        "n_bytes_shared": outcome.n_shared,
        "n_bytes_copied": outcome.n_copied,
        "n_bytes_computed": outcome.n_computed,
        "proof": {"n_headers": outcome.n_headers, "n_tensors": outcome.n_tensors, "n_gains": outcome.n_gains},
        "verification": None if outcome.verification is None else _checks(outcome.verification),
        "shards": [
            {"file": written.file, "n_bytes": written.n_bytes, "sha256": written.sha256} for written in outcome.written
        ],
        "verdict": plan.verdict.generation.value,
        "rules": rule_counts(plan),
        "config_edits": edits_document(preparation.edits),
        "side_files": files_document(preparation.files),
        "findings": findings_document(plan.findings),
    }


def verification_document(label: str, verification: Verification) -> dict[str, Any]:
    """What `verify` found. `passed` of a check is null where it could not judge."""
    return {
        "schema": schema("verify"),
        "checkpoint": label,
        "passed": verification.passed,
        "checks": _checks(verification),
    }


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """What `diff` found. `max_abs` is null where no finite values differ, or the dtype is no float."""
    return {
        "schema": schema("diff"),
        "equal": comparison.is_equal,
        "a": _side(comparison.a),
        "b": _side(comparison.b),
        "not_compared": [{"what": left.what, "reason": left.reason} for left in comparison.left],
        "n_compared": comparison.n_compared,
        "n_bytes": comparison.n_bytes,
        "only_a": list(comparison.only_a),
        "only_b": list(comparison.only_b),
        "forms": [
            {
                "name": form.name,
                "dtypes": [dtype.value for dtype in form.dtypes],
                "shapes": [list(shape) for shape in form.shapes],
            }
            for form in comparison.forms
        ],
        "values": [
            {
                "name": found.name,
                "n": found.n,
                "n_differ": found.n_differ,
                "max_abs": found.max_abs,
                "n_not_finite": found.n_not_finite,
            }
            for found in comparison.values
        ],
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "source": side.checkpoint.label,
        "verdict": side.plan.verdict.generation.value,
        "gain_shift": side.plan.shift,
        "options": options_document(side.plan),
        "n_tensors": sum(1 for _ in side.plan.writes()),
        "problem": None if side.problem is None else _problem(side.problem),
    }


def _checks(verification: Verification) -> list[dict[str, Any]]:
    return [
        {
            "name": check.name,
            "passed": check.passed,
            "summary": check.summary,
            "details": [{"name": name, "value": _finite(value)} for name, value in check.details],
        }
        for check in verification.checks
    ]


def _finite(value: str | float) -> str | float:
    """A detail as JSON can hold it."""
    return value if not isinstance(value, float) or math.isfinite(value) else str(value)


def error_document(error: Qwen35ConvError, command: str) -> dict[str, Any]:
    """An error in place of a command's document."""
    return {"schema": schema(command), "error": _problem(error)}


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint is: sizes, dtypes, files."""
    config = checkpoint.config
    return {
        "source": checkpoint.label,
        "origin": origin_document(checkpoint.origin),
        "model_type": config.model_type,
        "n_layers": config.n_layers,
        "n_full_attention_layers": sum(kind is LayerKind.FULL for kind in config.layer_kinds),
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "n_heads": config.n_heads,
        "n_kv_heads": config.n_kv_heads,
        "n_experts": config.n_experts,
        "n_experts_per_token": config.n_experts_per_token,
        "tied": config.tied,
        "n_tensors": len(checkpoint.tensors),
        "n_bytes": checkpoint.n_bytes,
        "dtypes": {
            share.what: {"tensors": share.n_tensors, "n_bytes": share.n_bytes} for share in dtype_shares(checkpoint)
        },
        "shards": {shard.file: shard.header.n_bytes for shard in checkpoint.shards},
        "strays": list(checkpoint.strays),
        "sidecars": [sidecar.file for sidecar in checkpoint.sidecars],
        "metadata": dict(checkpoint.metadata),
    }


def origin_document(origin: Origin | None) -> dict[str, Any] | None:
    """The commit on the Hub that was read; null for a source on this machine."""
    if origin is None:
        return None
    return {"repo": origin.repo, "revision": origin.revision, "commit": origin.commit, "etags": dict(origin.etags)}


def plan_document(plan: Plan, *, all_tensors: bool) -> dict[str, Any]:
    """A plan in counts; with `all_tensors` also each write and each skip."""
    document: dict[str, Any] = {
        "options": options_document(plan),
        "is_identity": plan.is_identity,
        "gain_shift": plan.shift,
        "head_gain_shift": plan.head_shift,
        "tied": plan.tied,
        "rules": rule_counts(plan),
        "shards": [_shard(shard) for shard in plan.shards],
        "sidecar_shards": [_shard(shard) for shard in plan.sidecar],
    }
    if all_tensors:
        document["writes"] = [_write(shard, write) for shard in (*plan.shards, *plan.sidecar) for write in shard.writes]
        document["skips"] = [
            {"name": skip.name, "file": skip.file, "n_bytes": skip.n_bytes, "reason": skip.reason}
            for skip in plan.skips
        ]
    return document


def edits_document(edits: Sequence[ConfigEdit]) -> list[dict[str, Any]]:
    """The changes of config.json, as the receipt lists them."""
    return [
        {"key": edit.key, "before": edit.before, "after": edit.after, "moved_from": edit.moved_from} for edit in edits
    ]


def files_document(files: SideFiles) -> dict[str, Any]:
    """The files beside the weights: copied, and left with the reason."""
    return {"copied": list(files.copied), "left": dict(files.left)}


def findings_document(findings: Sequence[Finding]) -> list[dict[str, str]]:
    """The findings with their stable codes."""
    return [{"code": found.code, "severity": found.severity.value, "text": found.text} for found in findings]


def _problem(error: Qwen35ConvError) -> dict[str, Any]:
    return {
        "kind": type(error).__name__,
        "message": str(error),
        "hint": error.hint,
        "exit_code": error.exit_code,
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    holds = stored_gains(verdict.generation)
    return {
        **verdict_document(verdict),
        "converts": verdict.converts,
        "shift": verdict.shift,
        "gains_hold": None if holds is None else holds.value,
        "gains": [_gain(stats) for stats in verdict.stats],
    }


def _gain(stats: GainStats) -> dict[str, Any]:
    return {
        "name": stats.name,
        "file": stats.file,
        "role": stats.role.value,
        "layer": stats.layer,
        "dtype": stats.dtype,
        "n": stats.n,
        "mean": stats.mean,
        "minimum": stats.minimum,
        "maximum": stats.maximum,
        "negative_share": stats.negative_share,
        "off_grid_share": stats.off_grid_share,
        "label": stats.label.value,
    }


def _shard(shard: PlanShard) -> dict[str, Any]:
    return {"file": shard.file, "tensors": len(shard.writes), "n_bytes": shard.n_bytes}


def _write(shard: PlanShard, write: Write) -> dict[str, Any]:
    return {
        "name": write.name,
        "sources": list(write.sources),
        "file": shard.file,
        "dtype": write.dtype.value,
        "shape": list(write.shape),
        "n_bytes": write.n_bytes,
        "rule": write.rule.value,
        "fix": write.fix.value,
        "source_dtype": write.source_dtype.value,
        "source_shape": list(write.source_shape),
    }


def _stored(tensor: SourceTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "file": tensor.file,
        "dtype": tensor.dtype.value,
        "shape": list(tensor.shape),
        "n_bytes": tensor.n_bytes,
        "is_named": is_named(tensor),
    }


def _forecast(found: Forecast) -> dict[str, Any]:
    return {
        "loader": found.loader,
        "versions": found.versions,
        "outcome": found.outcome.value,
        "text": found.text,
    }
