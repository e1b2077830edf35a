"""A batch as it runs: a live table in a terminal, one JSON line an event elsewhere; and what all jobs came to."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from qwen35conv.batch.results import Ended, Entered, Event, Moved, Phase, Result, State
from qwen35conv.batch.survey import Action, Survey
from qwen35conv.generation.convention import Generation
from qwen35conv.report.console import clean, emit, is_plain, n_columns, show_document
from qwen35conv.report.documents import schema
from qwen35conv.report.page import Page, Span, assembled, show_page
from qwen35conv.report.words import counted, exact, sized, style_of

if TYPE_CHECKING:
    from rich.console import RenderableType

_STYLES = {State.FAILED: "bold red", State.STOPPED: "yellow", State.NOT_RUN: "yellow", State.FINISHED: "green"}
_PER_SECOND = 5
_SHOWN = 30  # rows of the live table: what does not fit a screen can't be redrawn in place


def show_batch(
    events: Iterable[Event], names: Sequence[str], exit_code: Callable[[Sequence[Result]], int], *, as_json: bool
) -> tuple[Result, ...]:
    """All results in the order of `names`, each event shown as it comes; `exit_code` is what they come to."""
    begun = time.monotonic()
    by_name: dict[str, Result] = {}
    lines = as_json or not sys.stdout.isatty()
    with _table(names) if not lines else _lines() as show:
        for event in events:
            show(event)
            if isinstance(event, Ended):
                by_name[event.result.name] = event.result
                _annotate(event.result)
    results = tuple(by_name[name] for name in names)
    seconds = time.monotonic() - begun
    if lines:
        _emit_line({"event": "end", **_totals(results), "exit_code": exit_code(results), "seconds": round(seconds, 3)})
    else:
        show_page(lambda page: _build(page, results, seconds), sys.stdout)
    return results


def show_survey(survey: Survey, *, as_json: bool) -> None:
    """Write what a batch would do to stdout: one table, or a JSON line for each job and file system."""
    if not as_json:
        show_page(lambda page: _build_survey(page, survey), sys.stdout)
        return
    for look in survey.looks:
        document = result_document(look.result)
        _emit_line({"event": "planned", "action": look.action.value, **document})
    for system in survey.file_systems:
        _emit_line(
            {
                "event": "file-system",
                "path": system.path,
                "jobs": system.n_jobs,
                "n_bytes_needed": system.n_needed,
                "n_bytes_free": system.n_free,
                "fits": system.fits,
            }
        )
    _emit_line({"event": "end", "jobs": len(survey.looks), "exit_code": survey.exit_code})


def result_document(result: Result) -> dict[str, Any]:
    """A result as an event holds it."""
    return {
        "job": result.name,
        "source": result.source,
        "destination": result.destination,
        "state": result.state.value,
        "verdict": result.verdict,
        "n_bytes": result.n_bytes,
        "n_shards": result.n_shards,
        "n_shards_resumed": result.n_resumed,
        "seconds": result.seconds,
        "checks": [{"name": check.name, "passed": check.passed, "summary": check.summary} for check in result.checks],
        "exit_code": result.exit_code,
        "kind": result.kind,
        "reason": result.reason,
        "hint": result.hint,
    }


@contextmanager
def _lines() -> Iterator[Any]:
    def show(event: Event) -> None:
        if isinstance(event, Entered):
            line = {"event": "phase", "job": event.name, "phase": event.phase.value, "verdict": event.verdict}
            _emit_line(line | ({"n_bytes": event.total} if event.total else {}))
        elif isinstance(event, Ended):
            _emit_line({"event": "job", **result_document(event.result)})

    yield show


def _emit_line(document: dict[str, Any]) -> None:
    show_document({"schema": schema("batch"), **document}, indent=None)


def _totals(results: Sequence[Result]) -> dict[str, Any]:
    counts = Counter(result.state for result in results)
    return {
        "jobs": len(results),
        "states": {state.value: counts[state] for state in State if counts[state]},
        "n_bytes": sum(result.n_bytes for result in results if result.state is State.CONVERTED),
    }


@dataclass(slots=True)
class _Row:
    """One job in the live table."""

    name: str
    verdict: str | None = None
    phase: Phase | None = None
    done: int = 0
    total: int = 0
    begun: float = 0.0
    result: Result | None = None


@contextmanager
def _table(names: Sequence[str]) -> Iterator[Any]:
    """A function that shows events in a table that is redrawn in place; in a plain terminal, a line for each end."""
    rows = {name: _Row(name) for name in names}

    def take(event: Event) -> None:
        if isinstance(event, Ended):
            rows[event.result.name].result = event.result
            return
        row = rows[event.name]
        if isinstance(event, Moved):
            row.done += event.n_bytes
            return
        row.verdict, row.phase, row.begun = event.verdict, event.phase, time.monotonic()
        row.done, row.total = 0, event.total

    if is_plain(sys.stdout):

        def tell(event: Event) -> None:
            if isinstance(event, Ended):
                emit(f"{clean(event.result.name)}  {event.result.state.value}\n", sys.stderr)

        yield tell
        return
    from rich.console import Console
    from rich.live import Live

    console = Console(width=n_columns(sys.stdout), highlight=False, markup=False, emoji=False)
    with Live(
        get_renderable=lambda: _drawn(list(rows.values())),
        console=console,
        refresh_per_second=_PER_SECOND,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    ):
        yield take


def _drawn(rows: Sequence[_Row]) -> RenderableType:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for head, side in (("job", "left"), ("verdict", "left"), ("", "left"), ("written", "right"), ("rate", "right")):
        table.add_column(head, justify="right" if side == "right" else "left", no_wrap=True, overflow="ellipsis")
    running = [row for row in rows if row.phase is not None and row.result is None]
    ended = [row for row in rows if row.result is not None]
    waiting = [row for row in rows if row.phase is None and row.result is None]
    failures = [row for row in ended if row.result is not None and row.result.state is State.FAILED]
    others = [row for row in ended if row not in failures]
    n_left = max(0, _SHOWN - len(running))
    shown = [*failures[:n_left], *others[-max(0, n_left - len(failures)) :]][:n_left] if n_left else []
    for row in (*shown, *running):
        table.add_row(*(assembled(cell) for cell in _cells(row)))
    n_more = len(ended) - len(shown)
    parts = [counted(len(ended), "job") + " ended", f"{len(failures):,} failed", f"{len(waiting):,} waiting"]
    table.add_row(assembled((", ".join(parts) + (f"; {n_more:,} not shown" if n_more else ""), "dim")))
    return table


def _cells(row: _Row) -> list[Span]:
    if row.result is not None:
        n_bytes = sized(row.result.n_bytes) if row.result.state.is_right else ""
        return [row.name, _verdict(row.result.verdict), _state(row.result), n_bytes, ""]
    phase = row.phase.value if row.phase is not None else "waiting"
    if row.phase is not Phase.WRITE or not row.total:
        return [row.name, _verdict(row.verdict), phase, "", ""]
    share = min(1.0, row.done / row.total)
    bar = "█" * round(16 * share) + "·" * (16 - round(16 * share))
    seconds = time.monotonic() - row.begun
    rate = f"{sized(round(row.done / seconds))}/s" if seconds > 0.5 else ""
    return [row.name, _verdict(row.verdict), (f"{bar} {share:4.0%}", "cyan"), sized(row.done), rate]


def _verdict(verdict: str | None) -> Span:
    return "" if verdict is None else (verdict.upper(), style_of(Generation(verdict)))


def _state(result: Result) -> Span:
    return (result.state.value, _STYLES.get(result.state, "bold green"))


def _build(page: Page, results: Sequence[Result], seconds: float) -> None:
    n_right = sum(result.state.is_right for result in results)
    outcome: Span = ("ALL RIGHT", "bold green") if n_right == len(results) else (
        f"{n_right:,} right, {len(results) - n_right:,} not", "bold red")  # fmt: skip
    page.heading(f"Batch of {counted(len(results), 'job')}  ", outcome)
    rows: list[list[Span]] = []
    for result in results:
        n_bytes = sized(result.n_bytes) if result.state.is_right else ""
        rows.append([result.name, _verdict(result.verdict), _state(result), n_bytes, f"{result.seconds:.1f} s"])
    page.table(rows, align="lllrr", head=("", "verdict", "", "", ""))
    n_written = sum(result.n_bytes for result in results if result.state is State.CONVERTED)
    rate = f", {sized(round(n_written / seconds))}/s" if seconds > 0 else ""
    page.line(f"{sized(n_written)} written in {seconds:.1f} s{rate}")
    wrong = [result for result in results if result.reason is not None]
    if not wrong:
        return
    page.heading("Not right")
    for result in wrong:
        page.line((result.name, "bold"), f"  {result.reason}", hang=2)
        if result.hint:
            page.line((f"hint: {result.hint}", "cyan"), hang=2)


def _build_survey(page: Page, survey: Survey) -> None:
    page.heading("Dry run of ", (counted(len(survey.looks), "job"), "bold"), ("  nothing is written", ""))
    rows: list[list[Span]] = []
    for look in survey.looks:
        style = "bold red" if look.action is Action.REFUSE else ""
        n_bytes = exact(look.n_bytes) if look.n_bytes else ""
        rows.append([look.job.source, look.job.name, _verdict(look.verdict), (look.action.value, style), n_bytes])
    page.table(rows, align="llllr", head=("source", "destination", "verdict", "action", "to write"))
    if survey.file_systems:
        page.heading("Disks")
        disks: list[list[Span]] = []
        for system in survey.file_systems:
            told: Span = ("", "") if system.fits else ("does not fit", "bold red")
            disks.append([system.path, exact(system.n_needed), exact(system.n_free), told])
        page.table(disks, align="lrrl", head=("mounted", "needed", "free", ""))
    refused = [look for look in survey.looks if look.problem is not None]
    if refused:
        page.heading("Refused")
    for look in refused:
        page.line((look.job.name, "bold"), f"  {look.problem}", hang=2)
        if look.problem is not None and look.problem.hint:
            page.line((f"hint: {look.problem.hint}", "cyan"), hang=2)


def _annotate(result: Result) -> None:
    """Tell GitHub Actions of a job that failed; a workflow command is a line on either stream."""
    if os.environ.get("GITHUB_ACTIONS") != "true" or result.state is not State.FAILED:
        return
    told = clean(f"{result.verdict or 'no verdict'}: {result.reason}")
    told += f"\n{clean(result.hint)}" if result.hint else ""
    title = _escaped(clean(f"qwen35 batch: {result.name}")).replace(":", "%3A").replace(",", "%2C")
    emit(f"::error title={title}::{_escaped(told)}\n", sys.stderr)


def _escaped(text: str) -> str:
    for sign, code in (("%", "%25"), ("\r", "%0D"), ("\n", "%0A")):
        text = text.replace(sign, code)
    return text
