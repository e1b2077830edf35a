"""How many bytes a conversion will share with its source, asked of the file system before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from qwen35conv.planning.plan import PlanShard
from qwen35conv.source import Source
from qwen35conv.writing.clones import n_shareable
from qwen35conv.writing.sharing import Link, Sharing, not_shared_error, sharing_here
from qwen35conv.writing.steps import steps_of


def forecast_shared(shards: Iterable[PlanShard], source: Source, folder: Path, link: Link) -> int:
    """Bytes of the shards, written anywhere below `folder`, that will be the source's own blocks.

    Raises DestinationError where `link` asks for clones and the file system has none.
    """
    if link is Link.COPY:
        return 0
    sharing = sharing_here()
    by_ranges = sharing.can_share_ranges(folder)
    refusals: dict[int | None, OSError | None] = {}  # by the device that a file is on
    n_total = 0
    for shard in shards:
        n_shared = n_shareable(steps_of(shard, by_blocks=True), by_ranges=by_ranges)
        for file in sorted({piece.file for write in shard.writes for piece in write.read_pieces}):
            path = source.local_path(file)
            device = _device(path)
            if device not in refusals:
                refusals[device] = _refusal(sharing, path, folder)
            if (refusal := refusals[device]) is not None:
                if link is Link.CLONE:
                    raise not_shared_error(folder, file, refusal) from refusal
                n_shared = 0
        n_total += n_shared
    return n_total


def _device(path: Path | None) -> int | None:
    """The device that a file is on; None where it is not to be had here."""
    try:
        return None if path is None else path.stat().st_dev
    except OSError:
        return None


def _refusal(sharing: Sharing, path: Path | None, folder: Path) -> OSError | None:
    if path is None:
        return OSError("it is not on this machine")
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            sharing.probe(opened, folder)
        finally:
            os.close(opened)
    except OSError as error:
        return error
    return None
