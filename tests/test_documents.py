"""The JSON documents, against the files on disk and the safetensors library."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from field import qwen35
from safetensors import safe_open

from qwen35conv.convert import prepare, write
from qwen35conv.errors import SourceError
from qwen35conv.generation.convention import Generation
from qwen35conv.inspection import Inspection, inspect_checkpoint
from qwen35conv.planning.plan import Mtp, Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.report.documents import error_document, inspection_document, outcome_document, preparation_document
from qwen35conv.source import open_source

ORACLE = Path(__file__).parents[2] / "shared" / "oracle" / "data"
BROKEN = {
    "broken-double-shifted": ("double-shifted", -1),
    "broken-never-shifted": ("never-shifted", 1),
    "broken-raw-names-gamma": ("shifted-raw", 0),
}


def inspected(folder: Path, options: Options | None = None) -> Inspection:
    return inspect_checkpoint(read_checkpoint(open_source(str(folder))), options)


def document_of(inspection: Inspection, *, all_tensors: bool = False) -> dict[str, Any]:
    """The document as a script reads it."""
    found = json.loads(json.dumps(inspection_document(inspection, all_tensors=all_tensors), allow_nan=False))
    assert isinstance(found, dict)
    return found


def oracle_case(name: str) -> Path:
    folder = ORACLE / name / "src"
    if not folder.is_dir():
        pytest.skip(f"no oracle case {name}")
    return folder


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tiny.make()
    return tiny.save(tmp_path_factory.mktemp("raw") / "it's raw", made.raw, made.config)


def test_an_inspection_has_these_keys_and_they_stay(raw: Path) -> None:
    found = document_of(inspected(raw))
    assert list(found) == [
        "schema",
        "verdict",
        "converts",
        "changes",
        "checkpoint",
        "verdicts",
        "problem",
        "plan",
        "schemes",
        "repair",
        "dequantize",
        "config_edits",
        "side_files",
        "findings",
        "loaders",
        "next",
    ]
    assert found["schema"] == "qwen35/inspect/1"
    assert (found["converts"], found["changes"], found["problem"], found["repair"]) == (True, True, None, None)
    assert found["verdicts"]["trunk"]["generation"] == found["verdicts"]["head"]["generation"] == "raw"
    assert found["plan"]["gain_shift"] == 1


def test_sizes_are_those_of_the_files(raw: Path) -> None:
    checkpoint = document_of(inspected(raw))["checkpoint"]
    on_disk = {path.name: path.stat().st_size for path in raw.glob("*.safetensors")}
    assert checkpoint["shards"] == on_disk
    assert checkpoint["n_bytes"] == sum(on_disk.values())
    stored = tiny.load(raw)
    assert checkpoint["n_tensors"] == len(stored)
    assert sum(share["n_bytes"] for share in checkpoint["dtypes"].values()) == sum(t.nbytes for t in stored.values())
    assert (checkpoint["n_layers"], checkpoint["n_full_attention_layers"]) == (4, 1)


def test_every_stored_tensor_is_in_a_write_or_a_skip_and_counted(raw: Path) -> None:
    plan = document_of(inspected(raw), all_tensors=True)["plan"]
    stored = tiny.load(raw)
    sources = [name for written in plan["writes"] for name in written["sources"]]
    skipped = [skip["name"] for skip in plan["skips"]]
    assert sorted(sources + skipped) == sorted(stored)
    assert sum(rule["tensors"] for rule in plan["rules"].values()) == len(plan["writes"]) + len(skipped)
    for written in plan["writes"]:
        assert written["n_bytes"] == sum(stored[name].nbytes for name in written["sources"]), written["name"]


def test_gains_are_measured_as_numpy_measures_them(raw: Path) -> None:
    stored = tiny.load(raw)
    gains = document_of(inspected(raw))["verdicts"]["trunk"]["gains"]
    assert len(gains) == 2 * 4 + 2 + 3 + 1
    for gain in gains:
        values = stored[gain["name"]].astype(np.float64)
        assert gain["mean"] == pytest.approx(values.mean(), abs=1e-6)
        assert (gain["minimum"], gain["maximum"]) == (values.min(), values.max())
        assert gain["negative_share"] == pytest.approx((values < 0).mean())


def test_the_next_command_is_quoted_and_repeats_the_options(raw: Path) -> None:
    command = document_of(inspected(raw, Options(mtp=Mtp.SIDECAR, keep_vision=True)))["next"]
    assert shlex.split(command) == [
        *("qwen35", "convert", "--keep-vision", "--mtp", "sidecar"),
        str(raw),
        "it's raw-mlx",
    ]


@pytest.mark.parametrize(
    ("here", "source", "target"),
    [("m", ".", "../converted-mlx"), ("m/deep", "..", "../../converted-mlx"), (".", "m/.", "converted-mlx"),
     ("m", "../m/deep/..", "../converted-mlx"), (".", "-m", "m-mlx"), (".", "m/", "m-mlx")],
)  # fmt: skip
def test_the_next_command_works_where_it_was_shown(
    here: str, source: str, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny.make()
    for name in ("m", "-m"):
        tiny.save(tmp_path / name, made.raw, made.config, n_shards=1)
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("lm_head", "stale"))
    (tmp_path / "m" / "deep").mkdir()
    monkeypatch.chdir(tmp_path / here)
    found = inspect_checkpoint(read_checkpoint(open_source(source), ignore_index=True))
    command = shlex.split(str(document_of(found)["next"]))
    assert command[2:] == ["--ignore-index", *(["--"] if source == "-m" else []), source, target]
    assert qwen35(command[1], "--no-verify", *command[2:]).code == 0
    receipt = json.loads((Path(target) / "qwen35.json").read_text())
    assert receipt["options"]["ignore-index"] is True


def test_a_name_without_a_rule_is_a_problem_and_all_stored_tensors_are_listed(tmp_path: Path) -> None:
    made = tiny.make()
    tensors = {**made.raw, "model.language_model.layers.0.mlp.extra.weight": made.raw["lm_head.weight"]}
    found = document_of(inspected(tiny.save(tmp_path / "odd", tensors, made.config)), all_tensors=True)
    assert (found["plan"], found["repair"], found["next"]) == (None, None, None)
    assert found["problem"]["kind"] == "CheckpointError"
    assert found["problem"]["exit_code"] == 1
    assert [tensor["name"] for tensor in found["tensors"] if not tensor["is_named"]] == [
        "model.language_model.layers.0.mlp.extra.weight"
    ]
    assert len(found["tensors"]) == len(tensors)
    assert found["loaders"]["result"] == []


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_generation_is_a_problem_that_a_repair_answers(name: str) -> None:
    generation, shift = BROKEN[name]
    found = document_of(inspected(oracle_case(name)))
    assert found["verdicts"]["trunk"]["generation"] == generation
    assert (found["converts"], found["plan"]) == (False, None)
    assert found["problem"]["kind"] == "ConventionError"
    assert found["repair"]["gain_shift"] == shift
    assert found["next"].startswith("qwen35 convert --repair ")
    assert {f["outcome"] for f in found["loaders"]["result"]} == {"loads right"}
    assert "loads right" not in {f["outcome"] for f in found["loaders"]["source"]}


@pytest.mark.parametrize("name", sorted(path.name for path in ORACLE.glob("*")) or ["absent"])
def test_every_oracle_case_has_a_document_and_its_plan_the_expected_names(name: str) -> None:
    folder = oracle_case(name)
    found = document_of(inspected(folder), all_tensors=True)
    plan = found["plan"] or found["repair"]
    expected = json.loads((folder.parent / "expected.json").read_text())
    expected = expected.get("tensors", expected)
    assert {written["name"] for written in plan["writes"]} == set(expected)
    assert found["converts"] == (name not in BROKEN)


def test_a_kept_draft_head_makes_old_loaders_shift_twice_before_but_not_after() -> None:
    loaders = document_of(inspected(oracle_case("canonical-mtp-kept")))["loaders"]
    assert [f["outcome"] for f in loaders["source"] if f["versions"] == "up to 0.31"] == ["would shift twice"]
    assert {f["outcome"] for f in loaders["result"]} == {"loads right"}


def test_assuming_the_wrong_generation_forecasts_the_damage(raw: Path) -> None:
    found = document_of(inspected(raw, Options(assume=Generation.CANONICAL)))
    assert found["plan"]["gain_shift"] == 0
    assert {f["outcome"] for f in found["loaders"]["result"]} == {"would not shift"}


def test_a_dry_run_and_the_conversion_agree_and_the_proof_counts_what_is_there(raw: Path, tmp_path: Path) -> None:
    source = open_source(str(raw))
    plan = make_plan(read_checkpoint(source), Options(mtp=Mtp.SIDECAR))
    destination = tmp_path / "out"
    planned = json.loads(json.dumps(preparation_document(prepare(source, plan, destination))))
    done = json.loads(json.dumps(outcome_document(write(source, plan, destination)), allow_nan=False))
    assert planned["schema"] == done["schema"] == "qwen35/convert/1"
    assert (planned["dry_run"], done["dry_run"]) == (True, False)
    assert planned["plan"]["rules"] == done["rules"]
    assert planned["destination"] == done["destination"] == str(destination)
    for key in ("config_edits", "side_files", "findings", "sidecar"):
        assert planned[key] == done[key]
    names = []
    for file in (*destination.glob("*.safetensors"), *Path(done["sidecar"]).glob("*.safetensors")):
        with safe_open(file, framework="numpy") as opened:
            names += list(opened.keys())
    assert done["proof"]["n_tensors"] == len(names)
    sizes = {shard["file"]: shard["n_bytes"] for shard in done["shards"]}
    assert sizes == {
        path.name: path.stat().st_size
        for folder in (destination, Path(done["sidecar"]))
        for path in folder.glob("*.safetensors")
    }
    assert done["n_bytes"] == sum(sizes.values())


def test_an_error_document_carries_kind_hint_and_exit_code() -> None:
    assert error_document(SourceError("gone", hint="look"), "inspect") == {
        "schema": "qwen35/inspect/1",
        "error": {"kind": "SourceError", "message": "gone", "hint": "look", "exit_code": 3},
    }
