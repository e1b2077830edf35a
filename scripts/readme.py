"""Runs the commands that README.md shows on the small checkpoint of the repository, and puts their output under them.

python scripts/readme.py            rewrite the blocks
python scripts/readme.py --check    exit 1 where a block is not what the command prints (times aside)
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
CHECKPOINT = ROOT / "tests" / "data" / "tiny"
_BLOCK = re.compile(r"```console\n(.*?)```", re.DOTALL)
# A file system that shares blocks copies less.
_TIMES = re.compile(r"\d+\.\d s, [\d.]+ [kMG]?B/s\n(  [\d,]+ B .*\n)?")


def outputs(text: str) -> str:
    """The text with each console block run anew: lines that begin with `$ ` are commands."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(CHECKPOINT, folder / "tiny")

        def run(match: re.Match[str]) -> str:
            commands = [line[2:] for line in match[1].splitlines() if line.startswith("$ qwen35 ")]
            return "```console\n" + "\n".join(_shown(command, folder) for command in commands) + "```"

        return _BLOCK.sub(run, text)


def _shown(command: str, folder: Path) -> str:
    run = subprocess.run(
        [sys.executable, "-m", "qwen35conv", *shlex.split(command)[1:]],
        cwd=folder,
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "100", "PYTHONUTF8": "1"},
        check=False,
    )
    return f"$ {command}\n{run.stdout}{run.stderr}"


def without_times(text: str) -> str:
    """The text with times and rates left out, which no two runs share."""
    return _TIMES.sub("(time)", text)


def main() -> None:
    """Rewrite the blocks, or check them."""
    text = README.read_text(encoding="utf-8")
    anew = outputs(text)
    if "--check" not in sys.argv:
        README.write_text(anew, encoding="utf-8")
    elif without_times(anew) != without_times(text):
        sys.exit("README.md shows what the commands no longer print: run scripts/readme.py")


if __name__ == "__main__":
    main()
