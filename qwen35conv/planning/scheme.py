"""How the weights are quantised: as MLX packs them (that rides through), or in a scheme that MLX cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import SourceTensor, few
from qwen35conv.facts.config import MLX_MODES, ModelConfig, ModuleQuantization
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import Region, canonical_modules, parse_name

_FP8 = frozenset({Dtype.F8_E4M3, Dtype.F8_E5M2, Dtype.F8_E4M3FNUZ, Dtype.F8_E5M2FNUZ})
_OTHER = "download the BF16 release of this model, or a build that was quantised for MLX"
# The parameter (a name's tail behind its module) that gives a scheme away, most telling first.
_SIGNS: tuple[tuple[str, str], ...] = (
    ("weight_global_scale", "NVFP4 (compressed-tensors)"),
    ("weight_scale_2", "NVFP4 (ModelOpt)"),
    ("g_idx", "GPTQ"),
    ("qzeros", "AWQ or GPTQ"),
    ("qweight", "AWQ or GPTQ"),
    ("weight_packed", "compressed-tensors, pack-quantized"),
    ("absmax", "bitsandbytes"),
    ("quant_map", "bitsandbytes"),
    ("SCB", "bitsandbytes"),
    ("weight_scale_inv", "FP8 in blocks"),
    ("weight_scale", "FP8 (compressed-tensors)"),
    ("input_scale", "FP8 with static activations"),
)


@dataclass(frozen=True, slots=True)
class ForeignScheme:
    """A quantisation that MLX loaders cannot read: its name, and the tensors that show it."""

    name: str
    tensors: tuple[str, ...]


def find_schemes(tensors: Sequence[SourceTensor]) -> tuple[ForeignScheme, ...]:
    """Every foreign scheme in a checkpoint, by the names of its scales and the dtypes of its weights."""
    found: dict[str, list[str]] = {}
    signs = dict(_SIGNS)
    for tensor in tensors:
        tail = tensor.name.rpartition(".")[2]
        if tail in signs:
            found.setdefault(signs[tail], []).append(tensor.name)
    weights = [tensor.name for tensor in tensors if tensor.dtype in _FP8]
    if weights and not any(name.startswith(("FP8", "NVFP4")) for name in found):
        found["FP8 without scales"] = weights
    return tuple(ForeignScheme(name, tuple(names)) for name, names in found.items())


def check_scheme(label: str, tensors: Sequence[SourceTensor], config: ModelConfig) -> None:
    """Raises CheckpointError where a scheme that MLX cannot read is in use, naming each."""
    schemes = find_schemes(tensors)
    if not schemes:
        return
    method = f" (quant_method {config.foreign_scheme})" if config.foreign_scheme else ""
    listed = "; ".join(f"{scheme.name}: {len(scheme.tensors)} tensors ({few(scheme.tensors, 1)})" for scheme in schemes)
    raise CheckpointError(f"{label}: quantised in a scheme that MLX cannot read{method}: {listed}", hint=_OTHER)


def packing(config: ModelConfig, tensors: Sequence[SourceTensor]) -> Mapping[str, ModuleQuantization | None]:
    """How each quantised module is packed, by canonical module name: its own entry, else the default.

    A module counts as quantised where it has scales, or where its own entry names a mode that MLX does not know.
    """
    quantization = config.quantization
    if quantization is None:
        return {}
    own: dict[str, ModuleQuantization | None] = {}
    for stored, entry in quantization.modules.items():
        place = parse_name(f"{stored}.weight")
        if place is not None:
            own |= dict.fromkeys(canonical_modules(place), entry)
    opaque_default = quantization.default.mode not in MLX_MODES
    found: dict[str, ModuleQuantization | None] = {}
    for tensor in tensors:
        place = tensor.place
        if place is None or place.role is None or place.region is Region.VISION:
            continue
        for module in canonical_modules(place):
            entry = own.get(module, quantization.default)
            opaque = entry is not None and entry.mode not in MLX_MODES and (module in own or opaque_default)
            if place.parameter == "scales" or (opaque and place.parameter not in ("", "weight")):
                found[module] = entry
    return found
