"""Convert Qwen3.5-family checkpoints to the canonical MLX layout, bit for bit where nothing changes.

source = open_source("Qwen3.5-0.8B")      # a folder, a file, or a Hub id: owner/name
checkpoint = read_checkpoint(source)     # headers and gains, no other tensor
plan = make_plan(checkpoint)             # pure data: every tensor's byte ranges and fix
view = open_view(source, plan)           # canonical name -> array, nothing rewritten
write(source, plan, "out")               # the folder, whole or not at all
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwen35conv.version import __version__

if TYPE_CHECKING:
    from qwen35conv.convert import write
    from qwen35conv.errors import Qwen35ConvError
    from qwen35conv.planning.plan import Options, Plan, make_plan
    from qwen35conv.reading import read_checkpoint
    from qwen35conv.source import open_source
    from qwen35conv.view import open_view

# Loaded when first asked for: the view needs MLX, the plan does not.
_ROOMS = {
    "Options": "planning.plan",
    "Plan": "planning.plan",
    "Qwen35ConvError": "errors",
    "make_plan": "planning.plan",
    "open_source": "source",
    "open_view": "view",
    "read_checkpoint": "reading",
    "write": "convert",
}

__all__ = [
    "Options",
    "Plan",
    "Qwen35ConvError",
    "__version__",
    "make_plan",
    "open_source",
    "open_view",
    "read_checkpoint",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
