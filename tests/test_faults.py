"""Disks that fail, fill up, vanish or turn read-only, clocks that go backwards, and converters that meet."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tiny
from faulty import READS, WRITES, failing

from qwen35conv.convert import carry_out, prepare
from qwen35conv.errors import DestinationError, Qwen35ConvError, SourceError
from qwen35conv.planning.plan import Mtp, Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source

Tree = dict[str, str]
NUMBERS = [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES]


def tree(folder: Path) -> Tree:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make()
    folder = tiny.save(tmp_path_factory.mktemp("faults") / "source", made.raw, made.config, n_shards=3)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def convert(source: Path, target: Path, *, mtp: Mtp = Mtp.SIDECAR, jobs: int = 2, overwrite: bool = False) -> None:
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened), Options(mtp=mtp))
    carry_out(opened, prepare(opened, plan, target, jobs=jobs), check=False, overwrite=overwrite)


@pytest.fixture(scope="module")
def reference(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Tree:
    home = tmp_path_factory.mktemp("reference")
    convert(source, home / "out")
    return tree(home)


# --- errors of the system --------------------------------------------------------------------------------------------


def survives(
    source: Path, home: Path, reference: Tree, names: tuple[str, ...], number: int, at: int, *, for_good: bool
) -> bool:
    """Whether the fault was met; whatever happened, the next run makes the same bytes."""
    where = source if names is READS else home
    before = tree(source)
    error: Qwen35ConvError | None = None
    with failing(where, names, number, at, for_good=for_good) as disk:
        try:
            convert(source, home / "out")
        except Qwen35ConvError as caught:
            error = caught
    if error is not None:
        assert isinstance(error, SourceError if names is READS else DestinationError), (at, error)
        assert error.hint
        assert not (home / "out").exists() or names is WRITES
    else:  # a fault that another way of copying got round, or that was met while tidying up
        assert disk.n_failed <= 1 or for_good
        assert {k: v for k, v in tree(home).items() if ".journal" not in k} == reference, (at, number)
    if not (home / "out").exists():
        convert(source, home / "out")
    else:  # it was published before the fault: what the command left to tidy up, the next tidies up
        with pytest.raises(DestinationError, match="exists"):
            convert(source, home / "out")
    assert tree(home) == reference, (at, number)
    assert tree(source) == before
    return disk.n_failed > 0


def n_calls(source: Path, home: Path, names: tuple[str, ...]) -> int:
    with failing(source if names is READS else home, names) as disk:
        convert(source, home / "out")
    assert disk.n > 10
    return disk.n


@pytest.mark.parametrize("names", [READS, WRITES], ids=["reads", "writes"])
@pytest.mark.parametrize("for_good", [True, False], ids=["for good", "once"])
def test_a_fault_of_the_disk_at_some_calls_is_one_error_and_the_next_run_is_right(
    names: tuple[str, ...], for_good: bool, source: Path, reference: Tree, tmp_path: Path
) -> None:
    rng = random.Random(3)
    total = n_calls(source, tmp_path / "count", names)
    met = 0
    for i in range(16):
        at, number = rng.randrange(1, total + 1), errno.EIO if names is READS else rng.choice(NUMBERS)
        met += survives(source, tmp_path / str(i), reference, names, number, at, for_good=for_good)
    assert met >= 12


@pytest.mark.slow
@pytest.mark.parametrize("names", [READS, WRITES], ids=["reads", "writes"])
@pytest.mark.parametrize("for_good", [True, False], ids=["for good", "once"])
def test_a_fault_of_the_disk_at_each_call_is_one_error_and_the_next_run_is_right(
    names: tuple[str, ...], for_good: bool, source: Path, reference: Tree, tmp_path: Path
) -> None:
    for at in range(1, n_calls(source, tmp_path / "count", names) + 1):
        number = errno.EIO if names is READS else NUMBERS[at % len(NUMBERS)]
        survives(source, tmp_path / str(at), reference, names, number, at, for_good=for_good)
        shutil.rmtree(tmp_path / str(at))


# --- real disks ------------------------------------------------------------------------------------------------------


def run(*command: object) -> None:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"may not {command[0]} here: {done.stderr.strip()[:80]}")


@contextmanager
def mounted(at: Path, kind: str, options: str, image: Path | None = None) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    run("mount", "-t", kind, "-o", options, image or kind, at)
    try:
        yield at
    finally:
        subprocess.run(["umount", "-l", at], check=True)


def test_a_file_system_that_fills_up_step_by_step_is_one_error_each_time_and_then_right(
    source: Path, reference: Tree, tmp_path: Path
) -> None:
    with mounted(tmp_path / "disk", "tmpfs", "size=4m") as disk:
        filler = disk / "filler"
        told: list[str] = []
        for n_free in range(0, 400, 16):
            filler.unlink(missing_ok=True)
            room = shutil.disk_usage(disk).free - (n_free << 10)
            filler.write_bytes(b"\0" * max(0, room))
            opened = open_source(str(source))
            plan = make_plan(read_checkpoint(opened), Options(mtp=Mtp.SIDECAR))
            preparation = prepare(opened, plan, disk / "out")
            try:
                carry_out(opened, preparation, check=False)
            except DestinationError as error:
                told.append(str(error))
                assert not (disk / "out").exists()
            else:
                break
        else:
            pytest.fail("it never fitted")
        filler.unlink()
        assert tree(disk) == reference
        assert len(told) > 5
        assert all("free" in text or "No space left" in text for text in told)


@pytest.mark.parametrize("what", ["the partial folder", "its parent", "a finished shard"])
def test_a_destination_that_disappears_is_one_error_and_the_next_run_is_right(
    what: str, source: Path, reference: Tree, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened), Options(mtp=Mtp.SIDECAR))
    gone: list[int] = []

    def vanish(n_bytes: int) -> None:
        shards = sorted((home / "out.partial").glob("model-*")) if (home / "out.partial").exists() else []
        if gone or not shards:
            return
        gone.append(n_bytes)
        if what == "a finished shard":
            shards[0].unlink()
        else:
            shutil.rmtree(home if what == "its parent" else home / "out.partial")

    with pytest.raises((DestinationError, SourceError)) as caught:
        carry_out(opened, prepare(opened, plan, home / "out", jobs=1), check=False, on_bytes=vanish)
    assert gone
    assert caught.value.exit_code in (3, 4)
    assert not (home / "out").exists()
    convert(source, home / "out")
    assert tree(home) == reference


def test_a_disk_that_is_taken_away_is_one_error(source: Path, tmp_path: Path) -> None:
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened), Options(mtp=Mtp.DROP))
    with mounted(tmp_path / "disk", "tmpfs", "size=4m") as disk:
        gone: list[int] = []

        def take(n_bytes: int) -> None:
            if not gone:
                gone.append(n_bytes)
                subprocess.run(["umount", "-l", disk], check=True)

        with pytest.raises(DestinationError) as caught:
            carry_out(opened, prepare(opened, plan, disk / "out", jobs=1), check=False, on_bytes=take)
        assert caught.value.exit_code == 4
        assert list(disk.iterdir()) == []
        run("mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk)


# --- clocks, temporary folders, neighbours ---------------------------------------------------------------------------


@pytest.mark.parametrize("year", [1970, 2100])
def test_times_of_files_and_a_clock_that_goes_backwards_mean_nothing(
    year: int, source: Path, reference: Tree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = shutil.copytree(source, tmp_path / "source")
    when = (year - 1970) * 31_556_952
    for path in copied.iterdir():
        os.utime(path, (when, when))
    now = [4e9]

    def backwards() -> float:
        now[0] -= 3600
        return now[0]

    monkeypatch.setattr(time, "time", backwards)
    with failing(tmp_path, ("pwrite", "copy_file_range", "sendfile"), errno.EIO, 12), pytest.raises(DestinationError):
        convert(copied, tmp_path / "out", jobs=1)
    for path in (tmp_path / "out.partial").iterdir():
        os.utime(path, (when, when))
    convert(copied, tmp_path / "out")
    # The receipt holds the path of neither; every byte is the same.
    told = tree(tmp_path)
    assert {k: told[k] for k in reference if k.endswith(".safetensors")} == {
        k: v for k, v in reference.items() if k.endswith(".safetensors")
    }


def command(source: Path, target: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "qwen35conv", "convert", str(source), str(target), "--no-verify", *options],
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_full_folder_for_temporary_files_is_no_matter(source: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "tmp", "tmpfs", "size=64k") as full:
        (full / "filler").write_bytes(b"\0" * (shutil.disk_usage(full).free))
        process = command(source, tmp_path / "out", TMPDIR=str(full), TEMP=str(full), TMP=str(full), HOME=str(full))
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        assert [path.name for path in full.iterdir()] == ["filler"]


@pytest.mark.slow
@pytest.mark.parametrize("overwrite", [False, True])
def test_of_converters_that_meet_one_writes_and_the_others_say_so(
    overwrite: bool, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "alone", mtp=Mtp.DROP)
    options = ["--overwrite"] if overwrite else []
    for _ in range(3):
        running = [command(source, tmp_path / "out", *options) for _ in range(4)]
        ended = [(*process.communicate(timeout=120), process.returncode) for process in running]
        codes = [code for *_, code in ended]
        assert 0 in codes
        assert set(codes) <= {0, 4}
        for _, errors, code in ended:
            assert "Traceback" not in errors
            assert code == 0 or "another conversion is writing" in errors or "exists" in errors, errors
        if not overwrite:
            assert codes.count(0) == 1
        assert tree(tmp_path / "out") == tree(tmp_path / "alone")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]
        shutil.rmtree(tmp_path / "out")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.slow
def test_signals_at_any_time_end_with_their_code_and_can_be_resumed(
    number: signal.Signals, code: int, source: Path, tmp_path: Path
) -> None:
    convert(source, tmp_path / "alone", mtp=Mtp.DROP)
    rng = random.Random(number)
    codes = []
    for _ in range(12):
        process = command(source, tmp_path / "out")
        time.sleep(0.15 + rng.random() * 0.5)
        process.send_signal(number)
        _, errors = process.communicate(timeout=120)
        codes.append(process.returncode)
        # Before the program has taken over, Python itself answers to a signal.
        assert process.returncode in (0, code, -number), errors
        if process.returncode == code:
            assert "Traceback" not in errors
        if not (tmp_path / "out").exists():
            again = command(source, tmp_path / "out")
            again.communicate(timeout=120)
            assert again.returncode == 0
        assert tree(tmp_path / "out") == tree(tmp_path / "alone")
        assert sorted(path.name for path in tmp_path.iterdir()) == ["alone", "out"]
        shutil.rmtree(tmp_path / "out")
    assert code in codes


def test_threads_may_convert_to_folders_of_their_own_at_once(source: Path, reference: Tree, tmp_path: Path) -> None:
    threads = [threading.Thread(target=convert, args=(source, tmp_path / str(i) / "out")) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i in range(4):
        assert tree(tmp_path / str(i)) == reference
