"""Jobs, and the shards inside large ones, as tasks of a Dask cluster over a shared file system.

Dask schedules, and runs again what a dead worker had. What keeps that from writing anything twice or half: a job's task
alone holds the journal, whose lock dies with its process; a shard's task writes into a folder of its own inside the
partial folder, and only the job's task moves whole shards from there and notes them.
"""

from __future__ import annotations

import logging
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen35conv.batch.jobs import Job
from qwen35conv.batch.results import Ended, Entered, Event, Moved, Phase, Result, State
from qwen35conv.batch.runner import Stop, until_ended
from qwen35conv.batch.work import StoppedError, Surroundings, failed, run_job
from qwen35conv.errors import BusyError, DestinationError, Qwen35ConvError, SourceError
from qwen35conv.planning.plan import PlanShard
from qwen35conv.source import Source, open_source
from qwen35conv.writing.journal import Finished, open_journal
from qwen35conv.writing.sharing import Link
from qwen35conv.writing.writer import Partial, Written, write_shards

if TYPE_CHECKING:
    from distributed import Client
    from distributed import Future as AnyFuture

    Future = AnyFuture[Any]

LARGE_BYTES = 1 << 30  # jobs from here on are cut into a task for each shard
_STEPS_AT_ONCE = 8
_BUDGET = threading.BoundedSemaphore(_STEPS_AT_ONCE)  # of all tasks in this worker's process
_TELL_SECONDS = 0.2
_CONNECT_SECONDS = 20
_BUSY_SECONDS = 60  # twice as long as a worker without a scheduler goes on
_BUSY_PAUSE = 0.5


class ClusterError(Qwen35ConvError):
    """A cluster that can't be had: a usage error."""

    exit_code = 2
    usual_hint = "leave --scheduler and --local-cluster out to run on this machine alone"


@contextmanager
def connected(scheduler: str | None, n_local: int) -> Iterator[Client]:
    """A client of the cluster at `scheduler`, or of one with `n_local` workers that lives as long as the block.

    Raises ClusterError where there is none.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        hint = "install it with: pip install 'qwen35conv[dask]'"
        raise ClusterError("Dask is not installed", hint=hint) from error
    for name in list(logging.root.manager.loggerDict):
        if name.partition(".")[0] == "distributed":  # its news, and its farewells, are not ours to tell
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if scheduler is None:
        quiet = {"dashboard_address": ":0", "silence_logs": logging.CRITICAL}
        with (
            LocalCluster(n_workers=n_local, threads_per_worker=1, processes=True, **quiet) as cluster,
            Client(cluster) as client,
        ):
            yield client
        return
    try:
        client = Client(scheduler, timeout=_CONNECT_SECONDS)
    except (OSError, ValueError) as error:
        hint = "check the address, such as tcp://host:8786, and that the scheduler runs"
        raise ClusterError(f"{scheduler}: no scheduler answers: {error or 'timed out'}", hint=hint) from error
    with client:
        yield client


def run_on_cluster(
    jobs: Sequence[Job], client: Client, *, fail_fast: bool, stop: Stop, large_bytes: int = LARGE_BYTES
) -> Iterator[Event]:
    """As `run_jobs`, each job as a task; jobs of `large_bytes` and more are cut into tasks for their shards."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    topic = f"qwen35-batch-{uuid.uuid4().hex}"
    entered: set[str] = set()

    def hear(message: tuple[float, dict[str, Any]]) -> None:
        event = _event(message[1])
        entered.add(event.name)
        events.put(event)

    def end(job: Job, future: Future) -> None:
        events.put(Ended(_result(job, future, has_begun=job.name in entered, was_asked=stop.is_asked)))

    client.subscribe_topic(topic, hear)
    futures: list[Future] = []
    for job in jobs:
        future = client.submit(_run, _placed(job), topic, large_bytes, key=f"{topic}-{len(futures)}", pure=False)
        future.add_done_callback(partial(end, job))
        futures.append(future)
    with _cancelling(client, futures, stop):
        yield from until_ended(events.get, len(jobs), fail_fast=fail_fast, stop=stop)
    client.unsubscribe_topic(topic)


@contextmanager
def _cancelling(client: Client, futures: Sequence[Future], stop: Stop) -> Iterator[None]:
    """Cancel what has not ended, once someone asks to stop, and when the block ends."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.1):
            if stop.is_asked:
                client.cancel([future for future in futures if not future.done()])
                return

    watcher = threading.Thread(target=watch, name="canceller", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()
        client.cancel([future for future in futures if not future.done()])


def _placed(job: Job) -> Job:
    """The job as another process finds it: workers stand in folders of their own."""
    source = os.path.abspath(job.source) if os.path.lexists(job.source) else job.source  # noqa: PTH100 - as it is given
    return replace(job, source=source, destination=job.destination.absolute())


def _result(job: Job, future: Future, *, has_begun: bool, was_asked: bool) -> Result:
    """The result of a job whose task is over, whichever way; `was_asked`: somebody asked to stop."""
    from distributed.scheduler import KilledWorker

    blank = Result(job.name, job.source, str(job.destination), State.NOT_RUN)
    if future.status == "cancelled" and not was_asked:
        hint = "what is finished is kept; the same command resumes once the cluster runs again"
        return failed(blank, DestinationError(f"{job.destination}: the cluster's scheduler is gone", hint=hint))
    if future.status == "cancelled":
        state = State.STOPPED if has_begun else State.NOT_RUN
        return replace(blank, state=state, reason="the batch was stopped", hint="the same command resumes")
    try:
        result: Result = future.result()
    except KilledWorker as error:
        hint = "their logs say why (memory?); what is finished is kept, and the same command resumes"
        workers = DestinationError(f"{job.destination}: the workers that ran this job died: {error}", hint=hint)
        return failed(blank, workers)
    except Exception as error:
        hint = "is the same version of qwen35conv installed on all workers?"
        return failed(blank, ClusterError(f"the task failed: {type(error).__name__}: {error}", hint=hint))
    return replace(result, source=job.source, destination=str(job.destination))


def _event(message: dict[str, Any]) -> Entered | Moved:
    if "n_bytes" in message:
        return Moved(message["job"], message["n_bytes"])
    return Entered(message["job"], Phase(message["phase"]), message["verdict"], message["total"])


def _run(job: Job, topic: str, large_bytes: int) -> Result:
    """A job, in a worker."""
    teller = _Teller(topic)
    write = partial(_write_apart, spec=job.source, revision=job.settings.revision, large_bytes=large_bytes)
    around = Surroundings(tell=teller.tell, check=_check(), write_shards=write)
    deadline = time.monotonic() + _BUSY_SECONDS
    while True:
        result = run_job(job, around)
        # A worker that Dask gave up may still be at this very job: it ends soon, or has finished it.
        if result.kind != BusyError.__name__ or time.monotonic() > deadline:
            return result
        time.sleep(_BUSY_PAUSE)


class _Teller:
    """Sends events to whoever listens to a topic; bytes are gathered for a moment first."""

    def __init__(self, topic: str) -> None:
        from distributed import get_worker

        self._worker = get_worker()
        self._topic = topic
        self._n_bytes = 0
        self._at = time.monotonic()
        self._lock = threading.Lock()

    def tell(self, event: Event) -> None:
        """Send an event."""
        with self._lock:
            if isinstance(event, Entered):
                entry = {"phase": event.phase.value, "verdict": event.verdict, "total": event.total}
                self._send({"job": event.name, **entry})
            elif isinstance(event, Moved):
                self._n_bytes += event.n_bytes
                if time.monotonic() - self._at > _TELL_SECONDS:
                    self._send({"job": event.name, "n_bytes": self._n_bytes})
                    self._n_bytes, self._at = 0, time.monotonic()

    def _send(self, message: dict[str, Any]) -> None:
        self._worker.log_event(self._topic, message)


def _check() -> Callable[[], None]:
    """A function that raises StoppedError once nobody wants this task any more."""
    from distributed import get_worker

    worker = get_worker()
    key = worker.get_current_task()

    def check() -> None:
        task = worker.state.tasks.get(key)
        if task is None or task.state == "cancelled":
            raise StoppedError

    return check


def _write_apart(
    shards: Sequence[PlanShard],
    source: Source,
    target: Partial,
    *,
    jobs: int,
    checksum: bool,
    link: Link,
    on_bytes: Callable[[int], None],
    spec: str,
    revision: str | None,
    large_bytes: int,
) -> tuple[Written, ...]:
    """As `write_shards`: those of a large job each in a task, those of a small one here."""
    here = partial(write_shards, shards, source, target, jobs=jobs, checksum=checksum, link=link)
    resumed = target.finished.keys()
    waiting = [shard for shard in shards if shard.file not in resumed]
    if len(waiting) < 2 or sum(shard.n_bytes for shard in waiting) < large_bytes:
        return here(on_bytes=on_bytes, budget=_BUDGET)
    for shard in shards:
        if shard.file in resumed:
            on_bytes(shard.n_bytes)
    attempt = target.folder / f".attempt-{uuid.uuid4().hex}"
    attempt.mkdir()
    try:
        write_one = partial(_write_one, spec, revision, jobs, checksum, link)
        _scatter(waiting, source, target, attempt, on_bytes, write_one)
    finally:
        shutil.rmtree(attempt, ignore_errors=True)  # who still writes there finds no folder to go on in
    written = here(on_bytes=lambda n: None)
    return tuple(replace(one, resumed=one.file in resumed) for one in written)


def _scatter(
    shards: Sequence[PlanShard],
    source: Source,
    target: Partial,
    attempt: Path,
    on_bytes: Callable[[int], None],
    write_one: Callable[[PlanShard, dict[str, str], str], tuple[str, Finished]],
) -> None:
    """Write shards in tasks, and take each in as it comes."""
    from distributed import as_completed, worker_client

    sizes = {shard.file: shard.n_bytes for shard in shards}
    with worker_client() as client:
        futures = []
        for shard in shards:
            files = {piece.file for write in shard.writes for piece in write.pieces}
            identities = {file: source.identity(file) for file in sorted(files)}
            key = f"{attempt.name}-{shard.file}"
            futures.append(client.submit(write_one, shard, identities, str(attempt), key=key, pure=False))
        try:
            for future in as_completed(futures):
                folder, finished = future.result()
                target.adopt(attempt / folder / finished.file, finished)
                on_bytes(sizes[finished.file])
        finally:
            client.cancel(futures)


def _write_one(
    spec: str,
    revision: str | None,
    jobs: int,
    checksum: bool,
    link: Link,
    shard: PlanShard,
    identities: dict[str, str],
    attempt: str,
) -> tuple[str, Finished]:
    """One shard in a folder of its own inside `attempt`: that folder's name, and the whole shard."""
    check = _check()
    source = open_source(spec, revision=revision)
    for file, identity in identities.items():
        if source.identity(file) != identity:
            raise SourceError(
                f"{source.label}/{file}: this worker sees another file than the one that was planned",
                hint="workers must share the file system of the source, and nobody may write to it meanwhile",
            )
    folder = Path(attempt) / uuid.uuid4().hex
    try:
        folder.mkdir()
    except FileNotFoundError as error:
        raise DestinationError(
            f"{attempt}: this worker does not see the destination, or the job is over",
            hint="workers must share the file system of the destination",
        ) from error
    journal = open_journal(folder)
    assert journal is not None  # nobody else knows the folder
    try:
        target = Partial(folder, journal)
        how: dict[str, Any] = {"jobs": jobs, "checksum": checksum, "link": link}
        write_shards([shard], source, target, on_bytes=lambda n: check(), budget=_BUDGET, **how)
        return folder.name, target.finished[shard.file]
    finally:
        journal.close()
