"""Ways to feed a decoder: a long prompt in chunks, a few known tokens, rows that know nothing of each other."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from qwen35conv.model.attention import AttentionState
from qwen35conv.model.cache import Cache
from qwen35conv.model.decoder import Block, Decoder
from qwen35conv.model.gated_delta_net import DeltaCache
from qwen35conv.model.padding import padding_of
from qwen35conv.model.span import CallError, Span

CHUNK = 512  # positions of a prompt that go through the layers at once
MOST_APPENDED = 4


def prefill(
    decoder: Decoder,
    ids: np.ndarray,  # [B, T]
    cache: Cache,
    *,
    lengths: Sequence[int] | None = None,  # [B] real tokens of each row, the rest is padding behind them
    mask: np.ndarray | None = None,  # [B, T] instead of lengths: True where real, padding on any side
    positions: np.ndarray | None = None,  # [3, B, T] rotary positions: time, height, width
    chunk: int = CHUNK,
) -> mx.array:
    """The normed hidden state of each row's last real position, [B, 1, hidden]; zeros for a row without any.

    What is held at once is one chunk of one layer, whatever the length of the prompt and the depth of the model.
    """
    if mask is not None:
        padding = padding_of(mask)
        if lengths is not None or mask.shape != ids.shape:
            raise CallError(f"mask: expected {list(ids.shape)} and no lengths, found {list(mask.shape)}")
        ids, lengths = padding.packed(ids), padding.lengths
        positions = None if positions is None else padding.packed(positions)
    batch, n_steps = ids.shape
    if chunk < 1 or not n_steps:
        raise CallError(f"prefill: expected tokens in chunks of at least 1, found {n_steps} in chunks of {chunk}")
    real = [n_steps] * batch if lengths is None else list(lengths)
    rows = [mx.zeros((1, 1, decoder.config.hidden_size), decoder.norm.dtype)] * batch
    for begin in range(0, max(1, *real), chunk):
        end = min(begin + chunk, n_steps)
        hidden = decoder.hidden(
            ids[:, begin:end],
            cache,
            [min(max(n - begin, 0), end - begin) for n in real],
            positions=None if positions is None else positions[..., begin:end],
        )
        for row, n in enumerate(real):
            if begin < n <= end:
                rows[row] = mx.take(hidden[row : row + 1], mx.array([n - 1 - begin]), axis=1)
        mx.eval(rows)
        mx.clear_cache()
    return mx.concatenate([row.astype(hidden.dtype) for row in rows])


def append(decoder: Decoder, ids: np.ndarray, cache: Cache, lengths: Sequence[int] | None = None) -> mx.array:
    """The normed hidden states [B, T, hidden] of up to four known tokens, in one step.

    They and what is remembered have the bits that token by token gives: products run position by position, the
    recurrence once. Raises CallError for more tokens.
    """
    if not 1 <= ids.shape[1] <= MOST_APPENDED:
        raise CallError(
            f"append: expected 1 to {MOST_APPENDED} tokens, found {ids.shape[1]}", hint="prefill takes more"
        )
    return decoder.hidden(ids, cache, lengths, stepwise=True)


def independent_rows(
    decoder: Decoder,
    rows: Sequence[np.ndarray],  # ids [T] of each row
    caches: Sequence[Cache],  # of one row each
) -> list[mx.array]:
    """The normed hidden states [1, T, hidden] of each row, bit for bit as if it ran alone.

    Each layer is read once, and runs over one row after the other, so no product ever spans two rows.
    """
    ids = [np.asarray(row)[None] for row in rows]
    active = [i for i, row in enumerate(ids) if row.size]
    spans = [cache.span(row.shape[1]) for cache, row in zip(caches, ids, strict=True)]
    hidden = [decoder.embed(row) if row.size else mx.zeros((1, 0, decoder.config.hidden_size)) for row in ids]
    for i in range(decoder.config.n_layers):
        states = [caches[row].layers[i] for row in active]
        after = rows_apart(decoder.block(i), [hidden[row] for row in active], [spans[row] for row in active], states)
        for row, x in zip(active, after, strict=True):
            hidden[row] = x
    for row in active:
        caches[row].move(spans[row])
        hidden[row] = decoder.final_norm(hidden[row])
    return hidden


def rows_apart(
    block: Block,
    rows: Sequence[mx.array],  # [1, T, hidden] each
    spans: Sequence[Span],
    states: Sequence[AttentionState | DeltaCache],
) -> list[mx.array]:
    """What one layer makes of each row on its own."""
    after = []
    for x, span, state in zip(rows, spans, states, strict=True):
        after.append(block(x, span, state))
        mx.eval(after[-1], state.arrays())
    return after
