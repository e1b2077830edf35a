"""Blocks that two files share until one of them is written to: what Linux and macOS offer for it.

Nothing shared is ever an alias: the file system copies a block before either side changes it.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import stat
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Protocol

from qwen35conv.errors import DestinationError
from qwen35conv.writing.alignment import BLOCK_BYTES

# <linux/fs.h>; a machine whose numbers differ answers "no such call", and the bytes are copied
_FICLONE = 0x40049409
_FICLONERANGE = 0x4020940D
# <sys/clonefile.h>, <fcntl.h> of macOS
_AT_FDCWD = -2
_CLONE_NOOWNERCOPY = 2


class Link(str, Enum):
    """How the source's bytes come into the result."""

    AUTO = "auto"  # shared where that can be, else copied
    CLONE = "clone"  # an error where the file system can't share them
    COPY = "copy"


class Sharing(Protocol):
    """What a system can do; every call raises OSError where this file system, or these two files, can't."""

    def can_share_ranges(self, folder: Path) -> bool:
        """Whether parts of a file can be shared with one in `folder`, by blocks of BLOCK_BYTES, not only all of it."""

    def clone_file(self, source: int, target: Path) -> None:
        """Make `target`, which must not exist, of all bytes of an open file."""

    def clone_range(self, source: int, begin: int, target: int, offset: int, n_bytes: int) -> None:
        """Share whole blocks of one open file with another."""

    def probe(self, source: int, folder: Path) -> None:
        """Return if a file in `folder` could share blocks with an open one; nothing is left behind."""


class LinuxSharing:
    """FICLONE and FICLONERANGE: Btrfs, XFS, bcachefs, OCFS2, and ZFS from 2.2.2 on."""

    def can_share_ranges(self, folder: Path) -> bool:
        """Whether parts of a file can be shared with one in `folder`, by blocks of BLOCK_BYTES, not only all of it."""
        return os.statvfs(folder).f_bsize <= BLOCK_BYTES

    def clone_file(self, source: int, target: Path) -> None:
        """Make `target`, which must not exist, of all bytes of an open file."""
        made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            fcntl.ioctl(made, _FICLONE, source)
        except OSError:
            target.unlink()
            raise
        finally:
            os.close(made)

    def clone_range(self, source: int, begin: int, target: int, offset: int, n_bytes: int) -> None:
        """Share whole blocks of one open file with another."""
        fcntl.ioctl(target, _FICLONERANGE, struct.pack("=qQQQ", source, begin, n_bytes, offset))

    def probe(self, source: int, folder: Path) -> None:
        """Return if a file in `folder` could share blocks with an open one; the file tried has no name."""
        if sys.platform != "linux":
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))
        made = os.open(folder, os.O_WRONLY | os.O_TMPFILE, 0o600)
        try:
            fcntl.ioctl(made, _FICLONE, source)
        finally:
            os.close(made)


FileCloner = Callable[[int, bytes], int]  # (source, target) -> errno, 0 where all went well


def fclonefileat(source: int, target: bytes) -> int:
    """macOS's own call: makes `target`, with the source's mode and attributes but not its owner."""
    call = ctypes.CDLL(None, use_errno=True).fclonefileat
    return ctypes.get_errno() if call(source, _AT_FDCWD, target, _CLONE_NOOWNERCOPY) else 0


class MacSharing:
    """fclonefileat: APFS."""

    def __init__(self, call: FileCloner = fclonefileat) -> None:
        self._call = call

    def can_share_ranges(self, folder: Path) -> bool:
        """False: there is no such call."""
        return False

    def clone_file(self, source: int, target: Path) -> None:
        """Make `target`, which must not exist, of all bytes of an open file; its mode is that of any new file."""
        target.touch(exist_ok=False)
        mode = stat.S_IMODE(target.stat().st_mode)
        target.unlink()
        number = self._call(source, os.fsencode(target))
        if number:
            raise OSError(number, os.strerror(number))
        if sys.platform == "darwin":
            os.chflags(target, 0)  # a locked source has a locked clone
        target.chmod(mode)

    def clone_range(self, source: int, begin: int, target: int, offset: int, n_bytes: int) -> None:
        """Raises OSError."""
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    def probe(self, source: int, folder: Path) -> None:
        """Return if a file in `folder` could share blocks with an open one; the file tried is removed at once."""
        made = folder / f".qwen35-{os.urandom(4).hex()}"
        try:
            self.clone_file(source, made)
        finally:
            with suppress(FileNotFoundError):
                made.unlink()


def sharing_here() -> Sharing:
    """What this system offers."""
    return MacSharing() if sys.platform == "darwin" else LinuxSharing()


def not_shared_error(path: Path, file: str, error: OSError) -> DestinationError:
    """What to tell where blocks of a source file should be shared and can't be."""
    return DestinationError(
        f"{path}: can't share blocks with {file}: {error.strerror or error}",
        hint="--link auto copies instead; source and DST must be on one file system that shares (APFS, Btrfs, XFS)",
    )
