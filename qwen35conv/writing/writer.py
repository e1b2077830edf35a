"""Carries a plan out: every shard as runs of the source's bytes and the few tensors that are computed.

A shard grows under a temporary name, is flushed, and gets its own name when it is whole. Which thread writes which
bytes does not show in the result.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qwen35conv.errors import SourceError
from qwen35conv.fixes import computed, packed
from qwen35conv.planning.pieces import Fix, Piece, Write
from qwen35conv.planning.plan import PlanShard
from qwen35conv.source import Source
from qwen35conv.writing.clones import Clone, clone_of
from qwen35conv.writing.journal import Finished, destination_error
from qwen35conv.writing.publish import Partial, check_destination, publishing, settle
from qwen35conv.writing.sharing import Link, Sharing, not_shared_error, sharing_here
from qwen35conv.writing.steps import Packing, Step, steps_of
from qwen35conv.writing.transfer import BUFFER_BYTES, ReadFailedError, begin_flush, move, write_all

__all__ = [
    "BUFFER_BYTES",
    "Partial",
    "Written",
    "check_destination",
    "publishing",
    "settle",
    "write_shards",
]

_NOTED_BYTES = 128 << 20  # of a slow source: how much a kill may cost, and how often the disk is waited for
_NOTED_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Written:
    """A whole shard: its file's bytes; of its tensors' how many are in the source's own blocks, copied, or computed."""

    file: str
    n_bytes: int
    sha256: str | None
    resumed: bool
    n_shared: int
    n_copied: int
    n_computed: int


def write_shards(
    shards: Sequence[PlanShard],
    source: Source,
    partial: Partial,
    *,
    jobs: int,
    checksum: bool,
    link: Link = Link.AUTO,
    on_bytes: Callable[[int], None] = lambda n: None,
    budget: AbstractContextManager[object] | None = None,
    sharing: Sharing | None = None,
) -> tuple[Written, ...]:
    """What was written, in the order of `shards`; those that are whole already are not written again.

    `link` says whether blocks may be shared with the source, by `sharing`, or else what this system offers; the bytes
    are the same. `on_bytes` is told of bytes as they come, by one thread at a time. `budget` is entered for every step:
    a semaphore that several conversions share bounds what they do at once. Raises SourceError where the source can't be
    read or changes meanwhile, and DestinationError where a shard can't be written, or is to be a clone and can't; whole
    shards stay in the partial folder.
    """
    resumed = {
        shard.file
        for shard in shards
        if (found := partial.finished.get(shard.file)) and not (link is Link.COPY and found.n_shared)
    }
    for file in resumed:
        on_bytes(partial.finished[file].n_bytes)
    how = None if link is Link.COPY else sharing or sharing_here()
    growing = [_Growing(shard, source, partial, checksum, link, how) for shard in shards if shard.file not in resumed]
    for one in growing:
        on_bytes(one.n_bytes - one.n_missing)
    _Crew(growing, partial.folder, on_bytes, budget or nullcontext()).run(jobs)
    whole = partial.finished
    if checksum:
        for file in resumed:
            if whole[file].sha256 is None:
                whole[file] = replace(whole[file], sha256=_sha256(partial.folder / file, threading.Event()))
    return tuple(_written(shard, whole[shard.file], shard.file in resumed) for shard in shards)


class _Growing:
    """One shard on its way."""

    def __init__(
        self,
        shard: PlanShard,
        source: Source,
        partial: Partial,
        checksum: bool,
        link: Link,
        sharing: Sharing | None,  # None: nothing may be shared
    ) -> None:
        self.shard = shard
        self.source = source
        self.partial = partial
        self.checksum = checksum
        self.path = partial.temporary(shard.file)
        files = {piece.file for write in shard.writes for piece in write.read_pieces}
        self.identities = {file: source.identity(file) for file in sorted(files)}
        self.is_slow = any(source.local_path(file) is None for file in files)  # worth going on from inside
        self.link = link
        self.sharing = None if self.is_slow else sharing
        by_ranges = self.sharing is not None and self.sharing.can_share_ranges(partial.folder)
        steps = steps_of(shard, by_blocks=by_ranges)
        self.n_bytes = sum(step.n_bytes for step in steps)
        self.n_shared = 0
        self._clone = None if self.sharing is None else clone_of(steps)  # None: the file is no clone, or not any more
        self._refused: set[str] = set()  # source files that no blocks can be shared with
        done = partial.grown(shard.file)
        steps = tuple(step for step in steps if step.offset not in done) or steps[:1]
        self._unnoted: list[Step] = []  # done, but not in the journal yet
        self._noted_at = time.monotonic()
        self._noting = threading.Lock()
        self.waiting = deque(steps)
        self.n_pending = len(steps)  # waiting, or in some thread's hands
        self.n_missing = sum(step.n_bytes for step in steps)
        self.begun = False
        self._sources: dict[str, int] = {}

    def begin(self) -> int:
        """Make the file. Returns how many of its bytes are there at once, because it is a clone."""
        self.begun = True
        self._check_source()
        for file in self.identities:
            path = self.source.local_path(file)
            if path is not None:
                try:
                    self._sources[file] = os.open(path, os.O_RDONLY)
                except OSError as error:
                    raise _read_error(self.source, file, error) from error
        if self._clone is None or not self._begin_as(self._clone):
            self._clone = None
            self.path.touch()
            return 0
        self.waiting = deque(self._clone.patches)
        self.n_pending = len(self._clone.patches)
        self.n_missing -= self._clone.n_kept
        self.n_shared = self._clone.n_shared
        return self._clone.n_kept

    def carry_out(
        self, step: Step, target: int, stop: threading.Event, on_bytes: Callable[[int], None] = lambda n: None
    ) -> int:
        """Write the bytes of one step through `target`, an open descriptor. Returns how many of them are shared.

        `stop` ends a slow one; of that `on_bytes` is told as bytes come, of others when all are written.
        """
        if isinstance(step.content, bytes):
            if self._clone is None or not self._has(self._clone.file, step.content, step.offset):
                write_all(target, step.content, step.offset)  # a canonical source may have the very header
            on_bytes(step.n_bytes)
        elif isinstance(step.content, Piece):
            if step.is_aligned and self._share(step.content, step.offset, target):
                on_bytes(step.n_bytes)
                return step.n_bytes
            self._copy(step, step.content, target, stop, on_bytes)
        elif isinstance(step.content, Packing):
            self._pack(step.content, target, stop)
            on_bytes(step.n_bytes)
        else:
            self._compute(step.content, step.offset, target, stop)
            on_bytes(step.n_bytes)
        begin_flush(target, step.offset, step.n_bytes)
        if self.is_slow:
            with self._noting:
                self._unnoted.append(step)
            self._note(target, at_least=_NOTED_BYTES)
        return 0

    def leave(self) -> None:
        """Note what is done of a shard that is not whole, for the next run to go on from, and close the source."""
        if self._unnoted and self.shard.file not in self.partial.finished:
            with suppress(OSError):  # something failed already; what is not noted is only written again
                target = os.open(self.path, os.O_WRONLY)
                try:
                    self._note(target)
                finally:
                    os.close(target)
        self.close()

    def _note(self, target: int, at_least: int = 0) -> None:
        """Flush what is written and note the steps that this makes lasting: from so many bytes on, or after seconds."""
        with self._noting:
            n_bytes = sum(step.n_bytes for step in self._unnoted)
            if not n_bytes or (n_bytes < at_least and time.monotonic() - self._noted_at < _NOTED_SECONDS):
                return
            steps, self._unnoted, self._noted_at = self._unnoted, [], time.monotonic()
        os.fsync(target)
        self.partial.grow(self.shard.file, [step.offset for step in steps])

    def finish(self, target: int, stop: threading.Event) -> None:
        """Flush the file, and give it its own name if the source is still what it was."""
        os.fsync(target)
        sha256 = _sha256(self.path, stop) if self.checksum else None
        self.close()
        self._check_source()
        self.partial.finish(Finished(self.shard.file, self.n_bytes, sha256, self.n_shared))

    def close(self) -> None:
        """Close the source's files."""
        while self._sources:
            os.close(self._sources.popitem()[1])

    def _begin_as(self, clone: Clone) -> bool:
        """Whether the file now is a clone, cut to the shard's length."""
        assert self.sharing is not None
        try:
            self.path.unlink(missing_ok=True)
            self.sharing.clone_file(self._sources[clone.file], self.path)
            os.truncate(self.path, self.n_bytes)
        except OSError as error:
            self.path.unlink(missing_ok=True)
            self._refuse(clone.file, error)
            return False
        return True

    def _share(self, piece: Piece, offset: int, target: int) -> bool:
        """Whether whole blocks of the source now stand in the file."""
        assert self.sharing is not None
        if piece.file in self._refused:
            return False
        try:
            self.sharing.clone_range(self._sources[piece.file], piece.begin, target, offset, piece.n_bytes)
        except OSError as error:
            self._refuse(piece.file, error)
            return False
        return True

    def _has(self, file: str, content: bytes, begin: int) -> bool:
        return os.pread(self._sources[file], len(content), begin) == content

    def _refuse(self, file: str, error: OSError) -> None:
        if self.link is Link.CLONE:
            raise not_shared_error(self.path, file, error) from error
        self._refused.add(file)

    def _copy(
        self, step: Step, piece: Piece, target: int, stop: threading.Event, on_bytes: Callable[[int], None]
    ) -> None:
        offset, opened = step.offset, self._sources.get(piece.file)
        if opened is not None:
            # What is told of shared bytes is exact: where blocks fall on blocks, a copy may not share some by itself.
            may_share = self.link is not Link.COPY and (piece.file in self._refused or not step.is_congruent)
            try:
                move(opened, piece.begin, target, offset, piece.n_bytes, may_share=may_share)
            except ReadFailedError as error:
                raise _read_error(self.source, piece.file, error) from error
            on_bytes(piece.n_bytes)
            return
        for raw in self.source.stream(piece.file, piece.begin, piece.end, stop):
            write_all(target, raw, offset)
            offset += len(raw)
            on_bytes(len(raw))

    def _compute(self, write: Write, offset: int, target: int, stop: threading.Event) -> None:
        for content in computed(self.source, write, stop):
            write_all(target, content, offset)
            offset += len(content)

    def _pack(self, packing: Packing, target: int, stop: threading.Event) -> None:
        offsets = {write.packed.part: offset for write, offset in packing.parts if write.packed is not None}
        for contents in packed(self.source, packing.parts[0][0], stop):
            if stop.is_set():
                raise _StoppedError
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

    def __init__(
        self,
        shards: Sequence[_Growing],
        folder: Path,
        on_bytes: Callable[[int], None],
        budget: AbstractContextManager[object],
    ) -> None:
        self._shards = shards
        self._folder = folder
        self._on_bytes = on_bytes
        self._budget = budget
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
                shard.leave()
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
                with self._budget:
                    n_shared = shard.carry_out(step, target, self._stop, self._tell)
                if self._is_last(shard, step, n_shared):
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
                self._begin(shard)
            return shard, shard.waiting.popleft()

    def _begin(self, shard: _Growing) -> None:
        try:
            if n_cloned := shard.begin():
                self._on_bytes(n_cloned)
        except BaseException as error:  # before another thread misses the file, and that is taken for the cause
            self._failure = self._failure or error
            self._stop.set()
            raise

    def _is_last(self, shard: _Growing, step: Step, n_shared: int) -> bool:
        """Whether a step, now done, was the last of its shard."""
        with self._lock:
            shard.n_pending -= 1
            shard.n_missing -= step.n_bytes
            shard.n_shared += n_shared
            return shard.n_pending == 0

    def _tell(self, n_bytes: int) -> None:
        with self._lock:
            self._on_bytes(n_bytes)


class _StoppedError(Exception):
    """Another thread failed, or the user asked to stop."""


def _written(shard: PlanShard, finished: Finished, resumed: bool) -> Written:
    n_computed = sum(write.n_bytes for write in shard.writes if write.fix is not Fix.NONE)
    n_copied = shard.n_bytes - n_computed - finished.n_shared
    return Written(shard.file, finished.n_bytes, finished.sha256, resumed, finished.n_shared, n_copied, n_computed)


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
