"""Batch and diff with repositories on the Hub: streamed, skipped while the commit stays, done anew for another one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import HubServer
from hub_tool import REPO, Tool, files_of

from qwen35conv.batch.finished import STAMP


def ends(tool: Tool, jobs: Path, *options: str) -> dict[str, Any]:
    """How the jobs of a file end."""
    run = tool("batch", jobs, *options)
    lines = map(json.loads, run.stdout.splitlines())
    return {line["job"]: (line["state"], line["exit_code"]) for line in lines if line["event"] == "job"}


@pytest.mark.slow
def test_a_batch_streams_repositories_and_skips_what_is_finished(hub: HubServer, tmp_path: Path) -> None:
    tool = Tool(hub, tmp_path / "home")
    commits = []
    for seed in (1, 2):
        made = tiny.make(seed=seed)
        folder = tiny.save(tmp_path / f"source{seed}", made.raw, made.config)
        commits.append(hub.publish(REPO, folder))
    jobs = tmp_path / "jobs.toml"
    jobs.write_text(
        f'[[job]]\nsource = "{REPO}"\ndestination = "out/{{parent}}-{{name}}"\n'
        f'[[job]]\nsource = "{REPO}"\ndestination = "out/old"\nrevision = "{commits[0]}"\nvia-cache = true\n'
    )
    new = "out/" + REPO.replace("/", "-")
    assert ends(tool, jobs) == {new: ("converted", 0), "out/old": ("converted", 0)}
    for name, seed in ((new, 2), ("out/old", 1)):
        tiny.assert_same(tiny.load(tmp_path / name), tiny.make(seed=seed).canonical)
        plain = tmp_path / f"plain{seed}"
        assert tool("convert", REPO, plain, "--revision", commits[seed - 1]).returncode == 0
        shards = {name: content for name, content in files_of(plain).items() if name != "qwen35.json"}
        made_by_batch = files_of(tmp_path / name)
        assert STAMP in made_by_batch
        assert shards == {name: made_by_batch[name] for name in shards}
    assert ends(tool, jobs) == {new: ("finished before", 0), "out/old": ("finished before", 0)}
    other = tiny.make(seed=3)
    hub.publish(REPO, tiny.save(tmp_path / "source3", other.raw, other.config))
    assert ends(tool, jobs) == {new: ("failed", 4), "out/old": ("finished before", 0)}
    jobs.write_text("overwrite = true\n" + jobs.read_text())
    assert ends(tool, jobs) == {new: ("converted", 0), "out/old": ("finished before", 0)}
    tiny.assert_same(tiny.load(tmp_path / new), other.canonical)


def test_diff_compares_a_repository_with_a_folder_and_with_another_commit(hub: HubServer, tmp_path: Path) -> None:
    tool = Tool(hub, tmp_path / "home")
    commits = []
    for seed in (1, 2):
        made = tiny.make(seed=seed)
        commits.append(hub.publish(REPO, tiny.save(tmp_path / f"source{seed}", made.raw, made.config)))
    assert tool("convert", tmp_path / "source1", tmp_path / "out").returncode == 0
    assert tool("diff", REPO, tmp_path / "out", "--revision-a", commits[0]).returncode == 0
    assert tool("diff", tmp_path / "out", REPO).returncode == 1
    assert tool("diff", REPO, REPO, "--revision-a", commits[0], "--revision-b", commits[1]).returncode == 1


@pytest.mark.slow
def test_a_batch_publishes_what_it_made_once(hub: HubServer, tmp_path: Path) -> None:
    tool = Tool(hub, tmp_path / "home")
    hub.token = tool.environment["HF_TOKEN"] = "hf_write"
    made = tiny.make()
    tiny.save(tmp_path / "model", made.raw, made.config)
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nsource = "model"\ndestination = "out/{name}"\n')
    assert ends(tool, jobs) == {"out/model": ("converted", 0)}
    jobs.write_text(jobs.read_text() + 'push-to-hub = "owner/{name}-mlx"\n')
    assert ends(tool, jobs) == {"out/model": ("published", 0)}
    assert tool("diff", "owner/model-mlx", tmp_path / "model").returncode == 0
    n_before = len(hub.asked)
    assert ends(tool, jobs) == {"out/model": ("finished before", 0)}
    assert len(hub.asked) == n_before
    for wrong in ("no-verify = true", "push-to-hub = 'no id'"):
        jobs.write_text(f"push-to-hub = 'a/b'\n[[job]]\nsource = 'model'\ndestination = 'x'\n{wrong}\n")
        run = tool("batch", jobs)
        assert run.returncode == 2, run.stderr
        assert "jobs.toml:5" in run.stderr
