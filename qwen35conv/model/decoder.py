"""The text model: embeddings, layers in order, final norm and head; its layers held, or streamed one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx
import numpy as np

from qwen35conv.facts.config import LayerKind, ModelConfig
from qwen35conv.facts.layout import HEAD_MODULE, TRUNK_PREFIX
from qwen35conv.kernels import resolve_backend
from qwen35conv.model.attention import Attention, AttentionState, KVCache, load_attention
from qwen35conv.model.cache import Cache
from qwen35conv.model.delta_rule import Convolution
from qwen35conv.model.feed_forward import FeedForward, MixtureOfExperts, load_feed_forward, load_mixture
from qwen35conv.model.gated_delta_net import DeltaCache, GatedDeltaNet, load_gated_delta_net
from qwen35conv.model.linear import Linear, RowTable
from qwen35conv.model.padding import padding_of
from qwen35conv.model.span import CallError, Span, span_of
from qwen35conv.model.weights import Weights

HEAD_SLICE = 64 << 20  # bytes of the head that are read at once
_FEW = 4  # positions up to which layers need not be evaluated one by one: their hidden states are small

OnLayer = Callable[[int, mx.array], None]


@dataclass(frozen=True, slots=True)
class Block:
    """One layer: a mixer over positions and an MLP, each behind its norm."""

    mixer: GatedDeltaNet | Attention
    mlp: FeedForward | MixtureOfExperts
    input_norm: mx.array  # [hidden]
    post_norm: mx.array  # [hidden]
    eps: float

    def __call__(self, x: mx.array, span: Span, cache: AttentionState | DeltaCache | None = None) -> mx.array:
        """[B, T, hidden] -> [B, T, hidden]."""
        x = x + self.mix(mx.fast.rms_norm(x, self.input_norm, self.eps), span, cache)
        return x + span.mapped(self.mlp, mx.fast.rms_norm(x, self.post_norm, self.eps))

    def mix(self, x: mx.array, span: Span, cache: AttentionState | DeltaCache | None = None) -> mx.array:
        """The mixer alone, over normed positions [B, T, hidden]."""
        if isinstance(self.mixer, GatedDeltaNet):
            assert cache is None or isinstance(cache, DeltaCache)
            return self.mixer(x, span, cache)
        assert not isinstance(cache, DeltaCache)
        return self.mixer(x, span, cache)

    def make_cache(self) -> KVCache | DeltaCache:
        """An empty cache of the mixer's kind."""
        return DeltaCache() if isinstance(self.mixer, GatedDeltaNet) else KVCache()

    def shifted(self, by: float) -> Block:
        """The layer as it were with `by` added to each gain that a raw export stores shifted."""
        mixer = self.mixer
        if isinstance(mixer, Attention):
            mixer = replace(mixer, q_norm=mixer.q_norm + by, k_norm=mixer.k_norm + by)
        return replace(self, mixer=mixer, input_norm=self.input_norm + by, post_norm=self.post_norm + by)


@dataclass
class Decoder:
    """The text model over canonical weights. Layers are read when they are needed, and kept only where `keep`."""

    config: ModelConfig
    weights: Weights
    embeddings: RowTable
    head: RowTable
    norm: mx.array  # [hidden]
    backend: str
    keep: bool = False
    convolutions: Mapping[int, Convolution] = field(default_factory=dict)  # by layer, instead of the plain one
    _blocks: dict[int, Block] = field(default_factory=dict)
    _head: Linear | None = None

    def __call__(
        self,
        ids: np.ndarray | mx.array,
        cache: Cache | None = None,
        lengths: Sequence[int] | None = None,
        *,
        mask: np.ndarray | None = None,
        positions: np.ndarray | None = None,
        stepwise: bool = False,
    ) -> mx.array:
        """Logits [B, T, vocabulary] of ids [B, T]; the arguments are those of `hidden`."""
        hidden = self.hidden(ids, cache, lengths, mask=mask, positions=positions, stepwise=stepwise)
        return mx.concatenate([logits for _, logits in self.head_slices(hidden, stepwise=stepwise)], axis=-1)

    def hidden(
        self,
        ids: np.ndarray | mx.array,  # [B, T]
        cache: Cache | None = None,
        lengths: Sequence[int] | None = None,  # [B] real tokens of each row, the rest is padding behind them
        on_layer: OnLayer | None = None,
        *,
        mask: np.ndarray | None = None,  # [B, T] instead of lengths: True where real, padding on any side
        positions: np.ndarray | None = None,  # [3, B, T] rotary positions: time, height, width
        stepwise: bool = False,
    ) -> mx.array:
        """The last layer's output under the final norm, [B, T, hidden]; what it is where padded means nothing.

        For more than four positions each layer's output and cache are evaluated before the next layer starts, so that
        the memory in use does not grow with depth. `on_layer` sees rows with their real positions in front.
        """
        ids = np.array(ids)
        padding = None if mask is None else padding_of(mask)
        if padding is not None:
            if lengths is not None or padding.order.shape != ids.shape:
                raise CallError(f"mask: expected {list(ids.shape)} and no lengths, found {list(padding.order.shape)}")
            ids, lengths = padding.packed(ids), padding.lengths
            positions = None if positions is None else padding.packed(positions)
        batch, n_steps = ids.shape
        if cache is not None and len(cache.lengths) != batch:
            raise CallError(f"cache: made for {len(cache.lengths)} rows, found {batch}")
        if cache is None:
            span = span_of(n_steps, [0] * batch, lengths, positions=positions, stepwise=stepwise)
        else:
            span = cache.span(n_steps, lengths, positions=positions, stepwise=stepwise)
        x = self._through(self.embed(ids), span, cache, on_layer)
        if padding is not None:
            x = mx.take_along_axis(x, mx.array(padding.places)[..., None], axis=1)
        return self.final_norm(x)

    def _through(self, x: mx.array, span: Span, cache: Cache | None, on_layer: OnLayer | None) -> mx.array:
        for i in range(self.config.n_layers):
            state = None if cache is None else cache.layers[i]
            x = self.block(i)(x, span, state)
            if span.n_steps > _FEW or not self.keep:
                mx.eval(x, [] if state is None else state.arrays())
            if on_layer is not None:
                on_layer(i, x)
        if cache is not None:
            cache.move(span)
            mx.eval(x, [state.arrays() for state in cache.layers])
        return x

    def embed(self, ids: np.ndarray | mx.array) -> mx.array:
        """The embeddings [B, T, hidden] of ids [B, T]."""
        return self.embeddings.lookup(np.array(ids))

    def block(self, index: int) -> Block:
        """A layer. Raises OpaqueModuleError where one of its modules can't be run."""
        if index in self._blocks:
            return self._blocks[index]
        block = load_block(self.weights, index, self.config, self.backend)
        if index in self.convolutions and isinstance(block.mixer, GatedDeltaNet):
            block = replace(block, mixer=block.mixer.with_convolution(self.convolutions[index]))
        if self.keep:
            self._blocks[index] = block
        return block

    def final_norm(self, x: mx.array, by: float = 0.0) -> mx.array:
        """The norm before the head, with `by` added to its gain."""
        return mx.fast.rms_norm(x, self.norm + by if by else self.norm, self.config.rms_norm_eps)

    def head_slices(self, hidden: mx.array, *, stepwise: bool = False) -> Iterator[tuple[int, mx.array]]:
        """The logits of normed positions [B, T, hidden], as (first row, [B, T, rows]) for a part of the vocabulary."""
        span = span_of(hidden.shape[1], [0] * hidden.shape[0], stepwise=stepwise)
        if self.keep:
            self._head = self._head or self.head.linear(0, self.head.n_rows)
            yield 0, span.mapped(self._head, hidden)
            return
        for begin, end in self.head.slices(HEAD_SLICE):
            logits = span.mapped(self.head.linear(begin, end), hidden)
            mx.eval(logits)
            yield begin, logits

    def make_cache(self, batch: int = 1, attention: Callable[[int], AttentionState] | None = None) -> Cache:
        """An empty cache for a batch of sequences; `attention` makes the state of an attention layer, by its index."""
        layers: list[AttentionState | DeltaCache] = []
        for i, kind in enumerate(self.config.layer_kinds):
            if kind is LayerKind.LINEAR:
                layers.append(DeltaCache())
            else:
                layers.append(KVCache() if attention is None else attention(i))
        return Cache([0] * batch, layers)


def load_decoder(
    config: ModelConfig,
    weights: Weights,
    *,
    tied: bool,
    vocab_size: int | None = None,  # rows of the embeddings, where they differ from config.json's
    backend: str = "auto",
    keep: bool = False,
    convolutions: Mapping[int, Convolution] | None = None,  # by layer, instead of the plain one
) -> Decoder:
    """The text model; what can't be run of it raises OpaqueModuleError on use."""
    n_rows = config.vocab_size if vocab_size is None else vocab_size
    embeddings = weights.table(f"{TRUNK_PREFIX}embed_tokens", n_rows, config.hidden_size)
    return Decoder(
        config=config,
        weights=weights,
        embeddings=embeddings,
        head=embeddings if tied else weights.table(HEAD_MODULE, n_rows, config.hidden_size),
        norm=weights.array(f"{TRUNK_PREFIX}norm.weight"),
        backend=resolve_backend(backend),
        keep=keep,
        convolutions=convolutions or {},
    )


def load_block(weights: Weights, index: int, config: ModelConfig, backend: str = "auto") -> Block:
    """Layer `index`. Raises OpaqueModuleError where one of its modules can't be run."""
    layer = f"{TRUNK_PREFIX}layers.{index}"
    mixer: GatedDeltaNet | Attention
    if config.layer_kinds[index] is LayerKind.LINEAR:
        mixer = load_gated_delta_net(weights, f"{layer}.linear_attn", config, backend)
    else:
        mixer = load_attention(weights, f"{layer}.self_attn", config)
    mlp = f"{layer}.mlp"
    return Block(
        mixer=mixer,
        mlp=load_mixture(weights, mlp, config) if config.n_experts else load_feed_forward(weights, mlp),
        input_norm=weights.array(f"{layer}.input_layernorm.weight"),
        post_norm=weights.array(f"{layer}.post_attention_layernorm.weight"),
        eps=config.rms_norm_eps,
    )
