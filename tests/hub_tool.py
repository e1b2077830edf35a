"""The command line as a process of its own, pointed at the Hub's server on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import tiny
from hub_server import HubServer

REPO = "owner/model"
# Some MB in three shards, so that a shard is far longer than what is read of it at first touch.
SIZES = tiny.Sizes(hidden=64, vocab=12000, intermediate=700)


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


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "qwen35.json"
    }


def told(run: subprocess.CompletedProcess[str], code: int, *texts: str) -> None:
    """The run ended with a code and an error of two lines that holds the texts."""
    assert run.returncode == code, run.stderr
    assert run.stdout == ""
    assert "Traceback" not in run.stderr
    error, hint = run.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert hint.startswith("hint: ")
    for text in texts:
        assert text in run.stderr, run.stderr
