from __future__ import annotations

import errno
import os
import random
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.writing.transfer import (
    BUFFER_BYTES,
    Mover,
    ReadFailedError,
    copy_buffered,
    copy_range,
    move,
    send_file,
    write_all,
)

ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="moves bytes inside the kernel on Linux alone")
MOVERS = [
    pytest.param(copy_range, id="copy_file_range", marks=ON_LINUX),
    pytest.param(send_file, id="sendfile", marks=ON_LINUX),
    pytest.param(copy_buffered, id="buffered"),
]


@contextmanager
def opened(*ways: tuple[Path, int]) -> Iterator[list[int]]:
    with ExitStack() as stack:
        descriptors = []
        for path, flags in ways:
            descriptors.append(os.open(path, flags, 0o600))
            stack.callback(os.close, descriptors[-1])
        yield descriptors


def some_bytes(n: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(n)


@pytest.mark.parametrize("mover", MOVERS)
def test_each_mover_moves_exactly_the_range_it_is_given(mover: Mover, tmp_path: Path) -> None:
    content = some_bytes(BUFFER_BYTES + 70_001)
    (tmp_path / "source").write_bytes(content)
    (tmp_path / "target").write_bytes(b"\xee" * (len(content) + 99))
    begin, offset, n_bytes = 13, 77, BUFFER_BYTES + 60_007
    with opened((tmp_path / "source", os.O_RDONLY), (tmp_path / "target", os.O_WRONLY)) as (source, target):
        n_moved = 0
        while n_moved < n_bytes:
            n = mover(source, begin + n_moved, target, offset + n_moved, n_bytes - n_moved)
            assert 0 < n <= n_bytes - n_moved
            n_moved += n
    written = (tmp_path / "target").read_bytes()
    assert written[offset : offset + n_bytes] == content[begin : begin + n_bytes]
    assert set(written[:offset] + written[offset + n_bytes :]) == {0xEE}


@pytest.mark.parametrize("mover", MOVERS)
def test_no_mover_moves_more_than_the_source_has(mover: Mover, tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with opened((tmp_path / "source", os.O_RDONLY), (tmp_path / "target", os.O_RDWR | os.O_CREAT)) as (source, target):
        assert mover(source, 2, target, 0, 100) == 3
        assert mover(source, 5, target, 3, 100) == 0
    assert (tmp_path / "target").read_bytes() == b"345"


@settings(deadline=None, max_examples=50)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_a_move_puts_any_range_anywhere(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, data: st.DataObject
) -> None:
    begin = data.draw(st.integers(0, len(content)))
    n_bytes = data.draw(st.integers(0, len(content) - begin))
    offset = data.draw(st.integers(0, 50))
    folder = tmp_path_factory.mktemp("move")
    (folder / "source").write_bytes(content)
    with opened((folder / "source", os.O_RDONLY), (folder / "target", os.O_WRONLY | os.O_CREAT)) as (source, target):
        move(source, begin, target, offset, n_bytes)
    written = (folder / "target").read_bytes()
    assert written == (b"\0" * offset + content[begin : begin + n_bytes] if n_bytes else b"")


def test_a_move_reaches_another_file_system(tmp_path: Path) -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir() or shared.stat().st_dev == tmp_path.stat().st_dev or not os.access(shared, os.W_OK):
        pytest.skip("no second file system to write to")
    content = some_bytes(300_000)
    (tmp_path / "source").write_bytes(content)
    target_path = shared / f"qwen35-test-{os.getpid()}"
    try:
        with opened((tmp_path / "source", os.O_RDONLY), (target_path, os.O_WRONLY | os.O_CREAT)) as (source, target):
            move(source, 7, target, 3, 299_000)
        assert target_path.read_bytes() == b"\0\0\0" + content[7:299_007]
    finally:
        target_path.unlink(missing_ok=True)


def test_a_source_that_ends_early_is_a_failed_read(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (
        opened((tmp_path / "source", os.O_RDONLY), (tmp_path / "target", os.O_WRONLY | os.O_CREAT)) as (source, target),
        pytest.raises(ReadFailedError, match="ends 4 bytes early"),
    ):
        move(source, 1, target, 0, 8)


def test_a_source_that_cant_be_read_is_a_failed_read(tmp_path: Path) -> None:
    with (
        opened((tmp_path, os.O_RDONLY), (tmp_path / "target", os.O_WRONLY | os.O_CREAT)) as (folder, target),
        pytest.raises(ReadFailedError) as caught,
    ):
        move(folder, 0, target, 0, 8)
    assert caught.value.errno == errno.EISDIR


def test_a_target_that_cant_be_written_is_not_a_failed_read(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    (tmp_path / "target").touch()
    with opened((tmp_path / "source", os.O_RDONLY), (tmp_path / "target", os.O_RDONLY)) as (source, target):
        for mover in (move, copy_buffered):
            with pytest.raises(OSError) as caught:  # noqa: PT011 - the number is what matters
                mover(source, 0, target, 0, 5)
            assert caught.value.errno == errno.EBADF
            assert not isinstance(caught.value, ReadFailedError)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_full_disk_is_told_as_such_by_the_buffered_way(tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(b"12345")
    with (
        opened((tmp_path / "source", os.O_RDONLY), (Path("/dev/full"), os.O_WRONLY)) as (source, target),
        pytest.raises(OSError, match="No space left") as caught,
    ):
        copy_buffered(source, 0, target, 0, 5)
    assert caught.value.errno == errno.ENOSPC


def test_the_buffered_way_needs_no_more_memory_for_a_longer_range(tmp_path: Path) -> None:
    n_bytes = 40 << 20
    with (tmp_path / "source").open("wb") as made:
        made.truncate(n_bytes)
    with opened((tmp_path / "source", os.O_RDONLY), (tmp_path / "target", os.O_WRONLY | os.O_CREAT)) as (
        source,
        target,
    ):
        tracemalloc.start()
        try:
            assert copy_buffered(source, 0, target, 0, n_bytes) == n_bytes
            assert tracemalloc.get_traced_memory()[1] < BUFFER_BYTES + (1 << 20)
        finally:
            tracemalloc.stop()


def test_write_all_writes_at_the_offset(tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"abcdef")
    with opened((tmp_path / "target", os.O_WRONLY)) as (target,):
        write_all(target, b"XY", 3)
        write_all(target, b"", 0)
    assert (tmp_path / "target").read_bytes() == b"abcXYf"
