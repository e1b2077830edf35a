from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import cast

import ml_dtypes
import mlx.core as mx
import numpy as np
import pytest
from long_shards import assert_long, make_long
from safetensors import safe_open
from tiny import SMALL, SPARSE, Made, assert_same, load, make, save

from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.facts.header import LENGTH_BYTES, Dtype
from qwen35conv.planning.pieces import Fix, Piece, Rule, Write
from qwen35conv.planning.plan import Mtp, NormDtype, Options, PlanShard, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import LocalSource
from qwen35conv.writing.journal import JOURNAL
from qwen35conv.writing.publish import publishing
from qwen35conv.writing.steps import steps_of
from qwen35conv.writing.writer import Written, write_shards

ROOT = Path(__file__).parents[1]


class StoppedError(Exception):
    pass


@dataclass(frozen=True)
class Remote:
    """A source that is on no disk of this machine: ranges alone."""

    inner: LocalSource
    asked: list[int] = field(default_factory=list)

    @property
    def label(self) -> str:
        return "remote"

    @property
    def listing(self) -> Mapping[str, int]:
        return self.inner.listing

    def read(self, file: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        self.asked.extend(end - begin for begin, end in ranges)
        return self.inner.read(file, ranges)

    def read_many(
        self, wanted: Mapping[str, Sequence[tuple[int, int]]], on_file: Callable[[str], None] = lambda file: None
    ) -> dict[str, list[bytes]]:
        return {file: self.read(file, ranges) for file, ranges in wanted.items()}

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        for at in range(begin, end, 1 << 20):
            yield from self.read(file, [(at, min(at + (1 << 20), end))])

    @property
    def origin(self) -> None:
        return None

    def identity(self, file: str) -> str:
        return self.inner.identity(file)

    def local_path(self, file: str) -> Path | None:
        return None


def shards_of(folder: Path, options: Options | None = None) -> tuple[PlanShard, ...]:
    return make_plan(read_checkpoint(LocalSource(folder, str(folder))), options).shards


def carry_out(
    folder: Path,
    shards: Sequence[PlanShard],
    target: Path,
    *,
    jobs: int = 2,
    checksum: bool = False,
    on_bytes: Callable[[int], None] = lambda n: None,
) -> tuple[Written, ...]:
    with publishing(target, key="key", overwrite=False) as partial:
        return write_shards(shards, LocalSource(folder, ""), partial, jobs=jobs, checksum=checksum, on_bytes=on_bytes)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def made() -> Made:
    return make(SMALL)


@pytest.fixture
def source(made: Made, tmp_path: Path) -> Path:
    return save(tmp_path / "source", made.raw, made.config, n_shards=3)


@pytest.mark.parametrize("experts", ["none", "fused", "single", "pairs"])
@pytest.mark.parametrize("jobs", [1, 4])
def test_the_result_holds_what_plain_numpy_computes(experts: str, jobs: int, tmp_path: Path) -> None:
    made = make(SMALL if experts == "none" else SPARSE, experts=experts)
    folder = save(tmp_path / "source", made.raw, made.config, n_shards=3)
    carry_out(folder, shards_of(folder), tmp_path / "out", jobs=jobs)
    assert_same(load(tmp_path / "out"), made.canonical)


def test_mlx_reads_the_same_values(made: Made, source: Path, tmp_path: Path) -> None:
    carry_out(source, shards_of(source), tmp_path / "out")
    found: dict[str, mx.array] = {}
    for file in (tmp_path / "out").iterdir():
        arrays, metadata = cast("tuple[dict[str, mx.array], dict[str, str]]", mx.load(str(file), return_metadata=True))
        assert metadata == {"format": "mlx"}
        found |= arrays
    assert sorted(found) == sorted(made.canonical)
    for name, want in made.canonical.items():
        assert np.array_equal(np.array(found[name].astype(mx.float32)), want.astype(np.float32)), name


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(Options(keep_vision=True), id="vision"),
        pytest.param(Options(mtp=Mtp.KEEP), id="mtp"),
        pytest.param(Options(norm_dtype=NormDtype.FLOAT32), id="float32 gains"),
        pytest.param(Options(max_shard_bytes=5000), id="many shards"),
        pytest.param(Options(max_shard_bytes=1 << 30), id="one shard"),
    ],
)
def test_every_write_of_the_plan_is_its_pieces_with_its_fix(
    options: Options, made: Made, source: Path, tmp_path: Path
) -> None:
    shards = shards_of(source, options)
    carry_out(source, shards, tmp_path / "out")
    found = load(tmp_path / "out")
    for write in (write for shard in shards for write in shard.writes):
        (stored,) = (made.raw[name] for name in write.sources)
        if write.fix is Fix.ADD_ONE:
            stored = (stored.astype(np.float64) + 1).astype(np.float32 if write.dtype is Dtype.F32 else stored.dtype)
        elif write.fix is Fix.PATCH_AXES:
            stored = stored.transpose(0, 2, 3, 4, 1)
        assert found[write.name].dtype == stored.dtype
        assert found[write.name].tobytes() == np.ascontiguousarray(stored).tobytes(), write.name
        assert found[write.name].shape == write.shape


def test_headers_are_aligned_and_say_mlx(source: Path, tmp_path: Path) -> None:
    for written in carry_out(source, shards_of(source), tmp_path / "out"):
        raw = (tmp_path / "out" / written.file).read_bytes()
        assert len(raw) == written.n_bytes
        assert (LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")) % 8 == 0
        with safe_open(tmp_path / "out" / written.file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "mlx"}


def test_what_was_written_is_told(source: Path, tmp_path: Path) -> None:
    shards = shards_of(source)
    seen: list[int] = []
    written = carry_out(source, shards, tmp_path / "out", checksum=True, on_bytes=seen.append)
    assert [one.file for one in written] == [shard.file for shard in shards]
    assert sum(seen) == sum(one.n_bytes for one in written)
    for one, shard in zip(written, shards, strict=True):
        content = (tmp_path / "out" / one.file).read_bytes()
        assert one.sha256 == hashlib.sha256(content).hexdigest()
        assert one.n_computed == sum(write.n_bytes for write in shard.writes if write.fix is Fix.ADD_ONE)
        assert one.n_copied + one.n_computed == shard.n_bytes < one.n_bytes == len(content)
        assert not one.resumed
    assert sum(one.n_computed for one in written) > 0


def test_without_a_checksum_none_is_made(source: Path, tmp_path: Path) -> None:
    assert {one.sha256 for one in carry_out(source, shards_of(source), tmp_path / "out")} == {None}


@pytest.mark.parametrize("n_shards", [1, 3])
def test_bytes_do_not_depend_on_the_number_of_threads(n_shards: int, tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=70, n_shards=n_shards)
    for jobs in (1, 2, 5):
        carry_out(tmp_path / "source", shards, tmp_path / "out", jobs=jobs)
        assert_long(tmp_path / "out", shards, tmp_path / "source")
        shutil.rmtree(tmp_path / "out")


def test_a_source_without_files_here_is_read_by_small_ranges(made: Made, source: Path, tmp_path: Path) -> None:
    remote = Remote(LocalSource(source, ""))
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        write_shards(shards_of(source), remote, partial, jobs=2, checksum=False)
    assert_same(load(tmp_path / "out"), made.canonical)


@dataclass(frozen=True)
class Failing(Remote):
    """A remote source whose connection is gone for good after so many ranges."""

    n_left: list[int] = field(default_factory=list)

    def stream(self, file: str, begin: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        if self.n_left and self.n_left[0] == 0:
            raise SourceError("gone")
        if self.n_left:
            self.n_left[0] -= 1
        yield from super().stream(file, begin, end, stop)


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_remote_source_is_resumed_inside_its_shards_wherever_it_failed(
    made: Made, source: Path, tmp_path: Path, jobs: int
) -> None:
    shards = shards_of(source)
    steps = [step for shard in shards for step in steps_of(shard) if not isinstance(step.content, bytes)]
    for n_good in range(len(steps)):
        target = tmp_path / f"out{n_good}"
        first = Failing(LocalSource(source, ""), n_left=[n_good])
        with pytest.raises(SourceError), publishing(target, key="key", overwrite=False) as partial:
            write_shards(shards, first, partial, jobs=jobs, checksum=False)
        second = Failing(LocalSource(source, ""))
        told: list[int] = []
        with publishing(target, key="key", overwrite=False) as partial:
            write_shards(shards, second, partial, jobs=jobs, checksum=True, on_bytes=told.append)
        assert_same(load(target), made.canonical)
        assert sum(first.asked) + sum(second.asked) == sum(step.n_bytes for step in steps)  # none is read twice
        assert sum(told) == sum(path.stat().st_size for path in target.glob("*.safetensors"))


def test_another_conversion_never_goes_on_with_the_steps_of_an_interrupted_one(
    made: Made, source: Path, tmp_path: Path
) -> None:
    shards = shards_of(source)
    failing = Failing(LocalSource(source, ""), n_left=[5])
    with pytest.raises(SourceError), publishing(tmp_path / "out", key="old", overwrite=False) as partial:
        write_shards(shards, failing, partial, jobs=1, checksum=False)
    assert list((tmp_path / "out.partial").glob(".*.writing"))
    with publishing(tmp_path / "out", key="new", overwrite=False) as partial:
        assert not any(partial.grown(shard.file) for shard in shards)
        assert not list((tmp_path / "out.partial").glob(".*.writing"))
        write_shards(shards, Remote(LocalSource(source, "")), partial, jobs=1, checksum=False)
    assert_same(load(tmp_path / "out"), made.canonical)


def test_ranges_from_a_source_without_files_and_the_memory_they_take_are_bounded(tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=70, n_shards=1)
    remote = Remote(LocalSource(tmp_path / "source", ""))
    tracemalloc.start()
    try:
        with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
            write_shards(shards, remote, partial, jobs=2, checksum=True)
        assert tracemalloc.get_traced_memory()[1] < 30 << 20
    finally:
        tracemalloc.stop()
    assert max(remote.asked) <= 4 << 20
    assert_long(tmp_path / "out", shards, tmp_path / "source")


@pytest.mark.parametrize("shift", [Fix.ADD_ONE, Fix.SUBTRACT_ONE])
@pytest.mark.parametrize(
    ("dtype", "stored", "judge"),
    [
        pytest.param(Dtype.BF16, np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16), mx.bfloat16, id="bf16"),
        pytest.param(Dtype.F16, np.arange(1 << 16, dtype=np.uint16).view(np.float16), mx.float16, id="f16"),
        pytest.param(
            Dtype.F32,
            np.random.default_rng(4).integers(0, 1 << 32, 1 << 16, dtype=np.uint32).view(np.float32),
            mx.float32,
            id="f32",
        ),
    ],
)
def test_a_shift_has_the_bits_that_mlx_and_torch_give(
    shift: Fix, dtype: Dtype, stored: np.ndarray, judge: mx.Dtype, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    with np.errstate(invalid="ignore"):
        stored = stored[np.isfinite(stored.astype(np.float32))]
    raw = stored.tobytes()
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "s").write_bytes(b"..." + raw)
    piece, shape = Piece("s", 3, 3 + len(raw)), stored.shape
    write = Write("gain", dtype, shape, (piece,), shift, Rule.GAIN, dtype, shape, ("gain",))
    shard = PlanShard("model-00001-of-00001.safetensors", (write,))
    with publishing(tmp_path / "out", key="key", overwrite=False) as partial:
        write_shards([shard], LocalSource(tmp_path / "source", ""), partial, jobs=1, checksum=False)
    found = (tmp_path / "out" / shard.file).read_bytes()[-len(raw) :]
    one = 1 if shift is Fix.ADD_ONE else -1
    unsigned, signed = (np.uint32, np.int32) if dtype is Dtype.F32 else (np.uint16, np.int16)
    by_mlx = mx.array(stored.view(unsigned)).view(judge) + mx.array(one, dtype=judge)
    assert found == np.array(by_mlx.view(mx.uint32 if dtype is Dtype.F32 else mx.uint16)).tobytes()
    of_torch = {Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16, Dtype.F32: torch.float32}[dtype]
    by_torch = torch.from_numpy(stored.view(signed).copy()).view(of_torch) + one
    whole = by_torch.view(torch.int32 if dtype is Dtype.F32 else torch.int16)
    assert found == whole.numpy().tobytes()


@pytest.mark.parametrize("jobs", [1, 3])
def test_after_an_error_at_any_shard_the_next_run_writes_the_rest_and_the_same_bytes(
    jobs: int, source: Path, tmp_path: Path
) -> None:
    shards = shards_of(source, Options(max_shard_bytes=12000))
    assert len(shards) >= 6
    carry_out(source, shards, tmp_path / "whole")
    whole = files_of(tmp_path / "whole")
    for n in range(1, len(shards) + 1):
        target = tmp_path / f"out{n}"
        with pytest.raises(StoppedError), publishing(target, key="key", overwrite=False) as partial:  # noqa: PT012
            write_shards(shards[:n], LocalSource(source, ""), partial, jobs=jobs, checksum=False)
            raise StoppedError
        assert not target.exists()
        left = partial.folder
        before = {shard.file: (left / shard.file).stat() for shard in shards[:n]}
        written = carry_out(source, shards, target, jobs=jobs)
        assert [one.resumed for one in written] == [i < n for i in range(len(shards))]
        for file, stat in before.items():
            after = (target / file).stat()
            assert (after.st_ino, after.st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)
        assert files_of(target) == whole


def test_an_error_in_the_middle_of_a_shard_leaves_no_part_of_it(source: Path, tmp_path: Path) -> None:
    shards = shards_of(source, Options(max_shard_bytes=12000))
    carry_out(source, shards, tmp_path / "whole")
    n_calls: list[int] = []
    carry_out(source, shards, tmp_path / "counted", jobs=1, on_bytes=n_calls.append)
    for n in range(0, len(n_calls), 5):
        left = iter(range(n))

        def fail(n_bytes: int, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise StoppedError

        with pytest.raises(StoppedError):
            carry_out(source, shards, tmp_path / "out", jobs=1, on_bytes=fail)
        assert not (tmp_path / "out").exists()
        partial = tmp_path / "out.partial"
        if partial.exists():
            files = files_of(partial)
            del files[JOURNAL]
            assert files.items() <= files_of(tmp_path / "whole").items()
            shutil.rmtree(partial)


def test_a_resumed_run_tells_the_checksum_of_what_it_did_not_write(source: Path, tmp_path: Path) -> None:
    shards = shards_of(source)
    with pytest.raises(StoppedError), publishing(tmp_path / "out", key="key", overwrite=False) as partial:  # noqa: PT012
        write_shards(shards[:1], LocalSource(source, ""), partial, jobs=1, checksum=False)
        raise StoppedError
    seen: list[int] = []
    written = carry_out(source, shards, tmp_path / "out", checksum=True, on_bytes=seen.append)
    for one in written:
        assert one.sha256 == hashlib.sha256((tmp_path / "out" / one.file).read_bytes()).hexdigest()
    assert sum(seen) == sum(one.n_bytes for one in written)


@contextmanager
def running(source: Path, target: Path) -> Iterator[subprocess.Popen[str]]:
    """A conversion in a process of its own, once it has begun to write."""
    program = f"""
        import signal
        import sys
        from pathlib import Path
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent in the background may have it ignored
        sys.path.insert(0, {str(ROOT / "tests")!r})
        from long_shards import long_shards
        from qwen35conv.writing.publish import publishing
        from qwen35conv.source import LocalSource
        from qwen35conv.writing.writer import write_shards
        source = LocalSource(Path({str(source)!r}), "")
        with publishing(Path({str(target)!r}), key="key", overwrite=False) as partial:
            print("begun", flush=True)
            write_shards(long_shards(source.folder), source, partial, jobs=2, checksum=False)
    """
    process = subprocess.Popen(
        [sys.executable, "-c", dedent(program)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def whole_shards(target: Path) -> set[str]:
    partial = target.with_name(target.name + ".partial")
    return {path.name for path in partial.glob("model-*.safetensors")} if partial.exists() else set()


def wait_for(target: Path, n_shards: int) -> None:
    while len(whole_shards(target)) < n_shards and not target.exists():
        time.sleep(0.001)


def test_killed_at_any_time_the_next_run_resumes_to_the_same_bytes(tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=16, n_shards=8)
    random_ = random.Random(11)
    resumed_from = []
    for _ in range(4):
        target = tmp_path / "out"
        with running(tmp_path / "source", target) as process:
            wait_for(target, random_.randrange(1, 6))
            time.sleep(random_.random() / 50)
            process.kill()
            process.wait()
        if not target.exists():
            written = carry_out(tmp_path / "source", shards, target)
            resumed_from.append(sum(one.resumed for one in written))
        assert_long(target, shards, tmp_path / "source")
        assert not (tmp_path / "out.partial").exists()
        shutil.rmtree(target)
    assert any(0 < n < len(shards) for n in resumed_from), resumed_from


def test_an_interrupt_ends_soon_and_keeps_whole_shards(tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=60, n_shards=8)
    target = tmp_path / "out"
    errors = ""
    for _ in range(5):
        with running(tmp_path / "source", target) as process:
            wait_for(target, 1)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        if not target.exists():
            break
        shutil.rmtree(target)  # it was whole before the signal came
    assert "KeyboardInterrupt" in errors
    assert not target.exists()
    left = {path.name for path in (tmp_path / "out.partial").iterdir()}
    assert left == whole_shards(target) | {JOURNAL}
    written = carry_out(tmp_path / "source", shards, target)
    assert {one.file for one in written if one.resumed} == left - {JOURNAL}
    assert_long(target, shards, tmp_path / "source")


@pytest.mark.parametrize("change", ["touched", "replaced", "shortened", "removed"])
@pytest.mark.parametrize("n_before", [0, 2], ids=["while it is read", "before its turn"])
def test_a_source_that_changes_meanwhile_is_an_error(change: str, n_before: int, source: Path, tmp_path: Path) -> None:
    shards = shards_of(source)[2 - n_before :][: n_before + 1]
    file = shards[-1].writes[0].pieces[0].file
    content = (source / file).read_bytes()

    def change_it(n_bytes: int) -> None:
        path = source / file
        if change == "touched":
            os.utime(path)
        elif change == "replaced":
            (source / "new").write_bytes(content)
            (source / "new").rename(path)
        elif change == "shortened":
            os.truncate(path, len(content) // 2)
        else:
            path.unlink(missing_ok=True)

    with pytest.raises(SourceError) as caught:
        carry_out(source, shards, tmp_path / "out", jobs=1, on_bytes=change_it)
    assert caught.value.exit_code == 3
    assert file in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert whole_shards(tmp_path / "out") == {shard.file for shard in shards[:-1]}
    assert not list(tmp_path.rglob(".*.writing"))


def test_a_source_is_left_as_it_was_and_shares_nothing_with_the_result(source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o444)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()}
    carry_out(source, shards_of(source), tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert path.stat().st_nlink == 1
        assert not path.is_symlink()
        path.write_bytes(b"edited")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in source.iterdir()} == before


@contextmanager
def small_disk(at: Path, n_bytes: int) -> Iterator[Path]:
    at.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={n_bytes}", "tmpfs", at], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        yield at
    finally:
        subprocess.run(["umount", at], check=True)


def test_a_full_disk_is_a_clear_error_and_the_next_run_resumes(tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=3, n_shards=4)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        with pytest.raises(DestinationError, match="No space left") as caught:
            carry_out(tmp_path / "source", shards, disk / "out", jobs=1)
        assert caught.value.exit_code == 4
        assert "bytes were still to be written" in str(caught.value)
        assert "resumes" in str(caught.value.hint)
        assert whole_shards(disk / "out") == {shard.file for shard in shards[:2]}
        assert not list((disk / "out.partial").glob(".*.writing"))
        subprocess.run(["mount", "-o", f"remount,size={32 << 20}", disk], check=True)
        written = carry_out(tmp_path / "source", shards, disk / "out", jobs=1)
        assert [one.resumed for one in written] == [True, True, False, False]
        assert_long(disk / "out", shards, tmp_path / "source")


def test_a_disk_that_turns_read_only_is_a_clear_error(source: Path, tmp_path: Path) -> None:
    shards = shards_of(source)
    with small_disk(tmp_path / "disk", 8 << 20) as disk:
        with publishing(disk / "warm", key="key", overwrite=False) as partial:
            write_shards(shards[:1], LocalSource(source, ""), partial, jobs=1, checksum=False)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(DestinationError, match="Read-only") as caught:
            carry_out(source, shards, disk / "out")
        assert caught.value.exit_code == 4
        assert caught.value.hint


def test_a_file_larger_than_the_file_system_takes_is_a_clear_error(tmp_path: Path) -> None:
    shards = make_long(tmp_path / "source", n_blocks=3, n_shards=2)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limits[1]))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(DestinationError, match="File too large") as caught:
            carry_out(tmp_path / "source", shards, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "smaller shards" in str(caught.value.hint)
    assert not (tmp_path / "out.partial").exists()
