"""What people see and scripts read. The only room that prints: results to stdout, progress and errors to stderr."""

from __future__ import annotations

from qwen35conv.report.console import progress, show_document, show_error, steps
from qwen35conv.report.conversion import show_conversion, show_plan
from qwen35conv.report.inspection import check_report, show_inspection
from qwen35conv.report.verification import show_verification

__all__ = [
    "check_report",
    "progress",
    "show_conversion",
    "show_document",
    "show_error",
    "show_inspection",
    "show_plan",
    "show_verification",
    "steps",
]
