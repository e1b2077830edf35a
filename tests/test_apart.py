"""MLX in threads that are not the main one: what comes back, what stays behind, and how the process ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from qwen35conv.verify.apart import run_apart

MANY = """
import os, threading, time
import mlx.core as mx
from qwen35conv.verify.apart import run_apart

def product():
    return (mx.ones((2, 3)) @ mx.ones((3, 5))).sum().item()

def work():
    assert run_apart(product) == 30

def n_left(most):
    end = time.monotonic() + 10  # a thread that was joined may still be on its way out of the system
    while (n := len(os.listdir("/proc/self/task"))) > most and time.monotonic() < end:
        time.sleep(0.01)
    return n

for i in range(13):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if i == 0:
        n_first = len(os.listdir("/proc/self/task"))
print(n_left(n_first) - n_first)
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="only Linux lists a process's threads there")
def test_work_of_many_threads_leaves_one_behind_and_the_process_ends_well() -> None:
    run = subprocess.run([sys.executable, "-c", MANY], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout) <= 2  # MLX's own, made when they are first needed; one for each work would be twelve


def test_what_fails_apart_fails_where_it_was_asked_and_the_next_work_is_done() -> None:
    found: list[object] = []

    def fail() -> None:
        raise ValueError("no")

    def ask() -> None:
        with pytest.raises(ValueError, match="no"):
            run_apart(fail)
        found.append(run_apart(lambda: mx.arange(4).sum().item()))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    assert found == [6]
