"""What people see and scripts read. The only room that prints: results to stdout, progress and errors to stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen35conv.report.comparison import show_comparison
from qwen35conv.report.console import progress, show_document, show_error, steps
from qwen35conv.report.conversion import show_conversion, show_plan
from qwen35conv.report.inspection import check_report, show_inspection
from qwen35conv.report.verification import show_verification

if TYPE_CHECKING:
    from qwen35conv.report.lora import show_lora_targets

__all__ = [
    "check_report",
    "progress",
    "show_comparison",
    "show_conversion",
    "show_document",
    "show_error",
    "show_inspection",
    "show_lora_targets",
    "show_plan",
    "show_verification",
    "steps",
]


def __getattr__(name: str) -> Any:
    if name != "show_lora_targets":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from qwen35conv.report.lora import show_lora_targets  # needs MLX: only where it is asked for

    return show_lora_targets
