"""The files beside the weights: config.json that follows the tensors, the index, and what is copied as it is."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from qwen35conv.errors import CheckpointError
from qwen35conv.facts.checkpoint import CONFIG, INDEX, SUFFIX, Checkpoint, is_plain_name
from qwen35conv.facts.config import SPARSE, LayerKind, ModelConfig, ModuleQuantization, Quantization
from qwen35conv.facts.header import Dtype, shown
from qwen35conv.facts.layout import Region, canonical_modules, parse_name
from qwen35conv.generation.convention import MARKER_KEYS
from qwen35conv.planning.packing import GATE, is_gate
from qwen35conv.planning.plan import Mtp, Plan, PlanShard

RECEIPT = "qwen35.json"
SOURCE_GAINS = "qwen35-source-gains.bin"
_DTYPES = {Dtype.BF16: "bfloat16", Dtype.F16: "float16", Dtype.F32: "float32"}
_VISION_KEYS = ("vision_config", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_QUANTIZATION_KEYS = ("quantization", "quantization_config")
_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
# Of a flat config these stay at the top when the rest moves into text_config.
_TOP_KEYS = ("architectures", "model_type", "transformers_version", *_VISION_KEYS, *_QUANTIZATION_KEYS)
_BOTH_LEVELS = ("bos_token_id", "eos_token_id", "pad_token_id")
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".msgpack", ".h5", ".npz", ".pkl", ".tflite")
_UNFINISHED = (".incomplete", ".part", ".lock", ".tmp")
_TEMPLATES = "additional_chat_templates/"


@dataclass(frozen=True, slots=True)
class ConfigEdit:
    """One change of config.json: a dotted key, and its value before and after as JSON (None: absent).

    Where a value only moved, `moved_from` is its old key.
    """

    key: str
    before: str | None
    after: str | None
    moved_from: str | None = None


@dataclass(frozen=True, slots=True)
class SideFiles:
    """Files that are copied byte for byte, and those that are not, with the reason."""

    copied: tuple[str, ...]
    left: Mapping[str, str]


def build_config(plan: Plan) -> dict[str, Any]:
    """config.json for the result: the nested form, with every size written out, promising only what is there."""
    config = plan.checkpoint.config
    top: dict[str, Any] = copy.deepcopy(dict(config.document))
    if config.nested:
        text: dict[str, Any] = top["text_config"]
    else:
        text = {key: value for key, value in top.items() if key not in _TOP_KEYS}
        top = {key: value for key, value in top.items() if key in _TOP_KEYS or key in _BOTH_LEVELS}
        top["text_config"] = text
    top["model_type"] = config.model_type
    text["model_type"] = f"{config.model_type}_text"
    text |= {key: value for key, value in _sizes(config).items() if text.get(key) is None}
    text["vocab_size"] = _n_rows(plan) or config.vocab_size
    _write_rope(text, config)
    interval = _interval(config)
    if interval is not None:
        text["full_attention_interval"] = interval
    top["tie_word_embeddings"] = text["tie_word_embeddings"] = plan.tied
    _write_mtp(top, text, config, plan)
    _write_convention(top, text)
    if not plan.options.keep_vision:
        for key in _VISION_KEYS:
            top.pop(key, None)
            text.pop(key, None)
    dtype = _main_dtype(plan)
    if dtype is not None:
        for level in (top, text):
            level.pop("torch_dtype", None)
            level["dtype"] = dtype
    _write_quantization(top, text, plan)
    return top


def config_edits(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[ConfigEdit, ...]:
    """Each key whose value differs, in the order of the result, then what is gone."""
    old, new = dict(_flat(before, "")), dict(_flat(after, ""))
    edits, moved = [], set()
    for key, value in new.items():
        if old.get(key) == value:
            continue
        flat = key.removeprefix("text_config.")
        if key not in old and flat not in new and old.get(flat) == value:
            moved.add(flat)
            edits.append(ConfigEdit(key, value, value, flat))
        else:
            edits.append(ConfigEdit(key, old.get(key), value))
    gone = (ConfigEdit(key, value, None) for key, value in old.items() if key not in new and key not in moved)
    return (*edits, *gone)


def build_index(shards: Sequence[PlanShard]) -> dict[str, Any]:
    """The index: the tensors' bytes in all, and the file of each."""
    weight_map = {write.name: shard.file for shard in shards for write in shard.writes}
    return {
        "metadata": {"total_size": sum(shard.n_bytes for shard in shards)},
        "weight_map": dict(sorted(weight_map.items())),
    }


def build_json(document: Mapping[str, Any]) -> bytes:
    """JSON as it is written to disk."""
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return text.encode(errors="surrogateescape")  # names of files, where Python reads them by another encoding


def side_files(checkpoint: Checkpoint) -> SideFiles:
    """Which of the source's other files go along. The config, the index and the receipt are made anew."""
    copied, left = [], {}
    shards = {shard.file for shard in checkpoint.shards}
    for file in sorted(checkpoint.listing):
        if file in shards or file in (CONFIG, INDEX):
            continue
        reason = _why_left(file)
        if reason is None:
            copied.append(file)
        else:
            left[file] = reason
    return SideFiles(tuple(copied), left)


def _why_left(file: str) -> str | None:
    name = file.removeprefix(_TEMPLATES)
    if file in (RECEIPT, SOURCE_GAINS):
        return "made anew"
    if file.endswith(SUFFIX):
        return "weights that take no part"
    if file.endswith((SUFFIX + ".index.json", ".bin.index.json")):
        return "an index of other files"
    if file.endswith(_OTHER_WEIGHTS):
        return "weights in another format"
    if file.endswith(_UNFINISHED):
        return "an unfinished download"
    if name.startswith("."):
        return "hidden"
    if "/" in name:
        return "in a subfolder"
    if not is_plain_name(name):
        return "a name that is not safe everywhere"
    return None


def _sizes(config: ModelConfig) -> dict[str, Any]:
    """Every size under its usual key: loaders have defaults of their own where one is absent."""
    sizes = {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "linear_num_key_heads": config.n_key_heads,
        "linear_num_value_heads": config.n_value_heads,
        "linear_key_head_dim": config.key_dim,
        "linear_value_head_dim": config.value_dim,
        "linear_conv_kernel_dim": config.conv_kernel,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "layer_types": [kind.value for kind in config.layer_kinds],
    }
    if config.intermediate_size:
        sizes["intermediate_size"] = config.intermediate_size
    if config.model_type == SPARSE:
        sizes |= {
            "num_experts": config.n_experts,
            "num_experts_per_tok": config.n_experts_per_token,
            "moe_intermediate_size": config.expert_size,
            "shared_expert_intermediate_size": config.shared_expert_size,
            "norm_topk_prob": config.norm_topk_prob,
        }
    return sizes


def _write_rope(text: dict[str, Any], config: ModelConfig) -> None:
    """`rope_parameters` whole, and its two numbers beside it for loaders that look there."""
    rope = config.rope
    entry = text.get("rope_parameters")
    if not isinstance(entry, dict):
        legacy = text.get("rope_scaling")
        entry = dict(legacy) if isinstance(legacy, dict) else {}
    wanted = {
        "rope_type": entry.get("rope_type") or entry.get("type") or "default",
        "rope_theta": _number(rope.theta),
        "partial_rotary_factor": rope.partial_factor,
        "mrope_section": list(rope.mrope_section),
        "mrope_interleaved": rope.mrope_interleaved,
    }
    text["rope_parameters"] = entry | {key: value for key, value in wanted.items() if entry.get(key) is None}
    text["rope_theta"] = _number(rope.theta)
    text["partial_rotary_factor"] = rope.partial_factor


def _number(value: float) -> float | int:
    return int(value) if value.is_integer() else value


def _interval(config: ModelConfig) -> int | None:
    """The n of "each n-th layer is full attention", where the layers follow one."""
    kinds = config.layer_kinds
    first = next((i for i, kind in enumerate(kinds) if kind is LayerKind.FULL), None)
    if first is None:
        return len(kinds) + 1
    regular = all((kind is LayerKind.FULL) == ((i + 1) % (first + 1) == 0) for i, kind in enumerate(kinds))
    return first + 1 if regular else None


def _write_mtp(top: dict[str, Any], text: dict[str, Any], config: ModelConfig, plan: Plan) -> None:
    kept = plan.head_shift is not None and plan.options.mtp is Mtp.KEEP
    n_layers = (config.n_mtp_layers or 1) if kept else 0
    for level in (top, text):
        for key in _MTP_KEYS:
            if key in level:
                level[key] = n_layers
    text["mtp_num_hidden_layers"] = n_layers


def _write_convention(top: dict[str, Any], text: dict[str, Any]) -> None:
    """What the gains hold, written down; claims that were made of the source's would now be wrong."""
    text["norm_convention"] = "gamma"
    for level in (top, text):
        for key in MARKER_KEYS:
            if level is top or key != "norm_convention":
                level.pop(key, None)


def _n_rows(plan: Plan) -> int | None:
    rows = (write.shape[0] for write in plan.writes() if write.name.endswith(".embed_tokens.weight"))
    return next(rows, None)


def _main_dtype(plan: Plan) -> str | None:
    """The dtype of most of the bytes that are not packed."""
    counts: Counter[Dtype] = Counter()
    for write in plan.writes():
        if write.dtype in _DTYPES:
            counts[write.dtype] += write.n_bytes
    return _DTYPES[counts.most_common(1)[0][0]] if counts else None


def _write_quantization(top: dict[str, Any], text: dict[str, Any], plan: Plan) -> None:
    """Module keys under their canonical names; entries gone where nothing is quantised, or the module is not there."""
    for key in _QUANTIZATION_KEYS:
        text.pop(key, None)
        top.pop(key, None)
    if plan.options.quantize is not None:
        top["quantization"] = _quantization(plan, plan.options.quantize)
        top["quantization_config"] = copy.deepcopy(top["quantization"])
        return
    quantization = plan.checkpoint.config.quantization
    if not plan.packing or quantization is None:
        return
    entry = quantization.entry or _entry_of(quantization)
    modules = {write.name.rpartition(".")[0] for write in plan.writes()}
    renamed: dict[str, Any] = {}
    for name, value in entry.items():
        if not (isinstance(value, dict) or value is False):
            renamed[name] = value
            continue
        place = parse_name(f"{name}.weight")
        if place is None or place.region in (Region.VISION, Region.MTP):
            continue
        for module in canonical_modules(place):
            if module not in modules:
                continue
            if renamed.get(module, value) != value:
                raise CheckpointError(
                    f"{CONFIG}: quantization: {shown(name)}: experts that are stacked into {module} are packed "
                    f"differently: {value} and {renamed[module]}",
                    hint="MLX stacks the experts of a layer: they must share bits, group size and mode",
                )
            renamed[module] = value
    top["quantization"] = renamed
    top["quantization_config"] = copy.deepcopy(renamed)


def _entry_of(quantization: Quantization) -> dict[str, Any]:
    """MLX's entry for what was packed under another one's keys."""
    return {
        **asdict(quantization.default),
        **{name: False if how is None else asdict(how) for name, how in quantization.modules.items()},
    }


def _quantization(plan: Plan, asked: ModuleQuantization) -> dict[str, Any]:
    """The entry that mlx-lm writes: what was asked for, and the router gates, whose mode is MLX's default."""
    gates = {module: {"group_size": GATE.group_size, "bits": GATE.bits} for module in plan.packing if is_gate(module)}
    return {"group_size": asked.group_size, "bits": asked.bits, "mode": asked.mode, **gates}


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """Dotted keys and JSON values; a vision config and a quantised module's entry stand as a whole."""
    for key, inner in value.items():
        path = f"{prefix}{key}"
        if isinstance(inner, Mapping) and inner and key != "vision_config" and not prefix.startswith("quantization"):
            yield from _flat(inner, f"{path}.")
        else:
            yield path, json.dumps(inner, ensure_ascii=False)
