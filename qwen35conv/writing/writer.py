"""Carries a plan out: every shard as runs of the source's bytes and the few tensors that are computed.

A shard grows under a temporary name, is flushed, and gets its own name when it is whole. Which thread writes which
bytes does not show in the result.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35conv.errors import SourceError
from qwen35conv.fixes import computed, packed
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard
from qwen35conv.source import Source
from qwen35conv.writing.journal import Finished, destination_error
from qwen35conv.writing.publish import Partial, check_destination, publishing
from qwen35conv.writing.steps import METADATA, Packing, Step, steps_of
from qwen35conv.writing.transfer import BUFFER_BYTES, ReadFailedError, begin_flush, move, write_all

__all__ = ["BUFFER_BYTES", "METADATA", "Partial", "Written", "check_destination", "publishing", "write_shards"]


@dataclass(frozen=True, slots=True)
class Written:
    """A whole shard: its file's bytes, and how many of them are the source's own or were computed."""

    file: str
    n_bytes: int
    sha256: str | None
    resumed: bool
    n_copied: int
    n_computed: int


def write_shards(
    shards: Sequence[PlanShard],
    source: Source,
    partial: Partial,
    *,
    jobs: int,
    checksum: bool,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> tuple[Written, ...]:
    """What was written, in the order of `shards`; those that are whole already are not written again.

    `on_bytes` is told of bytes as they come, by one thread at a time. Raises SourceError where the source can't be read
    or changes meanwhile, and DestinationError where a shard can't be written; whole shards stay in the partial folder.
    """
    resumed = partial.finished.keys() & {shard.file for shard in shards}
    for file in resumed:
        on_bytes(partial.finished[file].n_bytes)
    growing = [_Growing(shard, source, partial, checksum) for shard in shards if shard.file not in resumed]
    _Crew(growing, partial.folder, on_bytes).run(jobs)
    whole = partial.finished
    if checksum:
        for file in resumed:
            if whole[file].sha256 is None:
                whole[file] = replace(whole[file], sha256=_sha256(partial.folder / file, threading.Event()))
    return tuple(_written(shard, whole[shard.file], shard.file in resumed) for shard in shards)


class _Growing:
    """One shard on its way."""

    def __init__(self, shard: PlanShard, source: Source, partial: Partial, checksum: bool) -> None:
        self.shard = shard
        self.source = source
        self.partial = partial
        self.checksum = checksum
        self.path = partial.temporary(shard.file)
        steps = steps_of(shard)
        self.waiting = deque(steps)
        self.n_pending = len(steps)  # waiting, or in some thread's hands
        self.n_missing = sum(step.n_bytes for step in steps)
        self.n_bytes = self.n_missing
        self.begun = False
        files = {piece.file for write in shard.writes for piece in write.read_pieces}
        self.identities = {file: source.identity(file) for file in sorted(files)}
        self._sources: dict[str, int] = {}

    def begin(self) -> None:
        """Make the file."""
        self.begun = True
        self._check_source()
        for file in self.identities:
            path = self.source.local_path(file)
            if path is not None:
                try:
                    self._sources[file] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise _read_error(self.source, file, error) from error
        self.path.touch()

    def carry_out(self, step: Step, target: int) -> None:
        """Write the bytes of one step through `target`, an open descriptor of the file."""
        if isinstance(step.content, bytes):
            write_all(target, step.content, step.offset)
        elif isinstance(step.content, Piece):
            self._copy(step.content, step.offset, target)
        elif isinstance(step.content, Packing):
            self._pack(step.content, target)
        else:
            self._compute(step.content, step.offset, target)
        begin_flush(target, step.offset, step.n_bytes)

    def finish(self, target: int, stop: threading.Event) -> None:
        """Flush the file, and give it its own name if the source is still what it was."""
        os.fsync(target)
        sha256 = _sha256(self.path, stop) if self.checksum else None
        self.close()
        self._check_source()
        self.partial.finish(Finished(self.shard.file, self.n_bytes, sha256))

    def close(self) -> None:
        """Close the source's files."""
        while self._sources:
            os.close(self._sources.popitem()[1])

    def _copy(self, piece: Piece, offset: int, target: int) -> None:
        opened = self._sources.get(piece.file)
        if opened is not None:
            try:
                move(opened, piece.begin, target, offset, piece.n_bytes)
            except ReadFailedError as error:
                raise _read_error(self.source, piece.file, error) from error
            return
        for begin in range(piece.begin, piece.end, BUFFER_BYTES):
            (raw,) = self.source.read(piece.file, [(begin, min(begin + BUFFER_BYTES, piece.end))])
            write_all(target, raw, offset + begin - piece.begin)

    def _compute(self, write: Write, offset: int, target: int) -> None:
        for content in computed(self.source, write):
            write_all(target, content, offset)
            offset += len(content)

    def _pack(self, packing: Packing, target: int) -> None:
        offsets = {write.packed.part: offset for write, offset in packing.parts if write.packed is not None}
        for contents in packed(self.source, packing.parts[0][0]):
            for part, content in contents.items():
                write_all(target, content, offsets[part])
                offsets[part] += len(content)

    def _check_source(self) -> None:
        for file, identity in self.identities.items():
            if self.source.identity(file) != identity:
                raise SourceError(
                    f"{file}: the source changed while it was read",
                    hint="wait until it is whole, then run the same command again",
                )


class _Crew:
    """Threads that share shards: each takes one of its own, and helps with the others when none is left."""

    def __init__(self, shards: Sequence[_Growing], folder: Path, on_bytes: Callable[[int], None]) -> None:
        self._shards = shards
        self._folder = folder
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failure: BaseException | None = None

    def run(self, jobs: int) -> None:
        """Write all shards. Raises the first failure; what is not whole then is for the partial folder to remove."""
        threads = [threading.Thread(target=self._work, name=f"writer-{i}") for i in range(max(1, jobs))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            self._stop.set()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for shard in self._shards:
                shard.close()
        if isinstance(self._failure, OSError):  # the source's own are SourceErrors by now
            n_needed = sum(shard.n_missing for shard in self._shards)
            raise destination_error(self._folder, self._failure, n_needed=n_needed) from self._failure
        if self._failure is not None:
            raise self._failure

    def _work(self) -> None:
        held, target = None, -1
        try:
            while (taken := self._take(held)) is not None:
                shard, step = taken
                if shard is not held:
                    if held is not None:
                        os.close(target)
                    held, target = None, os.open(shard.path, os.O_WRONLY)
                    held = shard
                shard.carry_out(step, target)
                if self._is_last(shard, step):
                    shard.finish(target, self._stop)
        except BaseException as error:  # raised again by `run`
            with self._lock:
                self._failure = self._failure or error
            self._stop.set()
        finally:
            if held is not None:
                os.close(target)

    def _take(self, held: _Growing | None) -> tuple[_Growing, Step] | None:
        """The next step: of the shard in hand, of one that nobody has begun, or of any; None where all are taken."""
        with self._lock:
            if self._stop.is_set():
                return None
            shard = held
            if shard is None or not shard.waiting:
                shard = next((one for one in self._shards if not one.begun), None)
            if shard is None:
                shard = max(self._shards, key=lambda one: len(one.waiting), default=None)
            if shard is None or not shard.waiting:
                return None
            if not shard.begun:
                shard.begin()
            return shard, shard.waiting.popleft()

    def _is_last(self, shard: _Growing, step: Step) -> bool:
        """Whether a step, now done, was the last of its shard."""
        with self._lock:
            shard.n_pending -= 1
            shard.n_missing -= step.n_bytes
            self._on_bytes(step.n_bytes)
            return shard.n_pending == 0


class _StoppedError(Exception):
    """Another thread failed, or the user asked to stop."""


def _written(shard: PlanShard, finished: Finished, resumed: bool) -> Written:
    n_computed = sum(write.n_bytes for write in shard.writes if write.fix is not Fix.NONE)
    n_copied = shard.n_bytes - n_computed
    return Written(shard.file, finished.n_bytes, finished.sha256, resumed, n_copied, n_computed)


def _read_error(source: Source, file: str, error: OSError) -> SourceError:
    return SourceError(
        f"{source.label}/{file}: can't be read: {error.strerror or error}",
        hint="what is finished is kept; the same command resumes",
    )


def _sha256(path: Path, stop: threading.Event) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with path.open("rb", buffering=0) as opened:
        while n_read := opened.readinto(buffer):
            if stop.is_set():
                raise _StoppedError
            digest.update(buffer[:n_read])
    return digest.hexdigest()
