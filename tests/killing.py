"""A conversion killed at many points, and run again each time: what is left in between and in the end, as JSON.

A script of its own, because a process that forks must have no threads: `killing.py WORK KIND WHEN N SEED`. Each run is
a child, forked after the imports and the plan. It kills itself before or after its n-th call of any function, or of the
system (`calls`, `system`), in any thread; or it is killed from outside after a random time (`time`).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny

from qwen35conv.convert import carry_out, prepare
from qwen35conv.errors import Qwen35ConvError
from qwen35conv.planning.plan import Mtp, Options, make_plan
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import open_source

Tree = dict[str, str]
JOURNAL = ".journal.jsonl"


def tree(folder: Path) -> Tree:
    """A digest of every file below a folder; empty where there is none."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def is_of_the_system(function: Any) -> bool:
    """Whether a function of C asks the system for something: files, folders, locks."""
    owner = type(getattr(function, "__self__", None)).__module__
    return getattr(function, "__module__", None) in ("posix", "fcntl", "_io") or owner == "_io"


class Calls:
    """Counts the calls of a process, and kills it at one of them."""

    def __init__(self, at: int | None, *, of_the_system: bool) -> None:
        self.n = 0
        self.at = at
        self.of_the_system = of_the_system

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if self.of_the_system and not (event in ("c_call", "c_return") and is_of_the_system(argument)):
            return
        self.n += 1
        if self.n == self.at:
            os.kill(os.getpid(), signal.SIGKILL)

    def begin(self) -> None:
        threading.setprofile(self)
        sys.setprofile(self)


def forked(job: Callable[[], int], kill_after: float | None = None) -> int:
    """The exit code of a child that runs `job`; -9 where it was killed."""
    child = os.fork()
    if child == 0:
        try:
            code = job()
        except BaseException:  # a child must end here, whatever happens
            import traceback

            traceback.print_exc()
            code = 99
        os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def main(work: Path, kind: str, when: str, n_points: int, seed: int) -> dict[str, Any]:
    """What came of `n_points` kills: how many left a whole folder, a resumable one or nothing, and every fault."""
    rng = random.Random(seed)
    timed = when == "time"
    with_head, overwrite = kind in ("sidecar", "both"), kind in ("overwrite", "both")
    made = tiny.make(tiny.Sizes(vocab=60_000 if timed else 70, hidden=96), seed=seed)
    folder = tiny.save(work / "source", made.raw, made.config, n_shards=4, seed=seed)
    (folder / "tokenizer.json").write_text("{}")
    source = open_source(str(folder))
    options = Options(mtp=Mtp.SIDECAR if with_head else Mtp.DROP)
    plan = make_plan(read_checkpoint(source), options)
    targets = [work / "out", *([work / "out-mtp"] if with_head else [])]

    def convert(to: Path, calls: Calls | None = None) -> int:
        preparation = prepare(source, plan, to, jobs=2)
        try:
            if calls is not None:
                calls.begin()
            carry_out(source, preparation, overwrite=overwrite, check=False)
        except Qwen35ConvError as error:
            sys.setprofile(None)
            sys.stderr.write(f"{error}\n")
            return error.exit_code
        return 0

    def count_calls() -> int:
        calls = Calls(None, of_the_system=when == "system")
        code = convert(work / "out", calls)
        sys.setprofile(None)
        (work / "count").write_text(str(calls.n))
        return code

    begun = time.monotonic()
    assert forked(count_calls) == 0
    seconds = time.monotonic() - begun
    n_calls = int((work / "count").read_text())
    references = [tree(target) for target in targets]
    before = tree(folder), {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    old = {"config.json": b"{}", "model.safetensors": b"old", "notes.txt": b"mine"}
    counts = {"killed": 0, "ended first": 0, "left whole": 0, "left shards": 0, "left nothing": 0}
    faults: list[str] = []

    def clear() -> None:
        for path in work.glob("out*"):
            shutil.rmtree(path)
        if overwrite:
            for target in targets:
                target.mkdir()
                for name, content in old.items():
                    (target / name).write_bytes(content)

    for _ in range(n_points):
        clear()
        at = rng.randrange(1, n_calls + 1)
        if timed:
            code = forked(lambda: convert(work / "out"), kill_after=rng.random() * seconds)
        else:
            code = forked(lambda: convert(work / "out", Calls(at, of_the_system=when == "system")))  # noqa: B023
        if code not in (0, -9):
            faults.append(f"{at}: the run ended with {code}")
        counts["killed" if code == -9 else "ended first"] += 1
        wholes = []
        for target, reference in zip(targets, references, strict=True):
            left = tree(target)
            left.pop(JOURNAL, None)  # published, and not yet cleaned up
            replaced = overwrite and left == {n: hashlib.sha256(c).hexdigest() for n, c in old.items()}
            if left and left != reference and not replaced:
                faults.append(f"{at}: {target.name} is half written: {sorted(left)[:5]}")
            wholes.append(left == reference)
            if overwrite and not left and not list(work.glob(f"{target.name}.old-*")):
                faults.append(f"{at}: the old {target.name} is lost")
        shards = list(work.glob("out*.partial/*.safetensors"))
        counts["left whole" if all(wholes) else "left shards" if shards else "left nothing"] += 1
        again = forked(lambda: convert(work / "out"))
        if again != (4 if all(wholes) and not overwrite else 0):
            faults.append(f"{at}: the same command ended with {again}")
        for target, reference in zip(targets, references, strict=True):
            if tree(target) != reference:
                faults.append(f"{at}: {target.name} differs after the second run")
        names = sorted(path.name for path in work.glob("out*"))
        if names != [target.name for target in targets]:
            faults.append(f"{at}: left behind: {names}")
        if (tree(folder), {path: path.stat().st_mtime_ns for path in folder.iterdir()}) != before:
            faults.append(f"{at}: the source was touched")
    return {"calls": n_calls, "seconds": seconds, "counts": counts, "faults": faults}


if __name__ == "__main__":
    found = main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
    sys.stdout.write(json.dumps(found))
