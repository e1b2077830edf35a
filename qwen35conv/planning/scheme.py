"""How the weights are quantised: as MLX packs them (that rides through), or in a scheme that MLX cannot read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import SourceTensor, few
from qwen35conv.facts.config import AUTO_ROUND, MLX_MODES, ModelConfig, ModuleQuantization
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import BLOCK_SCALE, Region, canonical_modules, parse_name

_FP8 = frozenset({Dtype.F8_E4M3, Dtype.F8_E5M2, Dtype.F8_E4M3FNUZ, Dtype.F8_E5M2FNUZ})
_OTHER = "download the BF16 release of this model, or a build that was quantised for MLX"
_DEQUANTIZE = "`qwen35 convert --dequantize` turns it into bfloat16"
_INTEGERS = "AWQ or GPTQ"
_BLOCKS = "FP8 in blocks"
# What stands behind a module's name gives its scheme away, the most telling first: scheme, and bits a weight.
_SIGNS: tuple[tuple[str, str, int | None], ...] = (
    ("weight_global_scale", "NVFP4 (compressed-tensors)", 4),
    ("weight_scale_2", "NVFP4 (ModelOpt)", 4),
    ("g_idx", "GPTQ", None),
    ("qzeros", _INTEGERS, None),
    ("qweight", _INTEGERS, None),
    ("weight_packed", "compressed-tensors, pack-quantized", None),
    ("absmax", "bitsandbytes", 4),
    ("quant_map", "bitsandbytes", 4),
    ("SCB", "bitsandbytes", 8),
    ("input_scale", "FP8 with static activations", 8),
    ("activation_scale", "FP8 with static activations", 8),
    (f"weight{BLOCK_SCALE}", _BLOCKS, 8),
    ("weight_scale", "compressed-tensors", 8),
)
_TAILS = {tail: i for i, (tail, _, _) in enumerate(_SIGNS)}
# What config.json calls the schemes whose tensors have the same names.
_METHODS = {"awq": "AWQ", "gptq": "GPTQ", **dict.fromkeys(AUTO_ROUND, "AutoRound")}


@dataclass(frozen=True, slots=True)
class ForeignScheme:
    """A quantisation that MLX loaders cannot read: its name, the modules in it, and bits a weight where that is known.

    `can_dequantize`: --dequantize turns it into bfloat16.
    """

    name: str
    modules: tuple[str, ...]
    bits: tuple[int, ...]
    can_dequantize: bool

    @property
    def is_integer(self) -> bool:
        """Whether some loader may repack it as it loads: mlx-lm does so with AWQ's and GPTQ's."""
        return self.name in (*_METHODS.values(), _INTEGERS)

    @property
    def advice(self) -> str:
        """What can be done with it."""
        return _DEQUANTIZE if self.can_dequantize else _OTHER

    def __str__(self) -> str:
        bits = f", {' and '.join(map(str, self.bits))} bits" if self.bits else ""
        return f"{self.name}: {len(self.modules)} modules{bits} ({few(self.modules, 1)})"


def find_schemes(tensors: Sequence[SourceTensor], config: ModelConfig) -> tuple[ForeignScheme, ...]:
    """Every foreign scheme in a checkpoint, by the names of its scales and the dtypes of its weights."""
    signs: dict[str, int] = {}
    for tensor in tensors:
        module, tail = _split(tensor)
        if tensor.name.endswith(BLOCK_SCALE) and len(tensor.shape) < 2:
            tail = "weight_scale"  # no block has it: one scale for the whole weight
        if tail in _TAILS:
            signs[module] = min(_TAILS[tail], signs.get(module, len(_SIGNS)))
    dtypes = {}
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        dtypes[module] = tensor.dtype
        if tensor.dtype in _FP8 and module not in signs and _split(tensor)[1] not in _TAILS:
            signs[module] = -1
    found: dict[tuple[str, int | None], list[str]] = {}
    for module, i in signs.items():
        found.setdefault(_scheme(i, dtypes.get(module), config), []).append(module)
    return tuple(
        ForeignScheme(
            name,
            tuple(modules),
            config.foreign_bits if bits is None else (bits,),
            name == _BLOCKS
            and config.fp8_block is not None
            and all(dtypes.get(module, Dtype.F8_E4M3) is Dtype.F8_E4M3 for module in modules),
        )
        for (name, bits), modules in found.items()
    )


def _split(tensor: SourceTensor) -> tuple[str, str]:
    """Module and telling tail of a name: `x.weight.absmax` and `x.absmax` are of one module."""
    if tensor.name.endswith(BLOCK_SCALE):
        return tensor.name.removesuffix(BLOCK_SCALE).removesuffix(".weight"), f"weight{BLOCK_SCALE}"
    module, _, tail = tensor.name.rpartition(".")
    return module.removesuffix(".weight"), tail


def _scheme(i: int, dtype: Dtype | None, config: ModelConfig) -> tuple[str, int | None]:
    """Name and bits of the scheme of a module."""
    if i < 0:
        return "FP8 without scales", 8
    tail, name, bits = _SIGNS[i]
    if tail in ("qweight", "qzeros", "g_idx"):
        name = _METHODS.get(config.foreign_scheme or "", name)
    elif tail == "weight_scale":
        name = "FP8 (one scale a tensor or row)" if dtype in _FP8 else f"{name}, {dtype.value if dtype else 'packed'}"
    elif tail == "absmax" and dtype is Dtype.I8:
        bits = 8
    return name, bits


def check_scheme(label: str, tensors: Sequence[SourceTensor], config: ModelConfig, *, dequantize: bool = False) -> None:
    """Raises SchemeError where a scheme that MLX cannot read is in use, naming each."""
    schemes = find_schemes(tensors, config)
    can = all(scheme.can_dequantize for scheme in schemes)
    if dequantize and not schemes:
        raise SchemeError(f"{label}: --dequantize: no FP8 weight in it", hint="leave the option out")
    if not schemes or (dequantize and can):
        return
    method = f" (quant_method {config.foreign_scheme})" if config.foreign_scheme else ""
    raise SchemeError(
        f"{label}: quantised in a scheme that MLX cannot read{method}: {'; '.join(map(str, schemes))}",
        hint=_DEQUANTIZE if can else _OTHER,
        can_dequantize=can,
    )


class SchemeError(CheckpointError):
    """Weights in a scheme that MLX cannot read; `can_dequantize`: an option makes them readable."""

    def __init__(self, message: str, *, hint: str, can_dequantize: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.can_dequantize = can_dequantize


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
