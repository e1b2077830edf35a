"""Blocks that source and result share: which, that the bytes are those of a copy, and that neither reaches the other.

The file systems are small loop mounts of XFS and Btrfs, where those may be made.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen35conv.convert import Outcome, carry_out, prepare, write
from qwen35conv.errors import DestinationError
from qwen35conv.facts.header import Dtype, build_header, parse_header
from qwen35conv.planning.pieces import Fix, Piece, Rule, Write
from qwen35conv.planning.plan import Mtp, Options, Plan, PlanShard, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import LocalSource
from qwen35conv.writing.alignment import BLOCK_BYTES, METADATA, header_of
from qwen35conv.writing.clones import clone_of
from qwen35conv.writing.journal import JOURNAL
from qwen35conv.writing.publish import publishing
from qwen35conv.writing.sharing import Link, MacSharing, sharing_here
from qwen35conv.writing.steps import Step, steps_of
from qwen35conv.writing.transfer import move
from qwen35conv.writing.writer import Written, write_shards

SIZES = tiny.Sizes(hidden=512, vocab=1003, intermediate=776, heads=6, kv_heads=3, head_dim=80, key_dim=48, value_dim=56)
FICLONE = 0x40049409


# --- what is decided, without any file system ------------------------------------------------------------------------


def copied(name: str, *pieces: Piece) -> Write:
    n_bytes = sum(piece.n_bytes for piece in pieces)
    return Write(name, Dtype.U8, (n_bytes,), pieces, Fix.NONE, Rule.KEEP, Dtype.U8, (n_bytes,), (name,))


def gain(name: str, begin: int, n: int) -> Write:
    piece = Piece("a", begin, begin + 2 * n)
    return Write(name, Dtype.BF16, (n,), (piece,), Fix.ADD_ONE, Rule.GAIN, Dtype.BF16, (n,), (name,))


def test_a_shard_that_keeps_all_tensors_has_its_data_where_the_source_has_it() -> None:
    begin = 3000 * 8
    shard = PlanShard("x", (copied("p", Piece("a", begin, begin + 99992)), gain("g", begin + 99992, 52),
                            copied("q", Piece("a", begin + 100096, begin + 400001))))  # fmt: skip
    header = header_of(shard)
    assert len(header) == begin
    assert header.rstrip(b" ")[8:] == build_header(shard.tensors(), METADATA).rstrip(b" ")[8:]
    clone = clone_of(steps_of(shard))
    assert clone is not None
    assert [step.content for step in clone.patches] == [header, shard.writes[1]]
    assert clone.n_kept == 99992 + 400001 - 100096


def test_a_header_that_does_not_fit_is_as_long_as_lets_most_bytes_move_by_whole_blocks() -> None:
    begin = 48  # nothing has room for the names
    shard = PlanShard("x", (copied("p", Piece("a", begin, begin + 300_000)), copied("q", Piece("a", 500_001, 600_000))))
    header = header_of(shard)
    assert (len(header) - begin) % BLOCK_BYTES == 0
    assert len(header) < len(build_header(shard.tensors(), METADATA)) + BLOCK_BYTES
    steps = steps_of(shard, by_blocks=True)
    assert clone_of(steps) is None
    whole = [step for step in steps if step.is_aligned]
    assert sum(step.n_bytes for step in whole) == (begin + 300_000) // BLOCK_BYTES * BLOCK_BYTES - BLOCK_BYTES
    for step in whole:
        assert isinstance(step.content, Piece)
        assert step.offset % BLOCK_BYTES == step.content.begin % BLOCK_BYTES == step.n_bytes % BLOCK_BYTES == 0


def test_a_small_shard_s_header_is_as_short_as_it_can_be() -> None:
    shard = PlanShard("x", (copied("p", Piece("a", 8000, 60_000)),))
    assert header_of(shard) == build_header(shard.tensors(), METADATA)


PIECES = st.tuples(st.sampled_from("ab"), st.integers(0, 40_000).map(lambda n: 8 * n), st.integers(0, 160_000))
PARTS = st.lists(st.lists(PIECES, max_size=3), max_size=5)


def planned(tensors: list[list[tuple[str, int, int]]], *, one_after_the_other: bool) -> PlanShard:
    """Tensors of given ranges; or of the same lengths, one after the other in a file, so that most stay in place."""
    writes, end = [], 4096
    for i, parts in enumerate(tensors):
        pieces = []
        for file, at, n in parts:
            begin = end if one_after_the_other else at
            pieces.append(Piece("a" if one_after_the_other else file, begin, begin + n))
            end += n
        writes.append(copied(f"t{i}", *pieces))
    return PlanShard("x", tuple(writes))


@settings(deadline=None)
@given(PARTS, st.booleans())
def test_a_clone_and_its_patches_and_steps_by_blocks_bring_the_bytes_of_a_copy(
    tensors: list[list[tuple[str, int, int]]], one_after_the_other: bool
) -> None:
    random = np.random.default_rng(5)
    files = {name: random.integers(0, 256, 2_500_000, dtype=np.uint8).tobytes() for name in "ab"}
    shard = planned(tensors, one_after_the_other=one_after_the_other)
    header = header_of(shard)
    parse_header("x", header[8:], len(header) + shard.n_bytes)
    wanted = header + b"".join(files[p.file][p.begin : p.end] for write in shard.writes for p in write.pieces)

    def carried(steps: tuple[Step, ...], begin: bytes) -> bytes:
        made = bytearray(begin[: len(wanted)].ljust(len(wanted), b"?"))
        for step in steps:
            content = step.content
            if isinstance(content, Piece):
                content = files[content.file][content.begin : content.end]
            assert isinstance(content, bytes)
            made[step.offset : step.offset + step.n_bytes] = content
        return bytes(made)

    for by_blocks in (False, True):
        steps = steps_of(shard, by_blocks=by_blocks)
        assert sum(step.n_bytes for step in steps) == len(wanted)
        assert carried(steps, b"") == wanted
        clone = clone_of(steps)
        if clone is not None:
            assert carried(clone.patches, files[clone.file]) == wanted
            assert clone.n_kept + sum(step.n_bytes for step in clone.patches) == len(wanted)
            same = [wanted[i : i + BLOCK_BYTES] == files[clone.file][i : i + BLOCK_BYTES]
                    for i in range(0, len(wanted) - BLOCK_BYTES + 1, BLOCK_BYTES)]  # fmt: skip
            assert clone.n_shared <= BLOCK_BYTES * sum(same)


# --- on file systems that share --------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    kind, folder = request.param, tmp_path_factory.mktemp("disks")
    image, at = folder / f"{kind}.img", folder / kind
    if shutil.which(f"mkfs.{kind}") is None:
        pytest.skip(f"no mkfs.{kind} here")
    with image.open("wb") as opened:
        opened.truncate(400 << 20)
    more = ["-m", "reflink=1"] if kind == "xfs" else []
    made = subprocess.run([f"mkfs.{kind}", "-q", *more, image], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    at.mkdir()
    mounted = subprocess.run(["mount", "-o", "loop", image, at], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"may not mount {kind} here: {mounted.stderr.strip()[:80]}")
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)
        image.unlink()


@pytest.fixture
def place(disk: Path) -> Iterator[Path]:
    """An empty folder on such a disk."""
    folder = disk / "test"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def saved(folder: Path, *, n_shards: int = 1, **kinds: bool) -> tuple[LocalSource, tiny.Tensors]:
    made = tiny.make(SIZES, **{"vision": False, "mtp": False, **kinds})  # type: ignore[arg-type]
    tiny.save(folder, made.raw, made.config, n_shards=n_shards)
    os.sync()
    return LocalSource(folder, str(folder)), made.canonical


def plan_of(source: LocalSource, options: Options | None = None) -> Plan:
    return make_plan(read_checkpoint(source), options)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def used(place: Path) -> int:
    os.sync()
    found = os.statvfs(place)
    return (found.f_blocks - found.f_bfree) * found.f_frsize


def bytes_of(outcome: Outcome) -> tuple[int, int, int]:
    return outcome.n_shared, outcome.n_copied, outcome.n_computed


def test_a_clone_takes_no_room_and_has_the_bytes_of_a_copy(place: Path) -> None:
    source, canonical = saved(place / "source")
    plan = plan_of(source)
    n_gains = sum(w.n_bytes for w in plan.shards[0].writes if w.fix is Fix.ADD_ONE)
    forecast = prepare(source, plan, place / "cloned").preflight
    before = used(place)
    cloned = write(source, plan, place / "cloned", link=Link.CLONE)
    middle = used(place)
    plain = write(source, plan, place / "copied", link=Link.COPY)
    after = used(place)
    assert files_of(place / "cloned") == files_of(place / "copied")
    tiny.assert_same(tiny.load(place / "cloned"), canonical)
    n_data = plan.shards[0].n_bytes
    assert bytes_of(plain) == (0, n_data - n_gains, n_gains)
    assert cloned.n_shared == forecast.n_shared > 0.95 * n_data
    assert sum(bytes_of(cloned)) == n_data
    assert cloned.n_computed == n_gains
    assert middle - before < 0.2 * n_data  # small files, and what each file system needs beside
    assert after - middle > 0.9 * n_data


@pytest.mark.parametrize("edited", ["source", "result"])
def test_an_edit_of_one_never_reaches_the_other(edited: str, place: Path) -> None:
    source, _ = saved(place / "source")
    outcome = write(source, plan_of(source), place / "result", link=Link.CLONE)
    assert outcome.n_shared > 0
    other = place / ("result" if edited == "source" else "source")
    before = files_of(other)
    (file,) = (place / edited).glob("*.safetensors")
    n_bytes = file.stat().st_size
    with file.open("r+b") as opened:
        for at in range(0, n_bytes - 8, 50_000):
            opened.seek(at)
            opened.write(b"\xa5" * 8)
        opened.truncate(n_bytes // 2)
    os.sync()
    assert files_of(other) == before
    shutil.rmtree(place / edited)
    os.sync()
    assert files_of(other) == before


@pytest.mark.parametrize("n_shards", [1, 3])
def test_tensors_that_are_left_out_cost_only_what_is_beside_them(n_shards: int, place: Path) -> None:
    source, canonical = saved(place / "source", n_shards=n_shards, vision=True, mtp=True)
    plan = plan_of(source, Options(mtp=Mtp.SIDECAR))
    forecast = prepare(source, plan, place / "cloned").preflight
    cloned = write(source, plan, place / "cloned", jobs=3, link=Link.CLONE)
    write(source, plan, place / "copied", link=Link.COPY)
    for name in ("{}", "{}-mtp"):
        assert files_of(place / name.format("cloned")) == files_of(place / name.format("copied"))
    tiny.assert_same(tiny.load(place / "cloned"), canonical)
    assert cloned.n_shared == forecast.n_shared > 0.5 * cloned.n_bytes


def test_names_that_grow_leave_no_room_for_the_header_and_most_blocks_are_shared_all_the_same(place: Path) -> None:
    source, canonical = saved(place / "source", text_only=True)
    plan = plan_of(source)
    assert clone_of(steps_of(plan.shards[0])) is None
    outcome = write(source, plan, place / "out", link=Link.CLONE)
    write(source, plan, place / "copied", link=Link.COPY)
    assert files_of(place / "out") == files_of(place / "copied")
    tiny.assert_same(tiny.load(place / "out"), canonical)
    assert outcome.n_shared > 0.8 * outcome.n_bytes


def test_a_copy_after_an_interrupted_clone_keeps_nothing_shared(place: Path) -> None:
    source, _ = saved(place / "source", n_shards=2)
    shards = plan_of(source).shards

    class StopError(Exception):
        pass

    def begun(target: Path, link: Link, n: int) -> tuple[Written, ...]:
        with publishing(target, key="key", overwrite=False) as partial:
            written = write_shards(shards[:n], source, partial, jobs=2, checksum=False, link=link)
            if n < len(shards):
                raise StopError
            return written

    with pytest.raises(StopError):
        begun(place / "out", Link.AUTO, 1)
    again = begun(place / "out", Link.COPY, 2)
    assert [one.n_shared for one in again] == [0, 0]
    with pytest.raises(StopError):
        begun(place / "third", Link.AUTO, 1)
    first, second = begun(place / "third", Link.AUTO, 2)
    assert (first.resumed, second.resumed) == (True, False)
    assert first.n_shared > 0
    assert files_of(place / "third") == files_of(place / "out")


def test_a_full_disk_has_room_for_a_clone(place: Path) -> None:
    source, canonical = saved(place / "source")
    plan = plan_of(source)
    for i in range(8):  # what was removed before comes free bit by bit
        if (n_free := shutil.disk_usage(place).free) < 10 << 20:
            break
        with (place / f"filler-{i}").open("wb") as filler:
            os.posix_fallocate(filler.fileno(), 0, n_free - (6 << 20))
        os.sync()
    assert prepare(source, plan, place / "out").preflight.n_free < plan.shards[0].n_bytes
    with pytest.raises(DestinationError, match="free"):
        write(source, plan, place / "out", link=Link.COPY)
    write(source, plan, place / "out")
    tiny.assert_same(tiny.load(place / "out"), canonical)


def test_a_canonical_source_is_shared_whole(place: Path) -> None:
    source, _ = saved(place / "source")
    write(source, plan_of(source), place / "first", link=Link.CLONE)
    first = LocalSource(place / "first", "first")
    again = write(first, plan_of(first), place / "second", link=Link.CLONE)
    assert again.n_copied < 2 * BLOCK_BYTES
    (shard,) = (place / "first").glob("model*.safetensors")
    assert (place / "second" / shard.name).read_bytes() == shard.read_bytes()


def ficlone(source: int, target: bytes) -> int:
    """As macOS's call: a clone under a new name, or the number of what failed."""
    made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        fcntl.ioctl(made, FICLONE, source)
    except OSError as error:
        Path(os.fsdecode(target)).unlink()
        return error.errno or errno.EIO
    finally:
        os.close(made)
    return 0


@pytest.mark.parametrize("kinds", [{"tied": True}, {"mtp": True}])
def test_a_system_that_clones_only_whole_files_comes_to_the_same(kinds: dict[str, bool], place: Path) -> None:
    source, _ = saved(place / "source", **kinds)
    shards = plan_of(source).shards
    with publishing(place / "out", key="key", overwrite=False) as partial:
        (written,) = write_shards(
            shards, source, partial, jobs=2, checksum=True, link=Link.CLONE, sharing=MacSharing(ficlone)
        )
    with publishing(place / "copied", key="key", overwrite=False) as partial:
        write_shards(shards, source, partial, jobs=2, checksum=False, link=Link.COPY)
    assert files_of(place / "out") == files_of(place / "copied")
    assert written.n_shared > 0.5 * written.n_bytes
    (made,) = (place / "out").iterdir()
    assert made.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_probe_leaves_nothing_behind(place: Path) -> None:
    source, _ = saved(place / "source")
    before = sorted(place.iterdir())
    with next(source.folder.glob("*.safetensors")).open("rb") as opened:
        for sharing in (sharing_here(), MacSharing(ficlone)):
            sharing.probe(opened.fileno(), place)
    assert sorted(place.iterdir()) == before


def test_a_copy_that_may_not_share_takes_room(place: Path) -> None:
    noise = os.urandom(4 << 20)
    (place / "a").write_bytes(noise)
    before = used(place)
    with (place / "a").open("rb") as source, (place / "b").open("wb") as target:
        move(source.fileno(), 0, target.fileno(), 0, len(noise), may_share=False)
    assert (place / "b").read_bytes() == noise
    assert used(place) - before >= len(noise)


# --- where nothing can be shared -------------------------------------------------------------------------------------


@pytest.fixture
def elsewhere() -> Iterator[Path]:
    """A folder on another file system than the tests', which shares with none."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no second file system here")
    folder = shm / f"qwen35-test-{os.getpid()}"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def test_clones_that_cannot_be_are_refused_before_anything_is_written(tmp_path: Path, elsewhere: Path) -> None:
    source, canonical = saved(tmp_path / "source")
    plan = plan_of(source)
    with pytest.raises(DestinationError, match="can't share blocks"):
        prepare(source, plan, elsewhere / "out", link=Link.CLONE)
    preparation = prepare(source, plan, elsewhere / "out")
    assert preparation.preflight.n_shared == 0
    outcome = carry_out(source, preparation)
    assert outcome.n_shared == 0
    tiny.assert_same(tiny.load(elsewhere / "out"), canonical)


def test_a_system_that_refuses_late_copies_or_is_one_error(tmp_path: Path) -> None:
    source, _ = saved(tmp_path / "source", tied=True)
    shards = plan_of(source).shards

    def refuse(source: int, target: bytes) -> int:
        return errno.EXDEV

    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        (written,) = write_shards(shards, source, partial, jobs=2, checksum=False, sharing=MacSharing(refuse))
    assert written.n_shared == 0
    with (
        pytest.raises(DestinationError, match="can't share blocks"),
        publishing(tmp_path / "second", key="key", overwrite=False) as partial,
    ):
        write_shards(shards, source, partial, jobs=2, checksum=False, link=Link.CLONE, sharing=MacSharing(refuse))
    assert not (tmp_path / "second").exists()
    assert not (tmp_path / "second.partial" / JOURNAL).exists()
