"""The Hub's server, and the command line pointed at it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import HubServer, serving
from hub_tool import Tool


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serving() as server:
        yield server


@pytest.fixture
def tool(hub: HubServer, tmp_path: Path) -> Tool:
    return Tool(hub, tmp_path / "home")
