"""MLX outside the main thread: one thread for all of it, which ends with the process and before its streams do."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

import mlx.core as mx

T = TypeVar("T")
_waiting: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
_starting = threading.Lock()
_thread: threading.Thread | None = None


def run_apart(work: Callable[[], T]) -> T:
    """What `work` returns or raises; no array may leave it.

    MLX gives each thread streams of its own, and every stream a thread of the system that lives as long as the process:
    work in a new thread each time would leave one behind each time. A stream that outlives its thread aborts the
    process when that ends, so the one thread gives its streams up last of all.
    """
    if threading.current_thread() is threading.main_thread():
        return work()
    _start()
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # raised again by who waits
            future.set_exception(error)

    _waiting.put(run)
    return future.result()


def _start() -> None:
    global _thread
    with _starting:
        if _thread is None:
            _thread = threading.Thread(target=_serve, name="mlx", daemon=True)
            _thread.start()
            atexit.register(_end, _thread)


def _serve() -> None:
    while (run := _waiting.get()) is not None:
        run()
        del run  # and all that it holds, until the next
    mx.clear_streams()


def _end(thread: threading.Thread) -> None:
    _waiting.put(None)
    thread.join()
