"""A disk that fails: the n-th call to the system that matches gets an error instead of an answer.

The functions of `os` are stood in for, and what Python opens by itself is met by an audit hook; this project's own code
is as it is. Nothing here needs a privilege or a device.
"""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

READS = ("read", "preadv", "copy_file_range", "sendfile")
WRITES = ("write", "pwrite", "fsync", "ftruncate", "copy_file_range", "sendfile", "rename", "mkdir", "open")
_EVENTS = {"open": "open", "os.rename": "rename", "os.mkdir": "mkdir", "os.remove": "remove", "os.rmdir": "rmdir"}


class Disk:
    """Counts matching calls and fails some of them; quiet until it is `begun`."""

    def __init__(self, folder: Path, names: tuple[str, ...], number: int, at: int, *, for_good: bool) -> None:
        self.folder = os.fspath(folder)
        self.names = names
        self.number = number
        self.at = at
        self.for_good = for_good
        self.n = 0
        self.n_failed = 0
        self.lock = threading.Lock()
        self.is_on = False

    def call(self, name: str, place: Any) -> None:
        """Raises OSError where this is the call that fails. `place` is a path or an open descriptor."""
        if not self.is_on or name not in self.names or not self._is_here(place):
            return
        with self.lock:
            self.n += 1
            fails = self.at and (self.n >= self.at if self.for_good else self.n == self.at)
            self.n_failed += bool(fails)
        if fails:
            raise OSError(self.number, os.strerror(self.number))

    def _is_here(self, place: Any) -> bool:
        if isinstance(place, int):
            try:
                place = Path(f"/proc/self/fd/{place}").readlink()
            except OSError:
                return False
        return os.fspath(place).startswith(self.folder) if isinstance(place, str | os.PathLike) else False


_disk: Disk | None = None
_hooked = False


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    disk = _disk
    if disk is None or not disk.is_on or event not in _EVENTS:
        return
    if event == "open":
        writes = isinstance(arguments[1], str) and any(c in arguments[1] for c in "wax+")
        if not writes:
            return
    disk.call(_EVENTS[event], arguments[0])


@contextmanager
def failing(
    folder: Path, names: tuple[str, ...], number: int = errno.EIO, at: int = 0, *, for_good: bool = True
) -> Iterator[Disk]:
    """A disk below `folder` whose calls fail from the `at`-th on (0: never), or only that one."""
    global _disk, _hooked
    if not _hooked:
        sys.addaudithook(_hook)
        _hooked = True
    disk = _disk = Disk(folder, names, number, at, for_good=for_good)
    # Which argument is the descriptor that says where. Of a copy, reads fail at the source, writes at the target.
    with pytest.MonkeyPatch.context() as patch:
        for name in ("read", "preadv", "write", "pwrite", "fsync", "ftruncate"):
            patch.setattr(os, name, _standing_in(disk, name, 0))
        writes = "pwrite" in names
        patch.setattr(os, "copy_file_range", _standing_in(disk, "copy_file_range", 1 if writes else 0))
        patch.setattr(os, "sendfile", _standing_in(disk, "sendfile", 0 if writes else 1))
        disk.is_on = True
        try:
            yield disk
        finally:
            disk.is_on = False
            _disk = None


def _standing_in(disk: Disk, name: str, place: int) -> Callable[..., Any]:
    real: Callable[..., Any] = getattr(os, name)

    def call(*arguments: Any) -> Any:
        disk.call(name, arguments[place])
        return real(*arguments)

    return call
