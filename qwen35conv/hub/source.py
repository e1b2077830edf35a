"""A checkpoint on the Hub, read by ranges; what lies in the local cache already is read from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import cached_property
from pathlib import Path

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import SUFFIX, Origin
from qwen35conv.hub.ranges import Range, merge
from qwen35conv.hub.repository import Repository, download, open_repository
from qwen35conv.hub.transport import RemoteFile, Transport

_LEAST_HEAD, _MOST_HEAD = 128 << 10, 512 << 10  # read of a file at first touch: nearly always its whole header
_HEAD_SHARE = 8192  # one part in so many of a file
N_CONNECTIONS = 8
_GAP = 16 << 10  # bytes between two ranges that are cheaper read than asked for apart
_KEPT_PIECE = 1 << 20  # longer stretches are not kept in memory
_KEPT_IN_ALL = 64 << 20
_BLOCK = 1 << 20
_GLANCE = 0.2  # seconds between two looks at the events of others


class HubSource:
    """A repository at one commit. Never written to. Once `stop` is set, reading raises StoppedError."""

    def __init__(self, repository: Repository, stop: threading.Event | None = None) -> None:
        self.label = repository.repo
        self.repository = repository
        self._cached = repository.cached
        self._stop = stop or threading.Event()
        self._transport = Transport(repository.repo, repository.commit)
        self._lock = threading.Lock()
        self._kept: dict[str, list[tuple[int, bytes]]] = {}  # by file: where a stretch begins, and its bytes
        self._n_kept = 0

    @cached_property
    def listing(self) -> Mapping[str, int]:
        """Every file of the commit, and its bytes."""
        return {name: file.n_bytes for name, file in sorted(self.repository.files.items())}

    @cached_property
    def origin(self) -> Origin:
        """The commit that is read, and the ETags of its weights."""
        found = self.repository
        etags = {name: file.etag for name, file in sorted(found.files.items()) if name.endswith(SUFFIX) and file.etag}
        return Origin(found.repo, found.revision, found.commit, etags, asked=found.asked)

    def identity(self, file: str) -> str:
        """The file's ETag, which names its content; commits that share a file share it."""
        found = self._file(file)
        return found.etag or f"{self.repository.commit}:{found.n_bytes}"

    def local_path(self, file: str) -> Path | None:
        """The file in the local cache, where it is there; for no file, none."""
        return self._cached.get(file)

    def read(self, file: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range of a file. Raises SourceError where they can't be had."""
        return self._read(file, ranges, self._stop)

    def read_many(
        self, wanted: Mapping[str, Sequence[Range]], on_file: Callable[[str], None] = lambda file: None
    ) -> dict[str, list[bytes]]:
        """As `read`, of several files at once; `on_file` is told of each that is done."""
        stop = _EitherEvent(self._stop)
        found = {}
        with ThreadPoolExecutor(N_CONNECTIONS) as pool:
            try:
                waiting = {pool.submit(self._read, file, ranges, stop): file for file, ranges in wanted.items()}
                for future in as_completed(waiting):
                    found[waiting[future]] = future.result()
                    on_file(waiting[future])
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        return found

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes of a range, a piece at a time. Raises SourceError where they can't be had."""
        path = self._cached.get(file)
        if path is not None:
            for at in range(begin, end, _BLOCK):
                yield from _read_cached(path, [(at, min(at + _BLOCK, end))])
            return
        kept = self._find(file, (begin, begin + 1))
        if kept is not None:
            at, raw = kept
            yield raw[begin - at : end - at]
            begin = min(end, at + len(raw))
        yield from self._transport.stream(self._file(file), begin, end, _EitherEvent(self._stop, stop))

    def download(self, files: Iterable[str], *, progress: bool = False) -> None:
        """Have files in the local cache, and read them from there. Raises what `repository.download` does."""
        self._cached = download(self.repository, files, progress=progress)

    def _file(self, file: str) -> RemoteFile:
        found = self.repository.files.get(file)
        if found is None:
            raise SourceError(f"{self.label}/{file}: no such file at commit {self.repository.commit}")
        return found

    def _read(self, file: str, ranges: Sequence[Range], stop: threading.Event) -> list[bytes]:
        path = self._cached.get(file)
        if path is not None:
            return _read_cached(path, ranges)
        remote = self._file(file)
        for _, end in ranges:
            if end > remote.n_bytes:
                raise SourceError(f"{self.label}/{file}: ends {end - remote.n_bytes} bytes early")
        missing = [one for one in ranges if one[0] < one[1] and self._find(file, one) is None]
        fresh: list[tuple[int, bytes]] = []
        if missing:
            n_head = min(max(_LEAST_HEAD, min(_MOST_HEAD, remote.n_bytes // _HEAD_SHARE)), remote.n_bytes)
            if file not in self._kept and min(missing)[0] < n_head:
                missing.append((0, n_head))
            fresh = self._transport.read(remote, merge(missing, _GAP), stop)
            self._keep(file, fresh)
        return [self._slice(file, one, fresh) for one in ranges]

    def _slice(self, file: str, one: Range, fresh: Sequence[tuple[int, bytes]]) -> bytes:
        begin, end = one
        if begin == end:
            return b""
        found = _holding(fresh, one) or self._find(file, one)
        assert found is not None  # what was not kept was read just now
        at, raw = found
        return raw[begin - at : end - at]

    def _find(self, file: str, one: Range) -> tuple[int, bytes] | None:
        """The stretch in memory that holds a range."""
        with self._lock:
            return _holding(self._kept.get(file, ()), one)

    def _keep(self, file: str, fresh: Iterable[tuple[int, bytes]]) -> None:
        with self._lock:
            kept = self._kept.setdefault(file, [])
            for at, raw in fresh:
                if len(raw) <= _KEPT_PIECE and self._n_kept + len(raw) <= _KEPT_IN_ALL:
                    kept.append((at, raw))
                    self._n_kept += len(raw)


def open_hub(repo: str, revision: str | None = None, stop: threading.Event | None = None) -> HubSource:
    """The repository at a revision. Raises SourceError where it can't be read, StoppedError once `stop` is set."""
    return HubSource(open_repository(repo, revision, stop), stop)


class _EitherEvent(threading.Event):
    """An event that is set once it, or one of others, is."""

    def __init__(self, *others: threading.Event | None) -> None:
        super().__init__()
        self._others = [other for other in others if other is not None]

    def is_set(self) -> bool:
        return super().is_set() or any(other.is_set() for other in self._others)

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set():
            left = _GLANCE if until is None else min(_GLANCE, until - time.monotonic())
            if left <= 0:
                return False
            super().wait(left)
        return True


def _holding(stretches: Iterable[tuple[int, bytes]], one: Range) -> tuple[int, bytes] | None:
    return next((found for found in stretches if found[0] <= one[0] and one[1] <= found[0] + len(found[1])), None)


def _read_cached(path: Path, ranges: Sequence[Range]) -> list[bytes]:
    try:
        with path.open("rb") as opened:
            found = []
            for begin, end in ranges:
                opened.seek(begin)
                found.append(opened.read(end - begin))
    except OSError as error:
        raise SourceError(f"{path}: can't be read: {error.strerror or error}") from error
    for (begin, end), raw in zip(ranges, found, strict=True):
        if len(raw) != end - begin:
            raise SourceError(f"{path}: ends {end - begin - len(raw)} bytes early", hint="download it again")
    return found
