"""Time `qwen35 batch` with 1, 2 and 4 workers beside as many `cp -r` at once; print the table as Markdown.

    python scripts/bench_batch.py --folder /big/disk --checkpoints 4 --gb 2

Workers are threads of one process (`--jobs`) or processes of a Dask cluster (`--local-cluster`). Every run is whole,
verification included, and followed by `sync`; runs go in turn and in changing order, and the table holds medians. The
copies show what the disk gives: where they take as long, it is the disk that bounds a batch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import evict, folder_bytes, make, sized

BATCH = (sys.executable, "-m", "qwen35conv", "batch")
WORKERS = (1, 2, 4)


@dataclass(frozen=True)
class Timed:
    """One run: its time with `sync`, what of it the jobs themselves took, and what the processors worked."""

    seconds: float
    job_seconds: float
    cpu_seconds: float


def time_command(command: Sequence[str]) -> Timed:
    """Run a command whole; the last line of a batch says how long its jobs took."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    with tempfile.TemporaryFile() as output:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        os.sync()
        seconds = time.perf_counter() - begun
        if process.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {process.returncode}")
        output.seek(0)
        lines = output.read().splitlines()
    job_seconds = json.loads(lines[-1])["seconds"] if lines else seconds
    return Timed(seconds, job_seconds, usage.ru_utime + usage.ru_stime)


def commands_of(folder: Path, names: Sequence[str]) -> dict[tuple[str, int], tuple[str, ...]]:
    """Every way to do the work, by its name and number of workers."""
    pairs = " ".join(names)
    copies = f"mkdir -p out; printf '%s\\n' {pairs} | xargs -P {{}} -I @ cp -r models/@ out/@"
    found: dict[tuple[str, int], tuple[str, ...]] = {}
    for n in WORKERS:
        found["`cp -r`", n] = ("sh", "-c", f"cd {folder} && {copies.format(n)}")
        found["`--jobs`", n] = (*BATCH, str(folder / "jobs.toml"), "--jobs", str(n))
        found["`--local-cluster`", n] = (*BATCH, str(folder / "jobs.toml"), "--local-cluster", str(n))
    return found


def bench(folder: Path, n_checkpoints: int, gigabytes: float, n_rounds: int, *, cold: bool) -> None:
    """Print the table."""
    names = [f"m{i}" for i in range(n_checkpoints)]
    make(folder / "models" / names[0], sized(gigabytes), max(2, round(gigabytes / 2)))
    for name in names[1:]:
        shutil.copytree(folder / "models" / names[0], folder / "models" / name)
    (folder / "jobs.toml").write_text('destination = "out/{name}"\n[[job]]\nsource = "models/*"\n')
    os.sync()
    commands = commands_of(folder, names)
    runs: dict[tuple[str, int], list[Timed]] = {key: [] for key in commands}
    written = {}
    for i in range(n_rounds):
        for key in list(commands)[:: 1 if i % 2 == 0 else -1]:
            if cold:
                for name in names:
                    evict(folder / "models" / name)
            runs[key].append(time_command(commands[key]))
            written[key] = folder_bytes(folder / "out")
            shutil.rmtree(folder / "out")
            os.sync()
    size = folder_bytes(folder / "models") / 1e9
    print(f"{n_checkpoints} checkpoints, {size:.2f} GB in all; {os.cpu_count()} processors; {n_rounds} rounds\n")
    print("| | at once | time | least-most | jobs alone | written a second | processors busy |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for (what, n), found in sorted(runs.items(), key=lambda item: list(commands).index(item[0]) % 3):
        seconds = [one.seconds for one in found]
        middle = statistics.median(seconds)
        alone = statistics.median(one.job_seconds for one in found)
        busy = statistics.median(one.cpu_seconds / one.seconds for one in found)
        print(
            f"| {what} | {n} | {middle:.2f} s | {min(seconds):.2f}-{max(seconds):.2f} s | {alone:.2f} s "
            f"| {written[what, n] / middle / 1e6:.0f} MB | {busy:.2f} |"
        )


def main() -> None:
    """Read the arguments, run what they ask for, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="Time qwen35 batch with 1, 2 and 4 workers.")
    parser.add_argument("--folder", type=Path, default=None, help="a disk with three times the checkpoints free")
    parser.add_argument("--checkpoints", type=int, default=4)
    parser.add_argument("--gb", type=float, default=0.4, help="of each checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the sources from the page cache before each run")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="qwen35-bench-") as made:
        bench(Path(made), asked.checkpoints, asked.gb, asked.rounds, cold=asked.cold)


if __name__ == "__main__":
    main()
