"""The first key head of a gated delta net and the value heads that it serves: a few MB of a layer of hundreds."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from qwen35conv.facts.config import ModelConfig, ModuleQuantization
from qwen35conv.model.linear import can_run
from qwen35conv.model.weights import Tensors, Weights

_OUTPUTS = 64  # rows of the output projection


def one_head_config(config: ModelConfig) -> ModelConfig:
    """The sizes of a model that has that key head alone."""
    return replace(config, n_key_heads=1, n_value_heads=config.n_value_heads // config.n_key_heads)


def one_head_weights(weights: Weights, module: str, config: ModelConfig) -> Weights:
    """The weights of a model whose layer `module` has that key head alone.

    Its output projection is unpacked: a head's columns need not be whole groups.
    """
    packing = dict(weights.packing)
    output = packing.get(f"{module}.out_proj")
    if can_run(output):
        packing.pop(f"{module}.out_proj", None)
    return replace(weights, tensors=_OneHead(weights.tensors, module, config, output), packing=packing)


class _OneHead:
    """Tensors of the layer `module`, cut to that head: only its rows are read. Other tensors are as they are."""

    def __init__(self, tensors: Tensors, module: str, config: ModelConfig, output: ModuleQuantization | None) -> None:
        self._tensors = tensors
        self._module = f"{module}."
        self._output = output
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
        }
        self._n_outputs = min(_OUTPUTS, config.hidden_size)
        self._n_columns = values

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __getitem__(self, name: str) -> mx.array:
        """The tensor's rows of that head; of the output projection the first rows, and the columns of that head."""
        if name == f"{self._module}out_proj.weight":
            return self._out_proj()
        part = name.removeprefix(self._module).partition(".")[0]
        if not name.startswith(self._module) or part not in self._rows:
            return self._tensors[name]
        return mx.concatenate([self._tensors.rows(name, begin, end) for begin, end in self._rows[part]])

    def _out_proj(self) -> mx.array:
        """The first rows of the output projection, and the columns of that head."""

        def read(part: str) -> mx.array:
            return self._tensors.rows(f"{self._module}out_proj.{part}", 0, self._n_outputs)

        weight = read("weight")
        if self._output is not None and can_run(self._output):
            biases = read("biases") if f"{self._module}out_proj.biases" in self._tensors else None
            how = self._output
            weight = mx.dequantize(
                weight, read("scales"), biases, group_size=how.group_size, bits=how.bits, mode=how.mode
            )
        return weight[:, : self._n_columns]

    def rows(self, name: str, begin: int, end: int) -> mx.array:
        """Rows of the whole tensor."""
        return self._tensors.rows(name, begin, end)
