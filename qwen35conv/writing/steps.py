"""A planned shard as steps that any thread can do in any order. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from qwen35conv.facts.header import build_header
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard

METADATA: Mapping[str, str] = {"format": "mlx"}
_COPY_BYTES = 32 << 20  # a thread stops between two steps
_ROWS_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes of a shard from `offset` on: given (the header), copied from the source, or computed."""

    offset: int
    n_bytes: int
    content: bytes | Piece | Write


def steps_of(shard: PlanShard) -> tuple[Step, ...]:
    """A shard's file from first byte to last. Ranges that follow each other in source and shard are one copy."""
    header = build_header(shard.tensors(), METADATA)
    steps = [Step(0, len(header), header)]
    offset = len(header)
    for write in shard.writes:
        for content in write.pieces if write.fix is Fix.NONE else (write,):
            last = steps[-1].content
            if (
                isinstance(content, Piece)
                and isinstance(last, Piece)
                and (last.file, last.end) == (content.file, content.begin)
            ):
                whole = Piece(last.file, last.begin, content.end)
                steps[-1] = Step(steps[-1].offset, whole.n_bytes, whole)
            else:
                steps.append(Step(offset, content.n_bytes, content))
            offset += content.n_bytes
    return tuple(part for step in steps for part in _cut(step))


def rows_of(write: Write) -> Iterator[tuple[Write, Piece]]:
    """A computed tensor in parts of whole rows (first axis), each a write of its own, a few MB at most."""
    n_stored = sum(piece.n_bytes for piece in write.pieces)
    n_row = n_stored // max(1, write.source_shape[0])
    n_block = max(1, _ROWS_BYTES // max(1, n_row)) * n_row
    for piece in write.pieces:
        for begin in range(piece.begin, piece.end, max(1, n_block)):
            part = Piece(piece.file, begin, min(begin + n_block, piece.end))
            stored = (part.n_bytes // n_row, *write.source_shape[1:])
            yield replace(write, source_shape=stored, pieces=(part,)), part


def _cut(step: Step) -> Iterator[Step]:
    """A copy in steps that end soon enough to stop between them; nothing for no bytes."""
    if not isinstance(step.content, Piece):
        yield step
        return
    piece = step.content
    for begin in range(piece.begin, piece.end, _COPY_BYTES):
        part = Piece(piece.file, begin, min(begin + _COPY_BYTES, piece.end))
        yield Step(step.offset + begin - piece.begin, part.n_bytes, part)
