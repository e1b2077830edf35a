"""config.json as frozen, typed sizes: nested under `text_config` or flat, either generation's spelling."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from qwen35conv.errors import CheckpointError, SourceError
from qwen35conv.facts.header import LFS_POINTER, Dtype, has_more_values, no_duplicates

DENSE, SPARSE = "qwen3_5", "qwen3_5_moe"
_FAMILY = {
    "qwen3_5": DENSE,
    "qwen3_5_text": DENSE,
    "qwen3_5_moe": SPARSE,
    "qwen3_5_moe_text": SPARSE,
}
MODE_DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "nvfp4": (16, 4), "mxfp8": (32, 8)}  # group size, bits
MLX_MODES = tuple(MODE_DEFAULTS)
AUTO_ROUND = ("auto-round", "auto_round", "intel/auto-round")
_CASTS = {"bfloat16": Dtype.BF16, "float16": Dtype.F16, "float32": Dtype.F32}
DEFAULT_THETA = 10_000_000.0
_MAX_LAYERS = 4096  # far above any release; a bound for the tables made from it
_MAX_SIZE = 2**31
_MAX_NUMBER = 1e300
_MAX_DEPTH = 50
_MAX_PAIRS = 300_000  # of an index: whole models have 190,000 tensors
_WRONG_CONFIG = "config.json is damaged or belongs to another model: fetch the one of this checkpoint"


class LayerKind(Enum):
    """What mixes the positions of a layer."""

    LINEAR = "linear_attention"
    FULL = "full_attention"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: base, the rotated share of head_dim, and the multimodal split of the frequencies."""

    theta: float
    partial_factor: float
    mrope_section: tuple[int, ...]
    mrope_interleaved: bool
    theta_given: bool


@dataclass(frozen=True, slots=True)
class ModuleQuantization:
    """How MLX packed a module: `mode` may be one that MLX itself does not know."""

    group_size: int
    bits: int
    mode: str


@dataclass(frozen=True, slots=True)
class Quantization:
    """The `quantization` entry: a default, and modules under their stored names (None: not quantised)."""

    default: ModuleQuantization
    modules: Mapping[str, ModuleQuantization | None]
    entry: Mapping[str, Any] | None = None  # MLX's own, as it stands; None: another packer's keys


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes of the text model. Axes are counted in elements."""

    model_type: str  # qwen3_5 or qwen3_5_moe
    nested: bool
    hidden_size: int
    vocab_size: int
    layer_kinds: tuple[LayerKind, ...]
    intermediate_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_key_heads: int  # of the gated delta net, as the next three
    n_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    n_experts: int  # 0 for a dense model
    n_experts_per_token: int
    expert_size: int
    shared_expert_size: int
    norm_topk_prob: bool
    tied: bool | None  # None where config.json does not say
    rope: Rope
    rms_norm_eps: float
    attention_bias: bool
    n_mtp_layers: int | None  # None where config.json does not say
    has_vision: bool
    vision_channels: int
    quantization: Quantization | None
    foreign_scheme: str | None  # quant_method of a scheme that is not MLX's
    foreign_bits: tuple[int, ...]  # bits a weight in that scheme, as far as config.json says; of several groups each
    fp8_block: tuple[int, int] | None  # rows and columns that share a scale; None: not FP8 in blocks
    cast_dtype: Dtype | None  # what mlx-lm casts weights to before it quantises them; None: nothing
    document: Mapping[str, Any]  # config.json as it stands, to be edited, never asked for sizes

    @property
    def n_layers(self) -> int:
        """Layers of the trunk."""
        return len(self.layer_kinds)

    @property
    def conv_size(self) -> int:
        """Channels C of the causal convolution: queries, keys and values."""
        return 2 * self.n_key_heads * self.key_dim + self.n_value_heads * self.value_dim

    @property
    def rotary_dim(self) -> int:
        """Rotated values of each attention head."""
        return int(self.head_dim * self.rope.partial_factor)


def parse_json(where: str, raw: bytes, *, max_pairs: int = _MAX_PAIRS) -> dict[str, Any]:
    """A JSON object from a file beside the weights. Raises SourceError where it is none."""
    if raw.startswith(LFS_POINTER):
        raise SourceError(
            f"{where}: a Git LFS pointer, not the file itself",
            hint="run `git lfs pull` in the repository, or download the file from the Hub",
        )
    if has_more_values(raw, max_pairs, 2 * max_pairs):
        raise SourceError(f"{where}: more than {max_pairs} entries", hint="this is no model's file")
    try:
        text = raw.decode("utf-8-sig")
        document = json.loads(text, object_pairs_hook=no_duplicates)
        if "\\ud" in text.lower():
            json.dumps(document, ensure_ascii=False).encode()  # half a character can't be written again
    except (ValueError, RecursionError) as error:
        kind = "nested too deep" if isinstance(error, RecursionError) else f"not valid JSON: {error}"
        raise SourceError(f"{where}: {kind}", hint="fetch this file again") from error
    if _depth_exceeds(document, _MAX_DEPTH):
        raise SourceError(f"{where}: nested deeper than {_MAX_DEPTH} levels", hint="this is no model's file")
    if not isinstance(document, dict):
        raise SourceError(f"{where}: expected a JSON object, found {type(document).__name__}")
    return document


def _depth_exceeds(value: Any, levels: int) -> bool:
    """Whether objects and lists are nested deeper than that many levels."""
    if not isinstance(value, dict | list) or not value:
        return False
    if levels == 0:
        return True
    return any(_depth_exceeds(inner, levels - 1) for inner in (value.values() if isinstance(value, dict) else value))


def parse_config(where: str, raw: bytes) -> ModelConfig:
    """The sizes in config.json.

    Raises SourceError for a file that is no config, CheckpointError for another architecture or impossible sizes.
    """
    document = parse_json(where, raw)
    nested = isinstance(document.get("text_config"), dict)
    text: dict[str, Any] = document["text_config"] if nested else document
    model_type = _model_type(where, document, text)
    read = _Reader(where, text)
    n_layers = read.size("num_hidden_layers", maximum=_MAX_LAYERS)
    hidden_size = read.size("hidden_size")
    n_heads = read.size("num_attention_heads")
    n_experts = read.size("num_experts", 0, minimum=0)
    if model_type == SPARSE and not n_experts:
        raise CheckpointError(f"{where}: {model_type} without num_experts", hint=_WRONG_CONFIG)
    n_kv_heads = read.size("num_key_value_heads", n_heads)
    n_key_heads, n_value_heads = read.size("linear_num_key_heads", 16), read.size("linear_num_value_heads", 32)
    for many, few, keys in (
        (n_heads, n_kv_heads, ("num_attention_heads", "num_key_value_heads")),
        (n_value_heads, n_key_heads, ("linear_num_value_heads", "linear_num_key_heads")),
    ):
        if many % few:
            raise CheckpointError(
                f"{where}: {keys[0]} {many} does not divide by {keys[1]} {few}: heads are served in equal groups",
                hint=_WRONG_CONFIG,
            )
    kinds, head_dim, rope = _layer_kinds(read, n_layers), read.size("head_dim", 256), _rope(read)
    n_turned = int(head_dim * rope.partial_factor)
    if LayerKind.FULL in kinds and (n_turned == 0 or n_turned % 2):
        raise CheckpointError(
            f"{where}: partial_rotary_factor {rope.partial_factor:g} rotates {n_turned} of head_dim {head_dim}: "
            "values are rotated in pairs",
            hint=_WRONG_CONFIG,
        )
    return ModelConfig(
        model_type=SPARSE if n_experts else DENSE,
        nested=nested,
        hidden_size=hidden_size,
        vocab_size=read.size("vocab_size"),
        layer_kinds=kinds,
        intermediate_size=read.size("intermediate_size", 0, minimum=0),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_key_heads=n_key_heads,
        n_value_heads=n_value_heads,
        key_dim=read.size("linear_key_head_dim", 128),
        value_dim=read.size("linear_value_head_dim", 128),
        conv_kernel=read.size("linear_conv_kernel_dim", 4, minimum=2),
        n_experts=n_experts,
        n_experts_per_token=read.size("num_experts_per_tok", min(8, n_experts), minimum=1, maximum=n_experts)
        if n_experts
        else 0,
        expert_size=read.size("moe_intermediate_size", 0, minimum=0),
        shared_expert_size=read.size("shared_expert_intermediate_size", 0, minimum=0),
        norm_topk_prob=read.flag("norm_topk_prob", True),
        tied=_tied(where, document, text),
        rope=rope,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        attention_bias=read.flag("attention_bias", False),
        n_mtp_layers=_n_mtp_layers(document, text),
        has_vision=isinstance(document.get("vision_config"), dict),
        vision_channels=_vision_channels(where, document),
        quantization=_quantization(where, document, text),
        foreign_scheme=_foreign_scheme(document, text),
        foreign_bits=_foreign_bits(document, text),
        fp8_block=_fp8_block(where, document, text),
        cast_dtype=_cast_dtype(document, text),
        document=document,
    )


class _Reader:
    """Typed reading of one level of config.json, with errors that name the key."""

    def __init__(self, where: str, entries: Mapping[str, Any]) -> None:
        self.where = where
        self.entries = entries

    def fail(self, key: str, wanted: str) -> CheckpointError:
        found = self.entries.get(key)
        return CheckpointError(f"{self.where}: {key}: expected {wanted}, found {str(found)[:60]!r}", hint=_WRONG_CONFIG)

    def size(self, key: str, default: int | None = None, *, minimum: int = 1, maximum: int = _MAX_SIZE) -> int:
        value = self.entries.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or not minimum <= value <= maximum:
            raise self.fail(key, f"a whole number from {minimum} to {maximum}")
        return value

    def number(self, key: str, default: float, *, maximum: float = _MAX_NUMBER) -> float:
        value = self.entries.get(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not 0 < value <= maximum:
            raise self.fail(key, "a positive number" if maximum == _MAX_NUMBER else f"a number up to {maximum}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.entries.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, "true or false")
        return value


def _model_type(where: str, document: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    named = [level.get("model_type") for level in (document, text)]
    found = next((_FAMILY[name] for name in named if isinstance(name, str) and name in _FAMILY), None)
    foreign = [name for name in named if name is not None and (not isinstance(name, str) or name not in _FAMILY)]
    if found is None or foreign:
        raise CheckpointError(
            f"{where}: model_type {str((foreign or named)[0])[:60]!r} is not of the Qwen3.5 family",
            hint=f"this tool converts {', '.join(_FAMILY)}; the gains of other architectures follow other rules",
        )
    return SPARSE if any(_FAMILY.get(str(name)) == SPARSE for name in named) else found


def _vision_channels(where: str, document: Mapping[str, Any]) -> int:
    vision = document.get("vision_config")
    return _Reader(where, vision if isinstance(vision, dict) else {}).size("in_channels", 3)


def _layer_kinds(read: _Reader, n_layers: int) -> tuple[LayerKind, ...]:
    kinds = read.entries.get("layer_types")
    if kinds is None:
        interval = read.size("full_attention_interval", 4)
        return tuple(LayerKind.LINEAR if (i + 1) % interval else LayerKind.FULL for i in range(n_layers))
    known = {kind.value: kind for kind in LayerKind}
    if not isinstance(kinds, list) or not all(isinstance(kind, str) and kind in known for kind in kinds):
        raise read.fail("layer_types", f"a list of {' and '.join(known)}")
    if len(kinds) != n_layers:
        raise CheckpointError(
            f"{read.where}: layer_types has {len(kinds)} entries, num_hidden_layers is {n_layers}", hint=_WRONG_CONFIG
        )
    return tuple(known[kind] for kind in kinds)


def _rope(read: _Reader) -> Rope:
    nested = next(
        (entry for key in ("rope_parameters", "rope_scaling") if isinstance(entry := read.entries.get(key), dict)), {}
    )
    inner = _Reader(read.where, {**read.entries, **{key: value for key, value in nested.items() if value is not None}})
    section = inner.entries.get("mrope_section", [11, 11, 10])
    if not isinstance(section, list) or not all(type(n) is int and n >= 0 for n in section):
        raise inner.fail("mrope_section", "a list of whole numbers")
    return Rope(
        theta=inner.number("rope_theta", DEFAULT_THETA),
        partial_factor=inner.number("partial_rotary_factor", 0.25, maximum=1),
        mrope_section=tuple(section),
        mrope_interleaved=inner.flag("mrope_interleaved", True),
        theta_given=inner.entries.get("rope_theta") is not None,
    )


def _tied(where: str, document: Mapping[str, Any], text: Mapping[str, Any]) -> bool | None:
    for level in (text, document):
        value = level.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
        if value is not None:
            raise _Reader(where, level).fail("tie_word_embeddings", "true or false")
    return None


def _n_mtp_layers(document: Mapping[str, Any], text: Mapping[str, Any]) -> int | None:
    for level in (text, document):
        for key in ("mtp_num_hidden_layers", "num_nextn_predict_layers"):
            if type(value := level.get(key)) is int and value >= 0:
                return value
    return None


def _quantization_entries(document: Mapping[str, Any], text: Mapping[str, Any]) -> list[dict[str, Any]]:
    keys = ("quantization", "quantization_config")
    return [entry for key in keys for level in (document, text) if isinstance(entry := level.get(key), dict)]


def _quantization(where: str, document: Mapping[str, Any], text: Mapping[str, Any]) -> Quantization | None:
    """MLX's entry: it has `group_size` and `bits` but no `quant_method`; else that of a packer which writes its own."""
    for entry in _quantization_entries(document, text):
        if "quant_method" in entry or not ("bits" in entry or "mode" in entry):
            continue
        default = _module_quantization(where, entry)
        inherited = _plain(entry)
        if default.mode in MLX_MODES:  # whose loaders take an entry without a mode for affine, whatever the default
            inherited.pop("mode", None)
        modules = {
            name: None if value is False else _module_quantization(where, {**inherited, **value})
            for name, value in entry.items()
            if value is False or isinstance(value, dict)
        }
        return Quantization(default, modules, entry)
    return _auto_round(where, _foreign_entry(document, text))


def _auto_round(where: str, entry: Mapping[str, Any]) -> Quantization | None:
    """AutoRound's entry, in MLX's terms: its exports for MLX are packed alike, and keep its own keys."""
    if entry.get("quant_method") not in AUTO_ROUND or "bits" not in entry:
        return None
    extra = entry.get("extra_config")
    layers = extra if isinstance(extra, dict) else {}
    return Quantization(
        _round_packing(where, entry),
        {
            name: None if value.get("bits") == 16 else _round_packing(where, {**_plain(entry), **value})
            for name, value in layers.items()
            if isinstance(value, dict)
        },
    )


def _round_packing(where: str, entry: Mapping[str, Any]) -> ModuleQuantization:
    kind, bits = str(entry.get("data_type", "int")), entry.get("bits")
    mode = f"mxfp{bits}" if kind.startswith("mx_fp") else f"nvfp{bits}" if kind.startswith("nv_fp") else "affine"
    return _module_quantization(where, {key: entry.get(key) for key in ("bits", "group_size")} | {"mode": mode})


def _plain(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if not isinstance(value, dict)}


def _module_quantization(where: str, entry: Mapping[str, Any]) -> ModuleQuantization:
    mode = entry.get("mode", "affine")
    read = _Reader(f"{where}: quantization", entry)
    if not isinstance(mode, str):
        raise read.fail("mode", "a name")
    group_size, _ = MODE_DEFAULTS.get(mode, (64, 4))
    return ModuleQuantization(group_size=read.size("group_size", group_size), bits=_bits(read, mode), mode=mode)


def _bits(read: _Reader, mode: str) -> int:
    """Bits a value; a mode that MLX does not know may count them as it likes."""
    if mode not in MLX_MODES and not isinstance(read.entries.get("bits"), int):
        return 0
    return read.size("bits", MODE_DEFAULTS.get(mode, (64, 4))[1], maximum=64)


def _foreign_scheme(document: Mapping[str, Any], text: Mapping[str, Any]) -> str | None:
    for entry in _quantization_entries(document, text):
        if isinstance(method := entry.get("quant_method"), str):
            return method
    return None


def _foreign_entry(document: Mapping[str, Any], text: Mapping[str, Any]) -> Mapping[str, Any]:
    entries = _quantization_entries(document, text)
    return next((entry for entry in entries if isinstance(entry.get("quant_method"), str)), {})


def _foreign_bits(document: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, ...]:
    """Bits of each group of modules, under the spellings of the schemes' own writers."""
    entry = _foreign_entry(document, text)
    groups = entry.get("config_groups")
    inner = (
        [group.get("weights") for group in groups.values() if isinstance(group, dict)]
        if isinstance(groups, dict)
        else []
    )
    found = [weights.get("num_bits") for weights in inner if isinstance(weights, dict)]
    found += [entry.get(key) for key in ("bits", "w_bit")]
    found += [
        n for key, n in (("load_in_4bit", 4), ("_load_in_4bit", 4), ("load_in_8bit", 8)) if entry.get(key) is True
    ]
    return tuple(sorted({n for n in found if type(n) is int and 0 < n <= 32}))


def _fp8_block(where: str, document: Mapping[str, Any], text: Mapping[str, Any]) -> tuple[int, int] | None:
    entry = _foreign_entry(document, text)
    if entry.get("quant_method") != "fp8":
        return None
    block = entry.get("weight_block_size", [128, 128])
    if block is None:  # one scale a tensor
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and 0 < n <= _MAX_SIZE for n in block):
        raise _Reader(f"{where}: quantization_config", entry).fail("weight_block_size", "two whole numbers")
    return block[0], block[1]


def _cast_dtype(document: Mapping[str, Any], text: Mapping[str, Any]) -> Dtype | None:
    """As mlx-lm looks for it: `torch_dtype` at the top, else `dtype` of the text model."""
    named = document.get("torch_dtype") or text.get("dtype")
    return _CASTS.get(named) if isinstance(named, str) else None
