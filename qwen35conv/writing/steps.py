"""A planned shard as steps that any thread can do in any order. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard
from qwen35conv.planning.rows import row_bytes, some_rows
from qwen35conv.writing.alignment import BLOCK_BYTES, LEAST_BYTES, header_of, runs_of

_COPY_BYTES = 32 << 20  # a thread stops between two steps


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes of a shard from `offset` on: given (the header), copied from the source, or computed.

    `is_aligned`: whole blocks that fall on blocks, which a file system may share instead of copying them.
    """

    offset: int
    n_bytes: int
    content: bytes | Piece | Write | Packing
    is_aligned: bool = False

    @property
    def is_congruent(self) -> bool:
        """Whether the source's blocks fall on blocks, so that even an ordinary copy might share some of them."""
        return isinstance(self.content, Piece) and (self.content.begin - self.offset) % BLOCK_BYTES == 0


@dataclass(frozen=True, slots=True)
class Packing:
    """The parts of one quantised weight, packed at once: each with its offset in the file."""

    parts: tuple[tuple[Write, int], ...]


def steps_of(shard: PlanShard, *, by_blocks: bool = False) -> tuple[Step, ...]:
    """A shard's file from first byte to last; the parts of packed weights come at the end, together.

    `by_blocks` cuts copies where whole blocks begin and end, if many of them can be shared.
    """
    header = header_of(shard)
    steps = [Step(0, len(header), header)]
    packings: dict[tuple[Piece, ...], list[tuple[Write, int]]] = {}
    for start, content in runs_of(shard):
        offset = len(header) + start
        if isinstance(content, Piece):
            steps += _cut(content, offset, by_blocks=by_blocks)
        elif content.packed is not None:
            packings.setdefault(content.pieces, []).append((content, offset))
        elif content.fix is Fix.DEQUANTIZE:
            steps += [Step(at, write.n_bytes, write) for write, at in _by_rows(content, offset)]
        else:
            steps.append(Step(offset, content.n_bytes, content))
    for parts in packings.values():
        for cuts in zip(*(_by_rows(write, offset) for write, offset in parts), strict=True):
            steps.append(Step(cuts[0][1], sum(write.n_bytes for write, _ in cuts), Packing(cuts)))
    return tuple(steps)


def _cut(piece: Piece, offset: int, *, by_blocks: bool) -> Iterator[Step]:
    """A copy in steps that end soon enough to stop between them; nothing for no bytes."""
    move = offset - piece.begin
    first = -(-piece.begin // BLOCK_BYTES) * BLOCK_BYTES
    last = piece.end // BLOCK_BYTES * BLOCK_BYTES
    if not by_blocks or move % BLOCK_BYTES or last - first < LEAST_BYTES:
        first = last = piece.begin
    for start, stop, is_aligned in ((piece.begin, first, False), (first, last, True), (last, piece.end, False)):
        for begin in range(start, stop, _COPY_BYTES):
            part = Piece(piece.file, begin, min(begin + _COPY_BYTES, stop))
            yield Step(begin + move, part.n_bytes, part, is_aligned)


def _by_rows(write: Write, offset: int) -> Iterator[tuple[Write, int]]:
    """Rows of a weight, as many as a step takes, and where they are written."""
    n_row = row_bytes(write)
    n_rows = sum(piece.n_bytes for piece in write.pieces) // max(1, n_row)
    n_step = max(1, _COPY_BYTES // max(1, n_row))
    for begin in range(0, n_rows, n_step):
        part = some_rows(write, begin, min(begin + n_step, n_rows))
        yield part, offset
        offset += part.n_bytes
