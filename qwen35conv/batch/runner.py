"""Jobs on this machine: a few at a time, sharing one bound on what is read and written at once."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType

from qwen35conv.batch.jobs import Job
from qwen35conv.batch.results import Ended, Event, State
from qwen35conv.batch.work import StoppedError, Surroundings, run_job
from qwen35conv.writing.writer import write_shards

_STEPS_AT_ONCE = 8  # of all jobs together; more only make a disk seek


class Stop:
    """A wish to stop, that any thread may look at."""

    def __init__(self) -> None:
        self.wish = threading.Event()
        self.signal: int | None = None

    def ask(self) -> None:
        """Stop what runs at its next step, and begin nothing more."""
        self.wish.set()

    def check(self) -> None:
        """Raises StoppedError once someone asked."""
        if self.wish.is_set():
            raise StoppedError

    @property
    def is_asked(self) -> bool:
        """Whether someone asked."""
        return self.wish.is_set()


@contextmanager
def stopping_on_signals(stop: Stop) -> Iterator[None]:
    """The first SIGINT or SIGTERM asks to stop, so that all jobs end in order; the second does what it always did."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        stop.ask()
        restore()

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        restore()


def run_jobs(jobs: Sequence[Job], *, n_at_once: int, fail_fast: bool, stop: Stop) -> Iterator[Event]:
    """What happens to the jobs, as it happens; every job ends, whatever becomes of the others.

    With `fail_fast` the first that fails stops the others. What is finished is kept, and the same call resumes.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    n_steps = max(n_at_once, min(_STEPS_AT_ONCE, 2 * (os.cpu_count() or 1)))
    around = Surroundings(
        tell=events.put,
        check=stop.check,
        stop=stop.wish,
        write_shards=partial(write_shards, budget=threading.BoundedSemaphore(n_steps)),
    )
    pool = ThreadPoolExecutor(n_at_once, thread_name_prefix="job")
    try:
        for job in jobs:
            pool.submit(_run, job, around, events.put)
        yield from until_ended(events.get, len(jobs), fail_fast=fail_fast, stop=stop)
    finally:
        stop.ask()
        pool.shutdown()


def until_ended(get: Callable[[], Event], n_jobs: int, *, fail_fast: bool, stop: Stop) -> Iterator[Event]:
    """Events until so many jobs have ended."""
    while n_jobs:
        event = get()
        if isinstance(event, Ended):
            n_jobs -= 1
            if fail_fast and event.result.state is State.FAILED:
                stop.ask()
        yield event


def _run(job: Job, around: Surroundings, put: Callable[[Event], None]) -> None:
    put(Ended(run_job(job, around)))
