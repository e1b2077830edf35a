"""The main job on a small checkpoint that the repository holds: inspect, convert, inspect the result, verify it."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

CHECKPOINT = Path(__file__).parents[1] / "tests" / "data" / "tiny"
PROMPT = (CHECKPOINT.parent / "tiny-prompts.txt").read_text().splitlines()[0]


def main() -> None:
    """Run the four commands, and stop where one fails."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "tiny-mlx"
        for arguments in (
            ["inspect", str(CHECKPOINT)],
            ["convert", str(CHECKPOINT), str(out)],
            ["inspect", str(out)],
            ["verify", str(out), "--source", str(CHECKPOINT), "--prompt", PROMPT],
        ):
            print(f"\n$ qwen35 {shlex.join(arguments)}\n", flush=True)
            run = subprocess.run([sys.executable, "-m", "qwen35conv", *arguments], check=False)
            if run.returncode:
                sys.exit(run.returncode)


if __name__ == "__main__":
    main()
