"""The Hub as the command line meets it: the real client, a real server on loopback, and everything that goes wrong."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from hub_server import HubServer, serving

REPO = "owner/model"
# Some MB in three shards, so that a shard is far longer than what is read of it at first touch.
SIZES = tiny.Sizes(hidden=64, vocab=12000, intermediate=700)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving() as server:
        yield server


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


class Tool:
    """The command line with its own home, pointed at the server."""

    def __init__(self, hub: HubServer, home: Path) -> None:
        self.environment = os.environ | {
            "COLUMNS": "120",
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
            self.environment.pop(name, None)

    def command(self, *arguments: object) -> list[str]:
        return [sys.executable, "-m", "qwen35conv", *map(str, arguments)]

    def __call__(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=120,
            env=self.environment | environment, check=False,
        )  # fmt: skip

    def json(self, *arguments: object, **environment: str) -> dict[str, Any]:
        run = self(*arguments, "--json", **environment)
        assert run.returncode == 0, run.stdout + run.stderr
        found: dict[str, Any] = json.loads(run.stdout)
        return found


@pytest.fixture
def tool(hub: HubServer, tmp_path: Path) -> Tool:
    return Tool(hub, tmp_path / "home")


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "qwen35.json"
    }


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
