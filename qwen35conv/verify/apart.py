"""MLX outside the main thread: a thread for each piece of work, which ends without its streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")


def run_apart(work: Callable[[], T]) -> T:
    """What `work` returns or raises; no array may leave it.

    MLX gives each thread streams of its own. A stream that outlives its thread aborts the process when that ends, and a
    thread that gave its streams up gets no others: so the thread must be new, and end here.
    """
    if threading.current_thread() is threading.main_thread():
        return work()

    def run() -> T:
        try:
            return work()
        finally:
            mx.clear_streams()

    with ThreadPoolExecutor(1, thread_name_prefix="mlx") as pool:
        return pool.submit(run).result()
