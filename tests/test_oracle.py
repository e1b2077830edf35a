"""Every oracle case through the API and the command line, byte for byte with what mlx-lm's own sanitize gives."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import tiny
from oracle import Case
from typer.testing import CliRunner

from qwen35conv import Options, make_plan, open_source, read_checkpoint, write
from qwen35conv.cli import app
from qwen35conv.errors import ConventionError

GAINS = (".input_layernorm.weight", ".post_attention_layernorm.weight", ".q_norm.weight", ".k_norm.weight",
         "model.norm.weight")  # fmt: skip
VISION_KEYS = {"vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"}
NAMES = {
    "raw-dense-vl-mtp", "raw-dense-text-tied", "raw-moe-vl-mtp", "raw-moe-text-per-expert", "raw-names-quantised-mtp",
    "canonical", "canonical-mtp-kept", "broken-double-shifted", "broken-never-shifted", "broken-raw-names-gamma",
}  # fmt: skip


def each(cases: Sequence[Case], *, broken: bool = False, further: bool = True) -> pytest.MarkDecorator:
    """The cases of this repository, and those from elsewhere where there are any."""
    chosen = [pytest.param(case, id=case.name) for case in cases]
    if further:
        none = pytest.mark.skip(reason="no cases in $QWEN35_ORACLE or shared/oracle")
        chosen += [
            pytest.param(case, id=f"further {case.name}") for case in oracle.FURTHER if case.is_broken is broken
        ] or [pytest.param(None, id="further", marks=none)]
    return pytest.mark.parametrize("case", chosen)


def convert(source: Path, destination: Path, options: Options | None = None) -> Path:
    opened = open_source(str(source))
    write(opened, make_plan(read_checkpoint(opened), options), destination, check=False)  # the judges are these tests
    return destination


def content(folder: Path) -> dict[str, str]:
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file()
    }


def read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def qwen35(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qwen35conv", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"COLUMNS": "300"},
        check=False,
    )


def test_the_cases_are_all_there_and_small() -> None:
    assert {case.name for case in oracle.CASES} == NAMES
    assert sum(file.stat().st_size for file in oracle.DATA.rglob("*") if file.is_file()) < 10**6


@pytest.mark.parametrize(
    ("name", "n_head", "n_trunk"),
    [
        ("raw-dense-vl-mtp", 15, 56),
        ("raw-moe-vl-mtp", 19, 72),
        ("raw-names-quantised-mtp", 31, 122),
        ("canonical-mtp-kept", 15, 56),
        ("raw-moe-text-per-expert", 0, 124),
    ],
)
def test_the_cases_have_the_inventory_of_the_releases(name: str, n_head: int, n_trunk: int) -> None:
    names = oracle.digests(oracle.DATA / name / "src").keys()
    assert sum("mtp." in name for name in names) == n_head
    assert sum("mtp." not in name and "visual" not in name for name in names) == n_trunk


@each(oracle.SOUND)
def test_every_byte_of_the_result_is_expected_and_the_source_unchanged(case: Case, tmp_path: Path) -> None:
    before = content(case.source)
    result = convert(case.source, tmp_path / "out")
    assert oracle.digests(result) == case.expected()
    assert content(case.source) == before


@each(oracle.SOUND)
def test_the_index_agrees_with_the_shards(case: Case, tmp_path: Path) -> None:
    result = convert(case.source, tmp_path / "out")
    index = read_json(result / "model.safetensors.index.json")
    assert index["weight_map"] == {name: file for name, (file, _) in oracle.stored(result).items()}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tiny.load(result).values())
    n_shards = len(set(index["weight_map"].values()))
    files = {f"model-{i + 1:05d}-of-{n_shards:05d}.safetensors" for i in range(n_shards)}
    assert {file.name for file in result.glob("*.safetensors")} == files


@each(oracle.SOUND)
def test_converting_the_result_again_changes_nothing(case: Case, tmp_path: Path) -> None:
    first = convert(case.source, tmp_path / "first")
    second = convert(first, tmp_path / "second")
    assert oracle.stored(second) == oracle.stored(first)
    for file in ("config.json", "model.safetensors.index.json"):
        assert (second / file).read_bytes() == (first / file).read_bytes()


@each(oracle.SOUND, further=False)
def test_the_command_line_writes_what_the_api_writes(case: Case, tmp_path: Path) -> None:
    before = content(case.source)
    done = qwen35("convert", case.source, tmp_path / "by-command")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert oracle.digests(tmp_path / "by-command") == case.expected()
    by_api, by_command = content(convert(case.source, tmp_path / "by-api")), content(tmp_path / "by-command")
    del by_api["qwen35.json"], by_command["qwen35.json"]  # each says when it was written
    assert by_command == by_api
    assert content(case.source) == before
    assert {path.name for path in tmp_path.iterdir()} == {"by-command", "by-api"}


@each(oracle.BROKEN, broken=True)
def test_the_command_line_refuses_broken_gains_and_leaves_nothing(case: Case, tmp_path: Path) -> None:
    before = content(case.source)
    done = qwen35("convert", case.source, tmp_path / "out")
    assert done.returncode == 1
    assert f"norm gains are {case.generation}" in done.stderr
    assert "--repair" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not list(tmp_path.iterdir())
    assert content(case.source) == before


@each(oracle.BROKEN, broken=True)
def test_a_repair_brings_the_gains_back(case: Case, tmp_path: Path) -> None:
    before = content(case.source)
    with pytest.raises(ConventionError, match="norm gains"):
        convert(case.source, tmp_path / "out")
    assert not list(tmp_path.iterdir())
    repaired = tiny.load(convert(case.source, tmp_path / "out", Options(repair=True)))
    sound = tiny.load(case.twin.source)
    assert repaired.keys() == sound.keys()
    for name, want in sound.items():
        got = repaired[name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape), name
        if case.generation == "double-shifted" and name.endswith(GAINS):
            # The second shift rounded gamma + 1, whose neighbours in bfloat16 lie 2**-7 times its binade apart.
            twice = want.astype(np.float64) + 1
            half_step = 2.0 ** (np.floor(np.log2(twice)) - 8)
            assert (np.abs(got.astype(np.float64) - want.astype(np.float64)) <= half_step).all(), name
        else:
            assert got.tobytes() == want.tobytes(), name
    assert content(case.source) == before


@each(oracle.BROKEN, further=False)
def test_the_command_line_repairs_as_the_api_does(case: Case, tmp_path: Path) -> None:
    done = qwen35("convert", "--repair", case.source, tmp_path / "by-command")
    assert done.returncode == 0, done.stderr
    by_api = convert(case.source, tmp_path / "by-api", Options(repair=True))
    assert oracle.stored(tmp_path / "by-command") == oracle.stored(by_api)
    assert read_json(tmp_path / "by-command" / "config.json") == read_json(by_api / "config.json")


@each([*oracle.CASES, *oracle.FURTHER], further=False)
def test_inspect_gives_the_verdict(case: Case) -> None:
    done = CliRunner().invoke(app, ["inspect", "--json", str(case.source)])
    document = json.loads(done.stdout)
    assert done.exit_code == (1 if case.is_broken else 0)
    assert document["verdicts"]["trunk"]["generation"] == case.generation
    assert document["converts"] is not case.is_broken


@each(oracle.SOUND)
def test_the_verdict_on_the_result_is_canonical(case: Case, tmp_path: Path) -> None:
    result = convert(case.source, tmp_path / "out")
    done = CliRunner().invoke(app, ["inspect", "--json", str(result)])
    document = json.loads(done.stdout)
    assert done.exit_code == 0
    assert document["verdicts"]["trunk"]["generation"] == "canonical"
    assert document["changes"] is False


@each(oracle.SOUND)
def test_the_result_promises_nothing_that_is_not_there(case: Case, tmp_path: Path) -> None:
    before = case.config()
    result = convert(case.source, tmp_path / "out")
    config = read_json(result / "config.json")
    text = config["text_config"]
    kind = "qwen3_5_moe" if "moe" in before["model_type"] else "qwen3_5"
    assert (config["model_type"], text["model_type"]) == (kind, f"{kind}_text")
    assert text["mtp_num_hidden_layers"] == 0
    assert not VISION_KEYS & (config.keys() | text.keys())
    tied = "language_model.lm_head.weight" not in case.expected()
    assert config["tie_word_embeddings"] is text["tie_word_embeddings"] is tied
    assert config["dtype"] == text["dtype"] == "bfloat16"
    assert not {"torch_dtype"} & (config.keys() | text.keys())
    old_text = before.get("text_config", before)
    rope = old_text["rope_parameters"]
    assert {key: text["rope_parameters"][key] for key in rope} == rope
    assert "rope_parameters" not in config
    sizes = {key: value for key, value in old_text.items() if isinstance(value, int) and not key.startswith("mtp_")}
    same = {key: text[key] for key in sizes if key not in VISION_KEYS and key != "tie_word_embeddings"}
    assert same == {key: sizes[key] for key in same}
    assert text["layer_types"] == old_text["layer_types"]
    assert text["vocab_size"] == tiny.load(result)["language_model.model.embed_tokens.weight"].shape[0]


@each([case for case in [*oracle.SOUND, *oracle.FURTHER] if "quantised" in case.name], further=False)
def test_the_quantization_names_the_modules_of_the_result(case: Case, tmp_path: Path) -> None:
    config = read_json(convert(case.source, tmp_path / "out") / "config.json")
    assert config["quantization"] == config["quantization_config"]
    assert not {"quantization", "quantization_config"} & config["text_config"].keys()
    packed = {
        name.removesuffix(".weight"): shape[-1] for name, (dtype, shape, _) in case.expected().items() if dtype == "U32"
    }
    entries = {name: entry for name, entry in config["quantization"].items() if isinstance(entry, dict)}
    assert entries
    assert entries.keys() <= packed.keys()
    before = case.config()["quantization"]
    assert {key: config["quantization"][key] for key in ("group_size", "bits", "mode")} == {
        key: before[key] for key in ("group_size", "bits", "mode")
    }
    groups = {
        name.removesuffix(".scales"): shape[-1] for name, (_, shape, _) in case.expected().items() if ".scales" in name
    }
    for module, n_words in packed.items():
        bits = n_words * 32 // (groups[module] * config["quantization"]["group_size"])
        assert entries.get(module, config["quantization"])["bits"] == bits, module


@each(oracle.SOUND)
def test_no_loaders_rule_would_shift_the_result(case: Case, tmp_path: Path) -> None:
    """Not "mtp or conv" of the older loaders, nor "conv" of the newer ones; both look at names and shapes alone."""
    shapes = {name: shape for name, (_, shape, _) in oracle.digests(convert(case.source, tmp_path / "out")).items()}
    assert not any("mtp." in name for name in shapes)
    convs = [shape for name, shape in shapes.items() if "conv1d.weight" in name]
    assert convs
    assert all(shape[-1] == 1 for shape in convs)
    assert all(name.startswith("language_model.") for name in shapes)
