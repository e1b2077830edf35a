"""The model card of a result, made from its receipt and the source's own card. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from huggingface_hub import ModelCardData

_FRONT = re.compile(r"\A\ufeff?---\s*\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)
_DEFAULTS = {"mtp": "drop", "norm-dtype": "source"}
_FORMER_LIBRARIES = {"transformers", "safetensors", "pytorch", "mlx"}
_FEW = 12


@dataclass(frozen=True, slots=True)
class Front:
    """What the head of a card says, as far as it holds for a conversion too."""

    license: str | None = None
    license_name: str | None = None
    license_link: str | None = None
    language: str | tuple[str, ...] | None = None
    tags: tuple[str, ...] = ()
    base_model: str | tuple[str, ...] | None = None


def parse_front(card: str) -> Front:
    """The head of a model card; nothing where it has none, or none that can be read."""
    import yaml

    match = _FRONT.match(card)
    if match is None:
        return Front()
    try:
        found = yaml.safe_load(match[1])
    except (yaml.YAMLError, ValueError, RecursionError):
        return Front()
    if not isinstance(found, dict):
        return Front()
    return Front(
        license=_text(found.get("license")),
        license_name=_text(found.get("license_name")),
        license_link=_text(found.get("license_link")),
        language=_texts(found.get("language")),
        tags=tuple(tag for tag in found["tags"] if isinstance(tag, str)) if isinstance(found.get("tags"), list) else (),
        base_model=_texts(found.get("base_model")),
    )


def build_card(receipt: Mapping[str, Any], front: Front, repo: str) -> str:
    """The card of the repository that a result goes to."""
    source = receipt["source"]
    base = source.get("repo")
    name = base or source["name"]
    options = receipt["options"]
    kept_vision = bool(options["keep-vision"])
    tags = [tag for tag in front.tags if tag not in _FORMER_LIBRARIES]
    head = ModelCardData(
        base_model=base or _listed(front.base_model),
        language=_listed(front.language),
        library_name="mlx",
        license=front.license,
        license_name=front.license_name,
        license_link=front.license_link,
        pipeline_tag="image-text-to-text" if kept_vision else "text-generation",
        tags=["mlx", *tags],
    ).to_yaml()
    at = f" at commit `{source['commit']}`" if "commit" in source else ""
    what = f"[{base}](https://huggingface.co/{base}){at}" if base else f"`{name}`"
    tool = receipt["tool"]
    return "\n".join([
        "---", head.strip(), "---", "",
        f"# {repo.rpartition('/')[2]}", "",
        f"{what} in the canonical MLX layout, converted by {tool['name']} {tool['version']}. {_untouched(options)}", "",
        "## Load it", "",
        "```bash", "pip install mlx-lm", "```", "",
        "```python",
        "from mlx_lm import generate, load",
        "",
        f'model, tokenizer = load("{repo}")',
        'messages = [{"role": "user", "content": "Hello"}]',
        "prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)",
        "print(generate(model, tokenizer, prompt=prompt))",
        "```", "",
        "## What was done", "",
        *_done(receipt), "",
        "The exact command:", "",
        "```bash", command_of(receipt), "```", "",
        "`qwen35.json` is the receipt: for each tensor the file and the bytes of the source that it was made from, the "
        "evidence for the verdict, and every edit of `config.json`.", "",
    ])  # fmt: skip


def command_of(receipt: Mapping[str, Any]) -> str:
    """The command line that gives this result again."""
    source = receipt["source"]
    words = ["qwen35", "convert"]
    for option, value in receipt["options"].items():
        if option == "quantize" and value:
            words += [
                "--quantize",
                str(value["bits"]),
                "--group-size",
                str(value["group_size"]),
                "--mode",
                value["mode"],
            ]
        elif value is True:
            words.append(f"--{option}")
        elif value not in (None, False, _DEFAULTS.get(option)):
            words += [f"--{option}", str(value)]
    if "commit" in source:
        words += ["--revision", source["commit"]]
    name = source.get("repo") or source["name"]
    return shlex.join([*words, name, f"{name.rpartition('/')[2]}-mlx"])


def _untouched(options: Mapping[str, Any]) -> str:
    """What became of the values of the weights."""
    packed = options["quantize"]
    told = ["FP8 weights were turned into bfloat16."] if options["dequantize"] else []
    if packed:
        how = f"{packed['bits']} bits in groups of {packed['group_size']} ({packed['mode']})"
        told.append(f"Weights were quantised to {how}.")
    return " ".join([*told, "Nothing was retrained."]) if told else "Nothing was quantised or retrained."


def _done(receipt: Mapping[str, Any]) -> list[str]:
    verdict = receipt["verdict"]
    shift = receipt["gain_shift"]
    lines = [
        f"The source's generation is **{verdict['generation']}**, decided by {verdict['by']}: "
        f"{'; '.join(verdict['reasons'][:2])}.",
        "",
        "| what | tensors | bytes |",
        "| --- | ---: | ---: |",
    ]
    for rule, count in receipt["rules"].items():
        lines.append(f"| {_cell(rule)} | {count['tensors']:,} | {count['n_bytes']:,} |")
    lines.append("")
    if shift:
        dtype = "float32" if receipt["options"]["norm-dtype"] == "float32" else "their own dtype"
        lines += [f"Norm gains: {'+' if shift > 0 else '-'} {abs(shift)}, in {dtype}.", ""]
    edits = receipt["config_edits"]
    if edits:
        keys = [f"`{edit['key']}`" for edit in edits]
        more = f" and {len(keys) - _FEW} more" if len(keys) > _FEW else ""
        lines.append(f"`config.json` follows the tensors: {', '.join(keys[:_FEW])}{more}.")
    return lines


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> str | tuple[str, ...] | None:
    if isinstance(value, list):
        return tuple(one for one in value if isinstance(one, str)) or None
    return _text(value)


def _listed(value: str | Sequence[str] | None) -> str | list[str] | None:
    return value if value is None or isinstance(value, str) else list(value)
