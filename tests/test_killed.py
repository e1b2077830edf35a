"""A conversion that is killed: nothing half-written, the source untouched, and the next run makes the same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
KINDS = ["plain", "overwrite", "sidecar", "both"]


def killed(work: Path, kind: str, when: str, n_points: int, seed: int) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, ROOT / "tests" / "killing.py", work, kind, when, str(n_points), str(seed)],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout)
    assert found["faults"] == []
    assert sum(found["counts"].values()) == 2 * n_points
    return found


def test_killed_at_a_few_calls_the_same_command_makes_the_same_bytes(tmp_path: Path) -> None:
    found = killed(tmp_path, "both", "system", 12, seed=5)
    assert found["counts"]["killed"] == 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_any_call_to_the_system_nothing_is_lost(kind: str, tmp_path: Path) -> None:
    found = killed(tmp_path, kind, "system", 50, seed=KINDS.index(kind))
    assert found["counts"]["killed"] == 50
    assert found["counts"]["left shards"] > 10


@pytest.mark.slow
def test_killed_at_any_call_of_the_program_nothing_is_lost(tmp_path: Path) -> None:
    assert killed(tmp_path, "both", "calls", 40, seed=9)["counts"]["killed"] == 40


@pytest.mark.slow
def test_killed_at_any_time_nothing_is_lost(tmp_path: Path) -> None:
    assert killed(tmp_path, "both", "time", 40, seed=10)["counts"]["killed"] > 5
