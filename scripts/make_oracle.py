"""Write small checkpoints by the real exporters, and what a right conversion of each holds.

    python scripts/make_oracle.py tests/data/oracle [--seed 0]

Needs torch, transformers and mlx-lm; the versions are written into each expected.json. A case is a folder:

    src/                 the checkpoint as a user has it
    expected.json        canonical name -> dtype, shape and SHA-256 of its bytes, by mlx-lm's own sanitize
    logits.safetensors   where given: input_ids [1, T], and logits [1, T, V] by transformers, weights read as float32

The weights of the raw and of the text-only cases go through transformers' save_pretrained, those of the canonical ones
through mlx-lm's loader and save_model, those of the quantised one through mx.quantize. What no exporter writes is made
from theirs: the draft head, which transformers does not have, and the broken checkpoints.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import torch
import transformers
from mlx_lm.utils import load_model, save_config, save_model
from safetensors import deserialize
from safetensors.torch import load_file, save_file
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

Tensors = dict[str, torch.Tensor]
N_TOKENS = 17
SHIFTED = (
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".q_norm.weight",
    ".k_norm.weight",
    "model.norm.weight",
)
# Mean, spread, least and greatest of the stored values, near what the published releases hold. First match wins; the
# gated norm is gamma in every export, the others are gamma - 1.
GAINS = (
    ("linear_attn.norm.weight", 0.87, 0.03, 0.75, 0.96),
    (".q_norm.weight", 0.76, 0.4, -0.5, 1.9),
    (".k_norm.weight", 0.8, 0.45, -0.57, 2.1),
    (".post_attention_layernorm.weight", -0.22, 0.06, -0.5, 0.1),
    (".input_layernorm.weight", -0.03, 0.11, -0.6, 0.9),
    ("pre_fc_norm_embedding.weight", -0.46, 0.1, -0.75, -0.18),
    ("pre_fc_norm_hidden.weight", -0.16, 0.12, -0.37, 0.45),
    ("mtp.norm.weight", 1.25, 0.4, -0.22, 1.93),
    ("language_model.norm.weight", 0.94, 0.4, -0.3, 2.6),
    ("model.norm.weight", 0.94, 0.4, -0.3, 2.6),
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the text model: three value heads to a key head, and keys and values of different width."""

    hidden: int = 24
    vocab: int = 80
    layers: int = 4
    intermediate: int = 40
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    key_heads: int = 2
    value_heads: int = 6
    key_dim: int = 8
    value_dim: int = 10
    experts: int = 5
    experts_per_token: int = 3
    expert_size: int = 10
    shared_size: int = 18


SIZES = Sizes()
SMALL = Sizes(hidden=16, vocab=50, intermediate=22, key_dim=6, value_dim=7)
PACKABLE = Sizes(hidden=32, intermediate=64, kv_heads=1, value_dim=16)  # groups of 32 must fit every input width


@dataclass(frozen=True, slots=True)
class Export:
    """A model, and the folder's content that transformers makes of it."""

    model: Any
    saved: Tensors  # as save_pretrained names them
    held: Tensors  # as the model holds them: a layer's experts fused, as the public repositories store them
    config: dict[str, Any]
    folder: Path


def export(folder: Path, sizes: Sizes, *, moe: bool, vision: bool, tied: bool, seed: int, n_shards: int = 1) -> Export:
    """A random model, saved to `folder` by transformers."""
    config: Any
    text: dict[str, Any] = {
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.key_heads,
        "linear_num_value_heads": sizes.value_heads,
        "linear_key_head_dim": sizes.key_dim,
        "linear_value_head_dim": sizes.value_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [1, 1, 0],
        },
    }
    if moe:
        text |= {
            "num_experts": sizes.experts,
            "num_experts_per_tok": sizes.experts_per_token,
            "moe_intermediate_size": sizes.expert_size,
            "shared_expert_intermediate_size": sizes.shared_size,
        }
    else:
        text["intermediate_size"] = sizes.intermediate
    if vision:
        tower = {
            "depth": 1,
            "hidden_size": 8,
            "intermediate_size": 20,
            "num_heads": 1,
            "out_hidden_size": sizes.hidden,
            "patch_size": 5,
            "num_position_embeddings": 9,
        }
        config = (Qwen3_5MoeConfig if moe else Qwen3_5Config)(
            text_config=text, vision_config=tower, tie_word_embeddings=tied
        )
        kind = "Qwen3_5MoeForConditionalGeneration" if moe else "Qwen3_5ForConditionalGeneration"
    else:
        config = (Qwen3_5MoeTextConfig if moe else Qwen3_5TextConfig)(**text)
        kind = "Qwen3_5MoeForCausalLM" if moe else "Qwen3_5ForCausalLM"
    model = getattr(transformers, kind)._from_config(config, experts_implementation="eager" if moe else None)
    model = model.to(torch.bfloat16)
    draw = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = drawn(name, tuple(parameter.shape), draw)
        # The releases keep these two in float32.
        parameter.data = values if name.endswith(("A_log", "linear_attn.norm.weight")) else values.to(torch.bfloat16)
    n_bytes = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(folder, max_shard_size=n_bytes if n_shards == 1 else int(n_bytes / n_shards * 1.1))
    return Export(
        model=model,
        saved=loaded(folder),
        held={name: value.detach().clone() for name, value in model.state_dict().items()},
        config=json.loads((folder / "config.json").read_text()),
        folder=folder,
    )


def drawn(name: str, shape: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    """Float32 values for one tensor of a raw export. An untrained model's gains would all be 0."""
    normal: torch.Tensor = torch.randn(shape, generator=draw)
    for suffix, mean, spread, least, greatest in GAINS:
        if name.endswith(suffix):
            return (mean + spread * normal).clamp(least, greatest)
    if name.endswith("A_log"):
        decay: torch.Tensor = 0.01 + 0.59 * torch.rand(shape, generator=draw)
        return decay.log()
    if name.endswith("embed_tokens.weight"):
        return 0.25 * normal
    if name.endswith("conv1d.weight"):
        return 0.5 * normal
    if len(shape) == 1:
        return (1.0 if "norm" in name else 0.0) + 0.1 * normal
    return normal / math.sqrt(shape[-1])


def draft_head(held: Mapping[str, torch.Tensor], seed: int) -> Tensors:
    """A draft head as the releases name it: 15 tensors, or 19 with experts. Its block has the shapes of the trunk's."""
    full = next(name for name in held if name.endswith("self_attn.q_proj.weight")).partition("self_attn.")[0]
    shapes = {
        "mtp.layers.0." + name.removeprefix(full): tuple(value.shape)
        for name, value in held.items()
        if name.startswith(full)
    }
    (hidden,) = shapes["mtp.layers.0.input_layernorm.weight"]
    shapes["mtp.fc.weight"] = (hidden, 2 * hidden)
    shapes |= {f"mtp.{norm}.weight": (hidden,) for norm in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    draw = torch.Generator().manual_seed(seed + 1000)
    return {name: drawn(name, shape, draw).to(torch.bfloat16) for name, shape in shapes.items()}


def is_gain(name: str, value: torch.Tensor) -> bool:
    """Whether a tensor of the trunk is gamma - 1 in a raw export."""
    return value.dim() == 1 and name.endswith(SHIFTED)


def loaded(folder: Path) -> Tensors:
    """Every tensor of a folder."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def store(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    *,
    files: str = "model.safetensors-{:05d}-of-{:05d}.safetensors",
    n_shards: int = 1,
    metadata: str = "pt",
) -> None:
    """Write a checkpoint with its index; neighbouring tensors lie in different shards."""
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i in range(n_shards):
        file = files.format(i + 1, n_shards)
        members = names[i::n_shards]
        save_file({name: tensors[name].contiguous() for name in members}, folder / file, {"format": metadata})
        weight_map |= dict.fromkeys(members, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=0) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def sanitized(tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What mlx-lm's own sanitize makes of the tensors: dtype, shape and SHA-256 by canonical name."""
    room = "qwen3_5_moe" if "moe" in config["model_type"] else "qwen3_5"
    module = importlib.import_module(f"mlx_lm.models.{room}")
    model = module.Model(module.ModelArgs.from_dict(json.loads(json.dumps(config))))
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before.safetensors"), Path(folder, "after.safetensors")
        save_file({name: value.contiguous() for name, value in tensors.items()}, before)
        mx.save_safetensors(str(after), model.sanitize(mx.load(str(before))))
        return {
            name: {
                "dtype": entry["dtype"],
                "shape": list(entry["shape"]),
                "sha256": hashlib.sha256(entry["data"]).hexdigest(),
            }
            for name, entry in sorted(deserialize(after.read_bytes()))  # type: ignore[no-untyped-call]
        }


def expect(case: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Write expected.json."""
    lines = [f"  {json.dumps(name)}: {json.dumps(entry)}" for name, entry in tensors.items()]
    versions = {"mlx-lm": mlx_lm.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    (case / "expected.json").write_text(
        f'{{\n"made_with": {json.dumps(versions)},\n"tensors": {{\n' + ",\n".join(lines) + "\n}\n}\n"
    )


def record_logits(case: Path, exported: Export, seed: int) -> None:
    """Write logits.safetensors. The model is float32 from here on."""
    vocab = exported.model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, vocab, (1, N_TOKENS), generator=torch.Generator().manual_seed(seed + 2000))
    with torch.no_grad():
        logits = exported.model.float().eval()(input_ids=ids, use_cache=False).logits
    save_file({"input_ids": ids.int(), "logits": logits.float().contiguous()}, case / "logits.safetensors")


def with_head(config: Mapping[str, Any]) -> dict[str, Any]:
    """A nested config.json that promises a draft head, as the releases' own do."""
    return dict(config) | {"text_config": config["text_config"] | {"mtp_num_hidden_layers": 1}}


def raw_dense_vl_mtp(case: Path, seed: int, sizes: Sizes = SIZES) -> None:
    """As the releases are: vision tower, draft head, two shards with the releases' own file names."""
    with tempfile.TemporaryDirectory() as folder:
        exported = export(Path(folder), sizes, moe=False, vision=True, tied=False, seed=seed)
    tensors, config = exported.saved | draft_head(exported.held, seed), with_head(exported.config)
    store(case / "src", tensors, config, n_shards=2)
    expect(case, sanitized(tensors, config))
    record_logits(case, exported, seed)


def raw_dense_text_tied(case: Path, seed: int, sizes: Sizes = SIZES) -> None:
    """A text-only export as transformers leaves it: one file, no index, a flat config.json, tied embeddings."""
    exported = export(case / "src", sizes, moe=False, vision=False, tied=True, seed=seed)
    expect(case, sanitized(exported.saved, exported.config))
    record_logits(case, exported, seed)


def raw_moe_vl_mtp(case: Path, seed: int, sizes: Sizes = SIZES) -> None:
    """As the releases with experts are: a layer's experts fused, three shards."""
    with tempfile.TemporaryDirectory() as folder:
        exported = export(Path(folder), sizes, moe=True, vision=True, tied=False, seed=seed)
    tensors, config = exported.held | draft_head(exported.held, seed), with_head(exported.config)
    store(case / "src", tensors, config, n_shards=3)
    expect(case, sanitized(tensors, config))
    record_logits(case, exported, seed)


def raw_moe_text_per_expert(case: Path, seed: int, sizes: Sizes = SIZES) -> None:
    """A text-only export as transformers leaves it: each expert's projections alone. Expected: the same, fused."""
    exported = export(case / "src", sizes, moe=True, vision=False, tied=False, seed=seed, n_shards=2)
    expect(case, sanitized(exported.held, exported.config))
    record_logits(case, exported, seed)


def raw_names_quantised_mtp(case: Path, seed: int, sizes: Sizes = PACKABLE) -> None:
    """Packed by MLX with names and gains left as they were, the modules of config.json's quantization too."""
    with tempfile.TemporaryDirectory() as folder:
        exported = export(Path(folder), sizes, moe=False, vision=True, tied=False, seed=seed)
    wanted = {name: value for name, value in exported.saved.items() if "visual" not in name}
    packed: dict[str, mx.array] = {}
    quantization: dict[str, Any] = {"group_size": 32, "bits": 4, "mode": "affine"}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "all.safetensors")
        save_file(wanted | draft_head(exported.held, seed), file)
        stored: Any = mx.load(str(file))
        for name, value in stored.items():
            if value.ndim != 2:
                packed[name] = value
                continue
            module = name.removesuffix(".weight")
            bits = 8 if module.endswith(("down_proj", "lm_head", "in_proj_a")) else 4
            weight, scales, biases = mx.quantize(value, group_size=32, bits=bits)
            packed |= {name: weight, f"{module}.scales": scales, f"{module}.biases": biases}
            if bits == 8:
                quantization[module] = {"group_size": 32, "bits": 8, "mode": "affine"}
        mx.save_safetensors(str(file), packed)
        tensors = load_file(file)
    config = with_head(exported.config) | {"quantization": quantization, "quantization_config": quantization}
    store(case / "src", tensors, config, files="model-{:05d}-of-{:05d}.safetensors", n_shards=2, metadata="mlx")
    expect(case, sanitized(tensors, config))


@dataclass(frozen=True, slots=True)
class Twin:
    """One small model in both generations. All cases below are made of it."""

    raw: Tensors  # without vision tower and draft head
    head: Tensors
    raw_config: dict[str, Any]
    canonical: Tensors
    config: dict[str, Any]
    expected: dict[str, dict[str, Any]]


def twin(seed: int, sizes: Sizes = SMALL) -> Twin:
    """A raw export, and what mlx-lm's loader and save_model make of it."""
    with tempfile.TemporaryDirectory() as folder:
        exported = export(Path(folder, "raw"), sizes, moe=False, vision=True, tied=False, seed=seed)
        model, config = load_model(exported.folder)
        save_model(Path(folder, "mlx"), model)
        save_config(config, Path(folder, "mlx", "config.json"))
        return Twin(
            raw={name: value for name, value in exported.saved.items() if "visual" not in name},
            head=draft_head(exported.held, seed),
            raw_config=exported.config,
            canonical=loaded(Path(folder, "mlx")),
            config=json.loads(Path(folder, "mlx", "config.json").read_text()),
            expected=sanitized(exported.saved, exported.config),
        )


def canonical(case: Path, seed: int) -> None:
    """As mlx-lm converts, in two shards."""
    made = twin(seed)
    files = "model-{:05d}-of-{:05d}.safetensors"
    store(case / "src", made.canonical, made.config, files=files, n_shards=2, metadata="mlx")
    expect(case, made.expected)


def canonical_mtp_kept(case: Path, seed: int) -> None:
    """Converted with its draft head: the rule "any mtp tensor" would shift it a second time."""
    made = twin(seed)
    head = {f"language_model.{name}": value + 1 if value.dim() == 1 else value for name, value in made.head.items()}
    store(case / "src", made.canonical | head, with_head(made.config), files="model.safetensors", metadata="mlx")
    expect(case, made.expected)


def broken_double_shifted(case: Path, seed: int) -> None:
    """Converted twice by a tool that shifts whatever it reads. Expected of all broken ones: their sound twin."""
    made = twin(seed)
    tensors = {name: value + 1 if is_gain(name, value) else value for name, value in made.canonical.items()}
    store(case / "src", tensors, made.config, files="model.safetensors", metadata="mlx")
    expect(case, made.expected)


def broken_never_shifted(case: Path, seed: int) -> None:
    """Renamed and moved, and the shift forgotten."""
    made = twin(seed)
    raw = {name.replace("model.language_model.", "language_model.model."): value for name, value in made.raw.items()}
    tensors = {name: raw[name] if is_gain(name, value) else value for name, value in made.canonical.items()}
    store(case / "src", tensors, made.config, files="model.safetensors", metadata="mlx")
    expect(case, made.expected)


def broken_raw_names_gamma(case: Path, seed: int) -> None:
    """Exported back from MLX under the raw names, conv moved back, gains left as gamma."""
    made = twin(seed)
    moved = {name: name.replace("model.language_model.", "language_model.model.") for name in made.raw}
    tensors = {name: made.canonical[moved[name]] if is_gain(name, value) else value for name, value in made.raw.items()}
    store(case / "src", tensors, made.raw_config, files="model.safetensors")
    expect(case, made.expected)


CASES: dict[str, Callable[[Path, int], None]] = {
    "raw-dense-vl-mtp": raw_dense_vl_mtp,
    "raw-dense-text-tied": raw_dense_text_tied,
    "raw-moe-vl-mtp": raw_moe_vl_mtp,
    "raw-moe-text-per-expert": raw_moe_text_per_expert,
    "raw-names-quantised-mtp": raw_names_quantised_mtp,
    "canonical": canonical,
    "canonical-mtp-kept": canonical_mtp_kept,
    "broken-double-shifted": broken_double_shifted,
    "broken-never-shifted": broken_never_shifted,
    "broken-raw-names-gamma": broken_raw_names_gamma,
}


def main() -> None:
    """Write every case, each folder anew, and print what it takes."""
    quiet: Any = transformers.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    parser = argparse.ArgumentParser(description="Write the oracle cases.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    total = 0
    for name, make in CASES.items():
        case = arguments.out / name
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        make(case, arguments.seed)
        n_bytes = sum(file.stat().st_size for file in case.rglob("*") if file.is_file())
        total += n_bytes
        print(f"{name:26} {n_bytes:9,} bytes")
    print(f"{'in all':26} {total:9,} bytes")


if __name__ == "__main__":
    main()
