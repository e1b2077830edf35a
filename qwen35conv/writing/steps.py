"""A planned shard as steps that any thread can do in any order. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from qwen35conv.facts.header import build_header
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard
from qwen35conv.planning.rows import row_bytes, some_rows

METADATA: Mapping[str, str] = {"format": "mlx"}
_COPY_BYTES = 32 << 20  # a thread stops between two steps


@dataclass(frozen=True, slots=True)
class Step:
    """Bytes of a shard from `offset` on: given (the header), copied from the source, or computed."""

    offset: int
    n_bytes: int
    content: bytes | Piece | Write | Packing


@dataclass(frozen=True, slots=True)
class Packing:
    """The parts of one quantised weight, packed at once: each with its offset in the file."""

    parts: tuple[tuple[Write, int], ...]


def steps_of(shard: PlanShard) -> tuple[Step, ...]:
    """A shard's file from first byte to last. Ranges that follow each other in source and shard are one copy."""
    header = build_header(shard.tensors(), METADATA)
    steps = [Step(0, len(header), header)]
    offset = len(header)
    packings: dict[tuple[Piece, ...], list[tuple[Write, int]]] = {}
    for write in shard.writes:
        if write.packed is not None:
            packings.setdefault(write.pieces, []).append((write, offset))
            offset += write.n_bytes
            continue
        for content in write.pieces if write.fix is Fix.NONE else (write,):
            last = steps[-1].content
            if (
                isinstance(content, Piece)
                and isinstance(last, Piece)
                and (last.file, last.end) == (content.file, content.begin)
                and steps[-1].offset + last.n_bytes == offset
            ):
                whole = Piece(last.file, last.begin, content.end)
                steps[-1] = Step(steps[-1].offset, whole.n_bytes, whole)
            else:
                steps.append(Step(offset, content.n_bytes, content))
            offset += content.n_bytes
    for parts in packings.values():
        steps.append(Step(parts[0][1], sum(write.n_bytes for write, _ in parts), Packing(tuple(parts))))
    return tuple(part for step in steps for part in _cut(step))


def _cut(step: Step) -> Iterator[Step]:
    """A step in ones that end soon enough to stop between them; nothing for no bytes."""
    if isinstance(step.content, Piece):
        piece = step.content
        for begin in range(piece.begin, piece.end, _COPY_BYTES):
            part = Piece(piece.file, begin, min(begin + _COPY_BYTES, piece.end))
            yield Step(step.offset + begin - piece.begin, part.n_bytes, part)
    elif isinstance(step.content, Packing):
        parts = [_by_rows(write, offset) for write, offset in step.content.parts]
        for cuts in zip(*parts, strict=True):
            yield Step(cuts[0][1], sum(write.n_bytes for write, _ in cuts), Packing(cuts))
    elif isinstance(step.content, Write) and step.content.fix is Fix.DEQUANTIZE:
        for write, offset in _by_rows(step.content, step.offset):
            yield Step(offset, write.n_bytes, write)
    else:
        yield step


def _by_rows(write: Write, offset: int) -> Iterator[tuple[Write, int]]:
    """Rows of a weight, as many as a step takes, and where they are written."""
    n_row = row_bytes(write)
    n_rows = sum(piece.n_bytes for piece in write.pieces) // max(1, n_row)
    n_step = max(1, _COPY_BYTES // max(1, n_row))
    for begin in range(0, n_rows, n_step):
        part = some_rows(write, begin, min(begin + n_step, n_rows))
        yield part, offset
        offset += part.n_bytes
