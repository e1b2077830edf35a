"""The journal of a folder that is being written: whose it is, which shards are whole, and what was moved aside.

It is locked while a process writes, and that lock dies with the process.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen35conv.errors import BusyError, DestinationError

JOURNAL = ".journal.jsonl"  # hidden, as no file that is copied from a source is
_SCHEMA = "qwen35/journal/1"
_RESUMES = "the same command resumes"
_HINTS = {
    errno.ENOSPC: f"free some space; {_RESUMES}",
    errno.EDQUOT: f"free some of your quota; {_RESUMES}",
    errno.EFBIG: "files that large can't be written here; ask for smaller shards, or choose another destination",
    errno.EROFS: "choose a destination that can be written",
    errno.EACCES: "choose a destination that you may write to, or change its permissions",
    errno.EPERM: "choose a destination that you may write to, or change its permissions",
    errno.ENAMETOOLONG: "choose a shorter name: .partial is put behind it while it is written",
    errno.ENOLCK: "files can't be locked there; choose a destination on a local disk",
    errno.EBUSY: "something is mounted there; choose a folder inside it",
}


@dataclass(frozen=True, slots=True)
class Finished:
    """A whole shard."""

    file: str
    n_bytes: int
    sha256: str | None
    n_shared: int = 0  # of these bytes, in blocks that are the source's own


class Journal:
    """One journal, open and locked."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.key = ""  # of no conversion
        self.finished: dict[str, Finished] = {}
        self.grown: dict[str, set[int]] = {}  # of a shard that is not whole: where the steps that are on disk begin
        self.aside: str | None = None  # the name that an old target was given
        self._read()

    def begin(self, key: str) -> None:
        """Start anew: nothing is finished."""
        os.ftruncate(self._descriptor, 0)
        self._append({"schema": _SCHEMA, "key": key})
        self.key, self.finished, self.grown, self.aside = key, {}, {}, None

    def finish(self, shard: Finished) -> None:
        """Note a whole shard."""
        self._append(asdict(shard))
        self.finished[shard.file] = shard
        self.grown.pop(shard.file, None)

    def grow(self, file: str, steps: Collection[int]) -> None:
        """Note steps of a shard that are on disk under its temporary name."""
        self._append({"grown": file, "steps": sorted(steps)})
        self.grown.setdefault(file, set()).update(steps)

    def move_aside(self, name: str) -> None:
        """Note the name that the old target is about to be given."""
        self._append({"aside": name})
        self.aside = name

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._descriptor)

    def _append(self, entry: dict[str, Any]) -> None:
        os.write(self._descriptor, json.dumps(entry).encode() + b"\n")
        os.fsync(self._descriptor)

    def _read(self) -> None:
        """Take in what stands there; a line that a crash cut short is cut off, anything else odd makes it nobody's."""
        with open(self._descriptor, "rb", closefd=False) as opened:
            whole, newline, cut = opened.read().rpartition(b"\n")
        try:
            first, *entries = [json.loads(line) for line in whole.split(b"\n")]
            if first["schema"] != _SCHEMA or not isinstance(first["key"], str):
                return
            for entry in entries:
                if "aside" in entry:
                    self.aside = str(entry["aside"])
                elif "grown" in entry:
                    self.grown.setdefault(str(entry["grown"]), set()).update(map(int, entry["steps"]))
                else:
                    self.finished[str(entry["file"])] = Finished(**entry)
                    self.grown.pop(str(entry["file"]), None)
        except (ValueError, TypeError, KeyError):
            self.finished.clear()
            self.grown.clear()
            return
        self.key = first["key"]
        if cut:
            os.ftruncate(self._descriptor, len(whole) + len(newline))


def open_journal(folder: Path) -> Journal | None:
    """The journal of a folder, made where there is none; None where another process removed it meanwhile.

    Raises BusyError where another process holds it, and OSError where it can't be opened.
    """
    descriptor = os.open(folder / JOURNAL, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise DestinationError(f"{folder / JOURNAL}: not a regular file", hint="move it away")
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), (folder / JOURNAL).stat()):
                return Journal(descriptor)
    except BlockingIOError as error:
        os.close(descriptor)
        raise BusyError(
            f"{folder}: another conversion is writing here", hint="wait until it ends, or choose another destination"
        ) from error
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def n_bytes_kept(folder: Path, key: str) -> int:
    """Bytes on the disk of the whole shards that a run with this key would find in a partial folder; read only."""
    n_bytes = 0
    try:
        first, *entries = [json.loads(line) for line in (folder / JOURNAL).read_bytes().splitlines()]
        if (first["schema"], first["key"]) == (_SCHEMA, key):
            whole = [entry for entry in entries if (folder / entry.get("file", "-")).is_file()]
            n_bytes = sum(entry["n_bytes"] - entry.get("n_shared", 0) for entry in whole)
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return n_bytes


def destination_error(path: Path, error: OSError, *, n_needed: int | None = None) -> DestinationError:
    """What to tell about a failed write; `n_needed` bytes were still to come."""
    needed = f"; {n_needed} bytes were still to be written" if n_needed is not None else ""
    return DestinationError(
        f"{path}: can't be written: {error.strerror or error}{needed}", hint=_HINTS.get(error.errno or 0, _RESUMES)
    )
