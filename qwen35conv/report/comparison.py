"""What two checkpoints have in common and what they have not: a line a side, then the worst of each kind."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from qwen35conv.report.console import show_document
from qwen35conv.report.documents import comparison_document
from qwen35conv.report.page import Page, Span, show_page
from qwen35conv.report.words import counted, exact, style_of

if TYPE_CHECKING:
    from qwen35conv.comparison import Comparison, Side

_SHOWN = 10  # of each kind; --json has all


def show_comparison(comparison: Comparison, *, as_json: bool) -> None:
    """Write a comparison to stdout."""
    if as_json:
        show_document(comparison_document(comparison))
    else:
        show_page(lambda page: _build(page, comparison), sys.stdout)


def _build(page: Page, comparison: Comparison) -> None:
    a, b = comparison.a, comparison.b
    outcome: Span = ("EQUAL", "bold green") if comparison.is_equal else ("DIFFERENT", "bold red")
    if not comparison.is_equal and _n_differences(comparison) == 0:
        outcome = ("EQUAL AS STORED, which settles nothing", "bold red")
    page.heading("Compared ", (a.checkpoint.label, "cyan"), " with ", (b.checkpoint.label, "cyan"), "  ", outcome)
    for name, side in (("A", a), ("B", b)):
        page.line((f"{name}  ", "dim"), *_side(side), hang=3)
    n_differ = f"{len(comparison.values):,} differ" if comparison.values else "all equal"
    compared = f"{counted(comparison.n_compared, 'tensor')}, {exact(comparison.n_bytes)} compared under their "
    page.line(f"{compared}canonical names: {n_differ}", hang=2)
    for left in comparison.left:
        page.line((f"not compared: {left.what}: {left.reason}", "dim"), hang=2)
    for side in (a, b):
        if side.problem is not None:
            page.line((str(side.problem), "yellow"), hang=2)
            page.line((_meaning(comparison) or side.problem.hint or "", "yellow"), hang=2)
    for name, only in (("A", comparison.only_a), ("B", comparison.only_b)):
        if only:
            page.heading(f"Only in {name}  ", (f"{len(only):,}", ""))
            page.list(only[:_SHOWN])
            _tell_rest(page, len(only))
    _show_forms(page, comparison)
    _show_values(page, comparison)


def _meaning(comparison: Comparison) -> str:
    """What an equal pair says of the side whose generation is not settled."""
    if not comparison.is_equal:
        return ""
    both = comparison.a.problem is not None and comparison.b.problem is not None
    return "both are laid out alike" if both else "as stored they are what the other side's plan gives: gamma"


def _side(side: Side) -> list[Span]:
    plan = side.plan
    generation = plan.verdict.generation
    n = sum(1 for _ in plan.writes())
    shift = f"{plan.shift:+d} to each gain" if plan.shift else "gains as they are stored"
    spans: list[Span] = [(side.checkpoint.label, "cyan"), "  ", (generation.value.upper(), style_of(generation))]
    return [*spans, f"  {counted(n, 'tensor')}, {shift}"]


def _show_forms(page: Page, comparison: Comparison) -> None:
    if not comparison.forms:
        return
    page.heading("Another dtype or shape  ", (f"{len(comparison.forms):,}", ""))
    rows = [
        [form.name, *(f"{d.value} {list(s)}" for d, s in zip(form.dtypes, form.shapes, strict=True))]
        for form in comparison.forms[:_SHOWN]
    ]
    page.table(rows, align="lll", head=("", "A", "B"))
    _tell_rest(page, len(comparison.forms))


def _show_values(page: Page, comparison: Comparison) -> None:
    if not comparison.values:
        return
    page.heading("Other values  ", (f"{len(comparison.values):,} tensors, the worst first", ""))
    rows = []
    for found in comparison.values[:_SHOWN]:
        largest = "" if found.max_abs is None else f"{found.max_abs:.3g}"
        rows.append([found.name, f"{found.n_differ:,}", f"{found.n:,}", largest, f"{found.n_not_finite or ''}"])
    page.table(rows, align="lrrrr", head=("", "differ", "of", "max abs", "not finite"))
    _tell_rest(page, len(comparison.values))


def _tell_rest(page: Page, n: int) -> None:
    if n > _SHOWN:
        page.line((f"and {n - _SHOWN:,} more; --json lists all", "dim"))


def _n_differences(comparison: Comparison) -> int:
    found = (comparison.only_a, comparison.only_b, comparison.forms, comparison.values)
    return sum(len(part) for part in found)
