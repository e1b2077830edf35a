"""The modules that a LoRA adapter may target."""

from __future__ import annotations

import sys

from qwen35conv.model.lora import LoraTarget, lora_targets
from qwen35conv.planning.plan import Plan
from qwen35conv.report.console import show_document
from qwen35conv.report.documents import schema
from qwen35conv.report.page import Page, show_page


def show_lora_targets(plan: Plan, *, as_json: bool) -> None:
    """Write the linear modules of a plan's result to stdout."""
    targets = lora_targets(plan)
    if as_json:
        show_document({"schema": schema("inspect"), "lora_targets": [_document(target) for target in targets]})
    else:
        show_page(lambda page: _build(page, plan, targets), sys.stdout)


def _document(target: LoraTarget) -> dict[str, object]:
    return {
        "module": target.module,
        "kind": target.kind,
        "n_inputs": target.n_inputs,
        "n_outputs": target.n_outputs,
        "n_experts": target.n_experts,
        "bits": None if target.packing is None else target.packing.bits,
        "mode": None if target.packing is None else target.packing.mode,
    }


def _build(page: Page, plan: Plan, targets: tuple[LoraTarget, ...]) -> None:
    page.heading("LoRA targets  ", f"{len(targets)} linear modules of ", (plan.checkpoint.label, "cyan"))
    kinds: dict[tuple[str, ...], int] = {}
    for target in targets:
        experts = f"{target.n_experts} x " if target.n_experts else ""
        stored = "plain" if target.packing is None else f"{target.packing.mode}, {target.packing.bits} bits"
        kind = (target.kind, f"{experts}[{target.n_outputs}, {target.n_inputs}]", stored)
        kinds[kind] = kinds.get(kind, 0) + 1
    rows = [[*kind, str(n)] for kind, n in kinds.items()]
    page.table(rows, align="lllr", head=("name", "shape", "weights", "modules"))
    page.heading("Modules")
    page.list([target.module for target in targets])
