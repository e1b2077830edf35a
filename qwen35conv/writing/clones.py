"""A shard that begins as a clone of a source file, and what must then still be written over it. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from qwen35conv.planning.pieces import Piece
from qwen35conv.writing.alignment import BLOCK_BYTES, LEAST_BYTES
from qwen35conv.writing.steps import Step


@dataclass(frozen=True, slots=True)
class Clone:
    """A source file whose bytes mostly are where a shard wants them.

    `n_shared` bytes of tensors lie in whole blocks that no patch touches; `n_kept` need no patch.
    """

    file: str
    patches: tuple[Step, ...]
    n_kept: int
    n_shared: int


def clone_of(steps: Sequence[Step]) -> Clone | None:
    """The clone that a shard had best begin as; None where it would leave half of the shard to be written anyway."""
    kept: Counter[str] = Counter()
    for step in steps:
        if isinstance(step.content, Piece) and step.content.begin == step.offset:
            kept[step.content.file] += step.n_bytes
    file, n_kept = max(kept.items(), key=lambda one: (one[1], one[0]), default=("", 0))
    if n_kept < LEAST_BYTES or 2 * n_kept <= sum(step.n_bytes for step in steps):
        return None
    patches, n_shared, begin, end = [], 0, 0, 0  # begin, end: of the bytes that are kept, without a gap
    for step in steps:
        if isinstance(step.content, Piece) and (step.content.file, step.content.begin) == (file, step.offset):
            if step.offset != end:
                n_shared += _whole_blocks(begin, end)
                begin = step.offset
            end = step.offset + step.n_bytes
        else:
            patches.append(step)
    return Clone(file, tuple(patches), n_kept, n_shared + _whole_blocks(begin, end))


def n_shareable(steps: Sequence[Step], *, by_ranges: bool) -> int:
    """Bytes that a shard can share: by parts of its source files (`by_ranges`), or only as a clone of one."""
    clone = clone_of(steps)
    n_shared, rest = (0, steps) if clone is None else (clone.n_shared, clone.patches)
    return n_shared + sum(step.n_bytes for step in rest if by_ranges and step.is_aligned)


def _whole_blocks(begin: int, end: int) -> int:
    return max(0, end // BLOCK_BYTES - -(-begin // BLOCK_BYTES)) * BLOCK_BYTES
