"""The canonical tensors of any checkpoint, read lazily: the plan's pieces and fixes, and nothing rewritten."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import mlx.core as mx
import numpy as np

from qwen35conv.facts.header import Dtype
from qwen35conv.fixes import computed, read_pieces
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import Plan
from qwen35conv.planning.rows import some_rows
from qwen35conv.source import Source

# How each dtype enters MLX: the type of its bits, and what they are viewed as. 8-bit floats stay bits, as in mx.load.
_ARRAYS: dict[Dtype, tuple[str, mx.Dtype]] = {
    Dtype.BOOL: ("?", mx.bool_),
    Dtype.U8: ("u1", mx.uint8),
    Dtype.I8: ("i1", mx.int8),
    Dtype.U16: ("<u2", mx.uint16),
    Dtype.I16: ("<i2", mx.int16),
    Dtype.F16: ("<f2", mx.float16),
    Dtype.BF16: ("<u2", mx.bfloat16),
    Dtype.U32: ("<u4", mx.uint32),
    Dtype.I32: ("<i4", mx.int32),
    Dtype.F32: ("<f4", mx.float32),
    Dtype.U64: ("<u8", mx.uint64),
    Dtype.I64: ("<i8", mx.int64),
    Dtype.C64: ("<c8", mx.complex64),
    **dict.fromkeys((Dtype.F8_E4M3, Dtype.F8_E5M2, Dtype.F8_E8M0), ("u1", mx.uint8)),
}


class View(Mapping[str, mx.array]):
    """Canonical name -> array. Each access reads the source anew; nothing is kept."""

    def __init__(self, source: Source, writes: Mapping[str, Write]) -> None:
        self._source = source
        self._writes = writes

    def __getitem__(self, name: str) -> mx.array:
        """The whole tensor. Raises KeyError, or SourceError where the source can't be read."""
        write = self._writes[name]
        return _array(write.dtype, write.shape, b"".join(self.chunks(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._writes)

    def __len__(self) -> int:
        return len(self._writes)

    def __contains__(self, name: object) -> bool:
        return name in self._writes

    def write(self, name: str) -> Write:
        """The tensor's dtype, shape, pieces and fix, without reading it."""
        return self._writes[name]

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Rows `begin` to `end` (one past) of the first axis; only their bytes are read."""
        write = self._writes[name]
        shape = (end - begin, *write.shape[1:])
        if write.fix in (Fix.DEQUANTIZE, Fix.QUANTIZE):
            n = math.prod(write.shape[1:-1])
            some = some_rows(write, begin * n, end * n)
            return _array(write.dtype, shape, b"".join(computed(self._source, some)))
        if write.fix is not Fix.NONE:
            return self[name][begin:end]
        n_row = write.n_bytes // write.shape[0]
        raw = self._stored(write, begin * n_row, end * n_row)
        return _array(write.dtype, shape, raw)

    def chunks(self, name: str, n_bytes: int = 1 << 22) -> Iterator[bytes]:
        """The tensor's final bytes, in order, `n_bytes` at a time; the last may be shorter."""
        write = self._writes[name]
        if write.fix is Fix.NONE:
            for begin in range(0, write.n_bytes, n_bytes):
                yield self._stored(write, begin, min(begin + n_bytes, write.n_bytes))
            return
        waiting = bytearray()
        for content in computed(self._source, write):
            waiting += content
            while len(waiting) >= n_bytes:
                yield bytes(waiting[:n_bytes])
                del waiting[:n_bytes]
        if waiting:
            yield bytes(waiting)

    def _stored(self, write: Write, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end` of the joined pieces, as stored."""
        return read_pieces(self._source, tuple(_within(write.pieces, begin, end)))


def open_view(source: Source, plan: Plan) -> View:
    """The canonical tensors of a checkpoint under its plan: bit for bit what converting it would write."""
    return View(source, {write.name: write for write in plan.writes()})


def _within(pieces: tuple[Piece, ...], begin: int, end: int) -> Iterator[Piece]:
    offset = 0
    for piece in pieces:
        low, high = max(begin - offset, 0), min(end - offset, piece.n_bytes)
        if low < high:
            yield Piece(piece.file, piece.begin + low, piece.begin + high)
        offset += piece.n_bytes


def _array(dtype: Dtype, shape: tuple[int, ...], raw: bytes) -> mx.array:
    if dtype is Dtype.F64:  # as mx.load has it
        return mx.array(np.frombuffer(raw, "<f8").astype(np.float32)).reshape(shape)
    if dtype not in _ARRAYS:
        raise TypeError(f"MLX has no array for {dtype.value}")
    bits, viewed = _ARRAYS[dtype]
    assert len(raw) == math.prod(shape) * np.dtype(bits).itemsize
    array = mx.array(np.frombuffer(raw, bits).reshape(shape))
    return array if array.dtype == viewed else array.view(viewed)
