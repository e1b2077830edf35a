"""A result on its way to the Hub: the real client against a real server, and the card as a pure function."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny
from hub_server import Fault, HubServer, serving
from hub_tool import REPO, SIZES, Tool, files_of, told
from huggingface_hub import ModelCard, ModelCardData
from safetensors import safe_open
from safetensors.numpy import save_file

from qwen35conv.hub.card import Front, build_card, command_of, parse_front

NEW = "owner/model-mlx"
README = """---
license: other
license_name: qwen
license_link: https://huggingface.co/owner/model/blob/main/LICENSE
language: [en, zh]
library_name: transformers
tags: [transformers, qwen3_5, "a: tag"]
base_model: owner/base
---
# The source
"""


@pytest.fixture
def hub(hub: HubServer) -> HubServer:
    hub.token = "hf_write"
    return hub


@pytest.fixture
def tool(tool: Tool) -> Tool:
    tool.environment["HF_TOKEN"] = "hf_write"
    return tool


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make(SIZES)
    folder = tiny.save(tmp_path_factory.mktemp("push") / "model", made.raw, made.config)
    (folder / "README.md").write_text(README)
    (folder / "LICENSE").write_text("Qwen License\n")
    return folder


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory, source: Path) -> Path:
    """A result of a repository: a conversion against a server of its own."""
    folder = tmp_path_factory.mktemp("push")
    with serving() as server:
        server.publish(REPO, source)
        assert Tool(server, folder / "home")("convert", REPO, folder / "out").returncode == 0
    return folder / "out"


def sent(hub: HubServer) -> dict[str, bytes]:
    return {name: blob.read(0, blob.n_bytes) for name, blob in hub.repos[NEW].commits[-1][1].items()}


def test_a_result_is_published_with_a_card_made_from_its_receipt(hub: HubServer, tool: Tool, result: Path) -> None:
    found = tool.json("push", result, NEW, "--private")
    files = sent(hub)
    card = files.pop("README.md").decode()
    assert files == {path.name: path.read_bytes() for path in result.iterdir() if path.name != "README.md"}
    assert hub.repos[NEW].private
    assert len(hub.repos[NEW].commits) == 1
    assert found["commit"] == hub.repos[NEW].commits[0][0]
    assert found["card"] == card
    commit = json.loads((result / "qwen35.json").read_text())["source"]["commit"]
    head = head_of(card)
    assert (head.base_model, head.library_name, head.pipeline_tag) == (REPO, "mlx", "text-generation")
    assert (head.license, head.license_name) == ("other", "qwen")
    assert head.tags == ["mlx", "qwen3_5", "a: tag"]
    assert head.language == ["en", "zh"]
    for text in (f"qwen35 convert --revision {commit} {REPO} model-mlx", f'load("{NEW}")', "gains shifted", "**raw**"):
        assert text in card


@pytest.mark.slow
def test_a_published_result_is_read_from_the_hub_as_canonical(hub: HubServer, tool: Tool, result: Path) -> None:
    assert tool("push", result, NEW).returncode == 0
    found = tool.json("inspect", NEW)
    assert (found["verdict"], found["changes"]) == ("canonical", False)


def test_a_dry_run_shows_card_and_files_and_sends_nothing(hub: HubServer, tool: Tool, result: Path) -> None:
    run = tool("push", result, NEW, "--dry-run")
    assert run.returncode == 0, run.stderr
    for text in ("base_model: owner/model", "library_name: mlx", "model-00001-of-00002.safetensors", "LICENSE"):
        assert text in run.stdout
    assert hub.asked == []


@pytest.mark.slow
def test_a_conversion_is_published_when_it_is_done(hub: HubServer, tool: Tool, source: Path, tmp_path: Path) -> None:
    hub.publish(REPO, source)
    dry = tool.json("convert", REPO, tmp_path / "out", "--push-to-hub", NEW, "--dry-run")
    assert NEW not in hub.repos
    assert not (tmp_path / "out").exists()
    found = tool.json("convert", REPO, tmp_path / "out", "--push-to-hub", NEW)
    assert found["push"]["commit"] == hub.repos[NEW].commits[0][0]
    assert sent(hub)["README.md"].decode() == found["push"]["card"] == dry["push"]["card"]
    assert [one["file"] for one in found["push"]["files"]] == [one["file"] for one in dry["push"]["files"]]
    assert not hub.repos[NEW].private


def test_a_result_that_fails_its_verification_is_never_sent(
    hub: HubServer, tool: Tool, result: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(result, tmp_path / "out")
    change(folder, lambda name, value: value + np.ones(1, value.dtype) if "layernorm" in name else value)
    told(tool("push", folder, NEW), 1, "fails its verification", "8 gains are not what was computed")
    (folder / "qwen35-source-gains.bin").unlink()
    told(tool("push", folder, NEW), 1, "does not hold the gains")
    assert hub.asked == []


@pytest.mark.slow
def test_a_result_whose_values_are_broken_is_never_sent(
    hub: HubServer, tool: Tool, result: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(result, tmp_path / "out")
    change(folder, lambda name, value: np.full_like(value, np.nan) if name.endswith("in_proj_z.weight") else value)
    told(tool("push", folder, NEW), 1, "fails its verification", "values", "nothing was sent")
    assert hub.asked == []


def change(folder: Path, edited: Callable[[str, np.ndarray], np.ndarray]) -> None:
    """Put other values into a result's shards, where they stand."""
    for file in sorted(folder.glob("model-*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        raw = bytearray(file.read_bytes())
        data = 8 + int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8:data])
        for name, value in tensors.items():
            begin, end = header[name]["data_offsets"]
            raw[data + begin : data + end] = edited(name, value).tobytes()
        file.write_bytes(raw)


@pytest.mark.slow
def test_only_a_whole_result_is_sent(hub: HubServer, tool: Tool, source: Path, result: Path, tmp_path: Path) -> None:
    told(tool("push", source, NEW), 3, "no qwen35.json in it")
    folder = shutil.copytree(result, tmp_path / "out")
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-4])
    told(tool("push", folder, NEW), 3, "model-00002-of-00002.safetensors")
    shard.unlink()
    told(tool("push", folder, NEW), 3, "model-00002-of-00002.safetensors")
    run = tool("push", result, "no id")
    assert (run.returncode, hub.asked) == (2, [])


@pytest.mark.slow
def test_a_repository_that_holds_another_model_is_left_alone(
    hub: HubServer, tool: Tool, source: Path, result: Path, tmp_path: Path
) -> None:
    commit = hub.publish(NEW, source)
    told(tool("push", result, NEW), 4, "holds other weights", "model.safetensors-00001-of-00002.safetensors")
    hub.publish(REPO, source)
    told(tool("convert", REPO, tmp_path / "out", "--push-to-hub", NEW), 4, "holds other weights")
    assert not (tmp_path / "out").exists()
    assert hub.repos[NEW].commits[-1][0] == commit


@pytest.mark.slow
def test_without_the_right_to_write_nothing_begins(
    hub: HubServer, tool: Tool, source: Path, result: Path, tmp_path: Path
) -> None:
    told(tool("push", result, NEW, HF_TOKEN=""), 4, "not logged in", "hf auth login")
    told(tool("push", result, NEW, HF_TOKEN="hf_wrong"), 4, "token")
    hub.publish(REPO, source)
    told(tool("convert", REPO, tmp_path / "out", "--push-to-hub", NEW, HF_TOKEN=""), 4, "not logged in")
    assert not (tmp_path / "out").exists()
    hub.faults = [Fault("/repos/create", status=403, headers={"X-Error-Message": "You have no right to write here"})]
    told(tool("push", result, NEW), 4, "You have no right to write here")


@pytest.mark.slow
def test_an_upload_that_broke_is_taken_up_again(hub: HubServer, tool: Tool, result: Path) -> None:
    hub.faults = [Fault("/lfs/", after=2, times=9, status=400)]
    told(tool("push", result, NEW), 4, f"`qwen35 push {result} {NEW}` goes on")
    assert hub.repos[NEW].commits == []
    hub.faults = [Fault("/lfs/", times=1, status=503, headers={"Retry-After": "0"})]
    arrived = set(hub.uploads)
    assert len(arrived) == 1
    hub.forget_requests()
    assert tool("push", result, NEW).returncode == 0
    assert not any(oid in one.path for one in hub.asked for oid in arrived)
    assert sent(hub)["model-00001-of-00002.safetensors"] == (result / "model-00001-of-00002.safetensors").read_bytes()


@pytest.mark.slow
def test_odd_answers_to_an_upload_are_one_error(hub: HubServer, tool: Tool, result: Path) -> None:
    for where in ("/api/whoami", "/repos/create", "/preupload/", "/objects/batch", "/commit/"):
        for body in (b"[]", b"<html>", b"{}"):
            answer = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
            hub.faults = [Fault(where, answer=answer + body, times=9)]
            run = tool("push", result, NEW)
            if run.returncode == 0:  # nobody needed what was odd
                assert sent(hub)["config.json"] == (result / "config.json").read_bytes()
            else:
                told(run, 4)
            hub.repos.pop(NEW, None)


EDITS: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "a key of config.json": (lambda out: rewrite(out / "config.json", foo=1), 1, "config.json: changed since"),
    "the index": (lambda out: rewrite(out / "model.safetensors.index.json", weight_map={"a": SHARD}), 1, "changed"),
    "another shard": (lambda out: shutil.copy(out / SHARD, out / "model-00003-of-00002.safetensors"), 1, "model-00003"),
    "a head": (lambda out: save_file({"mtp.norm.weight": np.ones(3)}, out / "mtp.safetensors"), 1, "mtp.safetensors"),
    "code": (lambda out: (out / "modeling.py").write_text("import os"), 1, "modeling.py"),
    "a link to elsewhere": (lambda out: (out / "notes").symlink_to("/etc/hostname"), 1, "not of the conversion: notes"),
    "a receipt without tensors": (lambda out: rewrite(out / "qwen35.json", tensors=None), 1, "not a receipt"),
    "a receipt without options": (lambda out: rewrite(out / "qwen35.json", options={}), 1, "not a receipt"),
    "a receipt with odd edits": (lambda out: rewrite(out / "qwen35.json", config_edits=3), 1, "not a receipt"),
    "a pipe for a receipt": (lambda out: put_pipe(out / "qwen35.json"), 3, "no qwen35.json in it"),
}  # fmt: skip
SHARD = "model-00002-of-00002.safetensors"


def rewrite(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("edit", "code", "text"),
    [pytest.param(*case, id=k, marks=() if k == "another shard" else pytest.mark.slow) for k, case in EDITS.items()],
)
def test_a_result_that_was_changed_by_hand_is_never_sent(
    hub: HubServer, tool: Tool, result: Path, tmp_path: Path, edit: Callable[[Path], object], code: int, text: str
) -> None:
    folder = shutil.copytree(result, tmp_path / "out")
    edit(folder)
    told(tool("push", folder, NEW), code, text)
    assert hub.asked == []


@pytest.mark.slow
def test_a_flipped_bit_of_a_packed_weight_is_seen_where_the_receipt_has_checksums(
    hub: HubServer, tool: Tool, tmp_path: Path
) -> None:
    made = tiny.make(tiny.Sizes(hidden=64, vocab=600, intermediate=128, head_dim=32))
    source = tiny.save(tmp_path / "model", made.raw, made.config)
    options = ("--quantize", "4", "--group-size", "32")
    assert tool("convert", source, tmp_path / "out", *options, "--checksum").returncode == 0
    card = tool.json("push", tmp_path / "out", NEW, "--dry-run")["card"]
    assert "Weights were quantised to 4 bits in groups of 32 (affine). Nothing was retrained." in card
    command = next(line for line in card.splitlines() if line.startswith("qwen35 convert"))
    assert command == "qwen35 convert --quantize 4 --group-size 32 --mode affine model model-mlx"
    again = [word.replace("model-mlx", str(tmp_path / "again")) for word in command.split()[1:]]
    again[again.index("model")] = str(source)
    assert tool(*again, "--checksum").returncode == 0
    assert files_of(tmp_path / "again") == files_of(tmp_path / "out")
    with safe_open(tmp_path / "out" / SHARD, framework="numpy") as opened:
        assert any(name.endswith(".scales") for name in opened.keys())  # noqa: SIM118
    raw = bytearray((tmp_path / "out" / SHARD).read_bytes())
    raw[-1000] ^= 1
    (tmp_path / "out" / SHARD).write_bytes(raw)
    told(tool("push", tmp_path / "out", NEW), 3, "1 shards are not those of qwen35.json", SHARD)
    assert hub.asked == []


VARIANTS = {
    "sidecar": ["--mtp", "sidecar"],
    "kept head": ["--mtp", "keep"],
    "vision": ["--keep-vision"],
    "float32": ["--norm-dtype", "float32", "--max-shard-size", "1MB"],
    "assumed": ["--assume", "raw"],
    "checksums": ["--checksum"],
}


@pytest.mark.slow
@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_kind_of_result_may_be_published(tool: Tool, source: Path, tmp_path: Path, options: list[str]) -> None:
    assert tool("convert", source, tmp_path / "out", *options).returncode == 0
    run = tool("push", tmp_path / "out", NEW, "--dry-run")
    assert run.returncode == 0, run.stderr
    command = next(line for line in run.stdout.splitlines() if line.strip().startswith("qwen35 convert"))
    wanted = [text.replace("1MB", "1000000") for text in options if text != "--checksum"]
    assert command.split() == ["qwen35", "convert", *sorted_like(wanted, command.split()), "model", "model-mlx"]
    if "--checksum" in options:
        shard = tmp_path / "out" / "model-00001-of-00002.safetensors"
        raw = bytearray(shard.read_bytes())
        raw[-1] ^= 1
        shard.write_bytes(raw)
        told(tool("push", tmp_path / "out", NEW, "--dry-run"), 3, shard.name)


def sorted_like(words: list[str], others: list[str]) -> list[str]:
    return sorted(words, key=others.index)


def head_of(card: str) -> ModelCardData:
    """The card's head as the Hub's own library reads it."""
    found = ModelCard(card).data
    assert isinstance(found, ModelCardData)
    return found


def receipt(**source: str) -> dict[str, object]:
    return {
        "tool": {"name": "qwen35conv", "version": "1.2.3"},
        "source": {"name": "folder", **source},
        "options": {"keep-vision": True, "mtp": "keep", "assume": None, "repair": False, "norm-dtype": "float32",
                    "max-shard-size": 5000000000, "tie-embeddings": False, "dequantize": False, "quantize": None},
        "verdict": {"generation": "canonical", "by": "facts", "reasons": ["one", "two", "three"]},
        "gain_shift": 0,
        "rules": {"renamed | odd": {"tensors": 1234, "n_bytes": 5678}},
        "config_edits": [],
    }  # fmt: skip


def test_the_card_of_a_folder_names_no_repository() -> None:
    card = build_card(receipt(), Front(), NEW)
    head = head_of(card)
    assert (head.base_model, head.license, head.pipeline_tag) == (None, None, "image-text-to-text")
    assert "`folder` in the canonical MLX layout" in card
    assert "renamed \\| odd | 1,234 | 5,678" in card


def test_the_card_of_a_quantised_result_says_so_and_how() -> None:
    made = receipt()
    options = made["options"]
    assert isinstance(options, dict)
    assert "Nothing was quantised or retrained." in build_card(made, Front(), NEW)
    options |= {"dequantize": True, "quantize": {"group_size": 32, "bits": 4, "mode": "affine"}}
    card = build_card(made | {"gain_shift": 1}, Front(), NEW)
    assert "bfloat16. Weights were quantised to 4 bits in groups of 32 (affine). Nothing was retrained." in card
    assert "--dequantize --quantize 4 --group-size 32 --mode affine folder folder-mlx" in card
    assert "+ 1, in float32" in card


HEADLESS = (
    "",
    "# no head",
    "---\n: [\n---\n",
    "---\n- a\n---\n",
    "---\nlicense: [1]\ntags: x\n---\n",
    "---\na: " + "[" * 3000 + "\n---\n",
)


def test_the_command_has_every_option_that_is_no_default() -> None:
    found = command_of(receipt(repo=REPO, commit="c" * 40))
    assert found == (
        "qwen35 convert --keep-vision --mtp keep --norm-dtype float32 --max-shard-size 5000000000 "
        f"--revision {'c' * 40} owner/model model-mlx"
    )


@pytest.mark.parametrize("text", HEADLESS)
def test_a_head_that_can_not_be_read_is_none(text: str) -> None:
    assert parse_front(text) == Front()


def test_a_head_is_read_with_every_line_ending() -> None:
    assert parse_front("\ufeff" + README.replace("\n", "\r\n")).license == "other"
