"""Where a checkpoint lies: listings, and files read by byte ranges."""

from __future__ import annotations

import os
import re
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from qwen35conv.errors import SourceError
from qwen35conv.facts.checkpoint import INDEX, SET_NAME, SUFFIX, Origin
from qwen35conv.facts.header import shown

if TYPE_CHECKING:
    from qwen35conv.hub.source import HubSource

_MAX_DEPTH = 3  # of subfolders that are looked into for strays
_BLOCK = 1 << 20
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")

Range = tuple[int, int]


class Source(Protocol):
    """Files to read by name and byte range."""

    @property
    def label(self) -> str:
        """What people call it."""

    @property
    def listing(self) -> Mapping[str, int]:
        """Every file, by its path inside the source with `/`, and its bytes."""

    def read(self, file: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range of a file. Raises SourceError where it ends early or can't be read."""

    def read_many(
        self, wanted: Mapping[str, Sequence[Range]], on_file: Callable[[str], None] = ...
    ) -> Mapping[str, list[bytes]]:
        """As `read`, of several files; `on_file` is told of each that is done."""

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes of one range, a few MB at most at a time; another thread may set `stop` to end it."""

    @property
    def origin(self) -> Origin | None:
        """The commit on the Hub, where it is one."""

    def identity(self, file: str) -> str:
        """A text that changes when the file does."""

    def local_path(self, file: str) -> Path | None:
        """The file on this machine, where it is one; for no file, the source itself."""


@dataclass(frozen=True)
class LocalSource:
    """A folder, or one safetensors file of it. Never opened for writing."""

    folder: Path
    label: str
    only: str | None = None  # read this shard alone, whatever an index says

    @cached_property
    def listing(self) -> Mapping[str, int]:
        """Every regular file to a depth of three folders, and its bytes; links to files are followed."""
        found = dict(_walk(self.folder, ""))
        if self.only is not None:
            found = {f: n for f, n in found.items() if f == self.only or not (f.endswith(SUFFIX) or f == INDEX)}
        return found

    def read(self, file: str, ranges: Sequence[Range]) -> list[bytes]:
        """The bytes of each range of a file. Raises SourceError where it ends early or can't be read."""
        path = self.folder / file
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise SourceError(f"{path}: not a regular file")
            with path.open("rb", buffering=0) as opened:
                found = []
                for begin, end in ranges:
                    opened.seek(begin)
                    found.append(_read_exactly(opened.fileno(), path, end - begin))
                return found
        except OSError as error:
            raise SourceError(f"{path}: can't be read: {error.strerror or error}") from error

    def read_many(
        self, wanted: Mapping[str, Sequence[Range]], on_file: Callable[[str], None] = lambda file: None
    ) -> dict[str, list[bytes]]:
        """As `read`, of several files, one after the other."""
        found = {}
        for file, ranges in wanted.items():
            found[file] = self.read(file, ranges)
            on_file(file)
        return found

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        """The bytes of one range, a MB at a time."""
        for at in range(begin, end, _BLOCK):
            yield from self.read(file, [(at, min(at + _BLOCK, end))])

    @property
    def origin(self) -> None:
        """Not from the Hub."""

    def identity(self, file: str) -> str:
        """Bytes, time of the last change, and number of the file."""
        try:
            found = (self.folder / file).stat()
        except OSError as error:
            raise SourceError(f"{self.folder / file}: can't be read: {error.strerror or error}") from error
        return f"{found.st_size}:{found.st_mtime_ns}:{found.st_ino}"

    def local_path(self, file: str) -> Path:
        """The file on this machine; for no file, what the source itself is: its folder, or its one file."""
        return self.folder / (file or self.only or "")


def open_source(
    spec: str, *, revision: str | None = None, stop: threading.Event | None = None
) -> LocalSource | HubSource:
    """The source that `spec` names: a folder or a single safetensors file; where neither is there, a Hub repository.

    `revision` is a repository's branch, tag or commit. Another thread may set `stop` to end what waits for the Hub.
    Raises SourceError where nothing is there.
    """
    found = _open_local(spec)
    if found is not None:
        if revision is not None:
            raise SourceError(
                f"{shown(spec)}: a folder or file on this machine has no --revision {shown(revision)}",
                hint="leave --revision out, or run the command in another folder to mean the Hub's repository",
            )
        return found
    if _HUB_ID.fullmatch(spec):
        from qwen35conv.hub.source import open_hub  # huggingface_hub: only where it is used

        return open_hub(spec, revision, stop)
    raise SourceError(
        f"{shown(spec)}: no such folder or file",
        hint="check the path; it was not found on this machine. A Hub repository is named owner/name",
    )


def _open_local(spec: str) -> LocalSource | None:
    """The folder or file that `spec` names; None where there is none."""
    try:
        path = Path(spec).expanduser()
        if path.is_dir():
            return LocalSource(path, spec)
        if path.is_file():
            if path.suffix != SUFFIX:
                raise SourceError(f"{spec}: not a folder, and not a {SUFFIX} file", hint="give the checkpoint's folder")
            _refuse_part_of_set(path)
            return LocalSource(path.parent, spec, only=path.name)
        exists = path.exists()
    except OSError as error:
        raise SourceError(f"{shown(spec)}: can't be opened: {error.strerror or error}") from error
    except (ValueError, RuntimeError) as error:
        raise SourceError(f"{shown(spec)}: no valid path: {error}", hint="check the path") from error
    if exists:
        raise SourceError(f"{spec}: neither a folder nor a regular file")
    return None


def _refuse_part_of_set(path: Path) -> None:
    """Raises SourceError for one file of several: read alone, the others' tensors would seem to be missing."""
    match = SET_NAME.fullmatch(path.name)
    if match is not None and int(match["n"]) > 1:
        raise SourceError(f"{path.name}: one of {int(match['n'])} shards", hint="give the folder that holds them all")


def _walk(folder: Path, prefix: str, depth: int = 0) -> Iterator[tuple[str, int]]:
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        if depth:
            return  # a subfolder of no concern
        raise SourceError(f"{folder}: can't be read: {error.strerror or error}") from error
    for entry in listed:
        name = f"{prefix}{entry.name}"
        if not _is_text(name):
            if not prefix and entry.name.endswith(SUFFIX):
                raise SourceError(f"{shown(name)}: the file's name is not valid UTF-8", hint="rename it")
            continue  # no document could name it
        try:
            if entry.is_dir(follow_symlinks=False):
                if depth < _MAX_DEPTH and entry.name != ".git":
                    yield from _walk(Path(entry.path), f"{name}/", depth + 1)
            elif stat.S_ISREG((found := entry.stat()).st_mode):
                yield name, found.st_size
        except OSError:
            continue  # a link that leads nowhere: as good as no file


def _is_text(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_exactly(descriptor: int, path: Path, n_bytes: int) -> bytes:
    parts = []
    while n_bytes:
        part = os.read(descriptor, n_bytes)
        if not part:
            raise SourceError(
                f"{path}: ends {n_bytes} bytes early", hint="the file shrank, or its download is unfinished"
            )
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)
