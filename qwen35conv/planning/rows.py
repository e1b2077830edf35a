"""A computed tensor in parts of whole rows, each a write of its own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from qwen35conv.planning.pieces import Blocks, Fix, Piece, Write

_ROWS_BYTES = 4 << 20
_CODE_BYTES = 1 << 20  # of FP8: their arithmetic takes ten times as much
_BY_ROW = (Fix.DEQUANTIZE, Fix.QUANTIZE)


def rows_of(write: Write) -> Iterator[Write]:
    """A computed tensor in parts of whole rows, of one piece and a few MB at most.

    A row is what one index of the first axis holds; of a weight that is dequantised or quantised, one of the last axis.
    """
    n_row = row_bytes(write)
    n_block = max(1, (_CODE_BYTES if write.blocks is not None else _ROWS_BYTES) // max(1, n_row)) * n_row
    for i, piece in enumerate(write.pieces):
        for begin in range(piece.begin, piece.end, max(1, n_block)):
            yield _part(write, i, begin, min(begin + n_block, piece.end), n_row)


def some_rows(write: Write, begin: int, end: int) -> Write:
    """Rows `begin` to `end` (one past) of a weight that is dequantised or quantised, matrices counted as one."""
    n_row = row_bytes(write)
    first, last = begin * n_row, end * n_row
    parts, offset = [], 0
    for i, piece in enumerate(write.pieces):
        low, high = max(first - offset, 0), min(last - offset, piece.n_bytes)
        if low < high:
            parts.append(_part(write, i, piece.begin + low, piece.begin + high, n_row))
        offset += piece.n_bytes
    n = end - begin
    return replace(
        write,
        pieces=tuple(piece for part in parts for piece in part.pieces),
        shape=(n, write.shape[-1]),
        source_shape=(n, write.n_columns),
        blocks=None
        if write.blocks is None
        else replace(
            write.blocks,
            pieces=tuple(piece for part in parts if part.blocks for piece in part.blocks.pieces),
            first_rows=tuple(row for part in parts if part.blocks for row in part.blocks.first_rows),
        ),
    )


def row_bytes(write: Write) -> int:
    """Stored bytes of a row."""
    if write.fix in _BY_ROW:
        return write.n_columns * write.source_dtype.n_bits // 8
    return sum(piece.n_bytes for piece in write.pieces) // max(1, write.source_shape[0])


def working_bytes(write: Write) -> int:
    """A bound on the bytes that the arithmetic of one part takes, a row of any length aside."""
    if write.fix not in _BY_ROW:
        return 0 if write.fix is Fix.NONE else 8 * _ROWS_BYTES
    n_codes = 12 * max(_CODE_BYTES, row_bytes(write)) if write.blocks is not None else 0
    n_values = 6 * max(_ROWS_BYTES, row_bytes(write)) if write.packed is not None else 0
    return n_codes + n_values


def _part(write: Write, i: int, begin: int, end: int, n_row: int) -> Write:
    """The rows of one piece that lie between two offsets of its file."""
    piece = Piece(write.pieces[i].file, begin, end)
    n = piece.n_bytes // n_row
    if write.fix not in _BY_ROW:
        return replace(write, pieces=(piece,), shape=(n, *write.shape[1:]), source_shape=(n, *write.source_shape[1:]))
    blocks = write.blocks
    if blocks is not None:
        blocks = _blocks_of(blocks, i, (begin - write.pieces[i].begin) // n_row, n, write.n_columns)
    return replace(write, pieces=(piece,), shape=(n, write.shape[-1]), source_shape=(n, write.n_columns), blocks=blocks)


def _blocks_of(blocks: Blocks, i: int, begin: int, n: int, n_columns: int) -> Blocks:
    """The scales over `n` rows of piece `i`, from its row `begin` on."""
    n_row = -(-n_columns // blocks.n_columns) * blocks.dtype.n_bits // 8
    first = blocks.first_rows[i] + begin
    low, high = first // blocks.n_rows, -(-(first + n) // blocks.n_rows)
    piece = blocks.pieces[i]
    scales = Piece(piece.file, piece.begin + low * n_row, piece.begin + high * n_row)
    return replace(blocks, pieces=(scales,), first_rows=(first % blocks.n_rows,))
