"""Mixture-of-experts weights, however stored, as the canonical `switch_mlp.{gate,up,down}_proj` [E, out, in]."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import SourceTensor, few
from qwen35conv.facts.config import ModelConfig
from qwen35conv.facts.header import shown
from qwen35conv.facts.layout import Role, canonical_module
from qwen35conv.planning.pieces import Fix, Piece, Rule, Write, copy_of, joined, piece_of

_HALVES = ("gate_proj", "up_proj")


def split_fused(tensor: SourceTensor, module: str, config: ModelConfig) -> tuple[Write, ...]:
    """The writes that a fused tensor becomes: gate and up from `gate_up_proj` [E, 2F, ...], else the tensor itself.

    `module` is its canonical module name. Raises CheckpointError where its axes are not experts, rows, inputs.
    """
    assert tensor.place is not None
    parameter = tensor.place.parameter or "weight"
    is_pair = module.endswith(".gate_up_proj")
    n_rows = config.expert_size * (2 if is_pair else 1) if not module.endswith(".down_proj") else config.hidden_size
    if len(tensor.shape) != 3 or tensor.shape[:2] != (config.n_experts, n_rows):
        raise CheckpointError(
            f"{shown(tensor.name)}: expected [experts {config.n_experts}, rows {n_rows}, inputs], "
            f"found {list(tensor.shape)}",
            hint="an adapter merge or exporter swapped the axes of the fused experts; export them again",
        )
    if not is_pair:
        return (copy_of(tensor, f"{module}.{parameter}"),)
    stem = module.removesuffix("gate_up_proj")
    n_half = tensor.n_bytes // config.n_experts // 2
    return tuple(
        Write(
            name=f"{stem}{half}.{parameter}",
            dtype=tensor.dtype,
            shape=(tensor.shape[0], tensor.shape[1] // 2, *tensor.shape[2:]),
            pieces=tuple(piece_of(tensor, (2 * e + i) * n_half, n_half) for e in range(config.n_experts)),
            fix=Fix.NONE,
            rule=Rule.SPLIT,
            source_dtype=tensor.dtype,
            source_shape=tensor.shape,
            sources=(tensor.name,),
        )
        for i, half in enumerate(_HALVES)
    )


def stack_experts(tensors: Iterable[SourceTensor], config: ModelConfig, *, prefix: str = "") -> tuple[Write, ...]:
    """One write for each projection and parameter of each layer, experts in their order.

    `prefix` replaces the canonical prefix of the draft head. Raises CheckpointError for a missing, doubled, surplus or
    ragged expert, by name.
    """
    groups: dict[tuple[str, str], dict[int, SourceTensor]] = {}
    for tensor in tensors:
        place = tensor.place
        assert place is not None
        assert place.expert is not None
        module = prefix + place.module if prefix else canonical_module(place)
        experts = groups.setdefault((module, place.parameter), {})
        if place.expert in experts:
            raise CheckpointError(f"{shown(tensor.name)}: another tensor is expert {place.expert} of {module} as well")
        experts[place.expert] = tensor
    return tuple(
        write for (module, parameter), experts in groups.items() for write in _stack(module, parameter, experts, config)
    )


def _stack(module: str, parameter: str, experts: dict[int, SourceTensor], config: ModelConfig) -> Sequence[Write]:
    missing = [e for e in range(config.n_experts) if e not in experts]
    surplus = sorted(e for e in experts if e >= config.n_experts)
    if missing or surplus:
        what, which = ("missing", missing) if missing else ("more than config.json has", surplus)
        raise CheckpointError(
            f"{module}.{parameter}: {len(which)} of {config.n_experts} experts are {what}: {few(map(str, which), 5)}",
            hint="the checkpoint is incomplete, or its config.json belongs to another one",
        )
    ordered = [experts[e] for e in range(config.n_experts)]
    first = ordered[0]
    for tensor in ordered:
        if tensor.shape != first.shape or tensor.dtype is not first.dtype:
            raise CheckpointError(
                f"{shown(tensor.name)}: {tensor.dtype.value} {list(tensor.shape)}, "
                f"but expert 0 has {first.dtype.value} {list(first.shape)}",
                hint="experts of one layer must be alike to be stacked",
            )
    assert first.place is not None
    if first.place.role is Role.FUSED_EXPERT:
        return _stack_pairs(module, parameter, ordered, config)
    return (_stacked(f"{module}.{parameter}", ordered, first.shape, [piece_of(tensor) for tensor in ordered]),)


def _stack_pairs(module: str, parameter: str, ordered: list[SourceTensor], config: ModelConfig) -> Sequence[Write]:
    """Gate and up from one fused tensor [2F, in] per expert."""
    first = ordered[0]
    if len(first.shape) != 2 or first.shape[0] != 2 * config.expert_size:
        raise CheckpointError(
            f"{shown(first.name)}: expected [{2 * config.expert_size}, inputs], found {list(first.shape)}",
            hint="the first axis holds the gate's rows, then the up projection's",
        )
    n_half, shape = first.n_bytes // 2, (first.shape[0] // 2, *first.shape[1:])
    stem = module.removesuffix("gate_up_proj")
    return [
        _stacked(
            f"{stem}{half}.{parameter}", ordered, shape, [piece_of(tensor, i * n_half, n_half) for tensor in ordered]
        )
        for i, half in enumerate(_HALVES)
    ]


def _stacked(name: str, ordered: list[SourceTensor], shape: tuple[int, ...], pieces: list[Piece]) -> Write:
    first = ordered[0]
    return Write(
        name=name,
        dtype=first.dtype,
        shape=(len(ordered), *shape),
        pieces=joined(pieces),
        fix=Fix.NONE,
        rule=Rule.STACK,
        source_dtype=first.dtype,
        source_shape=first.shape,
        sources=tuple(tensor.name for tensor in ordered),
    )
