"""Every tensor that config.json implies, with its shape; and the check of a plan against it.

Source of the table: the family's published tensor inventories (names, dtypes and shapes of the releases).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import few
from qwen35conv.facts.config import MLX_MODES, LayerKind, ModelConfig, ModuleQuantization
from qwen35conv.facts.header import Dtype
from qwen35conv.facts.layout import HEAD_MODULE, KEPT_MTP_PREFIX, TRUNK_PREFIX, Role
from qwen35conv.planning.pieces import Write

FLOATS = (Dtype.BF16, Dtype.F16, Dtype.F32)


@dataclass(frozen=True, slots=True)
class Expected:
    """A tensor that the config implies: module path inside its region, role, and canonical unquantised shape."""

    module: str
    parameter: str
    role: Role
    shape: tuple[int, ...]


def expected_trunk(config: ModelConfig) -> Iterator[Expected]:
    """Every tensor of the trunk in canonical form, without the head. Source: the family's published inventories."""
    hidden = config.hidden_size
    yield Expected("embed_tokens", "weight", Role.EMBEDDING, (config.vocab_size, hidden))
    for i, kind in enumerate(config.layer_kinds):
        mixer = _expected_linear(config) if kind is LayerKind.LINEAR else _expected_full(config)
        for suffix, role, shape in (*_layer_norms(config), *mixer, *_expected_mlp(config)):
            parameter = "" if role is Role.DECAY else "weight"
            yield Expected(f"layers.{i}.{suffix}", parameter, role, shape)
    yield Expected("norm", "weight", Role.GAIN, (hidden,))


def expected_head(config: ModelConfig) -> Expected:
    """The head of an untied model."""
    return Expected("lm_head", "weight", Role.LINEAR, (config.vocab_size, config.hidden_size))


def expected_mtp(config: ModelConfig) -> Iterator[Expected]:
    """Every tensor of a draft head, as stored in canonical form."""
    hidden = config.hidden_size
    yield Expected("fc", "weight", Role.LINEAR, (hidden, 2 * hidden))
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        yield Expected(name, "weight", Role.GAIN, (hidden,))
    for i in range(config.n_mtp_layers or 1):
        for suffix, role, shape in (*_layer_norms(config), *_expected_full(config), *_expected_mlp(config)):
            yield Expected(f"layers.{i}.{suffix}", "weight", role, shape)


_Row = tuple[str, Role, tuple[int, ...]]


def _layer_norms(config: ModelConfig) -> tuple[_Row, ...]:
    shape = (config.hidden_size,)
    return ("input_layernorm", Role.GAIN, shape), ("post_attention_layernorm", Role.GAIN, shape)


def _expected_linear(config: ModelConfig) -> tuple[_Row, ...]:
    hidden, heads, values = config.hidden_size, config.n_value_heads, config.n_value_heads * config.value_dim
    return (
        ("linear_attn.A_log", Role.DECAY, (heads,)),
        ("linear_attn.dt_bias", Role.DECAY, (heads,)),
        ("linear_attn.conv1d", Role.CONV, (config.conv_size, config.conv_kernel, 1)),
        ("linear_attn.in_proj_qkv", Role.LINEAR, (config.conv_size, hidden)),
        ("linear_attn.in_proj_z", Role.LINEAR, (values, hidden)),
        ("linear_attn.in_proj_a", Role.LINEAR, (heads, hidden)),
        ("linear_attn.in_proj_b", Role.LINEAR, (heads, hidden)),
        ("linear_attn.norm", Role.CONTROL, (config.value_dim,)),
        ("linear_attn.out_proj", Role.LINEAR, (hidden, values)),
    )


def _expected_full(config: ModelConfig) -> tuple[_Row, ...]:
    hidden, queries, keys = config.hidden_size, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    return (
        ("self_attn.q_proj", Role.LINEAR, (2 * queries, hidden)),  # per head: query, then gate
        ("self_attn.k_proj", Role.LINEAR, (keys, hidden)),
        ("self_attn.v_proj", Role.LINEAR, (keys, hidden)),
        ("self_attn.o_proj", Role.LINEAR, (hidden, queries)),
        ("self_attn.q_norm", Role.GAIN, (config.head_dim,)),
        ("self_attn.k_norm", Role.GAIN, (config.head_dim,)),
    )


def _expected_mlp(config: ModelConfig) -> tuple[_Row, ...]:
    hidden = config.hidden_size
    if not config.n_experts:
        wide = config.intermediate_size
        return _gate_up_down("mlp", Role.LINEAR, wide, hidden)
    stacked = (
        (name, role, (config.n_experts, *shape))
        for name, role, shape in _gate_up_down("mlp.switch_mlp", Role.EXPERTS, config.expert_size, hidden)
    )
    return (
        ("mlp.gate", Role.LINEAR, (config.n_experts, hidden)),
        *stacked,
        *_gate_up_down("mlp.shared_expert", Role.LINEAR, config.shared_expert_size, hidden),
        ("mlp.shared_expert_gate", Role.LINEAR, (1, hidden)),
    )


def _gate_up_down(stem: str, role: Role, wide: int, hidden: int) -> tuple[_Row, ...]:
    return (
        (f"{stem}.gate_proj", role, (wide, hidden)),
        (f"{stem}.up_proj", role, (wide, hidden)),
        (f"{stem}.down_proj", role, (hidden, wide)),
    )


class DraftHeadError(CheckpointError):
    """A draft head that is kept, and is not whole."""


def check_inventory(
    label: str,
    writes: Sequence[Write],
    config: ModelConfig,
    *,
    tied: bool,
    modes: Mapping[str, ModuleQuantization | None],
) -> None:
    """Raises CheckpointError where a tensor that the config implies is missing or misshapen, or one is too many.

    `writes` are the canonical tensors; `modes` says how each quantised module is packed, by canonical module name.
    """
    found = _by_module(writes)
    vocab = found.get(f"{TRUNK_PREFIX}embed_tokens", {}).get("weight")
    n_rows = vocab.shape[0] if vocab is not None and vocab.shape else config.vocab_size
    wanted = {TRUNK_PREFIX + expected.module: expected for expected in expected_trunk(config)}
    if not tied:
        wanted[HEAD_MODULE] = expected_head(config)
    for module in (f"{TRUNK_PREFIX}embed_tokens", HEAD_MODULE):
        if module in wanted:
            wanted[module] = replace(wanted[module], shape=(n_rows, *wanted[module].shape[1:]))
    ours = {module: parts for module, parts in found.items() if module.startswith((TRUNK_PREFIX, HEAD_MODULE))}
    _check(label, ours, wanted, config, modes)


def check_head_inventory(
    label: str,
    writes: Sequence[Write],
    config: ModelConfig,
    *,
    prefix: str,
    modes: Mapping[str, ModuleQuantization | None],
) -> None:
    """Raises DraftHeadError where a draft head, named under `prefix`, is not what the config implies."""
    own = {prefix + name.removeprefix(KEPT_MTP_PREFIX): how for name, how in modes.items()}
    try:
        _check(label, _by_module(writes), {prefix + e.module: e for e in expected_mtp(config)}, config, own)
    except CheckpointError as error:
        raise DraftHeadError(f"{error}", hint="--mtp drop leaves the draft head out") from error


def _by_module(writes: Sequence[Write]) -> dict[str, dict[str, Write]]:
    found: dict[str, dict[str, Write]] = {}
    for write in writes:
        module, _, parameter = write.name.rpartition(".")
        if parameter in ("A_log", "dt_bias"):
            module, parameter = write.name, ""
        found.setdefault(module, {})[parameter] = write
    return found


def _check(
    label: str,
    found: dict[str, dict[str, Write]],
    wanted: Mapping[str, Expected],
    config: ModelConfig,
    modes: Mapping[str, ModuleQuantization | None],
) -> None:
    missing, wrong, odd, extra = [], [], [], []
    for module, expected in wanted.items():
        parts = found.pop(module, {})
        quantised = modes.get(module)
        if quantised is not None and quantised.mode not in MLX_MODES:
            continue  # packed as only its own loader knows; every byte rides along
        shapes = {expected.parameter: expected.shape}
        if config.attention_bias and ".self_attn." in module and expected.role is Role.LINEAR:
            shapes["bias"] = expected.shape[:1]
        missing += [f"{module}.{name}" if name else module for name in shapes if name not in parts]
        if expected.parameter not in parts:
            continue
        packed = {"weight", "scales", "biases"} & parts.keys()
        if module in modes or "scales" in packed or (packed and parts[expected.parameter].dtype is Dtype.U32):
            wrong += _wrong_packing(module, parts, expected.shape, quantised)
            del shapes[expected.parameter]
        else:
            packed = set()
        for parameter, shape in shapes.items():
            if (part := parts.get(parameter)) is None:
                continue
            if part.shape != shape:
                wrong.append(f"{part.name}: expected {list(shape)}, found {list(part.shape)}")
            elif part.dtype not in FLOATS:
                odd.append(f"{part.name} ({part.dtype.value})")
        extra += [parts[parameter].name for parameter in parts if parameter not in (packed | shapes.keys())]
    extra += [write.name for parts in found.values() for write in parts.values()]
    if missing:
        raise CheckpointError(
            f"{label}: {len(missing)} tensors that config.json implies are missing: {few(missing)}",
            hint="the checkpoint is incomplete, or its config.json belongs to another one",
        )
    if wrong:
        raise CheckpointError(
            f"{label}: {len(wrong)} tensors do not fit config.json: {wrong[0]}",
            hint="its config.json belongs to another checkpoint, or the exporter moved an axis",
        )
    if odd:
        raise CheckpointError(
            f"{label}: {len(odd)} tensors in a dtype they can't have: {few(odd)}",
            hint="weights are BF16, F16 or F32, or packed as config.json says: export or download them so",
        )
    if extra:
        raise CheckpointError(
            f"{label}: {len(extra)} tensors have no place in the model that config.json describes: {few(extra)}",
            hint="strict loaders refuse them; does config.json belong to this checkpoint?",
        )


def _wrong_packing(
    module: str, parts: Mapping[str, Write], shape: tuple[int, ...], quantised: ModuleQuantization | None
) -> list[str]:
    """What is wrong with an MLX-packed weight [..., out, in * bits / 32] and its scales [..., out, in / group]."""
    weight, scales = parts["weight"], parts.get("scales")
    if scales is None:
        return [f"{module}.weight: packed, but its scales are gone"]
    if weight.dtype is not Dtype.U32:
        return [f"{module}.scales: a scale beside a {weight.dtype.value} weight that is not packed"]
    if quantised is None:
        return [f"{module}.weight: packed, but config.json's quantization says that it is not"]
    is_affine = quantised.mode == "affine"
    if is_affine and "biases" not in parts:
        return [f"{module}.weight: packed as affine, but its biases are gone"]
    if not is_affine and "biases" in parts:
        return [f"{module}.biases: packed as {quantised.mode}, which has no biases"]
    packed = shape[-1] * quantised.bits
    want_weight, want_scales = (*shape[:-1], packed // 32), (*shape[:-1], shape[-1] // quantised.group_size)
    if packed % 32 or shape[-1] % quantised.group_size or weight.shape != want_weight:
        return [f"{module}.weight: expected {list(want_weight)} for {quantised.bits} bits, found {list(weight.shape)}"]
    for name in ("scales", "biases"):
        part = parts.get(name)
        allowed = FLOATS if is_affine else (Dtype.U8,)
        if part is not None and (part.shape != want_scales or part.dtype not in allowed):
            wanted = f"{' or '.join(dtype.value for dtype in allowed)} {list(want_scales)}"
            return [f"{module}.{name}: expected {wanted}, found {part.dtype.value} {list(part.shape)}"]
    return []
