"""One job from source to verified destination, and whatever goes wrong as a result."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from qwen35conv.batch.finished import (
    STAMP,
    Standing,
    build_last_stamp,
    build_stamp,
    is_noted,
    is_proved,
    is_pushed,
    renew_stamp,
    standing_of,
)
from qwen35conv.batch.jobs import Job
from qwen35conv.batch.results import CheckLine, Entered, Event, Moved, Phase, Result, State
from qwen35conv.convert import (
    Means,
    Preparation,
    ShardWriter,
    carry_out,
    check_target,
    download_first,
    prepare,
)
from qwen35conv.errors import DestinationError, Qwen35ConvError
from qwen35conv.planning.plan import Plan, make_plan
from qwen35conv.planning.verdicts import judge_checkpoint
from qwen35conv.proof import verify_result
from qwen35conv.reading import read_checkpoint
from qwen35conv.source import LocalSource, open_source
from qwen35conv.writing.sharing import Link

if TYPE_CHECKING:
    from qwen35conv.hub.source import HubSource
    from qwen35conv.verify import Verification, VerifyOptions


class StoppedError(Exception):
    """The batch was asked to stop; raised inside a job, at the next step that it takes."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a job runs in. `tell` hears of it as it goes; `check` raises StoppedError once it is to stop.

    `stop`, where there is one, is set then, and ends what waits for the Hub.
    """

    tell: Callable[[Event], None]
    check: Callable[[], None]
    write_shards: ShardWriter
    stop: threading.Event | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """A job that was looked at: what it would do, and what stands at its destination."""

    source: LocalSource | HubSource
    preparation: Preparation
    standing: Standing

    @property
    def plan(self) -> Plan:
        """The job's plan."""
        return self.preparation.plan


def run_job(job: Job, around: Surroundings) -> Result:
    """What became of a job. Nothing is raised: an error is the job's own end."""
    begun = time.monotonic()
    blank = Result(job.name, job.source, str(job.destination), State.NOT_RUN)
    running = _Running(job, around, blank)
    try:
        around.check()
        result = running.run()
    except StoppedError:
        result = running.stopped()
    except Qwen35ConvError as error:
        result = failed(running.so_far, error)
    except Exception as error:
        if around.stop is not None and around.stop.is_set():  # so a read that was ended tells of it
            return replace(running.stopped(), seconds=round(time.monotonic() - begun, 3))
        where = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        hint = f"`qwen35 convert --debug` on {job.source} shows where; please report it"
        result = failed(running.so_far, Qwen35ConvError(f"unexpected: {where}", hint=hint))
    return replace(result, seconds=round(time.monotonic() - begun, 3))


def failed(result: Result, error: Qwen35ConvError) -> Result:
    """The result of a job that an error ended."""
    return replace(
        result,
        state=State.FAILED,
        exit_code=error.exit_code,
        kind=type(error).__name__,
        reason=str(error),
        hint=error.hint,
    )


def prepare_job(job: Job, on_verdict: Callable[[str], None], stop: threading.Event | None = None) -> Prepared:
    """All that is known of a job before it changes anything; `on_verdict` hears the generation, once it is known.

    Raises what reading, planning and preparing raise.
    """
    settings = job.settings
    source = open_source(job.source, revision=settings.revision, stop=stop)
    checkpoint = read_checkpoint(source, ignore_index=settings.ignore_index)
    verdicts = judge_checkpoint(checkpoint)
    on_verdict(verdicts.trunk.generation.value)
    plan = make_plan(checkpoint, settings.options, verdicts)
    preparation = prepare(
        source,
        plan,
        job.destination,
        jobs=settings.jobs,
        link=Link.AUTO if settings.via_cache else settings.link,  # what is not here yet can't be asked
    )
    standing = standing_of(source, preparation, settings)
    if standing is Standing.NEW:
        for target in (job.destination, preparation.sidecar):
            if target is not None:
                check_target(source, target, overwrite=settings.overwrite)
    return Prepared(source, preparation, standing)


class _Running:
    """A job on its way; `so_far` is what its result holds already."""

    def __init__(self, job: Job, around: Surroundings, blank: Result) -> None:
        self.job = job
        self.around = around
        self.so_far = blank
        self.phase: Phase | None = None

    def stopped(self) -> Result:
        """Where the job stood when the batch was stopped."""
        state = State.STOPPED if self.phase is not None else State.NOT_RUN
        return replace(self.so_far, state=state, reason="the batch was stopped", hint="the same command resumes")

    def run(self) -> Result:
        self._enter(Phase.INSPECT)
        prepared = prepare_job(self.job, self._note_verdict, self.around.stop)
        shards = (*prepared.plan.shards, *prepared.plan.sidecar)
        n_bytes = prepared.preparation.n_shard_bytes
        self.so_far = replace(self.so_far, n_bytes=n_bytes, n_shards=len(shards))
        self.around.check()
        result = self._made(prepared)
        repo = self.job.settings.push_to_hub
        if repo is not None and not is_pushed(self.job.destination, repo):
            self.so_far = result
            self._push(prepared, repo)
            if result.state is State.FINISHED:
                return replace(result, state=State.PUBLISHED)
        return result

    def _made(self, prepared: Prepared) -> Result:
        """The job's destination, brought to what the job asks."""
        match prepared.standing:
            case Standing.FINISHED:
                if not is_noted(self.job.destination):
                    self._renew(prepared)
                return replace(self.so_far, state=State.FINISHED)
            case Standing.UNVERIFIED:
                return self._verify(prepared)
            case Standing.UNPROVED:
                self._enter(Phase.VERIFY)
                if is_proved(prepared.source, prepared.preparation):
                    return self._verify(prepared)
                if not self.job.settings.overwrite:
                    raise DestinationError(
                        f"{self.job.destination}: exists, and is not what this job makes: it was changed, or another's",
                        hint="choose another folder, or overwrite = true to replace it",
                    )
                return self._convert(prepared)
            case Standing.NEW:
                return self._convert(prepared)

    def _convert(self, prepared: Prepared) -> Result:
        settings, source, preparation = self.job.settings, prepared.source, prepared.preparation
        if settings.via_cache and not isinstance(source, LocalSource):
            download_first(source, preparation, progress=False)
            preparation = prepare(source, prepared.plan, self.job.destination, jobs=settings.jobs, link=settings.link)
        self._enter(Phase.WRITE, preparation.n_shard_bytes)
        try:
            outcome = carry_out(
                source,
                preparation,
                overwrite=settings.overwrite,
                checksum=settings.checksum,
                check=not settings.no_verify,
                on_bytes=self._on_bytes,
                means=Means(
                    write_shards=self.around.write_shards,
                    files={STAMP: build_stamp(source, preparation, settings)},
                    verifying=_verifying(self.job, prepared),
                    on_check=self._on_check,
                ),
            )
        except DestinationError:
            # Another run may have finished it between our look and our turn.
            standing = standing_of(source, preparation, settings)
            if standing is Standing.NEW:
                raise
            return self._made(replace(prepared, preparation=preparation, standing=standing))
        self._renew(prepared)
        return replace(
            self.so_far,
            state=State.CONVERTED,
            n_resumed=sum(written.resumed for written in outcome.written),
            checks=_lines(outcome.verification),
        )

    def _verify(self, prepared: Prepared) -> Result:
        """Whether what an earlier run made passes what is asked now."""
        self._enter(Phase.VERIFY)
        destination = self.job.destination
        result = LocalSource(destination, str(destination))
        found = verify_result(
            result,
            read_checkpoint(result),
            _verifying(self.job, prepared),
            self._on_check,
            label=prepared.plan.checkpoint.label,
            assumed=prepared.plan.options.assume is not None,
            hint=f"{destination} was made before this was asked of it, and stays",
        )
        self._renew(prepared)
        return replace(self.so_far, state=State.VERIFIED, checks=_lines(found))

    def _push(self, prepared: Prepared, repo: str) -> None:
        """Send what has passed its verification to a repository, and note that."""
        from qwen35conv.push import prepare_push, push  # huggingface_hub: only where it is used

        self._enter(Phase.PUSH)
        settings, destination = self.job.settings, self.job.destination
        push(prepare_push(destination, repo, private=settings.private, verified=True))
        self._renew(prepared, pushed=repo)

    def _renew(self, prepared: Prepared, pushed: str | None = None) -> None:
        """Note what stands at the destination, and what it has passed."""
        try:
            stamp = build_last_stamp(prepared.source, prepared.preparation, self.job.settings, pushed)
            renew_stamp(stamp, self.job.destination)
        except OSError as error:
            place = self.job.destination / STAMP
            raise DestinationError(f"{place}: can't be written: {error.strerror or error}") from error

    def _enter(self, phase: Phase, total: int = 0) -> None:
        self.around.check()
        self.phase = phase
        self.around.tell(Entered(self.job.name, phase, self.so_far.verdict, total))

    def _note_verdict(self, verdict: str) -> None:
        self.so_far = replace(self.so_far, verdict=verdict)

    def _on_bytes(self, n_bytes: int) -> None:
        self.around.check()
        self.around.tell(Moved(self.job.name, n_bytes))

    def _on_check(self, what: str, done: int, total: int) -> None:
        if self.phase is Phase.VERIFY:
            self.around.check()
        else:
            self._enter(Phase.VERIFY)


def _verifying(job: Job, prepared: Prepared) -> VerifyOptions | None:
    """What a job asks of its result; None for the quick steps."""
    asked = job.settings.verifying
    if not asked.is_asked:
        return None
    from qwen35conv.verify import Original, RunDtype, VerifyOptions  # MLX: only where it is used
    from qwen35conv.verify.tokens import read_prompt

    return VerifyOptions(
        original=Original(prepared.source, prepared.plan) if asked.deep else None,
        prompt=asked.prompt if asked.prompt_file is None else read_prompt(asked.prompt_file),
        tokens=asked.tokens,
        chat=asked.chat,
        max_new_tokens=asked.max_new_tokens,
        backend=asked.backend,
        reference=asked.reference,
        atol=asked.atol,
        dtype=RunDtype(asked.dtype),
        deep=asked.deep,
        profile=asked.profile,
        max_memory=asked.max_memory,
    )


def _lines(verification: Verification | None) -> tuple[CheckLine, ...]:
    if verification is None:
        return ()
    return tuple(CheckLine(check.name, check.passed, check.summary) for check in verification.checks)
