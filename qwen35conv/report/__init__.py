"""What people see and scripts read. The only room that prints: results to stdout, progress and errors to stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen35conv.report.comparison import show_comparison
from qwen35conv.report.console import progress, show_document, show_error, shows_progress, steps
from qwen35conv.report.conversion import show_conversion, show_plan
from qwen35conv.report.inspection import check_report, show_inspection
from qwen35conv.report.publication import show_push
from qwen35conv.report.verification import show_verification

if TYPE_CHECKING:
    from qwen35conv.report.batch import show_batch, show_survey
    from qwen35conv.report.batch_files import check_writable, write_junit, write_summary
    from qwen35conv.report.lora import show_lora_targets

__all__ = [
    "check_report",
    "check_writable",
    "progress",
    "show_batch",
    "show_comparison",
    "show_conversion",
    "show_document",
    "show_error",
    "show_inspection",
    "show_lora_targets",
    "show_plan",
    "show_push",
    "show_survey",
    "show_verification",
    "shows_progress",
    "steps",
    "write_junit",
    "write_summary",
]


# Loaded when first asked for: what these stand on, other commands do without.
_ROOMS = {
    "check_writable": "batch_files",
    "show_batch": "batch",
    "show_survey": "batch",
    "write_junit": "batch_files",
    "write_summary": "batch_files",
    "show_lora_targets": "lora",  # needs MLX
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
