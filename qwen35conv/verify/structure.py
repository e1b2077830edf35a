"""Whether a checkpoint holds every tensor that its config implies, and none more."""

from __future__ import annotations

from collections import Counter

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.planning.inventory import check_inventory
from qwen35conv.planning.pieces import Fix
from qwen35conv.planning.plan import Plan
from qwen35conv.verify.check import Check, Value


def check_structure(checkpoint: Checkpoint, plan: Plan) -> Check:
    """Whether every tensor that config.json implies is there with its shape and dtype, and nothing else."""
    writes = tuple(plan.writes())
    shifted = sum(write.fix in (Fix.ADD_ONE, Fix.SUBTRACT_ONE) for write in writes)
    details: list[tuple[str, Value]] = [
        ("generation", plan.verdict.generation.value),
        ("tensors", len(writes)),
        ("bytes", sum(write.n_bytes for write in writes)),
        ("dtypes", ", ".join(f"{n} {dtype}" for dtype, n in Counter(w.dtype.value for w in writes).most_common())),
        ("packed modules", len(plan.packing)),
        ("gains shifted on reading", shifted),
        ("tensors left out", len(plan.skips)),
    ]
    try:
        check_inventory(checkpoint.label, writes, checkpoint.config, tied=plan.tied, modes=plan.packing)
    except CheckpointError as error:
        return Check("structure", False, str(error), tuple(details))
    summary = f"{len(writes)} tensors: each that config.json implies, none more"
    return Check("structure", True, summary, tuple(details))
