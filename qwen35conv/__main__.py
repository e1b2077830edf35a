"""The command `qwen35`, and `python -m qwen35conv`: signals are answered from here on."""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. SIGINT ends it with 130 and SIGTERM with 143, whenever they come."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _leave)
    from qwen35conv.cli import main as run

    run()


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)  # nothing has begun


if __name__ == "__main__":
    main()
