"""Checkpoints by someone who means harm: every one is a checkpoint or one clear error, in little memory and time."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from field import convert, inspect, qwen35, refused
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from qwen35conv.errors import Qwen35ConvError
from qwen35conv.facts.checkpoint import parse_index
from qwen35conv.facts.config import parse_config
from qwen35conv.facts.header import parse_header

INDEX = "model.safetensors.index.json"
OUTER = "model.language_model."
ESCAPES = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "a\r\nerror: b",
    "\x9b2J",
    "\u202egpj.exe",
    "\u2028",
    "\x7f\x08",
    "\U000e0041",
]
MOST = settings(max_examples=300, deadline=None)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made = tiny.make(vision=False)
    return tiny.save(tmp_path / "source", made.raw, made.config, n_shards=2)


def file_of(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def is_plain(text: str) -> bool:
    """Whether a terminal shows text as it is, whatever stands in it."""
    return all(line.isprintable() for line in text.split("\n"))


# --- any bytes at all ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=12,
)
CONFIG_KEYS = [
    "model_type", "text_config", "vision_config", "hidden_size", "num_hidden_layers", "layer_types", "vocab_size",
    "rope_parameters", "rope_scaling", "mrope_section", "quantization", "quantization_config", "tie_word_embeddings",
    "num_experts", "mtp_num_hidden_layers", "full_attention_interval", "rms_norm_eps", "linear_num_value_heads",
    "num_key_value_heads", "norm_convention", "quant_method", "bits", "group_size", "mode", "head_dim", "dtype",
]  # fmt: skip


def holds(parse: Callable[[], object]) -> None:
    """A fact or one error that people can read."""
    try:
        parse()
    except Qwen35ConvError as error:
        told = str(error), error.hint
    else:
        return
    assert told[0]
    assert len(told[0]) < 1500
    assert told[1]


@MOST
@given(st.binary(max_size=200) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_an_index_or_one_error(raw: bytes) -> None:
    holds(lambda: parse_index(raw))


@MOST
@given(
    st.dictionaries(
        st.text(max_size=20),
        st.text(max_size=30)
        | st.sampled_from(["../a", "/etc/passwd", "a/b", "a\\b", "C:a", "..", ".", "", "a\0"])
        | JSON,
        max_size=6,
    )
)
def test_an_index_names_only_plain_files(weight_map: dict[str, Any]) -> None:
    try:
        found = parse_index(json.dumps({"weight_map": weight_map}).encode())
    except Qwen35ConvError:
        return
    for file in found.values():
        assert Path("/folder", file).resolve().parent == Path("/folder")
        assert not re.search(r"[/\\:\0]", file)


@MOST
@given(st.data())
def test_any_config_is_sizes_or_one_error(data: st.DataObject) -> None:
    made = tiny.make_config(tiny.SPARSE, vision=True, mtp=True)
    levels = [made, made["text_config"]]
    for level in levels:
        for key in data.draw(st.lists(st.sampled_from(CONFIG_KEYS), max_size=3)):
            level[key] = data.draw(JSON | st.sampled_from([0, -1, 2**63, 1e308, "qwen3_5", "bfloat16", {}, []]))
    raw = json.dumps(made).encode()
    holds(lambda: parse_config("config.json", raw))


@MOST
@given(
    names=st.lists(st.text(max_size=30), max_size=4),
    shape=JSON | st.lists(st.integers(-1, 2**70), max_size=70),
    offsets=JSON | st.lists(st.integers(-1, 2**70), min_size=2, max_size=2),
    dtype=st.sampled_from(["BF16", "F32", "F4", "U8", "", "bf16"]) | JSON,
)
def test_any_entry_of_a_header_is_a_fact_or_one_error(names: list[str], shape: Any, offsets: Any, dtype: Any) -> None:
    raw = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": offsets} for name in names}).encode()
    holds(lambda: parse_header("file", raw, 8 + len(raw) + 64))


@pytest.mark.parametrize("seed", range(3))
def test_a_folder_with_bytes_changed_anywhere_is_a_checkpoint_or_one_error(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    made = tiny.make(vision=False)
    source = tiny.save(tmp_path / "source", made.raw, made.config)
    files = sorted(source.iterdir())
    contents = {path: path.read_bytes() for path in files}
    for _ in range(60):
        path = rng.choice(files)
        changed = bytearray(contents[path])
        for _ in range(rng.choice([1, 1, 3, 20])):
            at = rng.randrange(min(len(changed), 9000))
            match rng.randrange(4):
                case 0:
                    changed[at] = rng.randrange(256)
                case 1:
                    del changed[at : at + rng.randrange(1, 40)]
                case 2:
                    changed[at:at] = rng.choice([b"0", b'"', b"[[", b"{}", b"\0", b"9999999999", b"null", b"\xff"])
                case _:
                    changed[at : at + 4] = changed[rng.randrange(len(changed)) :][:4]
            if not changed:
                break
        path.write_bytes(changed)
        run = qwen35("inspect", source, "--json")
        assert run.code in (0, 1, 3)
        assert is_plain(run.err)
        json.loads(run.out)
        path.write_bytes(contents[path])


# --- paths and things that are no files ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    ["../secret.safetensors", "/etc/passwd", "a/../../b.safetensors", "..", ".", "", "a\\..\\b.safetensors", "C:b",
     "model\x00.safetensors", "\x1b[31m.safetensors", "a/b.safetensors", "./model.safetensors", "//host/share"],
)  # fmt: skip
def test_an_index_never_leads_out_of_its_folder(file: str, source: Path, tmp_path: Path) -> None:
    made = tiny.make(vision=False)
    save_file({n: v for n, v in made.raw.items() if v.dtype == np.float32}, tmp_path / "secret.safetensors")
    index = index_of(source)
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = file
    (source / INDEX).write_text(json.dumps(index))
    run = convert(source, tmp_path / "out")
    refused(run, 3, INDEX, "expected a file name in the same folder")
    assert is_plain(run.err)
    assert not (tmp_path / "out").exists()


def put_nothing(path: Path) -> None:
    """A link that leads nowhere."""
    path.symlink_to("nowhere")


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


def put_long_loop(path: Path) -> None:
    path.symlink_to(path.with_name("other").name)
    path.with_name("other").symlink_to(path.name)


def put_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as opened:
        here = Path.cwd()
        os.chdir(path.parent)  # the path of a socket may be 100 bytes long
        try:
            opened.bind(path.name)
        finally:
            os.chdir(here)


def put_folder(path: Path) -> None:
    path.mkdir()


def put_its_own_folder(path: Path) -> None:
    path.symlink_to(".")


PUT = [os.mkfifo, put_nothing, put_loop, put_long_loop, put_device, put_socket, put_folder, put_its_own_folder]


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
@pytest.mark.parametrize("file", ["model.safetensors-00002-of-00002.safetensors", "config.json", INDEX])
@pytest.mark.parametrize("index", [True, False])
def test_what_is_no_file_is_never_waited_for(
    put: Callable[[Path], None], file: str, index: bool, source: Path, tmp_path: Path
) -> None:
    if not index:
        (source / INDEX).unlink()
    (source / file).unlink(missing_ok=True)
    put(source / file)
    begun = time.monotonic()
    run = inspect(source)
    assert time.monotonic() - begun < 10
    if file == INDEX:  # no index, and a set that is whole without one
        assert run.code == 0
    else:
        refused(run, 3, file)


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
def test_what_is_no_file_is_no_source(put: Callable[[Path], None], tmp_path: Path) -> None:
    put(tmp_path / "model.safetensors")
    is_folder = put in (put_folder, put_its_own_folder)
    told = "no .safetensors file in it" if put is put_folder else "no config.json" if is_folder else "model.safetensors"
    refused(qwen35("inspect", tmp_path / "model.safetensors"), 3, "" if put is put_its_own_folder else told)
    refused(qwen35("inspect", "/dev/zero"), 3, "/dev/zero")


@pytest.mark.parametrize("put", PUT, ids=lambda put: put.__name__)
def test_what_lies_beside_a_checkpoint_and_is_no_file_is_left(
    put: Callable[[Path], None], source: Path, tmp_path: Path
) -> None:
    for name in ("tokenizer.json", "stray.safetensors"):
        put(source / name)
        if put is put_long_loop:
            (source / "other").unlink()
    assert convert(source, tmp_path / "out", "--no-verify").code == 0
    assert not (tmp_path / "out" / "tokenizer.json").exists()


# --- bombs -----------------------------------------------------------------------------------------------------------


def named(n: int, form: Callable[[int], str]) -> bytes:
    return ("{" + ",".join(form(i) for i in range(n)) + "}").encode()


HEADERS: dict[str, Callable[[], bytes]] = {
    "very many names": lambda: named(
        500_000, lambda i: f'"a.{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'),
    "a million names": lambda: named(1_000_000, lambda i: f'"{i}":[]'),
    "as many names as may be": lambda: named(
        99_000, lambda i: f'"model.language_model.layers.{i % 60}.mlp.experts.{i}.up_proj.weight":'
        '{"dtype":"BF16","shape":[0,4096],"data_offsets":[0,0]}'),
    "lists of lists": lambda: b'{"a":[' + b"[]," * 10_000_000 + b"[]]}",
    "nested without end": lambda: b"[" * 31_000_000,
    "nested objects": lambda: b'{"a":' * 6_000_000,
    "one name": lambda: b'{"' + b"a" * 31_000_000 + b'":{}}',
    "one number": lambda: b'{"a":' + b"1" * 31_000_000 + b"}",
    "one fraction": lambda: b'{"a":0.' + b"1" * 31_000_000 + b"}",
    "blanks": lambda: b" " * 31_000_000 + b"{}",
    "escapes": lambda: b'{"' + rb"\ud83d\ude00" * 2_500_000 + b'":0}',
    "one key again and again": lambda: b"{" + b'"a":0,' * 5_000_000 + b'"a":0}',
    "metadata": lambda: b'{"__metadata__":' + named(240_000, lambda i: f'"{i}":"{i}"') + b"}",
    "a shape of many axes": lambda: b'{"a":{"dtype":"U8","shape":[' + b"1," * 1_000_000 + b'1],"data_offsets":[0,1]}}',
}  # fmt: skip


def peak_of(*arguments: object) -> tuple[subprocess.CompletedProcess[str], int, float]:
    """A command in a process of its own, its peak memory in bytes, and its seconds."""
    program = (
        "import sys; from pathlib import Path; from qwen35conv.cli import main\n"
        "sys.argv[0] = 'qwen35'\n"
        "try: main()\n"
        "finally: print('\\n' + Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
    )
    begun = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)], capture_output=True, text=True, check=False, timeout=120
    )
    return run, int(run.stderr.split()[-1]) << 10, time.monotonic() - begun


def stays_small(folder: Path) -> None:
    run, peak, seconds = peak_of("inspect", folder)
    assert run.returncode in (1, 3), run.stderr[-500:]
    assert run.stderr.startswith("error: ")
    assert "unexpected" not in run.stderr
    assert len(run.stderr) < 2000
    assert peak < 200_000_000, f"{peak:,} bytes"
    assert seconds < 30


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_bomb_in_a_header_is_one_error_in_little_memory(header: Callable[[], bytes], source: Path) -> None:
    (source / "model.safetensors-00001-of-00002.safetensors").write_bytes(file_of(header()))
    stays_small(source)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
@pytest.mark.parametrize("file", ["config.json", INDEX])
def test_a_bomb_in_json_is_one_error_in_little_memory(header: Callable[[], bytes], file: str, source: Path) -> None:
    inner = header()
    (source / file).write_bytes(b'{"weight_map":' + inner + b"}")
    stays_small(source)


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("suffix", ["input_layernorm.weight", "A_log", "linear_attn.norm.weight"])
def test_a_gain_of_gigabytes_is_not_read(suffix: str, source: Path) -> None:
    n_bytes = 8 << 30
    entry = {"dtype": "F32", "shape": [n_bytes // 4], "data_offsets": [0, n_bytes]}
    header = json.dumps({f"{OUTER}layers.0.{suffix}": entry}).encode()
    (source / INDEX).unlink()
    with (source / "extra.safetensors").open("wb") as file:
        file.write(file_of(header))
        file.truncate(8 + len(header) + n_bytes)  # a sparse file: it takes no room
    for path in source.glob("model*"):
        path.unlink()
    stays_small(source)


def test_a_folder_of_very_many_files_is_listed_and_no_more(source: Path) -> None:
    for i in range(5000):
        (source / f"{i}.txt").touch()
    begun = time.monotonic()
    assert inspect(source).code == 0
    assert time.monotonic() - begun < 20


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "offsets"),
    [
        ([2**63], [0, 0]), ([2**32, 2**32], [0, 0]), ([2**31, 2**31, 4], [0, 0]), ([2**62, 4], [0, 0]),
        ([2**63 - 1, 2], [0, 2**64 - 4]), ([-1], [0, 0]), ([1.0], [0, 2]), ([True], [0, 2]), (["1"], [0, 2]),
        ([1], [0, 2**63]), ([1], [-2, 0]), ([1], [2, 0]), ([1], [0.0, 2.0]), ([1], [0, 2, 4]), ([[1]], [0, 2]),
        ([1] * 65, [0, 2]), (None, [0, 2]), ([1], None), ({}, [0, 2]),
    ],
)  # fmt: skip
def test_sizes_that_overflow_or_are_no_sizes_are_refused(shape: Any, offsets: Any, source: Path) -> None:
    header = json.dumps({"model.norm.weight": {"dtype": "BF16", "shape": shape, "data_offsets": offsets}}).encode()
    file = source / "model.safetensors-00001-of-00002.safetensors"
    file.write_bytes(file_of(header, b"\0\0"))
    refused(inspect(source), 3, file.name, "model.norm.weight")


def save_as_it_is(folder: Path, tensors: tiny.Tensors, config: dict[str, Any]) -> Path:
    """One file, in which a tensor without axes stays one."""
    folder.mkdir()
    save_file({n: v.copy() for n, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("shape", [(), (0,), (1, 0), (0, 24)])
@pytest.mark.parametrize(
    "name", ["input_layernorm.weight", "A_log", "conv1d.weight", "in_proj_a.weight", "linear_attn.norm.weight"]
)
def test_tensors_without_axes_or_elements_are_refused_by_name(
    shape: tuple[int, ...], name: str, tmp_path: Path
) -> None:
    made = tiny.make(vision=False, mtp=False)
    full = next(n for n in made.raw if n.endswith(name))
    tensors = dict(made.raw) | {full: np.zeros(shape, made.raw[full].dtype)}
    source = save_as_it_is(tmp_path / "source", tensors, made.config)
    assert inspect(source).code == 1
    run = convert(source, tmp_path / "out")
    refused(run, 1)
    assert full in run.err or full.replace(OUTER, "language_model.model.") in run.err


def test_tensors_without_axes_or_elements_that_nobody_needs_are_no_trouble(tmp_path: Path) -> None:
    made = tiny.make()
    odd = {"model.visual.scale": np.full((), 3, np.float32), "model.visual.empty": np.zeros((0, 3), np.float32)}
    source = save_as_it_is(tmp_path / "source", dict(made.raw) | odd, made.config)
    assert convert(source, tmp_path / "out").code == 0
    assert convert(source, tmp_path / "seeing", "--keep-vision").code == 0
    kept = tiny.load(tmp_path / "seeing")
    assert (kept["vision_tower.scale"].shape, kept["vision_tower.empty"].shape) == ((), (0, 3))


# --- what stands twice -----------------------------------------------------------------------------------------------


def test_a_key_that_stands_twice_is_refused_wherever_it_stands(source: Path) -> None:
    index, config = (source / INDEX).read_text(), (source / "config.json").read_text()
    name = next(iter(json.loads(index)["weight_map"]))
    doubled = {
        INDEX: index.replace('"weight_map": {', f'"weight_map": {{"{name}": "model.safetensors", '),
        "config.json": config.replace('"hidden_size": 24', '"hidden_size": 48, "hidden_size": 24'),
    }
    for file, text in doubled.items():
        good = (source / file).read_text()
        (source / file).write_text(text)
        refused(inspect(source), 3, file, "stands in it twice")
        (source / file).write_text(good)
    assert inspect(source).code == 0


# --- names that speak to the terminal --------------------------------------------------------------------------------


def screens(source: Path, tmp_path: Path) -> list[str]:
    """Everything that the tool can be made to say of a folder."""
    said = []
    for arguments in (
        ("inspect", source),
        ("inspect", source, "--tensors"),
        ("inspect", source, "--json", "--tensors"),
        ("inspect", source, "--lora-targets"),
        ("convert", source, tmp_path / "out", "--dry-run", "--overwrite"),
        ("convert", source, tmp_path / "out", "--mtp", "keep", "--overwrite"),
        ("verify", source),
    ):
        run = qwen35(*arguments)
        assert run.code in (0, 1, 3), run.err
        said += [run.out, run.err]
    for kind in ("html", "svg"):
        qwen35("inspect", source, "--tensors", "--report", tmp_path / f"page.{kind}")
        if (tmp_path / f"page.{kind}").exists():
            said.append((tmp_path / f"page.{kind}").read_text(encoding="utf-8"))
    return said


@pytest.mark.parametrize(
    "escape", [*ESCAPES[:2], *(pytest.param(e, marks=pytest.mark.slow) for e in ESCAPES[2:])], ids=ascii
)
def test_names_that_speak_to_the_terminal_are_shown_escaped_everywhere(escape: str, tmp_path: Path) -> None:
    made = tiny.make()
    config = json.loads(json.dumps(made.config))
    config["architectures"] = [escape]
    config[f"key {escape}"] = escape
    config["text_config"]["norm_convention"] = escape
    tensors = dict(made.raw) | {f"model.visual.{escape}.weight": np.ones((3, 5), tiny.BF16)}
    source = tiny.save(tmp_path / "source", tensors, config, metadata={"format": escape, escape: f"gguf {escape}"})
    (source / f"x{escape.replace('/', '')}.txt").write_text("x")
    save_file({f"{escape}.weight": np.ones(3, "f4")}, source / f"stray{escape}.safetensors")
    for text in screens(source, tmp_path):
        assert is_plain(text), [line for line in text.split("\n") if not line.isprintable()][:3]
    unknown = dict(tensors) | {f"{OUTER}layers.0.{escape}.weight": np.ones((3, 5), tiny.BF16)}
    for text in screens(tiny.save(tmp_path / "unknown", unknown, config), tmp_path):
        assert is_plain(text)
    for key in ("model_type", "tie_word_embeddings", "num_hidden_layers", "quantization"):
        broken = tiny.save(
            tmp_path / key, made.raw, config | {key: {"bits": escape} if key == "quantization" else escape}
        )
        for text in screens(broken, tmp_path):
            assert is_plain(text)


@pytest.mark.parametrize("escape", ESCAPES, ids=ascii)
def test_folders_that_speak_to_the_terminal_are_shown_escaped(escape: str, tmp_path: Path) -> None:
    made = tiny.make()
    source = tiny.save(tmp_path / f"so{escape}urce", made.raw, made.config)
    for text in screens(source, tmp_path):
        assert is_plain(text)
    for arguments in (
        ("inspect", tmp_path / f"absent{escape}"),
        ("convert", source, tmp_path / f"d{escape}"),
        ("convert", source, tmp_path / f"d{escape}"),
        ("verify", tmp_path / f"d{escape}", "--source", tmp_path / f"absent{escape}"),
        ("inspect", source, "--report", tmp_path / f"{escape}.doc"),
    ):
        run = qwen35(*arguments)
        assert is_plain(run.out)
        assert is_plain(run.err)


# --- code ------------------------------------------------------------------------------------------------------------


def test_importing_opens_no_socket_and_runs_no_program() -> None:
    program = """
        import sys
        asked = []
        sys.addaudithook(lambda event, arguments: asked.append(event) if event.startswith(("socket.", "subprocess.",
            "os.system", "os.exec", "os.fork", "os.posix_spawn", "urllib.", "http.client")) else None)
        import qwen35conv, qwen35conv.cli, qwen35conv.convert, qwen35conv.inspection, qwen35conv.verify
        import qwen35conv.report, qwen35conv.model, qwen35conv.kernels, qwen35conv.view
        print(sorted(set(asked) - {"socket.__new__"} if "socket" not in sys.modules else set(asked)))
    """
    import textwrap

    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_a_conversion_and_its_verification_open_no_socket(source: Path, tmp_path: Path) -> None:
    program = """
        import sys
        asked = []
        def hook(event, arguments):
            if event.startswith("socket.") and event not in ("socket.__new__",):
                asked.append(event)
        sys.addaudithook(hook)
        from typer.testing import CliRunner
        from qwen35conv.cli import app
        out = sys.argv[2]
        for line in (["inspect", sys.argv[1]], ["convert", *sys.argv[1:]], ["verify", out, "--tokens", "1,2,3"]):
            result = CliRunner().invoke(app, line)
            assert result.exit_code == 0, result.stderr
        print(asked)
    """
    import textwrap

    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), source, tmp_path / "out"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.stdout.strip() == "[]", run.stdout + run.stderr


def test_code_that_a_checkpoint_brings_along_is_neither_run_nor_imported(source: Path, tmp_path: Path) -> None:
    trap = f"import pathlib; pathlib.Path({str(tmp_path / 'sprung')!r}).touch()\n"
    for name in ("modeling_qwen3_5.py", "configuration_qwen3_5.py", "sitecustomize.py", "conftest.py", "setup.py",
                 "json.py", "numpy.py", "tokenization.py"):  # fmt: skip
        (source / name).write_text(trap)
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModel": "modeling_qwen3_5.Model", "AutoConfig": "configuration_qwen3_5.Config"}
    (source / "config.json").write_text(json.dumps(config))
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["tokenization.T", None]}}))
    for arguments in (["inspect", "."], ["convert", ".", "../out"], ["verify", "../out", "--tokens", "1,2"]):
        run = subprocess.run(
            [Path(sys.executable).with_name("qwen35"), *arguments] if Path(sys.executable).with_name("qwen35").exists()
            else [sys.executable, "-P" if sys.version_info >= (3, 11) else "-I", "-m", "qwen35conv", *arguments],
            cwd=source, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
    assert not (tmp_path / "sprung").exists()
