"""The command line as people and scripts meet it: exit codes, streams, one JSON document, no traceback."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny

import qwen35conv
from qwen35conv.errors import DestinationError, Qwen35ConvError, SourceError


def qwen35(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qwen35conv", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "100"} | environment,
        check=False,
    )


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make()
    return tiny.save(tmp_path_factory.mktemp("cli") / "source", made.raw, made.config)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make(mtp=False)
    gains = ("layernorm.weight", "q_norm.weight", "k_norm.weight", "model.norm.weight")
    twice = {name: value + np.array(1, tiny.BF16) if name.endswith(gains) else value
             for name, value in made.canonical.items()}  # fmt: skip
    return tiny.save(tmp_path_factory.mktemp("cli") / "broken", twice, made.config)


def test_inspect_then_convert_then_inspect(source: Path, tmp_path: Path) -> None:
    first = qwen35("inspect", source)
    assert first.returncode == 0, first.stderr
    assert "RAW" in first.stdout
    converted = qwen35("convert", source, tmp_path / "out")
    assert converted.returncode == 0, converted.stderr
    tiny.assert_same(tiny.load(tmp_path / "out"), tiny.make().canonical)
    second = qwen35("inspect", tmp_path / "out")
    assert second.returncode == 0
    assert "CANONICAL" in second.stdout


def test_json_is_one_document_on_standard_output(source: Path, tmp_path: Path) -> None:
    documents = {
        "inspect": qwen35("inspect", source, "--json"),
        "convert": qwen35("convert", source, tmp_path / "out", "--json"),
    }
    dry = qwen35("convert", source, tmp_path / "dry", "--dry-run", "--json")
    for command, run in [*documents.items(), ("convert", dry)]:
        assert run.returncode == 0, run.stderr
        document = json.loads(run.stdout)
        assert document["schema"] == f"qwen35/{command}/1"
    assert not (tmp_path / "dry").exists()
    assert json.loads(documents["inspect"].stdout)["verdicts"]["trunk"]["generation"] == "raw"


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_broken_generation_is_exit_1_everywhere(broken: Path, tmp_path: Path, as_json: bool) -> None:
    flag = ["--json"] if as_json else []
    inspected = qwen35("inspect", broken, *flag)
    assert inspected.returncode == 1
    assert "double-shifted" in inspected.stdout.lower()
    refused = qwen35("convert", broken, tmp_path / "out", *flag)
    assert refused.returncode == 1
    assert "gain" in refused.stdout + refused.stderr
    assert not list(tmp_path.iterdir())
    if as_json:
        error = json.loads(refused.stdout)["error"]
        assert (error["exit_code"], "--repair" in error["hint"]) == (1, True)
    else:
        assert refused.stdout == ""
    assert qwen35("convert", broken, tmp_path / "out", "--repair", *flag).returncode == 0


def test_exit_codes(source: Path, tmp_path: Path) -> None:
    (tmp_path / "exists").mkdir()
    (tmp_path / "file").write_text("x")
    empty = tmp_path / "empty"
    empty.mkdir()
    cases: list[tuple[int, tuple[object, ...]]] = [
        (2, ()),
        (2, ("inspect",)),
        (2, ("convert", source)),
        (2, ("nonsense",)),
        (2, ("convert", source, tmp_path / "x", "--mtp", "maybe")),
        (2, ("convert", source, tmp_path / "x", "--max-shard-size", "huge")),
        (2, ("convert", source, tmp_path / "x", "--repair", "--assume", "raw")),
        (2, ("inspect", source, "--lora-targets", "--report", tmp_path / "x.html")),
        (2, ("inspect", source, "--lora-targets", "--tensors")),
        (2, ("verify", source, "--max-new-tokens", "3")),
        (2, ("verify", source, "--reference", "x", "--atol", "nan")),
        (2, ("verify", source, "--max-memory", "9" * 400)),
        (3, ("inspect", tmp_path / "nowhere")),
        (3, ("inspect", empty)),
        (3, ("inspect", tmp_path / "file")),
        (4, ("convert", source, tmp_path / "exists")),
        (4, ("convert", source, source)),
        (4, ("convert", source, tmp_path / "file" / "out")),
        (0, ("--version",)),
        (0, ("--help",)),
    ]
    for code, arguments in cases:
        run = qwen35(*arguments)
        assert run.returncode == code, (arguments, run.stdout, run.stderr)
        assert "Traceback" not in run.stdout + run.stderr
        if code in (3, 4):
            assert run.stderr.startswith("error: ")
            assert run.stdout == ""
            assert len(run.stderr.strip().splitlines()) <= 4


def test_debug_shows_where(tmp_path: Path) -> None:
    assert "Traceback" in qwen35("inspect", tmp_path / "nowhere", "--debug").stderr


def test_no_colour_and_no_progress_where_there_is_no_terminal(source: Path, tmp_path: Path) -> None:
    for run in (qwen35("inspect", source, FORCE_COLOR=""), qwen35("convert", source, tmp_path / "out")):
        assert "\x1b" not in run.stdout + run.stderr


@pytest.mark.parametrize("columns", ["40", "80"])
def test_a_narrow_or_dumb_terminal_in_the_c_locale_is_no_trouble(source: Path, columns: str) -> None:
    run = qwen35("inspect", source, COLUMNS=columns, TERM="dumb", LC_ALL="C", PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert run.returncode == 0, run.stderr
    assert "RAW" in run.stdout


def test_a_report_is_saved_as_html_or_svg(source: Path, tmp_path: Path) -> None:
    for suffix, mark in (("html", "<html"), ("svg", "<svg")):
        path = tmp_path / f"report.{suffix}"
        assert qwen35("inspect", source, "--report", path).returncode == 0
        assert mark in path.read_text()
    assert qwen35("inspect", source, "--report", tmp_path / "report.doc").returncode == 2


def test_every_tensor_can_be_listed(source: Path) -> None:
    listed = qwen35("inspect", source, "--tensors", COLUMNS="300").stdout
    for name in tiny.make().raw:
        assert name in listed


def test_a_reader_that_leaves_early_is_no_error(source: Path) -> None:
    run = subprocess.run(
        f"{sys.executable} -m qwen35conv inspect {source} --tensors | head -1",
        shell=True, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "Traceback" not in run.stderr
    assert "Exception ignored" not in run.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_no_destination_and_the_same_command_resumes(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    made = tiny.make(tiny.Sizes(vocab=300_000, hidden=96))
    folder = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3)
    command = [sys.executable, "-m", "qwen35conv", "convert", str(folder), str(tmp_path / "out"), "--jobs", "1"]
    codes: set[Any] = set()
    for _ in range(6):  # one of them will hit it in the middle
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 30
        while not (tmp_path / "out.partial").exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.002)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
        codes.add(process.returncode)
        assert "Traceback" not in errors
        if process.returncode == code:
            assert not (tmp_path / "out").exists()
            break
        if process.returncode == 0:
            subprocess.run(["rm", "-rf", str(tmp_path / "out")], check=True)
    assert code in codes
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert [path.name for path in tmp_path.glob("out*")] == ["out"]


WHILE_LOADING = """
import os, sys
from qwen35conv.__main__ import main

class Loading:
    def find_spec(self, name, path, target=None):
        if name == "qwen35conv.cli":
            os.kill(os.getpid(), int(sys.argv[1]))

sys.meta_path.insert(0, Loading())
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_the_command_is_loaded_ends_it_with_its_code_alone(number: signal.Signals, code: int) -> None:
    run = subprocess.run([sys.executable, "-c", WHILE_LOADING, str(int(number))], capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (code, "", "")


def test_a_command_that_only_reads_has_nothing_to_resume(source: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "prompt")
    command = [sys.executable, "-m", "qwen35conv", "verify", str(source), "--prompt-file", str(tmp_path / "prompt")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline, writer = time.monotonic() + 30, -1
    while writer < 0:  # until it reads
        assert time.monotonic() < deadline
        try:
            writer = os.open(tmp_path / "prompt", os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    os.close(writer)
    assert process.returncode == 130
    assert errors == "error: interrupted\nhint: nothing was changed; run it again\n"


def test_a_backend_that_is_not_here_is_a_usage_error(source: Path) -> None:
    backend = "cuda" if sys.platform == "darwin" else "metal"
    run = qwen35("verify", source, "--backend", backend)
    assert (run.returncode, "--backend auto" in run.stderr) == (2, True)


def test_what_can_not_be_pushed_is_named_as_it_is(source: Path, tmp_path: Path) -> None:
    for folder, why in ((source, "not the result of a conversion"), (tmp_path / "nowhere", "no such folder")):
        run = qwen35("push", folder, "owner/new", "--dry-run")
        assert (run.returncode, why in run.stderr) == (3, True)


def test_a_report_that_can_not_be_written_asks_for_another_name(source: Path, tmp_path: Path) -> None:
    run = qwen35("inspect", source, "--report", tmp_path / "nowhere" / "x.html")
    assert (run.returncode, "another name for --report" in run.stderr) == (4, True)


def test_help_answers_at_once() -> None:
    times = []
    for _ in range(5):
        begun = time.monotonic()
        assert qwen35("--help").returncode == 0
        times.append(time.monotonic() - begun)
    assert min(times) < 1.0  # a loaded machine; `scripts/bench.py` measures the promise


def test_help_imports_neither_mlx_nor_the_hub() -> None:
    code = (
        "import sys, qwen35conv.cli; print(sorted({'mlx', 'huggingface_hub', 'numpy', 'ml_dtypes'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_every_error_says_what_to_do_next() -> None:
    for module in pkgutil.walk_packages(qwen35conv.__path__, "qwen35conv."):
        if "__main__" not in module.name:
            importlib.import_module(module.name)
    kinds, known = [Qwen35ConvError], set()
    while kinds:
        kind = kinds.pop()
        known.add(kind)
        kinds += kind.__subclasses__()
    assert len(known) > 12
    assert [kind.__name__ for kind in known - {Qwen35ConvError} if not kind.usual_hint] == []


def test_errors_know_their_exit_code() -> None:
    assert (Qwen35ConvError("x").exit_code, SourceError("x").exit_code, DestinationError("x").exit_code) == (1, 3, 4)
