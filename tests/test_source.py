"""Folders as people have them: shard sets, indexes, strays, and everything that can be missing or wrong."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from qwen35conv.errors import CheckpointError, Qwen35ConvError, SourceError
from qwen35conv.facts.checkpoint import Checkpoint
from qwen35conv.facts.header import Dtype
from qwen35conv.reading import read_checkpoint, values_of
from qwen35conv.source import open_source

INDEX = "model.safetensors.index.json"
FIRST, SECOND = (f"model.safetensors-0000{i}-of-00002.safetensors" for i in (1, 2))


def read(folder: Path, *, ignore_index: bool = False) -> Checkpoint:
    return read_checkpoint(open_source(str(folder)), ignore_index=ignore_index)


def codes(checkpoint: Checkpoint) -> set[str]:
    return {finding.code for finding in checkpoint.findings}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tiny.make()
    return tiny.save(tmp_path / "source", made.raw, made.config)


def test_a_folder_is_read_by_its_headers_and_gains_alone(folder: Path) -> None:
    checkpoint = read(folder)
    raw = tiny.make().raw
    assert {tensor.name for tensor in checkpoint.tensors} == set(raw)
    gains = {gain.name: gain for gain in checkpoint.gains}
    assert len([name for name in gains if "linear_attn" not in name and not name.startswith("mtp")]) == 4 * 2 + 2 + 1
    for name, gain in gains.items():
        np.testing.assert_array_equal(gain.values, raw[name].astype(np.float32))


def test_a_tensors_bytes_lie_where_it_says(folder: Path) -> None:
    raw = tiny.make().raw
    for tensor in read(folder).tensors:
        assert (folder / tensor.file).read_bytes()[tensor.begin : tensor.end] == raw[tensor.name].tobytes()


def test_one_file_is_a_source_without_its_neighbours(tmp_path: Path) -> None:
    made = tiny.make()
    folder = tiny.save(tmp_path / "s", made.raw, made.config, n_shards=1, index=False)
    save_file({"junk": np.zeros(3)}, folder / "other.safetensors")
    file = next(folder.glob("model*.safetensors"))
    assert len(read(file).tensors) == len(made.raw)


def test_links_into_a_cache_are_followed(folder: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for i, file in enumerate(sorted(folder.iterdir())):
        blob = file.rename(tmp_path / f"blob{i}")
        (snapshot / file.name).symlink_to(blob)
    assert len(read(snapshot).tensors) == len(tiny.make().raw)


def _missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()


def _dangling_link(folder: Path) -> None:
    (folder / SECOND).unlink()
    (folder / SECOND).symlink_to(folder / "nowhere")


def _truncated(folder: Path) -> None:
    with (folder / SECOND).open("r+b") as file:
        file.truncate((folder / SECOND).stat().st_size - 5)


def _empty(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"")


def _pointer(folder: Path) -> None:
    (folder / SECOND).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n")


def _path_in_index(folder: Path) -> None:
    _map(folder, lambda weight_map: weight_map | {next(iter(weight_map)): "../" + FIRST})


def _backslash_in_index(folder: Path) -> None:
    _map(folder, lambda weight_map: weight_map | {next(iter(weight_map)): "a\\" + FIRST})


def _promised_tensor(folder: Path) -> None:
    _map(folder, lambda weight_map: weight_map | {"model.language_model.layers.9.mlp.up_proj.weight": FIRST})


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _broken_index(folder: Path) -> None:
    (folder / INDEX).write_text('{"weight_map": 3}')


def _fifo(folder: Path) -> None:
    (folder / SECOND).unlink()
    os.mkfifo(folder / SECOND)


def _only_bin(folder: Path) -> None:
    for file in (FIRST, SECOND, INDEX):
        (folder / file).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"x")


def _map(folder: Path, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).write_text(json.dumps({"weight_map": change(index["weight_map"])}))


UNREADABLE: list[tuple[Callable[[Path], None], str]] = [
    (_missing_shard, f"1 of 2 shards that the index names are missing: {SECOND}"),
    (_dangling_link, f"1 of 2 shards that the index names are missing: {SECOND}"),
    (_truncated, f"{SECOND}: truncated"),
    (_empty, f"{SECOND}: the file is empty"),
    (_pointer, f"{SECOND}: a Git LFS pointer"),
    (_path_in_index, "expected a file name in the same folder"),
    (_backslash_in_index, "expected a file name in the same folder"),
    (_promised_tensor, "1 tensors that it names stand in no shard: model.language_model.layers.9.mlp.up_proj.weight"),
    (_no_config, "no config.json"),
    (_broken_config, "config.json: not valid JSON"),
    (_broken_index, "no weight_map"),
    (_fifo, "1 of 2 shards"),
    (_only_bin, "only PyTorch .bin (pytorch_model.bin)"),
]


@pytest.mark.parametrize(("damage", "message"), UNREADABLE, ids=[damage.__name__ for damage, _ in UNREADABLE])
def test_what_cannot_be_read_is_one_error_with_exit_3(
    folder: Path, damage: Callable[[Path], None], message: str
) -> None:
    damage(folder)
    with pytest.raises(SourceError) as caught:
        read(folder)
    assert message in str(caught.value)
    assert caught.value.exit_code == 3


def test_shards_are_held_to_what_their_names_say(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / FIRST).unlink()
    with pytest.raises(SourceError, match=f"1 shards that the others' names speak of are missing: {FIRST}"):
        read(folder)
    with pytest.raises(SourceError, match="one of 2 shards"):
        open_source(str(folder / SECOND))


def test_a_name_that_is_no_text_is_an_error_only_for_a_shard(folder: Path) -> None:
    (folder / os.fsdecode(b"\xff.txt")).write_bytes(b"")
    assert len(read(folder).tensors) == len(tiny.make().raw)
    (folder / os.fsdecode(b"\xff.safetensors")).write_bytes(b"")
    with pytest.raises(SourceError, match="not valid UTF-8"):
        read(folder)


def test_a_folder_of_checkpoints_is_told_from_one(folder: Path) -> None:
    (folder / "qwen35-source-gains.bin").write_bytes(b"")
    with pytest.raises(SourceError, match=f"only in folders below it .{folder.name}") as caught:
        read_checkpoint(open_source(str(folder.parent)))
    assert caught.value.hint == "give the checkpoint's own folder"


@pytest.mark.parametrize("spec", ["~nosuchuser/x", "no/such/folder", "./typo", "a\0b", "x" * 5000], ids=range(5))
def test_a_path_that_is_not_there_says_so(spec: str) -> None:
    with pytest.raises(SourceError):
        open_source(spec)


def test_a_tensor_that_another_listed_shard_holds_is_a_finding(folder: Path) -> None:
    _map(folder, lambda weight_map: {name: FIRST if file == SECOND else file for name, file in weight_map.items()}
         | {next(name for name, file in weight_map.items() if file == SECOND): SECOND})  # fmt: skip
    checkpoint = read(folder)
    assert codes(checkpoint) == {"index-misplaced"}
    assert len(checkpoint.tensors) == len(tiny.make().raw)


def test_of_two_copies_the_one_that_the_index_names_is_read(folder: Path) -> None:
    name = "model.language_model.norm.weight"
    wanted = json.loads((folder / INDEX).read_text())["weight_map"][name]
    other = FIRST if wanted == SECOND else SECOND
    tensors = load_file(folder / other)
    save_file(tensors | {name: np.full(24, 9, tiny.BF16)}, folder / other)
    checkpoint = read(folder)
    assert codes(checkpoint) == {"index-duplicate"}
    assert next(tensor.file for tensor in checkpoint.tensors if tensor.name == name) == wanted


def test_without_an_index_equal_copies_are_a_finding_and_others_stop(folder: Path) -> None:
    (folder / INDEX).unlink()
    name = "model.language_model.norm.weight"
    held = next(file for file in (FIRST, SECOND) if name in load_file(folder / file))
    other = FIRST if held == SECOND else SECOND
    tensors = load_file(folder / other)
    value = load_file(folder / held)[name]
    save_file(tensors | {name: value}, folder / other)
    assert codes(read(folder)) == {"equal-copies"}
    value = value.copy()
    value[-1] += np.array(1, tiny.BF16)
    save_file(tensors | {name: value}, folder / other)
    with pytest.raises(SourceError, match="different values"):
        read(folder)


def test_files_beside_the_index_take_no_part(folder: Path) -> None:
    save_file({"model.language_model.norm.weight": np.zeros(24, tiny.BF16)}, folder / "old.safetensors")
    (folder / "broken.safetensors").write_bytes(b"junk")
    (folder / "sub").mkdir()
    save_file({"a": np.zeros(3)}, folder / "sub" / "model.safetensors")
    checkpoint = read(folder)
    assert set(checkpoint.strays) == {"old.safetensors", "broken.safetensors", "sub/model.safetensors"}
    assert codes(checkpoint) == {"stray-broken"}


def test_an_index_that_is_stale_can_be_ignored(folder: Path) -> None:
    _promised_tensor(folder)
    assert len(read(folder, ignore_index=True).tensors) == len(tiny.make().raw)


@pytest.mark.parametrize("place", ["mtp.safetensors", "mtp/weights.safetensors"])
@pytest.mark.parametrize("index", [True, False], ids=["index", "no index"])
def test_a_draft_head_in_a_file_of_its_own_is_a_sidecar(tmp_path: Path, place: str, index: bool) -> None:
    made = tiny.make()
    trunk = {name: value for name, value in made.raw.items() if not name.startswith("mtp.")}
    head = {name: value for name, value in made.raw.items() if name.startswith("mtp.")}
    folder = tiny.save(tmp_path / "s", trunk, made.config, index=index)
    (folder / place).parent.mkdir(exist_ok=True)
    save_file(head, folder / place)
    (sidecar,) = read(folder).sidecars
    assert (sidecar.file, sidecar.n_tensors, len(sidecar.gains)) == (place, len(head), 7)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_models_stored_head_is_compared(tmp_path: Path, equal: bool) -> None:
    made = tiny.make(tied=True)
    head = made.raw["model.language_model.embed_tokens.weight"].copy()
    if not equal:
        head[-1, -1] += np.array(1, tiny.BF16)
    folder = tiny.save(tmp_path / "s", made.raw | {"lm_head.weight": head}, made.config)
    assert read(folder).head_equals_embeddings is equal


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    made = tiny.make()
    norm = made.raw["model.language_model.norm.weight"].copy()
    norm[3] = np.nan
    decay = made.raw["model.language_model.layers.0.linear_attn.A_log"].copy()
    decay[2] = -np.inf
    changed = {"model.language_model.norm.weight": norm, "model.language_model.layers.0.linear_attn.A_log": decay}
    checkpoint = read(tiny.save(tmp_path / "s", made.raw | changed, made.config))
    assert checkpoint.not_finite == ("model.language_model.norm.weight",)
    assert codes(checkpoint) == {"a-log-infinite"}


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    tensors = {"base_model.model.model.layers.0.mlp.up_proj.lora_A.weight": np.zeros((3, 4), np.float32)}
    with pytest.raises(CheckpointError, match="an adapter is not a checkpoint"):
        read(tiny.save(tmp_path / "s", tensors, tiny.make_config(tiny.SMALL), n_shards=1))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="none of its 1 tensors"):
        read(tiny.save(tmp_path / "s", {"wte": np.zeros(3)}, tiny.make_config(tiny.SMALL), n_shards=1))


@pytest.mark.parametrize("dtype", [Dtype.BF16, Dtype.F16, Dtype.F32], ids=str)
def test_stored_values_widen_exactly(dtype: Dtype) -> None:
    numpy = {Dtype.BF16: tiny.BF16, Dtype.F16: np.dtype("f2"), Dtype.F32: np.dtype("f4")}[dtype]
    bits = np.arange(2**16, dtype="u2") if dtype is not Dtype.F32 else np.arange(0, 2**32 - 1, 65521, dtype="u4")
    want = bits.view(numpy).astype(np.float32)
    np.testing.assert_array_equal(values_of(dtype, bits.tobytes()), want)


def test_deep_folders_loops_and_unreadable_ones_are_no_trap(folder: Path) -> None:
    (folder / "loop").symlink_to(folder)
    deep = folder / "a/b/c/d/e"
    deep.mkdir(parents=True)
    (deep / "x.safetensors").write_bytes(struct.pack("<Q", 2) + b"{}")
    assert read(folder).strays == ()


def test_a_source_that_vanishes_is_an_error(folder: Path) -> None:
    source = open_source(str(folder))
    assert FIRST in source.listing
    (folder / FIRST).unlink()
    with pytest.raises(Qwen35ConvError, match="can't be read"):
        read_checkpoint(source)
