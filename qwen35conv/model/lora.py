"""Which modules of a checkpoint a LoRA adapter may target."""

from __future__ import annotations

from dataclasses import dataclass

from qwen35conv.facts.config import ModuleQuantization
from qwen35conv.facts.layout import HEAD_MODULE, TRUNK_PREFIX, Role
from qwen35conv.model.linear import can_run
from qwen35conv.planning.inventory import expected_head, expected_trunk
from qwen35conv.planning.plan import Plan


@dataclass(frozen=True, slots=True)
class LoraTarget:
    """A linear module, under its canonical name."""

    module: str
    n_inputs: int
    n_outputs: int
    n_experts: int  # 0 for a single matrix
    packing: ModuleQuantization | None  # None: plain weights

    @property
    def kind(self) -> str:
        """Its last name, as adapter configs spell it: "in_proj_qkv", "q_proj", "down_proj"."""
        return self.module.rpartition(".")[2]


def lora_targets(plan: Plan) -> tuple[LoraTarget, ...]:
    """The text model's linear modules of the result, plain or as MLX packs them, in the order of the layers.

    Modules in a foreign mode are left out: nothing here can multiply by them. So are convolutions, embeddings, and a
    head that is tied to them.
    """
    config = plan.checkpoint.config
    rows = {write.name: write.shape[0] for write in plan.writes()}
    expected = [(TRUNK_PREFIX + e.module, e) for e in expected_trunk(config)]
    if not plan.tied:
        expected.append((HEAD_MODULE, expected_head(config)))
    targets = []
    for module, e in expected:
        packing = plan.packing.get(module)
        if e.role not in (Role.LINEAR, Role.EXPERTS) or not can_run(packing) or f"{module}.weight" not in rows:
            continue
        n_outputs = rows[f"{module}.weight"] if e.role is Role.LINEAR else e.shape[-2]
        n_experts = e.shape[0] if e.role is Role.EXPERTS else 0
        targets.append(LoraTarget(module, e.shape[-1], n_outputs, n_experts, packing))
    return tuple(targets)
