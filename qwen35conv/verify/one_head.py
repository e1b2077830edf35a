"""The first key head of a gated delta net and the value heads that it serves: a few MB of a layer of hundreds."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from qwen35conv.facts.config import ModelConfig
from qwen35conv.model.weights import Tensors

_OUTPUTS = 64  # rows of the output projection


def one_head_config(config: ModelConfig) -> ModelConfig:
    """The sizes of a model that has that key head alone."""
    return replace(config, n_key_heads=1, n_value_heads=config.n_value_heads // config.n_key_heads)


class OneHead:
    """Tensors of the layer `module`, cut to that head: only its rows are read. Other tensors are as they are."""

    def __init__(self, tensors: Tensors, module: str, config: ModelConfig) -> None:
        self._tensors = tensors
        self._module = f"{module}."
        keys, ratio = config.n_key_heads * config.key_dim, config.n_value_heads // config.n_key_heads
        values = ratio * config.value_dim
        mixed = ((0, config.key_dim), (keys, keys + config.key_dim), (2 * keys, 2 * keys + values))
        self._rows: dict[str, tuple[tuple[int, int], ...]] = {
            "in_proj_qkv": mixed,
            "conv1d": mixed,
            "in_proj_z": ((0, values),),
            "in_proj_a": ((0, ratio),),
            "in_proj_b": ((0, ratio),),
            "A_log": ((0, ratio),),
            "dt_bias": ((0, ratio),),
            "out_proj": ((0, min(_OUTPUTS, config.hidden_size)),),
        }
        self._share = config.n_key_heads

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> mx.array:
        """The tensor's rows of that head; of the output projection the first rows, and the columns of that head."""
        part = name.removeprefix(self._module).partition(".")[0]
        if not name.startswith(self._module) or part not in self._rows:
            return self._tensors[name]
        found = mx.concatenate([self._tensors.rows(name, begin, end) for begin, end in self._rows[part]])
        if part == "out_proj" and found.ndim == 2:
            return found[:, : found.shape[1] // self._share]
        return found

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Rows of the whole tensor."""
        return self._tensors.rows(name, begin, end)
