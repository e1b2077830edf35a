"""The Hub as the command line meets it: the real client, a real server on loopback, and everything that goes wrong."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from hub_server import Fault, HubServer
from hub_tool import REPO, SIZES, Tool, files_of, told

from qwen35conv import make_plan, open_source, read_checkpoint
from qwen35conv.planning.pieces import Piece
from qwen35conv.writing.steps import steps_of


@pytest.fixture(scope="module")
def made() -> tiny.Made:
    return tiny.make(SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, made: tiny.Made) -> Path:
    folder = tiny.save(tmp_path_factory.mktemp("hub") / "model", made.raw, made.config, n_shards=3)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\ntags: [qwen]\n---\n# A model\n")
    (folder / "LICENSE").write_text("Apache License\n")
    (folder / "tokenizer.json").write_text(json.dumps({"filler": "x" * 300_000}))
    return folder


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> dict[str, bytes]:
    """What the conversion of the folder on disk gives."""
    out = tmp_path_factory.mktemp("hub") / "local"
    run = subprocess.run([sys.executable, "-m", "qwen35conv", "convert", str(folder), str(out)], check=False)
    assert run.returncode == 0
    return files_of(out)


def test_a_repository_streams_to_the_very_bytes_of_the_local_conversion(
    hub: HubServer, tool: Tool, folder: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.publish(REPO, folder)
    run = tool("convert", REPO, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    assert files_of(tmp_path / "out") == local
    source = json.loads((tmp_path / "out" / "qwen35.json").read_text())["source"]
    assert (source["repo"], source["commit"]) == (REPO, commit)
    stored = {name: blob.sha256 for name, blob in hub.repos[REPO].commits[0][1].items() if name.endswith("safetensors")}
    assert source["etags"] == stored
    assert not any(one.authorization for one in hub.asked)
    assert hub.n_connections < len(hub.asked) / 1.4  # they are kept and used again


def test_inspect_prints_the_commit_it_resolved(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    old = hub.publish(REPO, folder)
    (other := tmp_path / "other").mkdir()
    for path in folder.iterdir():
        (other / path.name).symlink_to(path)
    (other / "NEWS").write_text("a newer commit\n")
    new = hub.publish(REPO, other)
    assert f"revision main, commit {new}" in tool("inspect", REPO).stdout
    found = tool.json("inspect", REPO, "--revision", old)
    assert found["checkpoint"]["origin"]["commit"] == old
    assert found["verdict"] == "raw"
    assert f"--revision {old}" in found["next"]


@pytest.mark.parametrize(
    "several_ranges", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["several-ranges", "one-range"]
)
def test_inspecting_a_repository_of_27b_reads_under_one_percent(
    hub: HubServer, tool: Tool, tmp_path: Path, several_ranges: bool
) -> None:
    hub.several_ranges = several_ranges
    n_bytes = make_27b(tmp_path / "27B")
    hub.publish("owner/27B", tmp_path / "27B", sparse=True)
    found = tool.json("inspect", "owner/27B")
    assert (found["verdict"], found["checkpoint"]["n_layers"]) == ("raw", 64)
    assert found["checkpoint"]["n_bytes"] > 50e9
    reads = hub.reads()
    assert sum(one.n_bytes for one in reads) < n_bytes / (1000 if several_ranges else 100)
    assert len({one.path for one in hub.asked if "/api/" in one.path}) == 1
    if several_ranges:
        blobs = hub.repos["owner/27B"].commits[0][1]
        for name, blob in blobs.items():
            if name.endswith(".safetensors"):
                n_requests = sum(name in one.path or str(blob.sha256) in one.path for one in reads)
                assert n_requests <= 3, name  # the redirect, the header, the gains


@pytest.mark.slow
def test_a_server_without_ranges_is_told(hub: HubServer, tool: Tool, tmp_path: Path) -> None:
    make_27b(tmp_path / "27B")
    hub.publish("owner/27B", tmp_path / "27B", sparse=True)
    hub.faults = [Fault("/cdn/", times=999, no_ranges=True)]
    told(tool("inspect", "owner/27B"), 3, "whole files only", "--via-cache")


def make_27b(folder: Path, n_rows: int = 248320) -> int:
    """A raw checkpoint with the sizes of the 27B in 11 shards, all of it holes but headers, gains and decay. Bytes."""
    sizes = tiny.Sizes(
        hidden=5120, layers=64, vocab=n_rows, intermediate=17408, heads=24, kv_heads=4, head_dim=256,
        key_heads=16, value_heads=48, key_dim=128, value_dim=128,
    )  # fmt: skip
    small = tiny.make(tiny.with_layers(64))
    shapes = {name: (spec.dtype, spec.shape) for name, spec in small.raw.items()}
    config = tiny.make_config(sizes, vision=True, mtp=True)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(shapes, key=_by_layer)
    random = np.random.default_rng(5)
    n_shards, total = 11, 0
    weight_map: dict[str, str] = {}
    for i in range(n_shards):
        file = f"model.safetensors-{i + 1:05d}-of-{n_shards:05d}.safetensors"
        members = names[i * len(names) // n_shards : (i + 1) * len(names) // n_shards]
        total += _write_sparse(
            folder / file, {name: _full_shape(name, shapes[name], sizes) for name in members}, random
        )
        weight_map |= dict.fromkeys(members, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return total


def _by_layer(name: str) -> tuple[int, str]:
    match = re.search(r"layers\.(\d+)\.", name)
    return (int(match[1]) if match and "mtp" not in name else 99 if "mtp" in name else -1, name)


def _full_shape(name: str, small: tuple[Any, tuple[int, ...]], sizes: tiny.Sizes) -> tuple[str, tuple[int, ...]]:
    """The tensor's dtype and shape in the large model: each axis of the small one is named by its length."""
    tiny_sizes = tiny.SMALL
    dtype, shape = small
    if "visual" in name:
        return "BF16", shape
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    values = sizes.value_heads * sizes.value_dim
    axes = {
        tiny_sizes.vocab: sizes.vocab, tiny_sizes.hidden: sizes.hidden, tiny_sizes.intermediate: sizes.intermediate,
        2 * tiny_sizes.hidden: 2 * sizes.hidden, 128: 2 * queries, 64: queries, 32: keys, 16: sizes.head_dim,
        tiny_sizes.conv: sizes.conv, 60: values, 6: sizes.value_heads, 10: sizes.value_dim, 1: 1, 4: 4,
    }  # fmt: skip
    return "F32" if dtype == np.float32 else "BF16", tuple(axes[n] for n in shape)


def _write_sparse(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], random: np.random.Generator) -> int:
    """A safetensors file as the library orders it: by dtype, then by name. Only one-dimensional tensors hold values."""
    entries: dict[str, Any] = {}
    end = 0
    ordered = sorted(tensors.items(), key=lambda item: (item[1][0] != "F32", item[0]))
    for name, (dtype, shape) in ordered:
        begin, end = end, end + int(np.prod(shape)) * (4 if dtype == "F32" else 2)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}} | entries).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        at = opened.tell()
        opened.truncate(at + end)
        for name, (dtype, shape) in ordered:
            if len(shape) == 1:
                mean, spread = (0.86, 0.02) if name.endswith("linear_attn.norm.weight") else (-0.05, 0.09)
                values = random.normal(mean, spread, shape).astype(np.float32)
                opened.seek(at + entries[name]["data_offsets"][0])
                opened.write((values if dtype == "F32" else values.astype(tiny.BF16)).tobytes())
    return at + end


@pytest.mark.slow
def test_a_token_goes_to_the_hub_and_nowhere_else(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    hub.repos[REPO].private = True
    hub.repos[REPO].token = "hf_secret"
    assert tool("convert", REPO, tmp_path / "out", HF_TOKEN="hf_secret").returncode == 0
    tokens = {(one.path.startswith("/cdn/"), one.authorization) for one in hub.asked}
    assert tokens == {(False, "Bearer hf_secret"), (True, None)}


@pytest.mark.slow
def test_neither_vision_nor_draft_head_are_transferred(
    hub: HubServer, tool: Tool, made: tiny.Made, tmp_path: Path
) -> None:
    heavy = {"model.visual.patch_embed.proj.weight": np.zeros((700, 3, 2, 16, 6), tiny.BF16)}
    folder = tiny.save(tmp_path / "model", made.raw | heavy, made.config, n_shards=1)
    hub.publish(REPO, folder)
    assert tool("convert", REPO, tmp_path / "out").returncode == 0
    kept = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    sent = sum(one.n_bytes for one in hub.reads(".safetensors?"))
    assert (folder / "model.safetensors-00001-of-00001.safetensors").stat().st_size > kept + 800_000
    assert sent < kept + 300_000  # the head of the file, and the gains


def slow_but(quick: str, name: str) -> list[pytest.MarkDecorator]:
    """Each case is a process or two: by default one is run."""
    return [] if name == quick else [pytest.mark.slow]


FAULTS = {
    "rate limit": [Fault("/cdn/", times=3, status=429, headers={"Retry-After": "0"})],
    "rate limit of the Hub": [Fault("/resolve/", times=2, status=429, headers={"RateLimit": '"resolvers";r=0;t=1'})],
    "busy": [Fault("/cdn/", times=2, status=503), Fault("/api/", status=503)],
    "drops": [Fault("/cdn/", times=6, after=4, drop_after=100_000)],
    "drops at once": [Fault("/cdn/", times=2, drop_after=0)],
    "short": [Fault("/cdn/", times=3, after=4, short_by=5000)],
    "slow": [Fault("/cdn/", times=1, after=5, stall=3.0)],
    "address ran out": [Fault("/cdn/", times=1, after=4, status=403)],
    "another ETag once": [Fault("file=model.safetensors-00001", times=1, after=2, etag="f" * 40)],
    "no several ranges": [],
    "whole files": [Fault("tokenizer.json", times=3, no_ranges=True)],
}


@pytest.mark.parametrize("faults", [pytest.param(v, id=k, marks=slow_but("drops", k)) for k, v in FAULTS.items()])
def test_what_passes_is_ridden_out(
    hub: HubServer, tool: Tool, folder: Path, local: dict[str, bytes], faults: list[Fault], tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    hub.faults = [replace(fault) for fault in faults]
    hub.several_ranges = bool(faults)
    run = tool("convert", REPO, tmp_path / "out", HF_HUB_DOWNLOAD_TIMEOUT="1")
    assert run.returncode == 0, run.stderr
    assert files_of(tmp_path / "out") == local
    assert not any(fault.times for fault in hub.faults)


LASTING = {
    "rate limit": (Fault("/cdn/", times=99, status=429, headers={"Retry-After": "0"}), "rate limit"),
    "long rate limit": (Fault("/api/", times=99, status=429, headers={"Retry-After": "3600"}), "rate limit"),
    "out of order": (Fault("/resolve/", times=99, status=502, headers={"Retry-After": "0"}), "out of order"),
    "stale ETag": (Fault("00002-of-00003", times=99, after=3, etag="e" * 64), "ETag"),
    "stale ETag of the CDN": (Fault("/cdn/", times=99, after=6, etag="f" * 40), "ETag changed"),
    "another length": (Fault("/resolve/", times=99, n_bytes=1000), "1000 bytes, not"),
    "another length at the CDN": (Fault("/cdn/", times=99, after=4, n_bytes=2_000_000_000), "2000000000 bytes, not"),
    "drops for good": (Fault("/cdn/", times=999, after=6, drop_after=0), "can't be reached"),
}


@pytest.mark.parametrize(
    ("fault", "told"), [pytest.param(*v, id=k, marks=slow_but("another length", k)) for k, v in LASTING.items()]
)
def test_what_does_not_pass_is_told_and_leaves_no_result(
    hub: HubServer, tool: Tool, folder: Path, fault: Fault, told: str, tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    hub.faults = [replace(fault)]
    run = tool("convert", REPO, tmp_path / "out")
    assert (run.returncode, run.stdout) == (3, ""), run.stderr
    assert told in run.stderr
    assert "hint:" in run.stderr
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "out").exists()


def test_a_shard_that_shrinks_is_told(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    files = hub.repos[REPO].commits[0][1]
    for name in files:
        if "00002" in name:
            files[name] = replace(files[name], n_bytes=files[name].n_bytes - 4096)
    # The listing is of the shrunken file, whose header still speaks of the whole one.
    run = tool("convert", REPO, tmp_path / "out")
    assert run.returncode == 3
    assert "00002-of-00003" in run.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.slow
def test_killed_twice_and_resumed_inside_a_shard(hub: HubServer, tool: Tool, made: tiny.Made, tmp_path: Path) -> None:
    folder = tiny.save(tmp_path / "model", made.raw, made.config, n_shards=1)
    hub.publish(REPO, folder)
    hub.bytes_a_second = 200_000
    partial = tmp_path / "out.partial"
    for signal_number in (signal.SIGKILL, signal.SIGTERM):
        process = started(tool, "convert", REPO, tmp_path / "out", "--jobs", 2)
        wait_until(partial_grows(partial), process)
        assert stopped(process, signal_number) in (-signal.SIGKILL, 143)
        assert not (tmp_path / "out").exists()
    noted = noted_steps(partial)
    plan = make_plan(read_checkpoint(open_source(str(folder))))
    steps = {step.offset: step for step in steps_of(plan.shards[0])}
    n_left = sum(step.n_bytes for at, step in steps.items() if at not in noted and isinstance(step.content, Piece))
    assert sum(steps[at].n_bytes for at in noted) > 200_000
    hub.bytes_a_second = None
    hub.forget_requests()
    run = tool("convert", REPO, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert sum(one.n_bytes for one in hub.reads(".safetensors?")) < n_left + 170_000  # the head, and the gains
    assert not partial.exists()


@pytest.mark.slow
def test_a_commit_between_two_runs_starts_anew_and_never_mixes(
    hub: HubServer, tool: Tool, made: tiny.Made, tmp_path: Path
) -> None:
    old = tiny.save(tmp_path / "old", made.raw, made.config, n_shards=1)
    newer = tiny.make(SIZES, seed=8)
    new = tiny.save(tmp_path / "new", newer.raw, newer.config, n_shards=1)
    hub.publish(REPO, old)
    hub.bytes_a_second = 200_000
    process = started(tool, "convert", REPO, tmp_path / "out", "--jobs", 2)
    wait_until(partial_grows(tmp_path / "out.partial"), process)
    stopped(process, signal.SIGTERM)
    commit = hub.publish(REPO, new)
    hub.bytes_a_second = None
    assert tool("convert", REPO, tmp_path / "out").returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), newer.canonical)
    assert json.loads((tmp_path / "out" / "qwen35.json").read_text())["source"]["commit"] == commit


@pytest.mark.slow
def test_a_commit_during_a_run_does_not_reach_it(hub: HubServer, tool: Tool, made: tiny.Made, tmp_path: Path) -> None:
    newer = tiny.make(SIZES, seed=8)
    commit = hub.publish(REPO, tiny.save(tmp_path / "old", made.raw, made.config))
    hub.bytes_a_second = 200_000
    process = started(tool, "convert", REPO, tmp_path / "out")
    wait_until(lambda: len(hub.reads("/cdn/")) > 5, process)
    hub.publish(REPO, tiny.save(tmp_path / "new", newer.raw, newer.config))
    hub.bytes_a_second = None
    process.communicate(timeout=60)
    assert process.returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert json.loads((tmp_path / "out" / "qwen35.json").read_text())["source"]["commit"] == commit


def started(tool: Tool, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        tool.command(*arguments), env=tool.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def stopped(process: subprocess.Popen[bytes], signal_number: int) -> int:
    process.send_signal(signal_number)
    process.communicate(timeout=60)
    return process.returncode


def noted_steps(partial: Path) -> set[int]:
    """Where the steps begin that the journal of an unfinished conversion notes."""
    journal = partial / ".journal.jsonl"
    if not journal.is_file():
        return set()
    lines = [json.loads(line) for line in journal.read_text().splitlines() if line.endswith("}")]
    return {step for line in lines for step in line.get("steps", ())}


def partial_grows(partial: Path) -> Callable[[], bool]:
    before = len(noted_steps(partial))
    return lambda: len(noted_steps(partial)) > before


def wait_until(is_so: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    try:
        while not is_so():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
    except BaseException:
        process.kill()
        process.communicate()
        raise


def change_folder(folder: Path, source: Path, **files: str | None) -> Path:
    """A copy of a folder by links, with some files written anew or left out."""
    folder.mkdir()
    for path in source.iterdir():
        if path.name not in files:
            (folder / path.name).symlink_to(path)
    for name, text in files.items():
        if text is not None:
            (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_no_such_repository_or_revision(hub: HubServer, tool: Tool, folder: Path) -> None:
    hub.publish(REPO, folder)
    told(tool("inspect", "owner/nothing"), 3, "owner/nothing: no such repository", "or a private one", "hf auth login")
    told(tool("inspect", REPO, "--revision", "v9"), 3, "no revision v9 in it")
    told(tool("inspect", "no/such/folder"), 3, "no such folder or file")
    told(tool("inspect", "owner/two--dashes..and.dots"), 3, "no valid name of a repository", "owner/name")
    hub.faults = [Fault("/api/", status=200)]
    told(tool("inspect", REPO), 3, "not as the Hub does", "HF_ENDPOINT")
    told(tool("inspect", folder, "--revision", "main"), 3, "has no --revision main")


@pytest.mark.slow
def test_gated_private_and_wrong_tokens(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    repo = hub.repos[REPO]
    repo.token, repo.gated = "hf_right", True
    told(tool("convert", REPO, tmp_path / "out"), 3, "gated", "accept it at", f"{hub.endpoint}/{REPO}", "hf auth login")
    repo.gated, repo.private = False, True
    told(tool("inspect", REPO, HF_TOKEN="hf_wrong"), 3, "or a private one")
    assert tool("inspect", REPO, HF_TOKEN="hf_right").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("file", "what"), [("pytorch_model.bin", ".bin"), ("model-Q4_K_M.gguf", "GGUF")])
def test_a_repository_without_safetensors_says_what_it_has(
    hub: HubServer, tool: Tool, tmp_path: Path, file: str, what: str
) -> None:
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo" / file).write_bytes(b"x" * 100)
    (tmp_path / "repo" / "config.json").write_text("{}")
    hub.publish(REPO, tmp_path / "repo")
    told(tool("inspect", REPO), 3, f"no .safetensors file in it, only {'PyTorch ' if what == '.bin' else ''}{what}")


@pytest.mark.slow
def test_a_pointer_that_was_uploaded_as_a_file_is_told(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path
) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "a" * 64 + "\nsize 3000000\n"
    shard = "model.safetensors-00002-of-00003.safetensors"
    hub.publish(REPO, change_folder(tmp_path / "a", folder, **{shard: pointer}))
    told(tool("inspect", REPO), 3, shard, "LFS pointer")
    hub.publish("owner/other", change_folder(tmp_path / "b", folder, **{"tokenizer.json": pointer}))
    told(tool("convert", "owner/other", tmp_path / "out"), 3, "tokenizer.json", "LFS pointer")


@pytest.mark.slow
def test_a_network_that_fails_is_told(hub: HubServer, tool: Tool) -> None:
    told(tool("inspect", REPO, HF_HUB_OFFLINE="1"), 3, "not in the local cache", "HF_HUB_OFFLINE")
    told(tool("inspect", REPO, HF_ENDPOINT="http://127.0.0.1:9"), 3, "http://127.0.0.1:9 can't be reached")
    told(tool("inspect", REPO, HF_ENDPOINT=hub.endpoint.replace("http", "https")), 3, "TLS fails", "SSL_CERT_FILE")
    refused = {"HF_ENDPOINT": "https://huggingface.invalid", "HTTPS_PROXY": hub.endpoint, "NO_PROXY": ""}
    told(tool("inspect", REPO, **refused), 3, "proxy", "HTTPS_PROXY")
    hub.token = "hf_right"
    hub.faults = [
        Fault("/api/", status=401, headers={"X-Error-Message": "Invalid credentials in Authorization header"})
    ]
    told(tool("inspect", REPO, HF_TOKEN="hf_wrong"), 3, "does not accept your token", "hf auth login")


@pytest.mark.slow
def test_what_is_in_the_cache_is_read_from_there(
    hub: HubServer, tool: Tool, folder: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    commit = hub.publish(REPO, folder)
    run = tool("convert", REPO, tmp_path / "first", "--via-cache")
    assert (run.returncode, run.stderr) == (0, "")
    assert files_of(tmp_path / "first") == local
    hub.forget_requests()
    assert tool("convert", REPO, tmp_path / "second").returncode == 0
    assert files_of(tmp_path / "second") == local
    assert hub.reads("of-00003.safetensors") == []
    hub.forget_requests()
    found = tool.json("inspect", REPO, HF_HUB_OFFLINE="1")
    assert found["checkpoint"]["origin"]["commit"] == commit
    assert "from-cache" in {one["code"] for one in found["findings"]}
    assert tool("convert", REPO, tmp_path / "third", HF_HUB_OFFLINE="1").returncode == 0
    assert hub.asked == []
    assert files_of(tmp_path / "third") == local
    hub.faults = [Fault("/api/", times=99, status=503, headers={"Retry-After": "0"})]
    assert tool.json("inspect", REPO)["checkpoint"]["origin"]["commit"] == commit
    receipts = [json.loads((tmp_path / name / "qwen35.json").read_text()) for name in ("first", "second", "third")]
    assert all(one["source"] == receipts[0]["source"] for one in receipts)


@pytest.mark.slow
def test_files_that_the_cache_lacks_are_streamed_and_the_rest_is_not(
    hub: HubServer, tool: Tool, folder: Path, local: dict[str, bytes], tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    assert tool("convert", REPO, tmp_path / "first", "--via-cache").returncode == 0
    (cached,) = Path(tool.environment["HF_HOME"]).glob("hub/*/snapshots/*/*00002-of-00003*")
    cached.unlink()
    hub.forget_requests()
    assert tool("convert", REPO, tmp_path / "second").returncode == 0
    assert files_of(tmp_path / "second") == local
    assert hub.reads("00002-of-00003.safetensors")
    assert not hub.reads("00001-of-00003.safetensors")
    told(tool("inspect", REPO, HF_HUB_OFFLINE="1"), 3, "incomplete", "00002-of-00003")


@pytest.mark.slow
def test_via_cache_needs_a_repository(tool: Tool, folder: Path, tmp_path: Path) -> None:
    run = tool("convert", folder, tmp_path / "out", "--via-cache")
    assert run.returncode == 2
    assert "Hub id" in run.stderr


@pytest.mark.parametrize(
    "flag", [[], pytest.param(["--via-cache"], marks=pytest.mark.slow)], ids=["streamed", "via-cache"]
)
def test_a_full_disk_is_told_before_anything_is_written(
    hub: HubServer, tool: Tool, tmp_path: Path, flag: list[str]
) -> None:
    make_27b(tmp_path / "27B", n_rows=5 * 10**8)
    hub.publish("owner/huge", tmp_path / "27B", sparse=True)
    run = tool("convert", "owner/huge", tmp_path / "out", *flag)
    told(run, 4, "bytes", "free")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.partial").exists()
    assert not Path(tool.environment["HF_HOME"], "hub").exists()
    assert sum(one.n_bytes for one in hub.reads()) < 20e6


@pytest.mark.slow
def test_verify_reads_a_repository_by_ranges(hub: HubServer, tool: Tool, folder: Path, tmp_path: Path) -> None:
    hub.publish(REPO, folder)
    assert tool.json("verify", REPO)["passed"]
    assert tool("convert", REPO, tmp_path / "out").returncode == 0
    found = tool.json("verify", tmp_path / "out", "--source", REPO)
    assert {check["name"]: check["passed"] for check in found["checks"]}["source"]


@pytest.mark.slow
def test_a_run_that_waits_for_a_busy_server_can_be_stopped(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path
) -> None:
    hub.publish(REPO, folder)
    hub.faults = [Fault("/cdn/", after=7, times=99, status=429, headers={"Retry-After": "250"})]
    process = started(tool, "convert", REPO, tmp_path / "out")
    wait_until(lambda: any(one.status == 429 for one in hub.reads()), process)
    begun = time.monotonic()
    assert stopped(process, signal.SIGTERM) == 143
    assert time.monotonic() - begun < 20
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="/proc says how much memory was used")
def test_the_memory_of_a_streamed_conversion_is_bounded(hub: HubServer, tool: Tool, tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(hidden=512, vocab=400_000, intermediate=1100))
    folder = tiny.save(tmp_path / "model", made.raw, made.config, n_shards=2)
    hub.publish(REPO, folder)
    code = (
        "import runpy, sys; sys.argv[0] = 'qwen35'\n"
        "try: runpy.run_module('qwen35conv', run_name='__main__')\n"
        "except SystemExit as error: assert not error.code\n"
        "lines = open('/proc/self/status').read().splitlines()\n"
        "print(*(line for line in lines if line.startswith('VmHWM')), file=sys.stderr)"
    )
    command = [sys.executable, "-c", code, "convert", REPO, str(tmp_path / "out"), "--no-verify"]
    run = subprocess.run(command, capture_output=True, text=True, env=tool.environment, check=True)
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    assert int(run.stderr.split()[-2]) < 250_000  # KB, of 820 MB


@pytest.mark.slow
def test_a_header_longer_than_what_is_read_at_first_touch(hub: HubServer, tool: Tool, tmp_path: Path) -> None:
    made = tiny.make(tiny.Sizes(experts=300), experts="single")
    folder = tiny.save(tmp_path / "model", made.raw, made.config, n_shards=1)
    shard = folder / "model.safetensors-00001-of-00001.safetensors"
    assert int.from_bytes(shard.read_bytes()[:8], "little") > 300_000
    hub.publish(REPO, folder)
    assert tool.json("inspect", REPO)["verdict"] == "raw"
    assert tool("convert", REPO, tmp_path / "out").returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)


@pytest.mark.slow
@pytest.mark.parametrize("where", [None, 0, 700_001], ids=["equal", "differs-in-a-sample", "differs-elsewhere"])
def test_a_tied_head_is_sampled_by_inspect_and_compared_by_convert(
    hub: HubServer, tool: Tool, tmp_path: Path, where: int | None
) -> None:
    made = tiny.make(SIZES, tied=True)
    head = made.raw["model.language_model.embed_tokens.weight"].copy()
    if where is not None:
        head.reshape(-1).view("u2")[where] ^= 1
    hub.publish(REPO, tiny.save(tmp_path / "model", made.raw | {"lm_head.weight": head}, made.config))
    hub.forget_requests()
    codes = {one["code"] for one in tool.json("inspect", REPO)["findings"]}
    assert ("head-sampled" in codes) == (where != 0)
    assert sum(one.n_bytes for one in hub.reads("/cdn/")) < 500_000
    run = tool("convert", REPO, tmp_path / "out")
    local = tool("convert", tmp_path / "model", tmp_path / "local")
    assert run.returncode == local.returncode
    if run.returncode == 0:
        assert files_of(tmp_path / "out") == files_of(tmp_path / "local")
        assert ("language_model.lm_head.weight" in tiny.load(tmp_path / "out")) == (where is not None)
