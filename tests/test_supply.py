"""What CI installs is pinned and hashed, and is what pyproject.toml asks for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[1]
LOCKS = {"dev.txt": "3.10", "judges.txt": "3.11"}
_PIN = re.compile(
    r"^(?P<name>[\w.-]+)==(?P<version>\S+)(?: ; [^\\]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", re.M
)


def pins(lock: str) -> dict[str, set[str]]:
    text = (ROOT / "locks" / lock).read_text()
    found: dict[str, set[str]] = {}
    for match in _PIN.finditer(text):
        found.setdefault(match["name"], set()).add(match["version"])
    n_pinned = sum(not line.startswith((" ", "#")) for line in text.splitlines())
    assert n_pinned == sum(len(versions) for versions in found.values()), "every pin has its hashes"
    return found


def wanted() -> list[Requirement]:
    """The requirements of the project and of its developers, as pyproject.toml has them."""
    text = (ROOT / "pyproject.toml").read_text()
    found = []
    for key in ("dependencies", "dev"):
        block = re.search(rf"^{key} = \[\n(.*?)^\]", text, re.M | re.S)
        assert block is not None
        found += [Requirement(line) for line in re.findall(r'^    "([^"]+)"', block[1], re.M)]
    return found


@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_pins_all_that_is_asked_for_with_hashes(lock: str) -> None:
    pinned = pins(lock)
    assert len(pinned) > 30
    for requirement in wanted():
        if requirement.marker is not None and not requirement.marker.evaluate({"python_version": LOCKS[lock]}):
            continue  # for older Pythons than the lock is for
        versions = pinned.get(requirement.name.lower().replace("_", "-"))
        assert versions, f"{requirement.name}: `make lock` pins it"
        for version in versions:
            assert Version(version) in requirement.specifier, requirement


@pytest.mark.parametrize("lock", [*LOCKS, "judges.in"])
def test_a_lock_names_no_place_on_the_network(lock: str) -> None:
    assert not re.search(r"https?:|file:|--index|--find-links", (ROOT / "locks" / lock).read_text())


def test_judges_are_the_ones_that_pyproject_pins() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    block = re.search(r"^judges = \[\n(.*?)^\]", text, re.M | re.S)
    assert block is not None
    pinned = set(re.findall(r'"([^"]+)"', block[1]))
    listed = {line for line in (ROOT / "locks" / "judges.in").read_text().splitlines() if not line.startswith("#")}
    torch = re.search(r"install '(torch==[^']+)'", (ROOT / "Makefile").read_text())
    assert torch is not None
    assert pinned == listed | {torch[1]}
