"""Field reports on indexes and shard sets (K), file integrity (L), unfinished downloads (M), places that are written
to (N), and memory (O).

M05, M10 and K13's download need a Hub: test_hub_reports.py. Not rebuilt: N01, a race of parallel downloads on Windows.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from field import convert, converted, head_of, inspect, qwen35, refused, shifted
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

INDEX = "model.safetensors.index.json"
OUTER = "model.language_model."


@pytest.fixture
def made() -> tiny.Made:
    return tiny.make()


@pytest.fixture
def source(made: tiny.Made, tmp_path: Path) -> Path:
    return tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def index_of(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / INDEX).read_text())
    return found


def remap(folder: Path, **changes: str) -> None:
    """Other files in the index, by tensor."""
    index = index_of(folder)
    index["weight_map"] |= changes
    (folder / INDEX).write_text(json.dumps(index))


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {
        str(f.relative_to(folder)): (f.read_bytes(), f.stat().st_mtime_ns) for f in folder.rglob("*") if f.is_file()
    }


# --- K: indexes and shard sets ---------------------------------------------------------------------------------------


def test_k01_an_index_copied_from_elsewhere_stops_and_can_be_ignored(made: tiny.Made, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=2)
    save_file({k: v for f in shards(source) for k, v in load_file(f).items()}, source / "model.safetensors")
    for file in shards(source):
        if file.name != "model.safetensors":
            file.unlink()
    refused(convert(source, tmp_path / "out"), 3, "incomplete: 2 of 2 shards that the index names", "--ignore-index")
    assert convert(source, tmp_path / "out", "--ignore-index").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert set(index_of(tmp_path / "out")["weight_map"]) == set(made.canonical)


STRAYS: dict[str, Callable[[tiny.Made], tiny.Tensors]] = {
    "helpers": lambda made: {"helper.scale": np.ones((3, 5), np.float32), "loss.weight": np.ones(7, tiny.BF16)},
    "other values": lambda made: {n: v * 2 for n, v in made.raw.items() if v.dtype == tiny.BF16},
    "four bits": lambda made: {f"{OUTER}layers.0.mlp.up_proj.scales": np.ones((3, 5), np.float16)},
    "gamma": lambda made: shifted(made.raw, 1),
    "an adapter": lambda made: {f"base_model.model.{OUTER}layers.0.mlp.up_proj.lora_A.weight": np.ones((3, 5), "f4")},
}


@pytest.mark.parametrize("stray", STRAYS.values(), ids=STRAYS)
@pytest.mark.parametrize("file", ["model.safetensors", "consolidated.safetensors", "a/model.safetensors"])
def test_k02_k04_k13_what_lies_beside_the_index_takes_no_part(
    stray: Callable[[tiny.Made], tiny.Tensors], file: str, source: Path, made: tiny.Made, tmp_path: Path
) -> None:
    (source / file).parent.mkdir(exist_ok=True)
    save_file(stray(made), source / file)
    found = inspect(source)
    assert (found.code, found.generation) == (0, "raw")
    beside = found.document["checkpoint"]
    assert file in beside["strays"] + beside["sidecars"]
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.parametrize(
    "content", [b"not a header", b"", b"\xff" * 64, b"version https://git-lfs.github.com/spec/v1\n"]
)
def test_k11_a_broken_leftover_beside_the_index_is_only_a_warning(
    content: bytes, source: Path, made: tiny.Made, tmp_path: Path
) -> None:
    (source / "model.safetensors").write_bytes(content)
    found = inspect(source)
    assert found.code == 0
    assert "stray-broken" in found.codes
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


def test_k05_the_index_is_made_anew_and_written_last(source: Path, made: tiny.Made, tmp_path: Path) -> None:
    for name in (INDEX, "pytorch_model.bin.index.json", "consolidated.safetensors.index.json"):
        shutil.copy(source / INDEX, source / "copy") if name == INDEX else (source / name).write_text("{}")
    (source / "copy").unlink()
    assert convert(source, tmp_path / "out").code == 0
    index = index_of(tmp_path / "out")
    assert set(index["weight_map"]) == set(made.canonical)
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in made.canonical.values())
    for name, file in index["weight_map"].items():
        assert name in load_file(tmp_path / "out" / file)
    assert not (tmp_path / "out" / "pytorch_model.bin.index.json").exists()
    assert not (tmp_path / "out" / "consolidated.safetensors.index.json").exists()


def twice(folder: Path, *, equal: bool) -> str:
    """A copy of one tensor in another listed shard; its name."""
    first, second, *_ = shards(folder)
    name = next(n for n, v in load_file(first).items() if n.startswith(OUTER) and v.ndim == 2)
    value = load_file(first)[name]
    save_file({**load_file(second), name: value if equal else value * 2}, second, {"format": "pt"})
    return name


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("listed", ["first", "second"])
def test_k07_k08_of_two_copies_the_one_that_the_index_names_is_read(
    equal: bool, listed: str, source: Path, made: tiny.Made, tmp_path: Path
) -> None:
    name = twice(source, equal=equal)
    file = shards(source)[listed == "second"].name
    remap(source, **{name: file})
    assert "index-duplicate" in inspect(source).codes
    assert convert(source, tmp_path / "out").code == 0
    got = tiny.load(tmp_path / "out")[name.replace(OUTER, "language_model.model.")]
    np.testing.assert_array_equal(got, load_file(source / file)[name])


@pytest.mark.parametrize("equal", [True, False])
def test_k07_without_an_index_equal_copies_are_a_warning_and_others_stop(
    equal: bool, source: Path, tmp_path: Path
) -> None:
    name = twice(source, equal=equal)
    (source / INDEX).unlink()
    run = convert(source, tmp_path / "out")
    if equal:
        assert run.code == 0
        assert "equal-copies" in run.codes
    else:
        refused(run, 3, name, shards(source)[0].name, shards(source)[1].name)


def test_k10_a_folder_with_older_shards_is_refused_and_overwritten_whole(
    source: Path, made: tiny.Made, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    refused(convert(source, out), 4, "exists", "--overwrite")
    out.rmdir()
    assert convert(source, out).code == 0
    save_file(
        {"language_model.model.layers.7.mlp.up_proj.weight": np.ones(3, "f4")}, out / "model-00009-of-00009.safetensors"
    )
    refused(convert(source, out), 4, "exists", "--overwrite")
    assert convert(source, out, "--overwrite").code == 0
    assert {f.name for f in shards(out)} == set(index_of(out)["weight_map"].values())
    tiny.assert_same(tiny.load(out), made.canonical)


@pytest.mark.parametrize("index", [True, False])
def test_k14_a_whole_checkpoint_under_names_of_a_larger_set_is_read_on_request(
    index: bool, made: tiny.Made, tmp_path: Path
) -> None:
    source = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3, index=index)
    for i, file in enumerate(shards(source)):
        file.rename(source / f"model-{i + 1:05d}-of-00006.safetensors")
    if index:
        names = {n: f"model-{i % 6 + 1:05d}-of-00006.safetensors" for i, n in enumerate(made.raw)}
        (source / INDEX).write_text(json.dumps({"weight_map": names}))
    refused(convert(source, tmp_path / "out"), 3, "incomplete", "--ignore-index")
    assert convert(source, tmp_path / "out", "--ignore-index").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


# --- L: file integrity -----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(short=st.integers(1, 2000), which=st.integers(0, 2), longer=st.booleans())
def test_l01_l11_m08_a_file_of_another_length_than_its_header_says_is_named(
    short: int, which: int, longer: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = tiny.make(vision=False, mtp=False)
    home = tmp_path_factory.mktemp("l01")
    source = tiny.save(home / "source", made.raw, made.config, n_shards=3)
    file = shards(source)[which]
    size = file.stat().st_size
    os.truncate(file, size + short if longer else size - min(short, size))
    for run in (inspect(source), convert(source, home / "out")):
        refused(run, 3, file.name)
    assert not list(home.glob("out*"))


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_l02_a_pointer_among_shards_is_recognised_with_the_fix(which: int, newline: bytes, source: Path) -> None:
    lines = [b"version https://git-lfs.github.com/spec/v1", b"oid sha256:" + b"a" * 64, b"size 1746942600", b""]
    file = shards(source)[which]
    file.write_bytes(newline.join(lines))
    refused(inspect(source), 3, file.name, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("file", ["config.json", INDEX, "tokenizer.json"])
def test_l02_a_pointer_in_place_of_a_side_file_is_recognised_too(file: str, source: Path, tmp_path: Path) -> None:
    (source / file).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:aa\nsize 7\n")
    refused(convert(source, tmp_path / "out"), 3, file, "Git LFS pointer", "git lfs pull")


@pytest.mark.parametrize("n_header", [32_000_001, 100_000_001, 126_000_000, 2**40, 2**64 - 1])
def test_l04_a_header_over_the_limit_is_refused_with_the_limit(n_header: int, source: Path) -> None:
    file = shards(source)[1]
    with file.open("wb") as opened:
        opened.write(n_header.to_bytes(8, "little"))
        opened.truncate(min(n_header, 126_000_000) + 64)  # a sparse file
    refused(inspect(source), 3, file.name, str(n_header), "limit of 32000000")


def rewritten(file: Path, change: Callable[[str], str]) -> None:
    """The file with its header's text changed."""
    raw = file.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    text = change(raw[8 : 8 + n].decode()).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + n :])


@pytest.mark.parametrize("inside", [False, True])
def test_l05_a_key_that_stands_twice_in_a_header_is_named(inside: bool, source: Path) -> None:
    file = shards(source)[0]
    if inside:
        rewritten(file, lambda text: text.replace('"dtype":"BF16"', '"dtype":"BF16","dtype":"BF16"', 1))
    else:
        name = next(iter(load_file(file)))
        entry = '{"dtype":"BF16","shape":[0],"data_offsets":[0,0]}'
        rewritten(file, lambda text: text.rstrip()[:-1] + f',"{name}":{entry}' + "}")
    refused(inspect(source), 3, file.name, "duplicate key", "dtype" if inside else name)


@pytest.mark.parametrize("form", ["null", "{}", '{"format": "pt"}', '{"training_step": "12"}', "absent"])
def test_l07_l08_metadata_may_be_anything_of_its_kind_or_absent(
    form: str, made: tiny.Made, source: Path, tmp_path: Path
) -> None:
    for file in shards(source):
        entry = '"__metadata__":{"format":"pt"},'
        assert entry in file.read_bytes()[:200].decode(errors="replace")
        rewritten(file, lambda t: t.replace(entry, "" if form == "absent" else f'"__metadata__":{form},'))  # noqa: B023
    found = inspect(source)
    assert (found.code, found.generation) == (0, "raw")
    assert convert(source, tmp_path / "out").code == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.parametrize("form", ["[]", "7", '"pt"', '{"format": 7}', '{"format": null}', '{"format": {"a": "b"}}'])
def test_l07_metadata_of_another_kind_is_one_error(form: str, source: Path) -> None:
    file = shards(source)[0]
    rewritten(file, lambda text: text.replace('"__metadata__":{"format":"pt"}', f'"__metadata__":{form}'))
    refused(inspect(source), 3, file.name, "__metadata__ must map strings to strings")


@pytest.mark.parametrize(
    "suffix", ["up_proj.weight", "input_layernorm.weight", "embed_tokens.weight", "A_log", "fc.weight"]
)
@pytest.mark.parametrize("every", [True, False])
def test_l10_tensors_without_elements_are_a_partitioned_save(suffix: str, every: bool, tmp_path: Path) -> None:
    made = tiny.make(vision=False)
    tensors = dict(made.raw)
    names = [n for n in tensors if n.endswith(suffix)]
    for name in names if every else names[:1]:
        tensors[name] = tensors[name].reshape(-1)[:0]
    source = tiny.save(tmp_path / "source", tensors, made.config)
    refused(convert(source, tmp_path / "out", "--mtp", "sidecar"), 1, "partitioned save", "ZeRO-3")


# --- M: unfinished downloads -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("left", [1, 2])
def test_m01_m02_absent_shards_are_an_incomplete_download_and_named(
    index: bool, left: int, made: tiny.Made, tmp_path: Path
) -> None:
    source = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=3, index=index)
    gone = shards(source)[left:]
    for file in gone:
        file.unlink()
    run = inspect(source)
    refused(run, 3, "incomplete", str(len(gone)), *(file.name for file in gone))
    assert OUTER not in run.err
    assert len(run.err) < 500


def test_m01_a_whole_shard_of_missing_tensors_is_no_list_of_hundreds(tmp_path: Path) -> None:
    made = tiny.make(tiny.with_layers(32), vision=False, mtp=False, tied=True)
    half = {n: v for i, (n, v) in enumerate(sorted(made.raw.items())) if i % 2 or "layernorm" in n}
    source = tiny.save(tmp_path / "source", half, made.config, n_shards=1, index=False)
    run = convert(source, tmp_path / "out")
    refused(run, 1, "tensors that config.json implies are missing", "incomplete", " more")
    assert len(run.err) < 700


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("partial", [None, "model.safetensors.incomplete", "model-00001-of-00003.safetensors.aria2"])
def test_m04_a_folder_without_shards_says_so(index: bool, partial: str | None, source: Path) -> None:
    for file in shards(source):
        file.unlink()
    if not index:
        (source / INDEX).unlink()
    if partial:
        (source / partial).write_bytes(b"x")
    told = "3 of 3 shards that the index names are missing" if index else "no .safetensors file in it"
    refused(inspect(source), 3, told, *([partial] if partial else []))


def test_m07_a_full_disk_is_said_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True)
    if mounted.returncode:
        pytest.skip("may not mount a small file system here")
    try:
        dry = convert(source, disk / "out", "--dry-run").document["preflight"]
        assert dry["n_bytes_written"] > dry["n_bytes_free"]
        refused(convert(source, disk / "out"), 4, "needs", "has", "free")
        assert not list(disk.iterdir())
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize(
    "spec", ["./models/qwen", "models/Qwen3.5-4B/", "/nowhere/at/all", "~/no-such-model", "../gone", "C:\\models\\qwen"]
)
def test_m11_a_path_that_is_absent_is_said_to_be(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(qwen35("inspect", spec), 3, "no such folder or file", "path")


# --- N: places that are written to -----------------------------------------------------------------------------------


def test_n02_a_cache_of_copies_and_one_of_links_give_the_same(source: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "abc"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for i, file in enumerate(sorted(source.iterdir())):
        shutil.copy(file, blobs / f"{i:064x}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i:064x}")
    assert convert(source, tmp_path / "a").code == convert(snapshot, tmp_path / "b").code == 0
    ours, theirs = ({f.name: f.read_bytes() for f in (tmp_path / x).iterdir() if f.name != "qwen35.json"} for x in "ab")
    assert ours == theirs


@pytest.mark.parametrize("way", ["itself", "dots", "link", "inside", "link to the parent", "around", "overwrite"])
def test_n04_n05_n07_the_source_is_no_destination_however_it_is_reached(way: str, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "up").symlink_to(tmp_path)
    target = {
        "itself": source,
        "dots": source / ".." / "source",
        "link": tmp_path / "link",
        "inside": source / "converted",
        "link to the parent": tmp_path / "up" / "source",
        "around": tmp_path,
        "overwrite": source,
    }[way]
    for options in ([], ["--overwrite"]):
        run = convert(source, target, *options)
        refused(run, 4, "error")
    assert contents(source) == before
    assert not (tmp_path / "source.partial").exists()


@pytest.mark.parametrize("mtp", ["drop", "keep", "sidecar"])
def test_n08_no_file_of_the_source_is_edited(mtp: str, source: Path, tmp_path: Path) -> None:
    before = contents(source)
    for file in source.iterdir():
        file.chmod(0o444)
    assert convert(source, tmp_path / "out", "--mtp", mtp).code == 0
    assert contents(source) == before
    for file in (tmp_path / "out").iterdir():
        assert file.stat().st_nlink == 1
        assert not file.is_symlink()
        file.write_bytes(b"edited")
    assert contents(source) == before


def test_n08_a_head_beside_a_converted_trunk_stays_where_it_is(made: tiny.Made, tmp_path: Path) -> None:
    source = tiny.save(tmp_path / "source", converted(made, head=None), made.config)
    save_file(head_of(made.raw), source / "mtp.safetensors")
    before = contents(source)
    assert convert(source, tmp_path / "out").code == 0
    assert contents(source) == before
    assert not (tmp_path / "out" / "mtp.safetensors").exists()


# --- O: memory -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize("experts", ["fused", "single"])
def test_o01_o02_experts_of_many_times_the_memory_are_stacked_and_split(experts: str, tmp_path: Path) -> None:
    sizes = tiny.Sizes(hidden=640, experts=96, expert_size=352, layers=4, vocab=70)
    made = tiny.make(sizes, experts=experts, vision=False, mtp=False)
    source = tiny.save(tmp_path / "source", made.raw, made.config)
    n_bytes = sum(value.nbytes for value in made.raw.values())
    assert n_bytes > 450 << 20
    program = (
        "import sys; from pathlib import Path; from qwen35conv.cli import app\n"
        "try: app(sys.argv[1:])\n"
        "finally: print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0], file=sys.stderr)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program, "convert", source, tmp_path / "out", "--no-verify", "--json"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    peak = int(run.stderr.split()[-1]) << 10
    assert peak < 200 << 20, f"{peak:,} bytes for {n_bytes:,}"
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
