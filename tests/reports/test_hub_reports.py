"""Field reports that need a Hub: what a download fetches (K13), repositories that lack a shard (M05), and those that
are gated (M10). Each is met twice: streamed, and downloaded into the cache first.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
from hub_server import HubServer
from hub_tool import REPO, SIZES, Tool, told

SHARDS = [f"model.safetensors-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
TOKEN = "hf_neverPrintedNorKept"
both_ways = pytest.mark.parametrize(
    "way", [[], pytest.param(["--via-cache"], marks=pytest.mark.slow)], ids=["streamed", "via-cache"]
)


@pytest.fixture(scope="module")
def made() -> tiny.Made:
    return tiny.make(SIZES)


@pytest.fixture
def folder(tmp_path: Path, made: tiny.Made) -> Path:
    return tiny.save(tmp_path / "model", made.raw, made.config, n_shards=3)


def cached(tool: Tool) -> set[str]:
    """The files of a repository that lie in the cache."""
    snapshots = Path(tool.environment["HF_HOME"], "hub").glob("models--*/snapshots/*")
    return {path.relative_to(one).as_posix() for one in snapshots for path in one.rglob("*") if path.is_file()}


@both_ways
def test_k13_of_duplicate_shards_in_subfolders_only_what_the_index_names_is_fetched(
    hub: HubServer, tool: Tool, folder: Path, made: tiny.Made, tmp_path: Path, way: list[str]
) -> None:
    other = tiny.make(SIZES, seed=2)
    for place in ("original", "BF16/deep"):
        tiny.save(folder / place, other.raw, other.config, n_shards=3)
    tiny.save(folder / "one", other.raw, other.config, n_shards=1)
    (folder / "one" / "model.safetensors-00001-of-00001.safetensors").rename(folder / "consolidated.safetensors")
    hub.publish(REPO, folder)
    assert tool("convert", REPO, tmp_path / "out", *way).returncode == 0
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    strays = [name for name in hub.repos[REPO].commits[0][1] if name.endswith(".safetensors") and name not in SHARDS]
    assert len(strays) == 7
    for name in strays:  # what kind of file it is stands in its header
        assert sum(one.n_bytes for one in hub.reads(f"file={name}")) < 200_000 < (folder / name).stat().st_size
    assert not any(name.endswith(".safetensors") and name not in SHARDS for name in cached(tool))
    assert set(SHARDS) <= cached(tool) if way else not cached(tool)


@both_ways
@pytest.mark.parametrize("index", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["index", "no-index"])
def test_m05_a_shard_that_the_repository_lacks_is_named_before_anything_is_downloaded(
    hub: HubServer, tool: Tool, folder: Path, tmp_path: Path, way: list[str], index: bool
) -> None:
    (folder / SHARDS[1]).unlink()
    if not index:
        (folder / "model.safetensors.index.json").unlink()
    hub.publish(REPO, folder)
    run = tool("convert", REPO, tmp_path / "out", *way)
    told(run, 3, f"{REPO}: incomplete: 1 ", SHARDS[1], "the repository itself lacks them", "--revision")
    assert "finish the download" not in run.stderr
    assert not hub.reads(".safetensors?")
    assert not cached(tool)
    assert {path.name for path in tmp_path.iterdir()} <= {"model", "home"}


@both_ways
def test_m10_a_gated_repository_needs_a_token_that_is_never_told(
    hub: HubServer, tool: Tool, folder: Path, made: tiny.Made, tmp_path: Path, way: list[str]
) -> None:
    hub.publish(REPO, folder)
    hub.repos[REPO].gated, hub.repos[REPO].token = True, TOKEN
    run = tool("convert", REPO, tmp_path / "out", *way)
    told(run, 3, f"{REPO}: gated", "accept it at", f"{hub.endpoint}/{REPO}", "HF_TOKEN")
    wrong = TOKEN[::-1]
    run = tool("convert", REPO, tmp_path / "out", *way, "--debug", HF_TOKEN=wrong)
    assert run.returncode == 3
    assert "gated" in run.stderr.splitlines()[-2]
    assert wrong not in run.stdout + run.stderr
    assert not (tmp_path / "out").exists()
    run = tool("convert", REPO, tmp_path / "out", *way, "--debug", HF_TOKEN=TOKEN)
    assert run.returncode == 0, run.stderr
    assert TOKEN not in run.stdout + run.stderr
    tiny.assert_same(tiny.load(tmp_path / "out"), made.canonical)
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    assert {one.authorization for one in hub.reads("/cdn/")} == {None}
