"""What becomes of jobs, as it happens and in the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from qwen35conv.errors import DestinationError, SourceError


class State(str, Enum):
    """How a job ended."""

    CONVERTED = "converted"
    VERIFIED = "verified"  # it had been converted before, and passed what is asked of it now
    PUBLISHED = "published"  # it had been finished before, and is on the Hub now
    FINISHED = "finished before"
    FAILED = "failed"
    STOPPED = "stopped"  # in the middle: the same command resumes
    NOT_RUN = "not run"

    @property
    def is_right(self) -> bool:
        """Whether the destination holds what the job asks for."""
        return self in (State.CONVERTED, State.VERIFIED, State.PUBLISHED, State.FINISHED)


class Phase(str, Enum):
    """What a job is at."""

    INSPECT = "inspecting"
    WRITE = "writing"
    VERIFY = "verifying"
    PUSH = "publishing"


@dataclass(frozen=True, slots=True)
class CheckLine:
    """One step of a verification in a line; `passed` is None where it could not judge."""

    name: str
    passed: bool | None
    summary: str


@dataclass(frozen=True, slots=True)
class Result:
    """One job's end. `reason` and `hint` tell what went wrong."""

    name: str
    source: str
    destination: str
    state: State
    verdict: str | None = None  # None: not read far enough to have one
    n_bytes: int = 0  # of its shards
    n_shards: int = 0
    n_resumed: int = 0  # shards that an earlier run had finished
    seconds: float = 0.0
    checks: tuple[CheckLine, ...] = ()
    exit_code: int = 0
    kind: str | None = None  # the error's class
    reason: str | None = None
    hint: str | None = None


@dataclass(frozen=True, slots=True)
class Entered:
    """A job entered a phase; `total` bytes are to be written in it, where that is known."""

    name: str
    phase: Phase
    verdict: str | None = None
    total: int = 0


@dataclass(frozen=True, slots=True)
class Moved:
    """So many more bytes of a job are written."""

    name: str
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A job is over."""

    result: Result


Event = Entered | Moved | Ended


def exit_code_of(results: Iterable[Result]) -> int:
    """0 only if all are right; 1 if any checkpoint is wrong; else the worst of 3 and 4."""
    codes = {result.exit_code for result in results if result.state is State.FAILED}
    if 1 in codes or codes - {SourceError.exit_code, DestinationError.exit_code}:
        return 1
    return max(codes, default=0)
