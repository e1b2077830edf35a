"""The Qwen3.5 text model in MLX, over the canonical tensors of any checkpoint."""

from __future__ import annotations

from qwen35conv.model.attention import Attention, AttentionState, KVCache
from qwen35conv.model.decoder import Block, Cache, Decoder, load_block, load_decoder
from qwen35conv.model.feed_forward import FeedForward, MixtureOfExperts
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet
from qwen35conv.model.linear import can_run
from qwen35conv.model.span import Span, span_of
from qwen35conv.model.weights import OpaqueModuleError, Tensors, Weights

__all__ = [
    "Attention",
    "AttentionState",
    "Block",
    "Cache",
    "Decoder",
    "DeltaCache",
    "FeedForward",
    "GatedDeltaNet",
    "KVCache",
    "MixtureOfExperts",
    "OpaqueModuleError",
    "Span",
    "Tensors",
    "Weights",
    "can_run",
    "load_block",
    "load_decoder",
    "span_of",
]
