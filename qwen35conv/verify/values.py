"""Whether the stored values can be right: the gains' verdict, and no NaN or infinity."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

import numpy as np

from qwen35conv.facts.checkpoint import Checkpoint, few
from qwen35conv.facts.header import Dtype
from qwen35conv.planning.pieces import Piece, Write
from qwen35conv.planning.plan import Plan
from qwen35conv.source import Source
from qwen35conv.verify.check import Check, OnProgress, Value

_SAMPLES, _FEW_SAMPLES = 4, 2  # blocks of each tensor
_SAMPLE_BYTES, _SMALL_SAMPLE_BYTES = 1 << 16, 1 << 14
_BLOCK_BYTES = 4 << 20
_READERS = 4
# The bits of a number's exponent: all set in a NaN and in an infinity.
_EXPONENTS: dict[Dtype, tuple[str, int]] = {
    Dtype.BF16: ("<u2", 0x7F80),
    Dtype.F16: ("<u2", 0x7C00),
    Dtype.F32: ("<u4", 0x7F800000),
}


def check_values(
    source: Source,
    checkpoint: Checkpoint,
    plan: Plan,
    *,
    everything: bool,
    brief: bool = False,
    on_progress: OnProgress | None = None,
) -> Check:
    """The verdict on the gains, and whether a sample of every tensor (or `everything`) is finite.

    `brief` takes two small samples of each: what was just written is on the disk only.
    """
    verdict = plan.verdict
    writes = [write for write in plan.writes() if _exponent(write, plan) is not None]
    details: list[tuple[str, Value]] = [("gains", verdict.generation.value), ("by", verdict.by)]
    details += [("because", reason) for reason in verdict.reasons]
    bad, n_bytes = list(checkpoint.not_finite), 0
    sample = None if everything else (_FEW_SAMPLES, _SMALL_SAMPLE_BYTES) if brief else (_SAMPLES, _SAMPLE_BYTES)
    with ThreadPoolExecutor(_READERS) as readers:  # a disk answers several small reads in the time of one
        found = readers.map(lambda write: _look(source, write, plan, sample), writes)
        for i, (write, (n_looked, is_finite)) in enumerate(zip(writes, found, strict=True)):
            n_bytes += n_looked
            if not is_finite and not write.name.endswith("A_log"):
                bad.append(write.name)
            if on_progress is not None:
                on_progress("values", i + 1, len(writes))
    details.append(("bytes looked at" if everything else "bytes sampled", n_bytes))
    if not verdict.converts:
        reason = verdict.reasons[0] if verdict.reasons else "no evidence"
        return Check("values", False, f"the norm gains are {verdict.generation.value}: {reason}", tuple(details))
    if bad:
        return Check("values", False, f"NaN or infinity in {len(bad)} tensors: {few(bad)}", tuple(details))
    looked = "every value" if everything else "a sample of every tensor"
    return Check("values", True, f"gains are {verdict.generation.value}; {looked} is finite", tuple(details))


def _look(source: Source, write: Write, plan: Plan, sample: tuple[int, int] | None) -> tuple[int, bool]:
    """Bytes looked at of a tensor, up to the first that are not finite, and whether all are."""
    exponent = _exponent(write, plan)
    assert exponent is not None
    kind, all_set = exponent
    n_bytes = 0
    for file, blocks in groupby(_blocks(write, sample), key=lambda piece: piece.file):
        ranges = [(piece.begin, piece.end) for piece in blocks]
        for some in [ranges] if sample is not None else [[one] for one in ranges]:
            raw = b"".join(source.read(file, some))
            n_bytes += len(raw)
            if ((np.frombuffer(raw, kind) & all_set) == all_set).any():
                return n_bytes, False
    return n_bytes, True


def _exponent(write: Write, plan: Plan) -> tuple[str, int] | None:
    """How the bits of a stored tensor show a NaN; None where they can't."""
    if write.source_dtype in _EXPONENTS:
        return _EXPONENTS[write.source_dtype]
    module, _, parameter = write.name.rpartition(".")
    packing = plan.packing.get(module)
    if packing is None or parameter != "scales" or write.source_dtype is not Dtype.U8:
        return None
    # Scales of 8 bits: a bare exponent, or E4M3, whose only NaNs have all bits but the sign set.
    return {"mxfp4": ("u1", 0xFF), "mxfp8": ("u1", 0xFF), "nvfp4": ("u1", 0x7F)}.get(packing.mode)


def _blocks(write: Write, sample: tuple[int, int] | None) -> Iterator[Piece]:
    """What to read of a tensor: all of it, or so many blocks of so many bytes spread over it."""
    if sample is None or sum(piece.n_bytes for piece in write.pieces) <= sample[0] * sample[1]:
        for piece in write.pieces:
            for begin in range(piece.begin, piece.end, _BLOCK_BYTES):
                yield Piece(piece.file, begin, min(begin + _BLOCK_BYTES, piece.end))
        return
    n_samples, n_sample = sample
    n_value = write.source_dtype.n_bits // 8
    for i in range(n_samples):
        piece = write.pieces[i * len(write.pieces) // n_samples]
        n_bytes = min(n_sample, piece.n_bytes)
        begin = piece.begin + (piece.n_bytes - n_bytes) * i // (n_samples - 1) // n_value * n_value
        yield Piece(piece.file, begin, begin + n_bytes)
