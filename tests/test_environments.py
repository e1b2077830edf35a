"""Where the command runs: users, homes, terminals, locales, names, masks, caches and file systems over a network."""

from __future__ import annotations

import errno
import fcntl
import os
import pty
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from field import convert, inspect, qwen35, refused

ROOT = Path(__file__).parents[1]
NOBODY = 65534


@pytest.fixture
def made() -> tiny.Made:
    return tiny.make()


@pytest.fixture
def source(made: tiny.Made, tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "source", made.raw, made.config)


def command(*arguments: object, shell: str = "", **how: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "qwen35conv", *map(str, arguments)]
    if shell:
        line = ["sh", "-c", f'"$@" {shell}', "sh", *line]
    how["env"] = os.environ | {"PYTHONPATH": str(ROOT)} | how.get("env", {})
    return subprocess.run(line, capture_output=True, text=True, check=False, timeout=120, **how)


# --- names -----------------------------------------------------------------------------------------------------------

NAMES = [
    "with spaces", " ", "Ünïcødé-模型-🦊", "a'b\"c", "-mlx", "--help", "a\\b", "$HOME", "%s", "{0}", "[a-z]*?", "a;b&c",
    "é" * 100, "x" * 247, ".hidden", "out.partial", "model.safetensors", "con:", "CON", "e\u0301",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name)[:20])
def test_any_name_will_do(name: str, made: tiny.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save(tmp_path / "in" / name, made.raw, made.config)
    (tmp_path / "in" / name / "tokenizer.json").write_text("{}")
    (tmp_path / "out").mkdir()
    assert inspect(tmp_path / "in" / name).code == 0
    run = convert(tmp_path / "in" / name, tmp_path / "out" / name)
    assert run.code == 0, run.err
    tiny.assert_same(tiny.load(tmp_path / "out" / name), made.canonical)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
    if not name.startswith("-"):
        monkeypatch.chdir(tmp_path / "out")
        assert qwen35("inspect", name).code == 0


def test_files_with_the_longest_names_go_along(source: Path, tmp_path: Path) -> None:
    longest = ["t" * 250 + ".json", "模" * 83 + ".json"]
    for name in longest:
        (source / name).write_text("{}")
    assert convert(source, tmp_path / "out").code == 0
    assert set(longest) <= {path.name for path in (tmp_path / "out").iterdir()}


@pytest.mark.parametrize("n", [248, 255, 256, 300, 5000])
def test_a_destination_whose_name_is_too_long_is_a_clear_error(n: int, source: Path, tmp_path: Path) -> None:
    refused(convert(source, tmp_path / ("x" * n)), 4, "too long", "shorter name")


# --- users, homes, masks ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mask", "file", "folder"), [(0o022, 0o644, 0o755), (0o077, 0o600, 0o700), (0o002, 0o664, 0o775)]
)
def test_modes_are_those_of_the_users_mask(mask: int, file: int, folder: int, source: Path, tmp_path: Path) -> None:
    for path in source.iterdir():
        path.chmod(0o400)
    before = os.umask(mask)
    try:
        assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    finally:
        os.umask(before)
    for name in ("out", "out-mtp"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == folder
        for path in (tmp_path / name).iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == file, path.name


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A folder that everyone may enter; pytest's own are the user's alone."""
    place = Path(tempfile.mkdtemp(prefix="qwen35-", dir="/tmp"))
    place.chmod(0o755)
    try:
        yield place
    finally:
        shutil.rmtree(place)


def readable(folder: Path) -> Path:
    """The folder, its files for everyone to read."""
    for path in folder.iterdir():
        path.chmod(0o644)
    return folder


def as_nobody(*arguments: object, **how: Any) -> subprocess.CompletedProcess[str]:
    if os.geteuid():
        pytest.skip("only root may become another user")
    who: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
    try:
        probe = subprocess.run(
            [sys.executable, "-c", "import qwen35conv.convert"], capture_output=True, check=False,
            env={"PYTHONPATH": str(ROOT)}, cwd="/", **who,
        )  # fmt: skip
    except OSError as error:
        pytest.skip(f"this Python is root's alone: {error}")
    if probe.returncode:
        pytest.skip("this Python is root's alone")
    return command(*arguments, **who, cwd="/", **how)


@pytest.mark.parametrize("home", ["/", "/nonexistent", None])
def test_a_user_without_rights_or_a_home_can_do_all(home: str | None, made: tiny.Made, open_place: Path) -> None:
    source = readable(tiny.save(open_place / "source", made.raw, made.config))
    (open_place / "theirs").mkdir()
    (open_place / "theirs").chmod(0o777)
    environment = {"XDG_CACHE_HOME": "/nonexistent"} | ({} if home is None else {"HOME": home})
    for arguments in (
        ("inspect", source),
        ("convert", source, open_place / "theirs" / "out"),
        ("convert", source, open_place / "theirs" / "out", "--overwrite"),
        ("verify", open_place / "theirs" / "out", "--source", source),
    ):
        run = as_nobody(*arguments, env=environment)
        assert run.returncode == 0, run.stderr
    tiny.assert_same(tiny.load(open_place / "theirs" / "out"), made.canonical)


def test_what_a_user_may_not_read_or_write_is_a_clear_error(made: tiny.Made, open_place: Path) -> None:
    source = readable(tiny.save(open_place / "source", made.raw, made.config))
    run = as_nobody("convert", source, open_place / "out")
    assert run.returncode == 4
    assert "Permission denied" in run.stderr
    assert "choose a destination that you may write to" in run.stderr
    shard = sorted(source.glob("*.safetensors"))[0]
    for path, told in ((shard, shard.name), (source / "config.json", "config.json"), (source, "source")):
        mode = path.stat().st_mode
        path.chmod(0)
        run = as_nobody("inspect", source)
        path.chmod(mode)
        assert run.returncode == 3, run.stderr
        assert "Permission denied" in run.stderr
        assert told in run.stderr


def test_a_home_that_nobody_knows_is_no_matter(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(kind: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    assert convert(source, tmp_path / "out").code == 0
    assert convert(source, tmp_path / "out", "--overwrite").code == 0


def test_a_current_folder_that_is_gone_is_no_matter(source: Path, tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    shell = f'; cd {tmp_path / "gone"} && rmdir ../gone && "$@"'
    for arguments in (("inspect", source), ("convert", source, tmp_path / "out", "--overwrite")):
        (tmp_path / "gone").mkdir(exist_ok=True)
        run = command(*arguments, shell=f"--help >/dev/null{shell}")
        assert run.returncode == 0, run.stderr
    (tmp_path / "gone").mkdir(exist_ok=True)
    run = command("convert", source, "relative", shell=f"--help >/dev/null{shell}")
    assert run.returncode == 4
    assert "Traceback" not in run.stderr


# --- streams and terminals -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "closed", ["<&- >&- 2>&-", *(pytest.param(c, marks=pytest.mark.slow) for c in (">&-", "2>&-", "<&-", ">&- 2>&-"))]
)
def test_closed_streams_lose_the_report_and_nothing_else(
    closed: str, made: tiny.Made, source: Path, tmp_path: Path
) -> None:
    assert command("inspect", source, shell=closed).returncode == 0
    assert command("convert", source, tmp_path / "out", "--no-verify", shell=closed).returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert command("convert", source, tmp_path / "out", shell=closed).returncode == 4


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device here that is always full")
def test_a_full_standard_output_is_a_clear_error_and_the_work_is_done(
    made: tiny.Made, source: Path, tmp_path: Path
) -> None:
    for options in ((), ("--json",)):
        run = command("inspect", source, *options, shell=">/dev/full")
        assert run.returncode == 4
        assert run.stderr.splitlines()[0] == "error: standard output can't be written: No space left on device"
        assert len(run.stderr.splitlines()) == 2
    assert command("convert", source, tmp_path / "out", "--no-verify", shell=">/dev/full").returncode == 4
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert command("inspect", tmp_path / "absent", shell="2>/dev/full").returncode == 3


def on_a_terminal(columns: int, *arguments: object, **environment: str) -> tuple[int, str]:
    """Exit code and everything that a terminal of so many columns was sent."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    clean = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CI")}
    process = subprocess.Popen(
        [sys.executable, "-m", "qwen35conv", *map(str, arguments)],
        stdin=slave, stdout=slave, stderr=slave, env=clean | {"PYTHONPATH": str(ROOT)} | environment,
    )  # fmt: skip
    os.close(slave)
    said = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # how Linux tells that the other end was closed
            break
        if not part:
            break
        said += part
    os.close(master)
    return process.wait(timeout=60), said.decode(errors="replace").replace("\r\n", "\n")


ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@pytest.mark.parametrize(
    ("columns", "term"),
    [
        (40, "xterm-256color"),
        (40, "dumb"),
        *(pytest.param(n, term, marks=pytest.mark.slow) for n in (80, 200) for term in ("xterm", "dumb", "vt100")),
    ],
)
def test_a_terminal_gets_lines_of_its_width_and_only_what_it_understands(
    columns: int, term: str, made: tiny.Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.save(tmp_path / "s", made.raw, made.config)
    monkeypatch.chdir(tmp_path)
    code, said = on_a_terminal(columns, "inspect", "s", TERM=term)
    assert code == 0
    assert ("\x1b" in said) == (term != "dumb")
    assert "RAW" in said
    assert max(len(line) for line in re.split(r"[\r\n]", ESCAPE.sub("", said))) <= columns
    code, said = on_a_terminal(columns, "convert", "s", "out", TERM=term)
    assert code == 0
    assert ("\x1b" in said or "\r" in said) == (term != "dumb")
    code, said = on_a_terminal(columns, "inspect", "absent", TERM=term, NO_COLOR="1")
    assert code == 3
    assert "\x1b" not in said


@pytest.mark.parametrize(
    "environment",
    [
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"LC_ALL": "C"},
        *(
            pytest.param(environment, marks=pytest.mark.slow)
            for environment in (
                {"LC_ALL": "POSIX", "PYTHONIOENCODING": "ascii"},
                {"LC_ALL": "C.UTF-8"},
                {"LANG": "nonsense", "LC_ALL": ""},
                {"PYTHONIOENCODING": "latin-1"},
                {"PYTHONIOENCODING": "utf-16"},
                {"PYTHONOPTIMIZE": "2"},
                {"PYTHONDEVMODE": "1"},
            )
        ),
    ],
    ids=lambda environment: " ".join(f"{k}={v}" for k, v in environment.items()),
)
def test_no_locale_or_encoding_is_a_trouble(environment: dict[str, str], made: tiny.Made, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "模型 é", made.raw, made.config)
    (source / "読んで.txt").write_text("x")
    for arguments in (("inspect", source, "--tensors"), ("inspect", source, "--json")):
        run = subprocess.run(
            [sys.executable, "-m", "qwen35conv", *map(str, arguments)],
            env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert b"Traceback" not in run.stderr
    run = subprocess.run(
        [sys.executable, "-m", "qwen35conv", "convert", str(source), str(tmp_path / "出"), "--no-verify"],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    tiny.assert_same(tiny.load(tmp_path / "出"), made.canonical)
    if environment.get("PYTHONUTF8") != "0":  # else Python itself can't read the name, and nobody could write it down
        assert (tmp_path / "出" / "読んで.txt").exists()


# --- caches and file systems -----------------------------------------------------------------------------------------


def test_a_snapshot_of_links_into_blobs_is_a_source(made: tiny.Made, source: Path, tmp_path: Path) -> None:
    cache = tmp_path / "hub" / "models--org--name"
    snapshot = cache / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0123abc")
    for i, file in enumerate(sorted(source.iterdir())):
        file.rename(cache / "blobs" / f"{i:064x}")
        (snapshot / file.name).symlink_to(f"../../blobs/{i:064x}")
    assert convert(snapshot, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    for target in (cache / "blobs", snapshot, cache, cache / "snapshots"):
        for options in ((), ("--overwrite",)):
            assert convert(snapshot, target, *options).code == 4
    linked = tmp_path / "linked"
    linked.symlink_to(snapshot)
    assert convert(linked, tmp_path / "again").code == 0


def test_a_file_system_that_flushes_no_folders_will_do(
    made: tiny.Made, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    assert convert(source, tmp_path / "out", "--mtp", "sidecar").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


def test_a_rename_whose_answer_was_lost_is_believed(
    made: tiny.Made, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def rename(path: Path, target: Path) -> Path:
        real(path, target)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))  # as the second try would

    monkeypatch.setattr(Path, "rename", rename)
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]


def test_a_file_system_without_locks_is_a_clear_error(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    refused(convert(source, tmp_path / "out"), 4, "No locks available", "local disk")
