"""How long a shard's header is: so long that the source's blocks fall on blocks of the result, and can be shared. Pure.

A header may end in spaces. Its length follows from the plan alone, whatever the file system can do: a clone and a copy
have the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from qwen35conv.facts.header import LENGTH_BYTES, build_header
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard

METADATA: Mapping[str, str] = {"format": "mlx"}
BLOCK_BYTES = 4096  # what APFS, Btrfs and XFS share by, and what most disks write by
LEAST_BYTES = 64 << 10  # less is quicker copied than shared, and not worth a block of spaces
_MOST_SPACES = 64 << 10
_ALIGN = 8  # where the data area of a safetensors file begins


def runs_of(shard: PlanShard) -> Iterator[tuple[int, Piece | Write]]:
    """A shard's data area from first byte to last, each part with its offset in it.

    Ranges that follow each other in source and shard are one piece; a write is one that must be computed.
    """
    offset, run = 0, None
    for write in shard.writes:
        for content in write.pieces if write.fix is Fix.NONE else (write,):
            if run is not None and isinstance(content, Piece) and (run.file, run.end) == (content.file, content.begin):
                run = Piece(run.file, run.begin, content.end)
            else:
                if run is not None:
                    yield offset - run.n_bytes, run
                run = content if isinstance(content, Piece) else None
                if isinstance(content, Write):
                    yield offset, content
            offset += content.n_bytes
    if run is not None:
        yield offset - run.n_bytes, run


def header_of(shard: PlanShard) -> bytes:
    """The first bytes of a shard's file, length included.

    As long as the source's, where that keeps most bytes where they are; else so long that the most bytes move by whole
    blocks; and no longer than it must be where too few could be shared.
    """
    plain = build_header(shard.tensors(), METADATA)
    moves: Counter[int] = Counter()  # where a header must end for bytes to stay where they are -> how many
    for offset, content in runs_of(shard):
        if isinstance(content, Piece) and (content.begin - offset) % _ALIGN == 0:
            moves[content.begin - offset] += content.n_bytes
    if not moves:
        return plain
    stay = max(moves, key=lambda end: (moves[end], -end))
    if moves[stay] >= LEAST_BYTES and 2 * moves[stay] > shard.n_bytes and 0 <= stay - len(plain) <= _MOST_SPACES:
        return _lengthened(plain, stay)
    aligned: Counter[int] = Counter()  # spaces to add -> bytes that then move by whole blocks
    for end, n_bytes in moves.items():
        if n_bytes >= LEAST_BYTES:
            aligned[(end - len(plain)) % BLOCK_BYTES] += n_bytes
    return _lengthened(plain, len(plain) + max(aligned, key=lambda n: (aligned[n], -n), default=0))


def _lengthened(header: bytes, n_bytes: int) -> bytes:
    text = header[LENGTH_BYTES:].ljust(n_bytes - LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
