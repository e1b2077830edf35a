"""What field reports are rebuilt with: a small checkpoint changed as someone's was, and the command line's answer.

The command runs in this process, as `main` would run it: exit code, both streams, and no exception left over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tiny
from typer.testing import CliRunner

from qwen35conv.cli import app

CANONICAL_HEAD = "language_model.mtp."
_TRUNK_GAINS = (".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight",
                "language_model.norm.weight", ".q_norm.weight", ".k_norm.weight")  # fmt: skip
_HEAD_GAINS = (*_TRUNK_GAINS, ".pre_fc_norm_embedding.weight", ".pre_fc_norm_hidden.weight", "mtp.norm.weight")


@dataclass(frozen=True)
class Run:
    """One command: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document on standard output."""
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def codes(self) -> set[str]:
        """The codes of the findings."""
        return {finding["code"] for finding in self.document["findings"]}

    @property
    def generation(self) -> str:
        """The verdict on the trunk."""
        return str(self.document["verdict"])

    @property
    def head(self) -> str:
        """The verdict on the draft head inside the shards."""
        return str(self.document["verdicts"]["head"]["generation"])

    @property
    def warnings(self) -> str:
        """Every warning of the trunk's verdict and every finding, as one text."""
        document = self.document
        verdicts = [v for v in (document["verdicts"]["trunk"], document["verdicts"]["head"]) if v]
        told = [text for verdict in verdicts for text in verdict["warnings"]]
        return "\n".join([*told, *(finding["text"] for finding in document["findings"])])


def qwen35(*arguments: object) -> Run:
    """The command line's answer. An exception that reaches the user is a failure of the test."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert "Traceback" not in result.stderr
    assert "unexpected:" not in result.stderr, result.stderr
    return Run(result.exit_code, result.stdout, result.stderr)


def inspect(folder: Path, *options: object) -> Run:
    """What `inspect --json` says."""
    return qwen35("inspect", folder, "--json", *options)


def convert(folder: Path, destination: Path, *options: object) -> Run:
    """What `convert --json` says."""
    return qwen35("convert", folder, destination, "--json", *options)


def refused(run: Run, code: int, *words: str) -> None:
    """The command failed with an exit code, in two lines that hold these words."""
    assert run.code == code, run.err
    lines = run.err.splitlines()
    assert len(lines) == 2, run.err
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    for word in words:
        assert word in run.err, run.err


def config_of(folder: Path) -> dict[str, Any]:
    """config.json of a folder."""
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def is_trunk_gain(name: str) -> bool:
    """Whether a stored name is that of a gain that is gamma - 1 in a raw trunk."""
    return "mtp." not in name and name.endswith(_TRUNK_GAINS) and ".linear_attn." not in name


def is_head_gain(name: str) -> bool:
    """The same for a draft head."""
    return "mtp." in name and name.endswith(_HEAD_GAINS)


def shifted(tensors: Mapping[str, np.ndarray], by: float, of: Callable[[str], bool] = is_trunk_gain) -> tiny.Tensors:
    """The tensors with a number added to each gain that `of` picks, in its own dtype."""
    return {
        name: (value.astype(np.float32) + by).astype(value.dtype) if of(name) else value
        for name, value in tensors.items()
    }


def renamed(tensors: Mapping[str, np.ndarray], change: Callable[[str], str]) -> tiny.Tensors:
    """The tensors under other names."""
    return {change(name): value for name, value in tensors.items()}


def with_mean(tensors: Mapping[str, np.ndarray], suffix: str, mean: float) -> tiny.Tensors:
    """The tensors with those of a suffix moved to a mean."""
    return {
        name: (value.astype(np.float32) + (mean - float(value.astype(np.float32).mean()))).astype(value.dtype)
        if name.endswith(suffix)
        else value
        for name, value in tensors.items()
    }


def head_of(tensors: Mapping[str, np.ndarray], *, prefix: str = "mtp.") -> tiny.Tensors:
    """The draft head of a raw checkpoint, under another prefix."""
    return {prefix + name.removeprefix("mtp."): v for name, v in tensors.items() if name.startswith("mtp.")}


def converted(made: tiny.Made, *, head: str | None = CANONICAL_HEAD, head_by: float = 1) -> tiny.Tensors:
    """The canonical form, with the draft head still inside under a prefix, its gains shifted."""
    found = dict(made.canonical)
    if head is not None:
        gamma = shifted(head_of(made.raw), head_by, is_head_gain)
        # As in published heads: a gamma final norm averages 2.25 and more, and the pre-fc norms 0.27 to 0.84.
        if head_by == 1:
            gamma = with_mean(gamma, "mtp.norm.weight", 2.4)
        found |= head_of(gamma, prefix=head)
    return found


def packed(
    tensors: Mapping[str, np.ndarray],
    chosen: Callable[[str], bool],
    *,
    bits: int = 4,
    group_size: int = 32,
    scales: np.dtype[Any] = tiny.BF16,
) -> tiny.Tensors:
    """The tensors with the chosen weights packed by MLX, in affine groups."""
    import mlx.core as mx

    found: tiny.Tensors = {}
    for name, value in tensors.items():
        if not (chosen(name) and name.endswith(".weight") and value.ndim >= 2 and value.shape[-1] % group_size == 0):
            found[name] = value
            continue
        parts = mx.quantize(mx.array(value.astype(np.float32)), group_size=group_size, bits=bits)
        stem = name.removesuffix(".weight")
        found[name] = np.array(parts[0])
        found[f"{stem}.scales"] = np.array(parts[1]).astype(scales)
        found[f"{stem}.biases"] = np.array(parts[2]).astype(scales)
    return found


def deep(sizes: tiny.Sizes, layers: int = 12) -> tiny.Sizes:
    """The same sizes with enough layers for a share of them to be odd."""
    return replace(sizes, layers=layers)
