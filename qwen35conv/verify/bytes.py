"""Whether a result is what its source's plan gives, byte for byte."""

from __future__ import annotations

from dataclasses import replace

from qwen35conv.errors import ConventionError
from qwen35conv.facts.checkpoint import Checkpoint, few
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import BLOCK_SCALE, KEPT_MTP_PREFIX, VISION_PREFIX, Region, Role, parse_name
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.inventory import DraftHeadError
from qwen35conv.planning.plan import Mtp, NormDtype, Options, Plan, make_plan
from qwen35conv.planning.scheme import packing
from qwen35conv.verify.check import Check, OnProgress, Value
from qwen35conv.view import View


def plan_of_all(checkpoint: Checkpoint, plan: Plan) -> Plan:
    """The plan of a result with all that stands in it: a kept vision tower and draft head too."""
    regions = {tensor.place.region for tensor in checkpoint.tensors if tensor.place is not None}
    mtp = Mtp.KEEP if Region.MTP in regions else Mtp.DROP
    options = replace(plan.options, keep_vision=Region.VISION in regions, mtp=mtp)
    try:
        return make_plan(checkpoint, options, plan.verdicts)
    except (ConventionError, DraftHeadError):  # a draft head whose own gains tell nothing, or that is not whole
        return make_plan(checkpoint, replace(options, mtp=Mtp.DROP), plan.verdicts)


def plan_like(original: Checkpoint, result: Plan, assume: Generation | None = None) -> Plan:
    """The plan that turns `original` into what `result` holds; its options are read off the result.

    `assume` is the generation that someone vouched for when it was made. Raises what `make_plan` does.
    """
    names = {write.name: write for write in result.writes()}
    packed = result.checkpoint.config.quantization if result.packing else None
    gains = {w.dtype for w in names.values() if (place := parse_name(w.name)) and place.role is Role.GAIN}
    options = Options(
        keep_vision=any(name.startswith(VISION_PREFIX) for name in names),
        mtp=Mtp.KEEP if any(name.startswith(KEPT_MTP_PREFIX) for name in names) else Mtp.DROP,
        norm_dtype=NormDtype.FLOAT32 if gains == {Dtype.F32} else NormDtype.SOURCE,
        tie=result.tied,
        assume=assume,
        repair=assume is None,
        dequantize=any(tensor.name.endswith(BLOCK_SCALE) for tensor in original.tensors),
        quantize=packed.default if packed is not None and not packing(original.config, original.tensors) else None,
    )
    return make_plan(original, options)


def check_bytes(original: View, result: View, on_progress: OnProgress | None = None) -> Check:
    """Whether both views hold the same tensors: names, dtypes, shapes, and every byte."""
    missing, extra = sorted(original.keys() - result.keys()), sorted(result.keys() - original.keys())
    shared = [name for name in original if name in result]
    other, differing, n_bytes = [], [], 0
    for i, name in enumerate(shared):
        a, b = original.write(name), result.write(name)
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            other.append(f"{name} ({a.dtype.value} {list(a.shape)}, {b.dtype.value} {list(b.shape)})")
        else:
            n_same, same = _compare(original, result, name)
            n_bytes += n_same
            if not same:
                differing.append(f"{name} (within its first {n_same:,} bytes)")
        if on_progress is not None:
            on_progress("source", i + 1, len(shared))
    details: list[tuple[str, Value]] = [("bytes compared", n_bytes), ("tensors compared", len(shared))]
    for what, names in (
        ("missing from the result", missing),
        ("not in the source's plan", extra),
        ("of another dtype or shape", other),
        ("of other bytes", differing),
    ):
        if names:
            return Check("source", False, f"{len(names)} tensors {what}: {few(names)}", tuple(details))
    summary = f"{len(shared)} tensors, {n_bytes:,} bytes compared with the source: all equal"
    return Check("source", True, summary, tuple(details))


def _compare(a: View, b: View, name: str) -> tuple[int, bool]:
    """Bytes compared, and whether all were equal; ends at the first chunk that differs."""
    n_bytes = 0
    for x, y in zip(a.chunks(name), b.chunks(name), strict=True):
        n_bytes += len(x)
        if x != y:
            return n_bytes, False
    return n_bytes, True
