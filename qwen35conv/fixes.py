"""The arithmetic of a conversion: a gain plus or minus one, a cast, the patch embedding's axes, FP8 and packing."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

import numpy as np

from qwen35conv.facts.header import Dtype
from qwen35conv.fp8 import dequantized
from qwen35conv.planning.pieces import Fix, Part, Piece, Write
from qwen35conv.planning.rows import rows_of
from qwen35conv.quantizing import quantized
from qwen35conv.reading import values_of
from qwen35conv.rounding import as_bfloat16
from qwen35conv.source import Source

_SHIFTS = {Fix.ADD_ONE: 1.0, Fix.SUBTRACT_ONE: -1.0, Fix.CAST: 0.0}


def computed(source: Source, write: Write, stop: threading.Event | None = None) -> Iterator[bytes]:
    """The bytes of a canonical tensor, read and fixed a few MB at a time; `stop` ends a slow read."""
    for part in rows_of(write):
        yield fixed(part, read_pieces(source, part.pieces, stop), _scales(source, part, stop))


def packed(source: Source, write: Write, stop: threading.Event | None = None) -> Iterator[Mapping[Part, bytes]]:
    """The bytes of every part that a quantised weight becomes, a few MB at a time; `write` is any of them."""
    for part in rows_of(write):
        yield _packed(part, read_pieces(source, part.pieces, stop), _scales(source, part, stop))


def fixed(write: Write, raw: bytes, scales: bytes = b"") -> bytes:
    """The bytes of a canonical tensor from its joined pieces, and from the scales of their blocks where it has any.

    A shift is a float32 add, rounded once (nearest even) to the written dtype: the bits of the same add in that dtype.
    """
    if write.fix is Fix.NONE:
        return raw
    if write.fix is Fix.DEQUANTIZE:
        return dequantized(write, raw, scales).tobytes()
    if write.packed is not None:
        return _packed(write, raw, scales)[write.packed.part]
    if write.fix is Fix.PATCH_AXES:
        n_bytes = write.source_dtype.n_bits // 8
        stored = np.frombuffer(raw, f"V{n_bytes}").reshape(write.source_shape)
        return np.ascontiguousarray(np.moveaxis(stored, 1, -1)).tobytes()
    values = values_of(write.source_dtype, raw)
    if write.fix is not Fix.CAST:
        values = values + np.float32(_SHIFTS[write.fix])
    return _stored(write.dtype, values)


def read_pieces(source: Source, pieces: tuple[Piece, ...], stop: threading.Event | None = None) -> bytes:
    """The bytes of all pieces, joined; neighbours in one file are read at once. `stop` ends a slow read."""
    if len(pieces) == 1:
        return b"".join(source.stream(pieces[0].file, pieces[0].begin, pieces[0].end, stop))
    parts: list[bytes] = []
    begin = 0
    while begin < len(pieces):
        file = pieces[begin].file
        end = next((i for i in range(begin, len(pieces)) if pieces[i].file != file), len(pieces))
        parts += source.read(file, [(piece.begin, piece.end) for piece in pieces[begin:end]])
        begin = end
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _scales(source: Source, write: Write, stop: threading.Event | None) -> bytes:
    return b"" if write.blocks is None else read_pieces(source, write.blocks.pieces, stop)


def _packed(write: Write, raw: bytes, scales: bytes) -> Mapping[Part, bytes]:
    if write.blocks is None:
        return quantized(write, write.source_dtype, raw)
    return quantized(write, Dtype.BF16, dequantized(write, raw, scales).tobytes())


def _stored(dtype: Dtype, values: np.ndarray) -> bytes:
    """Float32 values as a dtype stores them, rounded to nearest even."""
    if dtype is not Dtype.BF16:
        return values.astype("<f2" if dtype is Dtype.F16 else "<f4").tobytes()
    return as_bfloat16(values).tobytes()
