"""A whole conversion: the folder it leaves, what it refuses, and what it never touches."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import tiny
from safetensors import deserialize
from safetensors.numpy import load_file

from qwen35conv import Options, make_plan, open_source, read_checkpoint, write
from qwen35conv.convert import Outcome, conversion_key, prepare
from qwen35conv.errors import DestinationError, SourceError
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.plan import Mtp
from qwen35conv.planning.receipt import parse_receipt
from qwen35conv.planning.verdicts import judge_checkpoint
from qwen35conv.verify import Step, VerifyOptions, open_original, plan_to_verify, verify


def convert(source: Path, destination: Path, options: Options | None = None, **how: Any) -> Outcome:
    opened = open_source(str(source))
    return write(opened, make_plan(read_checkpoint(opened), options), destination, **how)


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def made() -> tiny.Made:
    return tiny.make()


@pytest.fixture
def source(tmp_path: Path, made: tiny.Made) -> Path:
    folder = tiny.save(tmp_path / "source", made.raw, made.config)
    for name, content in {
        "tokenizer.json": b"{}\r\n\xff",
        "chat_template.jinja": b"{{ messages }}",
        "LICENSE": b"licence",
        "README.md": b"readme",
        "preprocessor_config.json": b"{}",
        "generation_config.json": b"{}",
        "pytorch_model.bin": b"weights",
        ".gitattributes": b"x",
        "additional_chat_templates/tool.jinja": b"{}",
        "figures/a.png": b"png",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def test_the_folder_holds_canonical_tensors_and_everything_beside_them(
    source: Path, made: tiny.Made, tmp_path: Path
) -> None:
    before = digests(source)
    outcome = convert(source, tmp_path / "out", checksum=True)
    out = tmp_path / "out"
    tiny.assert_same(tiny.load(out), made.canonical)
    for file in sorted(out.glob("*.safetensors")):
        loaded = mx.load(str(file))
        assert isinstance(loaded, dict)
        assert all(loaded[name].shape == made.canonical[name].shape for name in loaded)
    assert digests(source) == before
    after = digests(out)
    for name in ("tokenizer.json", "chat_template.jinja", "LICENSE", "README.md", "preprocessor_config.json",
                 "generation_config.json", "additional_chat_templates/tool.jinja"):  # fmt: skip
        assert after[name] == before[name]
    made_anew = {"config.json", "model.safetensors.index.json", "qwen35.json", "qwen35-source-gains.bin"}
    shards = {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert set(after) - set(before) == shards | made_anew - set(before)
    assert not {"pytorch_model.bin", ".gitattributes", "figures/a.png"} & set(after)
    assert (outcome.n_headers, outcome.n_tensors, outcome.n_gains) == (2, len(made.canonical), 11)
    receipt = json.loads((out / "qwen35.json").read_text())
    assert receipt["files_left"].keys() == {"pytorch_model.bin", ".gitattributes", "figures/a.png"}
    assert {file: shard["sha256"] for file, shard in receipt["shards"].items()} == {
        file: after[file] for file in shards
    }
    assert not list(tmp_path.glob("out.*"))


def test_the_receipt_replays_every_tensor(source: Path, made: tiny.Made, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    receipt = json.loads((tmp_path / "out" / "qwen35.json").read_text())
    assert receipt["tensors"].keys() == made.canonical.keys()
    for name, entry in receipt["tensors"].items():
        raw = b"".join((source / file).read_bytes()[begin:end] for file, begin, end in entry["pieces"])
        want = np.ascontiguousarray(made.canonical[name])
        if entry.get("fix") == "add one":
            raw = (np.frombuffer(raw, tiny.BF16).astype(np.float32) + 1).astype(tiny.BF16).tobytes()
        assert raw == want.tobytes()
        assert entry["shape"] == list(want.shape)
    text = (tmp_path / "out" / "qwen35.json").read_text()
    assert str(tmp_path) not in text


def test_the_sources_gains_can_be_had_back_bit_for_bit(source: Path, made: tiny.Made, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    kept = dict(deserialize((tmp_path / "out" / "qwen35-source-gains.bin").read_bytes()))  # type: ignore[no-untyped-call]
    assert len(kept) == 11
    for name, entry in kept.items():
        assert bytes(entry["data"]) == made.raw[name].tobytes()


def test_the_same_input_gives_the_same_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "a", jobs=1)
    monkeypatch.setenv("LC_ALL", "tr_TR.UTF-8")
    convert(source, tmp_path / "b", jobs=4)
    assert digests(tmp_path / "a") == digests(tmp_path / "b")


def test_the_config_promises_only_what_is_there(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["model_type"]) == ("qwen3_5", "qwen3_5_text")
    assert config["text_config"]["mtp_num_hidden_layers"] == 0
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is False
    assert not {"vision_config", "image_token_id", "video_token_id"} & set(config)
    assert config["text_config"]["rope_parameters"]["rope_theta"] == 10000000
    assert config["text_config"]["full_attention_interval"] == 4


def test_a_flat_config_becomes_nested(tmp_path: Path) -> None:
    made = tiny.make(text_only=True, vision=False, mtp=False, tied=True)
    convert(tiny.save(tmp_path / "source", made.raw, made.config), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["text_config"]["hidden_size"]) == ("qwen3_5", 24)
    assert config["tie_word_embeddings"] is config["text_config"]["tie_word_embeddings"] is True
    assert "hidden_size" not in config


def test_a_draft_head_gets_a_folder_of_its_own(source: Path, made: tiny.Made, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", Options(mtp=Mtp.SIDECAR))
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    head = tiny.load(tmp_path / "out-mtp")
    assert head.keys() == {name for name in made.raw if name.startswith("mtp.")}
    for name, value in head.items():
        stored = made.raw[name].astype(np.float32)
        if "norm" in name:
            np.testing.assert_array_equal(value, (stored + 1).astype(tiny.BF16))
        else:
            np.testing.assert_array_equal(value, made.raw[name])
    assert not any("mtp." in name for name in tiny.load(tmp_path / "out"))


def test_a_quantised_source_rides_through_with_its_config(tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(hidden=64, vocab=50, intermediate=96))
    raw: tiny.Tensors = {}
    for name, value in made.raw.items():
        if value.ndim == 2 and value.shape[1] == 64 and "layers." in name and "mtp" not in name:
            packed, scales, biases = mx.quantize(mx.array(value.astype(np.float32)), group_size=32, bits=4)
            stem = name.removesuffix(".weight")
            raw |= {name: np.array(packed), f"{stem}.scales": np.array(scales), f"{stem}.biases": np.array(biases)}
        else:
            raw[name] = value
    key = "model.language_model.layers.1.mlp.up_proj"
    entry = {"group_size": 32, "bits": 4, "mode": "affine", key: {"group_size": 32, "bits": 4}, "lm_head": False,
             "mtp.fc": {"bits": 8, "group_size": 64}}  # fmt: skip
    config = made.config | {"quantization": entry, "quantization_config": entry}
    convert(tiny.save(tmp_path / "source", raw, config), tmp_path / "out")
    found = tiny.load(tmp_path / "out")
    for name in ("weight", "scales", "biases"):
        got = found[f"language_model.model.layers.1.mlp.up_proj.{name}"]
        np.testing.assert_array_equal(got, raw[f"{key}.{name}"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization"] == written["quantization_config"]
    assert written["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "mode": "affine",
        "language_model.model.layers.1.mlp.up_proj": {"group_size": 32, "bits": 4},
        "language_model.lm_head": False,
    }


def test_modules_of_an_unknown_mode_ride_through_byte_for_byte(tmp_path: Path, made: tiny.Made) -> None:
    raw = dict(made.raw)
    stem = "model.language_model.layers.1.mlp.up_proj"
    del raw[f"{stem}.weight"]
    raw |= {f"{stem}.codes": np.arange(35, dtype="i2").reshape(5, 7), f"{stem}.lattice": np.ones(3, "f4")}
    config = made.config | {"quantization": {"group_size": 32, "bits": 4, stem: {"mode": "trellis", "bits": 2}}}
    convert(tiny.save(tmp_path / "source", raw, config), tmp_path / "out")
    found = tiny.load(tmp_path / "out")
    np.testing.assert_array_equal(found["language_model.model.layers.1.mlp.up_proj.codes"], raw[f"{stem}.codes"])
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["quantization"]["language_model.model.layers.1.mlp.up_proj"]["mode"] == "trellis"


def test_stale_quantisation_keys_go(tmp_path: Path, made: tiny.Made) -> None:
    config = made.config | {"quantization": {"group_size": 32, "bits": 4}}
    convert(tiny.save(tmp_path / "source", made.raw, config), tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quantization", "quantization_config"} & set(written)


def test_a_side_file_that_is_only_a_pointer_stops(source: Path, tmp_path: Path) -> None:
    (source / "tokenizer.json").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(SourceError, match=r"tokenizer\.json: a Git LFS pointer"):
        convert(source, tmp_path / "out")


@pytest.mark.parametrize("options", [Options(mtp=Mtp.KEEP), Options(keep_vision=True)], ids=["mtp", "vision"])
def test_what_was_kept_is_compared_with_the_source_too(source: Path, tmp_path: Path, options: Options) -> None:
    convert(source, tmp_path / "out", options)
    opened = open_source(str(tmp_path / "out"))
    checkpoint = read_checkpoint(opened)
    plan = plan_to_verify(checkpoint)
    original = open_original(str(source), opened, checkpoint, plan)
    (check,) = verify(opened, plan, checkpoint, VerifyOptions(steps=(Step.SOURCE,), original=original)).checks
    assert check.passed, check.summary


@pytest.mark.parametrize("assume", [Generation.RAW, Generation.CANONICAL])
def test_what_was_assumed_is_compared_as_it_was_assumed(source: Path, tmp_path: Path, assume: Generation) -> None:
    convert(source, tmp_path / "out", Options(assume=assume))
    for whole in (True, False):
        opened = open_source(str(tmp_path / "out"))
        checkpoint = read_checkpoint(opened)
        plan = plan_to_verify(checkpoint)
        original = open_original(str(source), opened, checkpoint, plan)
        (check,) = verify(opened, plan, checkpoint, VerifyOptions(steps=(Step.SOURCE,), original=original)).checks
        assert check.passed is (whole or assume is Generation.RAW), check.summary
        (tmp_path / "out" / "qwen35.json").write_text("[]")  # no receipt: the source's own verdict


@pytest.mark.parametrize("n_shards", [3, 4])
def test_a_result_of_few_layers_in_several_files_is_canonical(n_shards: int, tmp_path: Path) -> None:
    made = tiny.make(vision=False, mtp=False)
    for seed in range(8):  # in most of them a norm is alone in its file
        folder = tiny.save(tmp_path / f"{seed}", made.raw, made.config, n_shards=n_shards, seed=seed)
        convert(folder, tmp_path / f"{seed}-mlx", check=False)
        verdict = judge_checkpoint(read_checkpoint(open_source(str(tmp_path / f"{seed}-mlx")))).trunk
        assert verdict.generation is Generation.CANONICAL, verdict.reasons


def test_an_existing_destination_is_refused_or_replaced_whole(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "old").write_text("old")
    with pytest.raises(DestinationError, match="is no checkpoint"):
        convert(source, tmp_path / "out", overwrite=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    with pytest.raises(DestinationError) as caught:
        convert(source, tmp_path / "out")
    assert caught.value.exit_code == 4
    assert digests(tmp_path / "out").keys() == {"old", "config.json"}
    convert(source, tmp_path / "out", overwrite=True)
    assert "old" not in digests(tmp_path / "out")
    assert "config.json" in digests(tmp_path / "out")


@pytest.mark.parametrize("where", ["source", "source/inside", "link", "./source/../source"])
def test_the_source_is_no_destination(source: Path, tmp_path: Path, where: str) -> None:
    (tmp_path / "link").symlink_to(source)
    before = digests(source)
    with pytest.raises(DestinationError):
        convert(source, tmp_path / where, overwrite=True)
    assert digests(source) == before


def test_a_source_that_changes_is_noticed(source: Path, tmp_path: Path) -> None:
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened))
    file = sorted(source.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(SourceError):
        write(opened, plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_preflight_is_exact_but_for_the_receipt(source: Path, tmp_path: Path) -> None:
    opened = open_source(str(source))
    plan = make_plan(read_checkpoint(opened))
    preflight = prepare(opened, plan, tmp_path / "deep" / "er" / "out").preflight
    assert not (tmp_path / "deep").exists()
    write(opened, plan, tmp_path / "out")
    made_anew = {"qwen35.json", "qwen35-source-gains.bin"}
    n_files = sum(f.stat().st_size for f in (tmp_path / "out").rglob("*") if f.is_file() and f.name not in made_anew)
    assert preflight.n_written == n_files
    assert preflight.n_free > 0


def test_the_key_tells_sources_options_and_plans_apart(source: Path, tmp_path: Path) -> None:
    def key(options: Options) -> str:
        opened = open_source(str(source))
        return conversion_key(make_plan(read_checkpoint(opened), options))

    keys = [key(Options()), key(Options(keep_vision=True)), key(Options(max_shard_bytes=9000)), key(Options())]
    assert len(set(keys)) == 3
    file = next(source.glob("*.safetensors"))
    file.write_bytes(file.read_bytes())
    assert key(Options()) != keys[0]


def test_a_single_file_with_its_config_converts(tmp_path: Path, made: tiny.Made) -> None:
    folder = tiny.save(tmp_path / "source", made.raw, made.config, n_shards=1, index=False)
    convert(next(folder.glob("*.safetensors")), folder / "out")
    (file,) = (folder / "out").glob("*.safetensors")
    tiny.assert_same(load_file(file), made.canonical)


def test_the_receipt_of_very_many_experts_can_be_read_again() -> None:
    pieces = [["model-00001-of-00094.safetensors", i, i + 1] for i in range(400_000)]  # two a tensor, with scales
    document = {"schema": "qwen35/receipt/1", "tensors": {"x": {"pieces": pieces, "blocks": {"pieces": pieces}}}}
    assert parse_receipt("qwen35.json", json.dumps(document).encode()) == document
