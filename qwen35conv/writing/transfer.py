"""Bytes of one open file into another: inside the kernel where it can, through a small buffer where it can't."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

BUFFER_BYTES = 4 << 20
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # another way of moving would meet the same wall

# (source, begin, target, offset, n_bytes) -> bytes moved; 0 where the source has ended or the way is closed
Mover = Callable[[int, int, int, int, int], int]


class ReadFailedError(OSError):
    """The source, not the target, is what failed."""


def copy_range(source: int, begin: int, target: int, offset: int, n_bytes: int) -> int:
    """Bytes moved inside the kernel, which shares them on file systems that copy on write."""
    if sys.platform != "linux":
        return 0
    return os.copy_file_range(source, target, n_bytes, begin, offset)


def send_file(source: int, begin: int, target: int, offset: int, n_bytes: int) -> int:
    """Bytes moved inside the kernel, also between file systems; moves `target`'s own position."""
    if sys.platform != "linux":
        return 0  # elsewhere it only sends to sockets
    os.lseek(target, offset, os.SEEK_SET)
    return os.sendfile(target, source, begin, n_bytes)


def copy_buffered(source: int, begin: int, target: int, offset: int, n_bytes: int) -> int:
    """Bytes moved through a buffer; works everywhere. Raises ReadFailedError where the source can't be read."""
    buffer = memoryview(bytearray(min(n_bytes, BUFFER_BYTES)))
    n_moved = 0
    while n_moved < n_bytes:
        try:
            n_read = os.preadv(source, [buffer[: n_bytes - n_moved]], begin + n_moved)
        except OSError as error:
            raise ReadFailedError(error.errno, error.strerror) from error
        if n_read == 0:
            break
        write_all(target, buffer[:n_read], offset + n_moved)
        n_moved += n_read
    return n_moved


def move(source: int, begin: int, target: int, offset: int, n_bytes: int, *, may_share: bool = True) -> None:
    """Move all of a range, the quickest way that works; unless `may_share`, one that makes the bytes the target's own.

    Raises ReadFailedError where the source ends early or can't be read, and OSError where the target can't be written.
    """
    for mover in (copy_range, send_file) if may_share else (send_file,):
        try:
            while n_bytes and (n_moved := mover(source, begin, target, offset, n_bytes)):
                begin, offset, n_bytes = begin + n_moved, offset + n_moved, n_bytes - n_moved
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise
            # Not here, not between these two, or a fault of either side: the buffer tells which.
    n_missing = n_bytes - copy_buffered(source, begin, target, offset, n_bytes) if n_bytes else 0
    if n_missing:
        raise ReadFailedError(errno.ENODATA, f"ends {n_missing} bytes early")


def write_all(target: int, content: bytes | memoryview, offset: int) -> None:
    """Write all of `content` at `offset`."""
    view = memoryview(content)
    while view:
        n_written = os.pwrite(target, view, offset)
        view, offset = view[n_written:], offset + n_written


def begin_flush(target: int, offset: int, n_bytes: int) -> None:
    """Let the kernel start on writing a range to disk, so that the flush at the end finds little left to do.

    The advice drops what is on disk already; what was written just now stays in memory.
    """
    if sys.platform == "linux":
        os.posix_fadvise(target, offset, n_bytes, os.POSIX_FADV_DONTNEED)
