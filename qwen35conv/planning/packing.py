"""Which weights are quantised on the way, how, and the writes that each becomes.

The choice is mlx-lm's: every linear, embedding and stack of experts whose rows divide into groups; the router gates
of a sparse model at 8 bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.config import MODE_DEFAULTS, ModelConfig, ModuleQuantization
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import HEAD_MODULE, TRUNK_PREFIX, Role, parse_name
from qwen35conv.planning.pieces import Fix, Packed, Part, Rule, Write, joined

_PACKABLE = (Role.LINEAR, Role.EMBEDDING, Role.EXPERTS)
_FLOATS = (Dtype.BF16, Dtype.F16, Dtype.F32)
_GATES = (".mlp.gate", ".mlp.shared_expert_gate")
AFFINE_BITS, AFFINE_SIZES = (2, 3, 4, 5, 6, 8), (32, 64, 128)
GATE = ModuleQuantization(group_size=64, bits=8, mode="affine")  # whatever was asked for the rest


def packing_of(bits: int, group_size: int | None, mode: str) -> ModuleQuantization | str:
    """How weights are packed, or why MLX has no such form. Only affine packing leaves a choice."""
    default_size, default_bits = MODE_DEFAULTS[mode]
    if mode == "affine":
        if bits not in AFFINE_BITS or (group_size or default_size) not in AFFINE_SIZES:
            return f"affine packing has {_listed(AFFINE_BITS)} bits, and groups of {_listed(AFFINE_SIZES)}"
    elif (bits, group_size or default_size) != (default_bits, default_size):
        return f"{mode} has {default_bits} bits, and groups of {default_size}"
    return ModuleQuantization(group_size=group_size or default_size, bits=bits, mode=mode)


def _listed(numbers: Sequence[int]) -> str:
    return f"{', '.join(map(str, numbers[:-1]))} or {numbers[-1]}"


def quantized(
    label: str, writes: Sequence[Write], config: ModelConfig, asked: ModuleQuantization
) -> tuple[list[Write], Mapping[str, ModuleQuantization | None]]:
    """The same writes with each packable weight of the trunk and head as its parts, and how each module is packed.

    Raises CheckpointError where nothing can be packed.
    """
    found: list[Write] = []
    modules: dict[str, ModuleQuantization | None] = {}
    for write in writes:
        module = write.name.removesuffix(".weight")
        how = _how(write, module, asked)
        if how is None:
            found.append(write)
        else:
            modules[module] = how
            found += _parts(write, module, how, config.cast_dtype or write.dtype)
    if not modules:
        raise CheckpointError(
            f"{label}: no weight has rows that divide into groups of {asked.group_size}",
            hint="choose a smaller --group-size",
        )
    return found, modules


def is_gate(module: str) -> bool:
    """Whether a module chooses the experts, or how much the shared one counts."""
    return module.endswith(_GATES)


def is_packable(write: Write) -> bool:
    """Whether a weight is packed if its rows divide into groups."""
    if not write.name.endswith(".weight") or not write.name.startswith((TRUNK_PREFIX, HEAD_MODULE)):
        return False
    place = parse_name(write.name)
    return write.dtype in _FLOATS and place is not None and place.role in _PACKABLE


def _how(write: Write, module: str, asked: ModuleQuantization) -> ModuleQuantization | None:
    if not is_packable(write) or write.shape[-1] % asked.group_size:
        return None
    if not is_gate(module):
        return asked
    return None if write.shape[-1] % GATE.group_size else GATE


def _parts(write: Write, module: str, how: ModuleQuantization, dtype: Dtype) -> Iterator[Write]:
    """Packed weight [..., out, in * bits / 32] and scales [..., out, in / group], of affine packing biases alike."""
    *outer, n_columns = write.shape
    grouped = (*outer, n_columns // how.group_size)
    parts = [(Part.WEIGHT, Dtype.U32, (*outer, n_columns * how.bits // 32))]
    if how.mode == "affine":
        parts += [(Part.SCALES, dtype, grouped), (Part.BIASES, dtype, grouped)]
    else:
        parts.append((Part.SCALES, Dtype.U8, grouped))
    pieces = write.pieces if write.blocks is not None else joined(write.pieces)
    for part, stored, shape in parts:
        yield replace(
            write,
            name=f"{module}.{part.value}",
            dtype=stored,
            shape=shape,
            pieces=pieces,
            fix=Fix.QUANTIZE,
            rule=Rule.QUANTIZE,
            source_shape=(*outer, n_columns),
            packed=Packed(how, dtype, part),
        )
