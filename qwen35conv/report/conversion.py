"""What convert would do, and what it did and proved."""

from __future__ import annotations

import shlex
import sys
from typing import TYPE_CHECKING

from qwen35conv.facts.checkpoint import Severity
from qwen35conv.planning.sidecar import RECEIPT
from qwen35conv.report.console import show_document
from qwen35conv.report.documents import outcome_document, preparation_document
from qwen35conv.report.page import Page, Span, show_page
from qwen35conv.report.plan_table import show_files, show_tallies
from qwen35conv.report.publication import push_document, show_push
from qwen35conv.report.words import MEANING, counted, exact, overruled, sized, style_of

if TYPE_CHECKING:
    from qwen35conv.convert import Outcome, Preparation
    from qwen35conv.planning.plan import Plan
    from qwen35conv.push import Publication, Published


def show_plan(preparation: Preparation, publication: Publication | None = None, *, as_json: bool) -> None:
    """Write what a conversion would do, and what of it would be published, to stdout."""
    if as_json:
        push = {} if publication is None else {"push": push_document(publication, None)}
        show_document(preparation_document(preparation) | push)
        return
    show_page(lambda page: _build_plan(page, preparation), sys.stdout)
    if publication is not None:
        sys.stdout.write("\n")
        show_push(publication, None, as_json=False)


def show_conversion(
    outcome: Outcome, publication: Publication | None = None, published: Published | None = None, *, as_json: bool
) -> None:
    """Write what a conversion did, what was proved about it, and where it was published, to stdout."""
    if as_json:
        push = {} if publication is None else {"push": push_document(publication, published)}
        show_document(outcome_document(outcome) | push)
        return
    show_page(lambda page: _build_conversion(page, outcome), sys.stdout)
    if publication is not None:
        sys.stdout.write("\n")
        show_push(publication, published, as_json=False)


def _build_plan(page: Page, preparation: Preparation) -> None:
    plan, flight = preparation.plan, preparation.preflight
    generation = plan.verdict.generation
    page.heading("Dry run", ("  nothing is written", ""))
    page.line((plan.checkpoint.label, "cyan"), " → ", (str(preparation.destination), "cyan"))
    if (origin := plan.checkpoint.origin) is not None:
        page.line(f"revision {origin.revision}, commit ", (origin.commit, "cyan"))
    page.line((generation.value.upper(), style_of(generation)), f"  {MEANING[generation]}", hang=2)
    if (told := overruled(plan)) is not None:
        page.line((told, "bold yellow"), hang=2)
    page.heading("Tensors")
    show_tallies(page, plan)
    show_files(page, plan, preparation.edits, preparation.files, brief=False)
    _show_findings(page, plan)
    page.heading("Needs")
    rows = [("read", flight.n_read), ("written", flight.n_written)]
    if flight.n_shared:
        rows.append(("of these shared with the source", flight.n_shared))
    rows += [("free on the target", flight.n_free), ("memory for buffers, at most", flight.n_memory)]
    page.table([[name, exact(n), sized(n)] for name, n in rows], align="lrr")
    if flight.n_needed > flight.n_free:
        missing = flight.n_needed - flight.n_free
        page.line((f"does not fit: {exact(missing)} are missing", "bold red"))


def _build_conversion(page: Page, outcome: Outcome) -> None:
    preparation = outcome.preparation
    plan, destination = preparation.plan, preparation.destination
    page.heading("Converted ", (plan.checkpoint.label, "cyan"), " → ", (str(destination), "cyan"))
    if (origin := plan.checkpoint.origin) is not None:
        page.line(f"revision {origin.revision}, commit ", (origin.commit, "cyan"))
    files = counted(len(outcome.written), "shard")
    rate = f", {sized(round(outcome.n_bytes / outcome.seconds))}/s" if outcome.seconds > 0 else ""
    page.line(f"{sized(outcome.n_bytes)} in {files}, {outcome.seconds:.1f} s{rate}")
    ways = (
        (outcome.n_shared, "shared with the source"),
        (outcome.n_copied, "copied"),
        (outcome.n_computed, "computed"),
    )
    page.line(", ".join(f"{exact(n)} {how}" for n, how in ways if n or how == "copied"), hang=2)
    page.line(
        ("✓ ", "green"),
        f"re-read {counted(outcome.n_headers, 'header')}, checked {counted(outcome.n_tensors, 'name')} and shapes "
        f"against the plan and config.json, compared {counted(outcome.n_gains, 'computed gain')}: all equal",
        hang=2,
    )
    if outcome.verification is not None:
        for check in outcome.verification.checks:
            mark: Span = ("✓ ", "green") if check.passed else ("? ", "yellow")
            page.line(mark, f"{check.name}: {check.summary}", hang=2)
    if preparation.sidecar is not None:
        page.line("draft head in ", (str(preparation.sidecar), "cyan"))
    page.line(f"receipt in {destination / RECEIPT}", hang=2)
    _show_findings(page, plan)
    page.heading("Next")
    page.line((shlex.join(["qwen35", "verify", str(destination)]), "bold"), hang=4)


def _show_findings(page: Page, plan: Plan) -> None:
    if not plan.findings:
        return
    page.heading("Findings")
    for found in sorted(plan.findings, key=lambda found: found.severity is Severity.NOTE):
        style = "dim" if found.severity is Severity.NOTE else "yellow"
        page.line((f"{found.severity.value:9}", style), found.text, hang=9)
