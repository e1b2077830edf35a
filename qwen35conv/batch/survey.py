"""What a batch would do, and what that takes: every job looked at, nothing changed."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path

from qwen35conv.batch.finished import Standing
from qwen35conv.batch.jobs import Job
from qwen35conv.batch.results import Result, State, exit_code_of
from qwen35conv.batch.work import failed, prepare_job
from qwen35conv.convert import conversion_key
from qwen35conv.errors import DestinationError, Qwen35ConvError
from qwen35conv.writing.journal import n_bytes_kept


class Action(str, Enum):
    """What a job would do."""

    CONVERT = "convert"
    RESUME = "resume"
    REPLACE = "replace"
    VERIFY = "verify"  # what an earlier run made
    NOTHING = "nothing: finished"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class Look:
    """One job: its verdict, what it would do, and how many bytes it would write; `problem` is why it is refused."""

    job: Job
    verdict: str | None
    action: Action
    n_bytes: int
    problem: Qwen35ConvError | None = None

    @property
    def result(self) -> Result:
        """The look as a result, for what counts results."""
        job = self.job
        blank = Result(job.name, job.source, str(job.destination), State.NOT_RUN, self.verdict, self.n_bytes)
        return blank if self.problem is None else failed(blank, self.problem)


@dataclass(frozen=True, slots=True)
class FileSystem:
    """One file system that jobs write to, and the bytes that all of them need and it has."""

    path: str  # where it is mounted
    n_jobs: int
    n_needed: int
    n_free: int

    @property
    def fits(self) -> bool:
        """Whether there is room."""
        return self.n_needed <= self.n_free


@dataclass(frozen=True, slots=True)
class Survey:
    """All jobs, and the file systems that they write to."""

    looks: tuple[Look, ...]
    file_systems: tuple[FileSystem, ...]

    @property
    def exit_code(self) -> int:
        """What running the jobs would come to, as far as that shows."""
        code = exit_code_of(look.result for look in self.looks)
        is_full = not all(system.fits for system in self.file_systems)
        return code if code == 1 or not is_full else DestinationError.exit_code


def survey_jobs(jobs: Sequence[Job], *, n_at_once: int) -> Survey:
    """What the jobs would do. A job that can't be done is part of the answer."""
    stop = threading.Event()
    with ThreadPoolExecutor(n_at_once, thread_name_prefix="survey") as pool:
        try:
            looks = tuple(pool.map(partial(_look, stop=stop), jobs))
        except BaseException:  # interrupted
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise
    found: dict[int, FileSystem] = {}
    for look in looks:
        if look.action in (Action.REFUSE, Action.NOTHING, Action.VERIFY):
            continue
        parent = next(place for place in look.job.destination.absolute().parents if place.is_dir())
        device = parent.stat().st_dev
        if device not in found:
            found[device] = FileSystem(str(_mount(parent)), 0, 0, shutil.disk_usage(parent).free)
        system = found[device]
        found[device] = replace(system, n_jobs=system.n_jobs + 1, n_needed=system.n_needed + look.n_bytes)
    return Survey(looks, tuple(found.values()))


def _look(job: Job, stop: threading.Event) -> Look:
    verdicts: list[str] = []
    try:
        prepared = prepare_job(job, verdicts.append, stop)
        if prepared.standing is not Standing.NEW:
            action = Action.NOTHING if prepared.standing is Standing.FINISHED else Action.VERIFY
            return Look(job, verdicts[0], action, 0)
        partials = [
            place.with_name(f"{place.name}.partial")
            for place in (job.destination, prepared.preparation.sidecar)
            if place is not None
        ]
        n_kept = sum(n_bytes_kept(place, conversion_key(prepared.plan)) for place in partials)
        action = Action.REPLACE if os.path.lexists(job.destination) else Action.RESUME if n_kept else Action.CONVERT
        return Look(job, verdicts[0], action, prepared.preparation.preflight.n_needed - n_kept)
    except Qwen35ConvError as error:
        return Look(job, verdicts[0] if verdicts else None, Action.REFUSE, 0, error)


def _mount(folder: Path) -> Path:
    folder = folder.resolve()
    return next(place for place in (folder, *folder.parents) if place.is_mount())
