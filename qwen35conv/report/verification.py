"""What a verification found: a line a check, and the numbers that it rests on."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from qwen35conv.report.console import show_document
from qwen35conv.report.documents import verification_document
from qwen35conv.report.page import Page, Span, show_page

if TYPE_CHECKING:
    from qwen35conv.verify import Verification

_MARKS: dict[bool | None, Span] = {True: ("✓ ", "green"), False: ("✗ ", "bold red"), None: ("? ", "yellow")}


def show_verification(label: str, verification: Verification, *, as_json: bool) -> None:
    """Write the checks of a checkpoint to stdout."""
    if as_json:
        show_document(verification_document(label, verification))
    else:
        show_page(lambda page: _build(page, label, verification), sys.stdout)


def _build(page: Page, label: str, verification: Verification) -> None:
    failed = [check.name for check in verification.checks if check.passed is False]
    unsure = [check.name for check in verification.checks if check.passed is None]
    if failed:
        outcome: Span = (f"WRONG  {', '.join(failed)}", "bold red")
    elif unsure:
        outcome = (f"RIGHT as far as it can be judged; not judged: {', '.join(unsure)}", "green")
    else:
        outcome = ("RIGHT", "bold green")
    page.heading("Verified ", (label, "cyan"), "  ", outcome)
    for check in verification.checks:
        page.heading(_MARKS[check.passed], (check.name, "bold"), f"  {check.summary}")
        for name, value in check.details:
            text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
            page.line((f"{name}: ", "dim"), text, hang=2)
