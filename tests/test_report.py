"""What reaches the streams: the screens at several widths, JSON alone, errors in two lines, and real terminals."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from rich.cells import cell_len

from qwen35conv import report
from qwen35conv.convert import prepare, write
from qwen35conv.errors import CheckpointError, DestinationError, Qwen35ConvError, SourceError
from qwen35conv.generation.convention import Generation
from qwen35conv.inspection import Inspection, inspect_checkpoint
from qwen35conv.planning.plan import Mtp, Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source

ORACLE = Path(__file__).parents[2] / "shared" / "oracle" / "data"
CASES = sorted(path.name for path in ORACLE.glob("*")) or ["absent"]
LAYER = "model.language_model.layers."
ESCAPE = "\x1b"


def oracle_case(name: str) -> Path:
    folder = ORACLE / name / "src"
    if not folder.is_dir():
        pytest.skip(f"no oracle case {name}")
    return folder


def inspected(folder: Path, options: Options | None = None) -> Inspection:
    return inspect_checkpoint(read_checkpoint(open_source(str(folder))), options)


Screen = Callable[..., str]


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Screen:
    """The text that an inspection puts on a pipe of so many columns."""

    def of(folder: Path, n_columns: int = 100, options: Options | None = None, *, all_tensors: bool = False) -> str:
        monkeypatch.setenv("COLUMNS", str(n_columns))
        report.show_inspection(inspected(folder, options), as_json=False, all_tensors=all_tensors, report=None)
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return of


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make()
    return tiny.save(tmp_path_factory.mktemp("raw") / "raw", made.raw, made.config)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """64 layers, of which one has an input norm that was shifted already."""
    made = tiny.make(tiny.with_layers(64))
    name = f"{LAYER}23.input_layernorm.weight"
    made.raw[name] = (made.raw[name].astype(np.float32) + 1).astype(made.raw[name].dtype)
    return tiny.save(tmp_path_factory.mktemp("odd") / "odd", made.raw, made.config)


@pytest.mark.parametrize("n_columns", [24, 40, 80, 120])
@pytest.mark.parametrize("name", CASES)
def test_no_line_is_wider_than_the_stream_and_none_holds_a_control(screen: Screen, name: str, n_columns: int) -> None:
    text = screen(oracle_case(name), n_columns)
    for line in text.splitlines():
        assert cell_len(line) <= n_columns, line
        assert line.isprintable(), line
        assert line == line.rstrip()
    assert "Verdict" in text
    assert text.index("Verdict") < text.index("Next")


def test_a_raw_export_is_explained_on_one_screen(screen: Screen, raw: Path) -> None:
    text = screen(raw)
    assert len(text.splitlines()) < 50
    for part in (
        "4 layers (3 linear + 1 full attention)",
        "RAW  as transformers exports it",
        "8 anchors: 8 gamma - 1",
        "control: 3 gated norms",
        "draft head (mtp)  RAW",
        "gains shifted: + 1",
        "left out: vision tower",
        "mlx-lm up to 0.31",
        f"qwen35 convert {raw} raw-mlx",
    ):
        assert part in text, part


@pytest.mark.parametrize(
    ("name", "verdict", "command"),
    [
        ("broken-double-shifted", "DOUBLE-SHIFTED", "qwen35 convert --repair"),
        ("broken-never-shifted", "NEVER-SHIFTED", "qwen35 convert --repair"),
        ("canonical", "CANONICAL", "nothing: it loads right as it is"),
        ("canonical-mtp-kept", "CANONICAL", "qwen35 convert "),
    ],
)
def test_the_verdict_and_what_comes_next_are_said(screen: Screen, name: str, verdict: str, command: str) -> None:
    text = screen(oracle_case(name))
    assert f"Verdict  {verdict}  " in text
    assert command in text[text.index("Next") :]
    assert ("Does not convert" in text) == name.startswith("broken")
    assert ("What --repair would do" in text) == name.startswith("broken")


def test_loaders_that_would_ruin_it_are_named_with_the_rule_that_misleads_them(screen: Screen) -> None:
    text = screen(oracle_case("canonical-mtp-kept"), 200)
    line = next(line for line in text.splitlines() if "mlx-lm up to 0.31" in line)
    assert line.split("  ")[-1] == "✓ loads right"
    assert "✗ would shift twice" in line
    assert "mlx-lm up to 0.31, mlx-bun 0.4, mlx-swift-lm before September 2026: shifts if any mtp.*" in text


@pytest.mark.parametrize("n_columns", [40, 80, 120])
def test_an_odd_layer_is_marked_under_its_own_column(screen: Screen, odd: Path, n_columns: int) -> None:
    lines = screen(odd, n_columns).splitlines()
    at = next(i for i, line in enumerate(lines) if re.fullmatch(r"  odd +\^", line))
    begin = max(i for i in range(at) if lines[i].startswith("  layer"))
    first = int(lines[begin].split()[1])
    column = lines[at].index("^")
    assert first + column - lines[begin].index(str(first)) == 23
    assert lines[begin + 1][column] == "▅"
    assert lines[begin + 1].count("▅") == 1
    assert lines[begin + 2][column] == "▃"
    told = " ".join(" ".join(lines).split())
    assert "layer 23 input_layernorm: mean 0.96" in told or "layer 23 input_layernorm: mean 0.97" in told


def test_a_mixed_checkpoint_shows_where_and_offers_no_conversion(screen: Screen, tmp_path: Path) -> None:
    made = tiny.make(tiny.with_layers(12))
    for i in range(6):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            name = f"{LAYER}{i}.{norm}.weight"
            made.raw[name] = (made.raw[name].astype(np.float32) + 1).astype(made.raw[name].dtype)
    text = screen(tiny.save(tmp_path / "mixed", made.raw, made.config))
    assert "Verdict  MIXED" in text
    assert "  input    ▅▅▅▅▅▅▃▃▃▃▃▃" in text
    assert "? cannot tell" in text
    assert "qwen35 convert" not in text
    assert "converted" not in text


def test_names_with_terminal_escapes_are_shown_escaped_everywhere(screen: Screen, tmp_path: Path) -> None:
    made = tiny.make()
    name = f"{LAYER}0.\x1b[31mbad\r\n\u202e.weight"
    folder = tiny.save(tmp_path / "b\x1b[2Jad", {**made.raw, name: made.raw["lm_head.weight"]}, made.config)
    text = screen(folder, all_tensors=True)
    assert ESCAPE not in text
    assert "\u202e" not in text
    assert r"\x1b[31mbad\r\n\u202e.weight" in text
    assert "no rule knows this name" in text


def test_every_tensor_is_listed_on_a_line_of_its_own_when_asked_for(screen: Screen, raw: Path) -> None:
    text = screen(raw, 60, all_tensors=True)
    lines = {line.split()[0]: line for line in text.splitlines() if line.startswith("  ") and len(line) > 10}
    stored = tiny.load(raw)
    assert stored.keys() <= lines.keys()
    conv = f"{LAYER}0.linear_attn.conv1d.weight"
    assert lines[conv].split()[1:3] == ["→", conv.replace("model.language_model.", "language_model.model.")]
    assert "[92, 4, 1]" in lines[conv]
    assert "left out: vision tower" in lines["model.visual.blocks.0.norm1.weight"]


def test_an_overruled_verdict_is_said_so(screen: Screen, raw: Path) -> None:
    text = screen(raw, options=Options(assume=Generation.CANONICAL))
    assert "overruled by --assume canonical: the gains stay as they are" in text
    assert "✗ would not shift" in text
    text = screen(oracle_case("broken-double-shifted"), options=Options(repair=True))
    assert "overruled by --repair: -1 to each gain" in text


def test_a_pipe_gets_no_colour_whatever_the_environment_says(
    screen: Screen, raw: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    assert ESCAPE not in screen(raw)


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_a_stream_that_lacks_our_signs_gets_look_alikes(
    raw: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    raw_bytes = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw_bytes, encoding=encoding))
    report.show_inspection(inspected(raw), as_json=False, all_tensors=False, report=None)
    text = raw_bytes.getvalue().decode(encoding)
    assert ("input    ▃▃▃▃" in text) == (encoding == "utf-8")
    assert ("input    ----" in text) == (encoding != "utf-8")
    assert "loads right" in text


@pytest.mark.parametrize("name", CASES)
def test_with_json_stdout_is_one_document_and_stderr_empty(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    report.show_inspection(inspected(oracle_case(name)), as_json=True, all_tensors=True, report=None)
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == "qwen35/inspect/1"
    assert captured.out.isascii()
    assert captured.err == ""


def test_an_error_is_two_lines_on_stderr_and_with_json_a_document_on_stdout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = SourceError("model\x1b[2J.safetensors: truncated\nat 7", hint="fetch it again")
    report.show_error(error)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: model\\x1b[2J.safetensors: truncated\\nat 7\nhint: fetch it again\n"
    report.show_error(error, command="convert", as_json=True)
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert document["schema"] == "qwen35/convert/1"
    assert document["error"] == {
        "kind": "SourceError",
        "message": str(error),
        "hint": "fetch it again",
        "exit_code": 3,
    }
    assert captured.err.startswith("error: ")
    report.show_error(Qwen35ConvError("no hint"))
    assert capsys.readouterr().err == "error: no hint\n"
    report.show_error(CheckpointError("no hint of its own"))
    assert capsys.readouterr().err.splitlines()[1].startswith("hint: ")


@pytest.mark.parametrize("suffix", [".html", ".svg"])
def test_the_screen_is_saved_as_a_picture_that_asks_nothing_of_the_network(
    odd: Path, tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"screen{suffix}"
    report.show_inspection(inspected(odd), as_json=True, all_tensors=False, report=file)
    assert json.loads(capsys.readouterr().out)["converts"] is True
    text = file.read_text(encoding="utf-8")
    assert "▅" in text
    assert "input_layernorm" in text
    assert not re.search(r"(?:href|src|url)\s*[=(]\s*[\"']?\s*(?:https?:)?//", text)


def test_a_picture_of_another_format_is_a_usage_error_and_one_that_cant_be_written_a_destination_error(
    raw: Path, tmp_path: Path
) -> None:
    for name in ("screen.pdf", "screen"):
        with pytest.raises(Qwen35ConvError, match=r"\.html or \.svg") as caught:
            report.show_inspection(inspected(raw), as_json=False, all_tensors=False, report=tmp_path / name)
        assert caught.value.exit_code == 2
        assert not (tmp_path / name).exists()
    with pytest.raises(DestinationError, match="can't be written"):
        report.show_inspection(inspected(raw), as_json=False, all_tensors=False, report=tmp_path / "no" / "x.svg")


@pytest.mark.parametrize("n_columns", [24, 40, 100])
def test_a_dry_run_lists_files_edits_and_exact_bytes(
    tmp_path: Path, n_columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(n_columns))
    made = tiny.make()
    raw = tiny.save(tmp_path / "raw", made.raw, made.config)
    (raw / "tokenizer.json").write_text("{}")
    (raw / "notes.bin").write_text("other weights")
    source = open_source(str(raw))
    plan = make_plan(read_checkpoint(source), Options(mtp=Mtp.SIDECAR))
    preparation = prepare(source, plan, tmp_path / "out")
    report.show_plan(preparation, as_json=False)
    text = capsys.readouterr().out
    assert all(cell_len(line) <= n_columns for line in text.splitlines())
    if n_columns == 100:
        assert f"{preparation.preflight.n_read:,} B" in text
        assert f"{preparation.preflight.n_written:,} B" in text
        assert re.search(r"vision_config +gone \(was ", text)
        assert re.search(r"mtp-00001-of-\d+\.safetensors", text)
        assert "copied  tokenizer.json" in text
        assert "left    notes.bin: weights in another format" in text
        assert list(tmp_path.iterdir()) == [raw]
    report.show_plan(preparation, as_json=True)
    assert json.loads(capsys.readouterr().out)["dry_run"] is True


def test_a_conversion_reports_its_proof_its_place_and_the_next_command(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    source = open_source(str(raw))
    destination = tmp_path / "o ut"
    outcome = write(source, make_plan(read_checkpoint(source)), destination)
    report.show_conversion(outcome, as_json=False)
    text = capsys.readouterr().out
    n_tensors = len(tiny.load(destination))
    assert f"re-read 2 headers, checked {n_tensors} names and shapes against the plan and config.json" in text
    assert "compared 11 computed gains: all equal" in text
    assert f"qwen35 verify '{destination}'" in text
    report.show_conversion(outcome, as_json=True)
    assert json.loads(capsys.readouterr().out)["proof"]["n_gains"] == 11


def test_progress_is_silent_where_stderr_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with report.progress("convert", 100) as on_bytes:
        on_bytes(60)
        on_bytes(40)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_counts_bytes_from_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = _Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with report.progress("con\x1b[2Jvert", 4_000_000) as on_bytes:
        threads = [threading.Thread(target=lambda: [on_bytes(1000) for _ in range(1000)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        time.sleep(0.2)  # the bar is drawn at most ten times a second
        on_bytes(0)
    text = stream.getvalue()
    assert r"con\x1b[2Jvert" in text
    assert "4.00M/4.00M" in text


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_no_colour_gets_neither_bars_nor_coloured_errors(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for changed in (False, True):
        stream = _Terminal()
        monkeypatch.setattr(sys, "stderr", stream)
        if changed:
            monkeypatch.setenv(variable, value)
        with report.progress("convert", 10) as on_bytes:
            on_bytes(10)
        assert (stream.getvalue() == "") == changed
        report.show_error(CheckpointError("wrong"))
        assert (ESCAPE in stream.getvalue()) != changed


def on_a_terminal(folder: Path, **environment: str) -> str:
    """What `qwen35 inspect` writes to a terminal of its own."""
    master, slave = os.openpty()
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "TERM")}
    code = "import sys; from qwen35conv.cli import main; sys.argv = ['qwen35', 'inspect', sys.argv[1]]; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)],
        stdout=slave,
        stderr=slave,
        stdin=subprocess.DEVNULL,
        cwd=Path(__file__).parents[1],
        env=kept | environment,
    )
    os.close(slave)
    parts = []
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux says so when the other end is closed
            break
        if not part:
            break
        parts.append(part)
    os.close(master)
    assert process.wait() == 0
    return b"".join(parts).decode()


def test_a_terminal_gets_colour_unless_it_is_dumb_or_told_not_to(raw: Path) -> None:
    coloured = on_a_terminal(raw, TERM="xterm-256color", COLUMNS="90")
    assert ESCAPE in coloured
    plain = on_a_terminal(raw, TERM="xterm-256color", COLUMNS="90", NO_COLOR="1")
    assert ESCAPE not in plain
    stripped = [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", coloured).splitlines()]
    assert stripped == plain.splitlines()
    assert ESCAPE not in on_a_terminal(raw, TERM="dumb", COLUMNS="90")


def test_importing_the_report_loads_neither_rich_nor_tqdm_nor_mlx() -> None:
    code = (
        "import sys, qwen35conv.report; print(sorted({m.split('.')[0] for m in sys.modules} & {'rich', 'tqdm', 'mlx'}))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1]
    )
    assert found.stdout.strip() == "[]"


def test_a_column_without_a_character_takes_none_from_another(capsys: pytest.CaptureFixture[str]) -> None:
    from qwen35conv.report.page import show_page

    head = ("mounted", "needed", "")
    show_page(lambda page: page.table([["/", "1", ""]], align="lrl", head=head), sys.stdout)
    assert capsys.readouterr().out.split() == ["mounted", "needed", "/", "1"]
