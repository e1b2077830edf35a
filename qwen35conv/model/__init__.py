"""The Qwen3.5 text model in MLX, over the canonical tensors of any checkpoint."""

from __future__ import annotations

from qwen35conv.model.attention import Attention, AttentionState, KVCache
from qwen35conv.model.cache import Cache
from qwen35conv.model.capture import Capture
from qwen35conv.model.decoder import Block, Decoder, load_block, load_decoder
from qwen35conv.model.delta_rule import Convolution, DeltaRule, plain_convolution
from qwen35conv.model.feed_forward import FeedForward, MixtureOfExperts, swiglu
from qwen35conv.model.feeding import append, independent_rows, prefill, rows_apart
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet
from qwen35conv.model.linear import can_run
from qwen35conv.model.lora import LoraTarget, lora_targets
from qwen35conv.model.padding import Padding, padding_of
from qwen35conv.model.paged_cache import PagedKVCache, PagePool
from qwen35conv.model.profile import Phase, PhaseTime, Profile, profile
from qwen35conv.model.quantized_cache import QuantizedKVCache
from qwen35conv.model.rollback import DeltaRound
from qwen35conv.model.rope import RotaryEmbedding
from qwen35conv.model.span import CallError, Span, span_of
from qwen35conv.model.weights import OpaqueModuleError, Tensors, Weights

__all__ = [
    "Attention",
    "AttentionState",
    "Block",
    "Cache",
    "CallError",
    "Capture",
    "Convolution",
    "Decoder",
    "DeltaCache",
    "DeltaRound",
    "DeltaRule",
    "FeedForward",
    "GatedDeltaNet",
    "KVCache",
    "LoraTarget",
    "MixtureOfExperts",
    "OpaqueModuleError",
    "Padding",
    "PagePool",
    "PagedKVCache",
    "Phase",
    "PhaseTime",
    "Profile",
    "QuantizedKVCache",
    "RotaryEmbedding",
    "Span",
    "Tensors",
    "Weights",
    "append",
    "can_run",
    "independent_rows",
    "load_block",
    "load_decoder",
    "lora_targets",
    "padding_of",
    "plain_convolution",
    "prefill",
    "profile",
    "rows_apart",
    "span_of",
    "swiglu",
]
