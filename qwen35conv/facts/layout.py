"""The table of names: which tensor of the model a stored name means, and what the canonical form calls it.

Both generations and text-only exports are read, specific before general: vision under any prefix, then the draft head
(mtp), then the text model's trunk and head. Inside a layer only the names below exist; anything else has no rule.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache

from qwen35conv.generation.convention import Naming

TRUNK_PREFIX = "language_model.model."
HEAD_MODULE = "language_model.lm_head"
VISION_PREFIX = "vision_tower."
KEPT_MTP_PREFIX = "language_model.mtp."
SIDECAR_MTP_PREFIX = "mtp."

# Segments that training wrappers leave inside names.
WRAPPERS = frozenset(
    {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_forward_module", "_fp32_params"}
)
_FIRST_WRAPPER = "module"  # of data parallel training; a wrapper only in front
PARAMETERS = ("weight", "scales", "biases", "bias")
BLOCK_SCALE = "_scale_inv"  # behind the name of an FP8 weight: its scales
_OUTER = frozenset({"model", "language_model"})


class Region(Enum):
    """Which part of a checkpoint a tensor belongs to."""

    TRUNK = "text model"
    HEAD = "head"
    VISION = "vision tower"
    MTP = "draft head (mtp)"


class Role(Enum):
    """What a module is, which decides its shape and what becomes of it."""

    GAIN = "RMSNorm gain"
    CONTROL = "gated norm gain"
    CONV = "conv1d weight"
    DECAY = "decay parameter"
    LINEAR = "linear"
    EMBEDDING = "embedding"
    EXPERTS = "stacked experts"
    FUSED_EXPERTS = "fused experts"
    EXPERT = "one expert"
    FUSED_EXPERT = "one expert, gate and up fused"
    BUFFER = "buffer"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a stored name belongs. `module` is its path inside the region, as the canonical form spells it."""

    region: Region
    module: str
    parameter: str  # weight, scales, biases, bias; empty where the module is the tensor itself
    role: Role | None  # None: no rule inside this region
    naming: Naming
    expert: int | None = None
    n_wrappers: int = 0
    collapsed: bool = False

    @property
    def path(self) -> str:
        """Module and parameter."""
        return f"{self.module}.{self.parameter}" if self.parameter else self.module


_LAYER_MODULES: dict[str, Role] = {
    "input_layernorm": Role.GAIN,
    "post_attention_layernorm": Role.GAIN,
    "self_attn.q_norm": Role.GAIN,
    "self_attn.k_norm": Role.GAIN,
    "linear_attn.norm": Role.CONTROL,
    "linear_attn.conv1d": Role.CONV,
    **dict.fromkeys(
        (
            *(f"self_attn.{name}_proj" for name in "qkvo"),
            *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")),
            *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
            "mlp.gate",
            *(f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")),
            "mlp.shared_expert_gate",
        ),
        Role.LINEAR,
    ),
    **dict.fromkeys((f"mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down")), Role.EXPERTS),
}
_BARE = {"linear_attn.A_log": Role.DECAY, "linear_attn.dt_bias": Role.DECAY}
_MTP_MODULES = {
    "fc": Role.LINEAR,
    "norm": Role.GAIN,
    "pre_fc_norm_embedding": Role.GAIN,
    "pre_fc_norm_hidden": Role.GAIN,
}
_TRUNK_MODULES = {"embed_tokens": Role.EMBEDDING, "norm": Role.GAIN}
_QUANTISABLE = frozenset(
    {Role.LINEAR, Role.EMBEDDING, Role.EXPERTS, Role.FUSED_EXPERTS, Role.EXPERT, Role.FUSED_EXPERT}
)


def parse_name(name: str) -> Place | None:
    """Where a stored tensor name belongs; None where no rule knows it.

    A known module with a parameter that no rule knows has the role of the module; `is_known` tells them apart.
    """
    if name.endswith(BLOCK_SCALE):
        place = parse_name(name.removesuffix(BLOCK_SCALE))
        return place and replace(place, parameter=f"{place.parameter or 'weight'}{BLOCK_SCALE}")
    parts = name.split(".")
    kept = [part for part in parts if part not in WRAPPERS]
    while len(kept) > 1 and kept[0] == _FIRST_WRAPPER:
        del kept[0]
    n_wrappers = len(parts) - len(kept)
    n_outer = next((i for i, part in enumerate(kept) if part not in _OUTER), len(kept))
    outer, inner = kept[:n_outer], kept[n_outer:]
    if not inner:
        return None
    naming, collapsed = _naming(outer)
    first, rest = inner[0], inner[1:]
    if first in ("visual", "vision_tower") and rest:
        return Place(Region.VISION, ".".join(rest), "", None, naming, None, n_wrappers, collapsed)
    if first == "mtp" and rest:
        region, inner = Region.MTP, rest
    elif first == "lm_head":
        parameter = ".".join(rest)
        return Place(Region.HEAD, "lm_head", parameter, Role.LINEAR, naming, None, n_wrappers, collapsed)
    else:
        region = Region.TRUNK
    found = _parse_inner(".".join(inner), region is Region.MTP)
    if found is None:
        return Place(region, ".".join(inner), "", None, naming) if region is Region.MTP else None
    module, parameter, role, expert = found
    return Place(region, module, parameter, role, naming, expert, n_wrappers, collapsed)


def is_known(place: Place) -> bool:
    """Whether the parameter is one that the module's role can have in a plain or MLX-quantised checkpoint."""
    if place.role is None:
        return False
    if place.role in (Role.DECAY, Role.BUFFER):
        return not place.parameter
    if place.role in _QUANTISABLE:
        return place.parameter in (*PARAMETERS, f"weight{BLOCK_SCALE}") or (
            place.role is Role.FUSED_EXPERTS and not place.parameter
        )
    return place.parameter == "weight"


def _naming(outer: list[str]) -> tuple[Naming, bool]:
    """The generation that a prefix speaks of, and whether it stood there several times."""
    once = [part for i, part in enumerate(outer) if i == 0 or part != outer[i - 1]]
    collapsed = len(once) != len(outer) or len(once) > 2
    if "language_model" not in once:
        return Naming.NEUTRAL, collapsed
    return (Naming.RAW if once[0] == "model" else Naming.CANONICAL), collapsed


@lru_cache(maxsize=4096)
def _parse_suffix(suffix: str) -> tuple[str, str, Role, int | None] | None:
    """Module, parameter, role and expert of a name inside a layer."""
    if suffix in _BARE:
        return suffix, "", _BARE[suffix], None
    if suffix.endswith("rotary_emb.inv_freq"):
        return suffix, "", Role.BUFFER, None
    parts = suffix.split(".")
    if parts[:2] == ["mlp", "experts"] and len(parts) > 2:
        return _parse_expert(parts[2:])
    for n in (len(parts) - 1, *range(1, len(parts) - 1)):
        module = ".".join(parts[:n])
        if module in _LAYER_MODULES:
            return module, ".".join(parts[n:]), _LAYER_MODULES[module], None
    return None


def _parse_expert(parts: list[str]) -> tuple[str, str, Role, int | None] | None:
    """The part of a name behind `mlp.experts.`: fused, or one expert."""
    if parts[0].isdecimal() and parts[0].isascii() and len(parts) >= 3 and len(parts[0]) < 8:
        expert, projection, parameter = int(parts[0]), parts[1], ".".join(parts[2:])
        if projection in ("gate_proj", "up_proj", "down_proj"):
            return f"mlp.switch_mlp.{projection}", parameter, Role.EXPERT, expert
        if projection == "gate_up_proj":
            return "mlp.switch_mlp.gate_up_proj", parameter, Role.FUSED_EXPERT, expert
        return None
    projection, parameter = parts[0], ".".join(parts[1:])
    if projection == "gate_up_proj":
        return "mlp.switch_mlp.gate_up_proj", parameter, Role.FUSED_EXPERTS, None
    if projection in ("gate_proj", "up_proj", "down_proj"):
        return f"mlp.switch_mlp.{projection}", parameter, Role.FUSED_EXPERTS, None
    return None


def _parse_inner(inner: str, is_mtp: bool) -> tuple[str, str, Role, int | None] | None:
    first, _, rest = inner.partition(".")
    if first == "layers":
        layer, _, suffix = rest.partition(".")
        if not (layer.isdecimal() and layer.isascii() and len(layer) < 8):
            return None
        found = _parse_suffix(suffix)
        return None if found is None else (f"layers.{int(layer)}.{found[0]}", *found[1:])
    modules = _MTP_MODULES if is_mtp else _TRUNK_MODULES
    if first in modules and rest:
        return first, rest, modules[first], None
    if inner == "rotary_emb.inv_freq":
        return inner, "", Role.BUFFER, None
    return None


def canonical_module(place: Place) -> str:
    """The module's whole name in the canonical form, the draft head's as if it were kept."""
    match place.region:
        case Region.TRUNK:
            return TRUNK_PREFIX + place.module
        case Region.HEAD:
            return HEAD_MODULE
        case Region.VISION:
            return VISION_PREFIX + place.module
        case Region.MTP:
            return KEPT_MTP_PREFIX + place.module


def canonical_modules(place: Place) -> tuple[str, ...]:
    """The canonical modules that a stored module becomes: two where gate and up were fused."""
    module = canonical_module(place)
    if module.endswith(".gate_up_proj"):
        stem = module.removesuffix("gate_up_proj")
        return f"{stem}gate_proj", f"{stem}up_proj"
    return (module,)


def layer_of(module: str) -> int | None:
    """The layer number in a module path like `layers.3.self_attn.q_proj`, or None."""
    parts = module.split(".", 2)
    return int(parts[1]) if parts[0] == "layers" and len(parts) == 3 else None
