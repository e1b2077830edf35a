"""A folder that appears whole or not at all: written beside its place, journalled, renamed at the end.

`DST.partial` holds what is finished, and a journal of it. An old DST that is replaced waits as `DST.old-…` until the
new one stands; the journal says so, and the next run puts right what a crash left between.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qwen35conv.errors import DestinationError
from qwen35conv.facts.header import shown
from qwen35conv.writing.journal import JOURNAL, Finished, Journal, destination_error, open_journal

_NO_FOLDERS = (errno.EINVAL, errno.EBADF, errno.ENOTSUP)  # from network file systems that flush no folders
_OURS = re.compile(r"(model|mtp)-\d{5,}-of-\d{5,}\.safetensors|\..+\.writing")


class Partial:
    """The folder that a conversion is written into; one process at a time holds it."""

    def __init__(self, folder: Path, journal: Journal) -> None:
        self.folder = folder
        self._journal = journal

    @property
    def finished(self) -> dict[str, Finished]:
        """The shards that are whole, by file name."""
        return dict(self._journal.finished)

    @property
    def n_finished_bytes(self) -> int:
        """Bytes that the whole shards take on the disk: what they share with the source is not theirs."""
        return sum(shard.n_bytes - shard.n_shared for shard in self._journal.finished.values())

    @property
    def n_grown_bytes(self) -> int:
        """Bytes on disk of the shards that an earlier run left unfinished."""
        return sum(self.temporary(file).stat().st_blocks * 512 for file in self._journal.grown)

    def grown(self, file: str) -> frozenset[int]:
        """Where the steps of a shard begin that an earlier run left on disk, under the temporary name."""
        return frozenset(self._journal.grown.get(file, ()))

    def grow(self, file: str, steps: Collection[int]) -> None:
        """Note steps of a shard that are flushed, for a later run to go on from."""
        self._journal.grow(file, steps)

    def temporary(self, file: str) -> Path:
        """Where a shard is written until it is whole."""
        return self.folder / _temporary(file)

    def finish(self, shard: Finished) -> None:
        """Give a shard, whole and flushed under its temporary name, its own name, and note it."""
        _rename(self.temporary(shard.file), self.folder / shard.file)
        self._journal.finish(shard)

    def adopt(self, path: Path, shard: Finished) -> None:
        """Take in a shard that stands whole and flushed elsewhere on this file system, and note it."""
        path.rename(self.folder / shard.file)
        self._journal.finish(shard)

    def write_file(self, file: str, content: bytes | Iterable[bytes]) -> None:
        """Write a file beside the shards; it is flushed when the folder is published.

        Raises DestinationError where it can't be written.
        """
        path = self.folder / file
        with _writing(path):
            path.parent.mkdir(exist_ok=True)
            opened = path.open("wb")
        with opened:
            for part in (content,) if isinstance(content, bytes) else content:  # a part may fail to be read
                with _writing(path):
                    opened.write(part)
            with _writing(path):
                opened.flush()


@contextmanager
def publishing(target: Path, *, key: str, overwrite: bool, settled: bool = True) -> Iterator[Partial]:
    """The folder to write into; `target` appears when the block ends well. `key` names source, options and version.

    A folder that belongs to another is not `settled`: it keeps its journal until `settle` is told of both.

    On any error there is no `target`, and whole shards wait for the next run with the same key. Raises DestinationError
    where `target` exists (unless `overwrite`), can't be written, or is being written by another process.
    """
    target = _resolved(target)
    folder = target.with_name(target.name + ".partial")
    with _writing(target):
        _clean_published(target)
        _refuse_existing(target, overwrite)
        target.parent.mkdir(parents=True, exist_ok=True)
        journal = _open_partial(folder)
    try:
        with _writing(target):
            _put_back(target, journal)
            _refuse_existing(target, overwrite)
            _begin(folder, journal, key)
        yield Partial(folder, journal)
        with _writing(target):
            _refuse_existing(target, overwrite)
            old = _publish(folder, target, journal)
            if settled:
                _clean(target, old)
    except BaseException:
        _abandon(folder, journal)
        raise
    finally:
        journal.close()


def check_destination(source_folder: Path, target: Path) -> None:
    """Raises DestinationError where writing `target` could touch the source: they are one, or one holds the other.

    Links are followed, those of the source's single files too.
    """
    source, target = _resolved(source_folder), _resolved(target)
    for place in (target, target.with_name(target.name + ".partial")):
        if _is_within(place, source):
            where = "is the source" if _is_within(source, place) else "lies inside the source"
            raise DestinationError(f"{target}: the destination {where}", hint="choose a folder beside the source")
        if any(_is_within(path, place) for path in (source, *_linked(source))):
            raise DestinationError(f"{target}: the destination holds the source", hint="choose a folder beside it")


def settle(target: Path, beside: Path) -> None:
    """Bring a folder that belongs to `target` in line with it: both are published, or neither is.

    After a kill between their two renames `beside` is unfinished again; after both, what was left to tidy up is done.
    Raises DestinationError where it can't be moved, or is being written by another process.
    """
    target, beside = _resolved(target), _resolved(beside)
    with _writing(beside):
        folder = beside.with_name(beside.name + ".partial")
        if not (target.with_name(target.name + ".partial") / JOURNAL).is_file():
            _clean_published(beside)
            _clean_published(target)
        elif (beside / JOURNAL).is_file() and not os.path.lexists(folder):
            journal = open_journal(beside)
            if journal is not None:
                try:
                    if journal.key:
                        beside.rename(folder)
                        _put_back(beside, journal)
                finally:
                    journal.close()


def _publish(folder: Path, target: Path, journal: Journal) -> Path | None:
    """Give the folder its name; the old folder that it replaces, under another."""
    for root, _, files in os.walk(folder):
        for path in (*(Path(root, file) for file in files), Path(root)):
            _flush(path)
    old = None
    if os.path.lexists(target):
        old = target.with_name(f"{target.name}.old-{os.urandom(4).hex()}")
        journal.move_aside(old.name)
        target.rename(old)
    try:
        _rename(folder, target)
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    _flush(target.parent)
    return old


def _clean(target: Path, old: Path | None) -> None:
    """Remove what a published folder no longer needs: the one it replaced, and at last its journal."""
    if old is not None and old.is_dir():
        shutil.rmtree(old)
    (target / JOURNAL).unlink()
    _flush(target)


def _clean_published(target: Path) -> None:
    """Finish a run that ended after its folder had been published."""
    if not (target / JOURNAL).is_file():
        return
    journal = open_journal(target)
    if journal is None:
        return
    try:
        if journal.key:
            _clean(target, None if journal.aside is None else target.with_name(journal.aside))
    finally:
        journal.close()


def _put_back(target: Path, journal: Journal) -> None:
    """Undo a replacement that stopped between its two renames."""
    if journal.aside is not None and not os.path.lexists(target):
        old = target.with_name(journal.aside)
        if old.is_dir():
            old.rename(target)


def _open_partial(folder: Path) -> Journal:
    """The journal of a partial folder that is ours. Raises DestinationError where it is not, or is in use."""
    while True:
        folder.mkdir(exist_ok=True)
        if folder.is_symlink():
            raise DestinationError(f"{folder}: is a link, and needed for the work", hint="move it away")
        names = {path.name for path in folder.iterdir()}
        others = sorted(name for name in names if not _OURS.fullmatch(name))
        if others and JOURNAL not in names:
            raise DestinationError(
                f"{folder}: is needed for the work, but holds what no conversion wrote: {shown(others[0])}",
                hint="move it away, or choose another destination",
            )
        journal = open_journal(folder)
        if journal is None:
            continue
        if others and not journal.key and set(others) != {JOURNAL}:
            journal.close()
            raise DestinationError(
                f"{folder}: is needed for the work, but its journal is no conversion's; it holds {shown(others[0])}",
                hint="move it away, or choose another destination",
            )
        return journal


def _begin(folder: Path, journal: Journal, key: str) -> None:
    """Keep the whole shards of this very conversion, and nothing else."""
    if journal.key != key:
        journal.begin(key)
        _flush(folder)
        _flush(folder.parent)
    for shard in list(journal.finished.values()):
        path = folder / shard.file
        if not path.is_file() or path.stat().st_size != shard.n_bytes:
            del journal.finished[shard.file]
    for file in list(journal.grown):
        if not (folder / _temporary(file)).is_file():
            del journal.grown[file]
    _empty(folder, _kept(journal))


def _abandon(folder: Path, journal: Journal) -> None:
    """Leave only what the same command can resume from; where there is nothing, leave nothing."""
    with suppress(OSError):
        _empty(folder, _kept(journal))
        if not journal.finished and not journal.grown:
            (folder / JOURNAL).unlink()
            folder.rmdir()


def _temporary(file: str) -> str:
    return f".{file}.writing"


def _kept(journal: Journal) -> set[str]:
    """The names that a later run goes on from."""
    return {*journal.finished, *map(_temporary, journal.grown)}


def _empty(folder: Path, kept: Collection[str]) -> None:
    with os.scandir(folder) as entries:
        for entry in list(entries):
            if entry.name == JOURNAL or entry.name in kept:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                Path(entry.path).unlink()


def _refuse_existing(target: Path, overwrite: bool) -> None:
    if not os.path.lexists(target):
        return
    if not target.is_dir():
        raise DestinationError(f"{target}: exists and is no folder", hint="choose another destination")
    if not overwrite:
        raise DestinationError(f"{target}: exists", hint="choose another destination, or --overwrite replaces it")
    names = [path.name for path in target.iterdir()]
    if names and not any(name == "config.json" or name.endswith(".safetensors") for name in names):
        raise DestinationError(
            f"{target}: is no checkpoint and is not replaced: it holds {shown(names[0])}",
            hint="remove it yourself, or choose another destination",
        )
    for kept in _never_replaced():
        if _is_within(kept, target):
            raise DestinationError(f"{target}: holds {kept} and is not replaced", hint="choose another destination")


def _never_replaced() -> Iterator[Path]:
    """The current folder and the user's own, where there are any."""
    for find in (Path.cwd, Path.home):
        with suppress(OSError, RuntimeError):
            yield find()


def _rename(old: Path, new: Path) -> None:
    """Rename, and believe what is there: over a network the answer may be lost, and the second try find nothing."""
    before = old.stat()
    try:
        old.rename(new)
    except FileNotFoundError:
        if os.path.lexists(old) or not os.path.lexists(new) or not os.path.samestat(before, new.stat()):
            raise


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDERS or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise destination_error(path, error) from error


def _resolved(path: Path) -> Path:
    try:
        found = path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:
        raise DestinationError(f"{shown(str(path))}: no valid path: {error}", hint="check the path") from error
    if not found.name:
        raise DestinationError(f"{found}: no place for a new folder", hint="name a folder in it")
    return found


def _linked(folder: Path) -> Iterator[Path]:
    """Where the links among a folder's files lead."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                with suppress(DestinationError):  # a link that leads nowhere leads to no destination
                    yield _resolved(Path(entry.path))


def _is_within(path: Path, folder: Path) -> bool:
    """Whether a path is `folder` or below it, also where a file system ignores case."""
    for place in (path, *path.parents):
        if place == folder:
            return True
        with suppress(OSError):
            if place.samefile(folder):
                return True
    return False
