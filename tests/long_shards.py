"""Files that take a while to copy, for the tests that interrupt it."""

from __future__ import annotations

import random
from pathlib import Path

from qwen35conv.facts.header import Dtype
from qwen35conv.planning.pieces import Fix, Piece, Rule, Write
from qwen35conv.planning.plan import PlanShard

_BLOCK = 1 << 20


def make_long(folder: Path, *, n_blocks: int, n_shards: int) -> list[PlanShard]:
    """Random files of `n_blocks` MB, and a shard of each that lacks a few bytes at both ends."""
    folder.mkdir()
    noise = random.Random(7).randbytes(_BLOCK)
    for i in range(n_shards):
        with (folder / f"s{i}").open("wb") as opened:
            for k in range(n_blocks):
                cut = 991 * (k + 7 * i) % _BLOCK
                opened.write(noise[cut:])
                opened.write(noise[:cut])
    return long_shards(folder)


def long_shards(folder: Path) -> list[PlanShard]:
    """The shards of such a folder."""
    files = sorted(folder.iterdir())
    shards = []
    for i, file in enumerate(files, 1):
        piece = Piece(file.name, 5, file.stat().st_size - 11)
        shape = (piece.n_bytes,)
        write = Write(file.name, Dtype.U8, shape, (piece,), Fix.NONE, Rule.KEEP, Dtype.U8, shape, (file.name,))
        shards.append(PlanShard(f"model-{i:05d}-of-{len(files):05d}.safetensors", (write,)))
    return shards


def assert_long(folder: Path, shards: list[PlanShard], source: Path) -> None:
    """Every shard of a folder ends with the bytes that it was to copy, and no other file is there."""
    assert sorted(path.name for path in folder.iterdir()) == [shard.file for shard in shards]
    for shard in shards:
        (piece,) = shard.writes[0].pieces
        wanted = (source / piece.file).read_bytes()[piece.begin : piece.end]
        found = (folder / shard.file).read_bytes()
        assert found.endswith(wanted), shard.file
        assert len(found) - len(wanted) == 8 + int.from_bytes(found[:8], "little")
