"""A prompt as token ids, by the tokenizer that lies in the checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qwen35conv.errors import CheckpointError, Qwen35ConvError, SourceError
from qwen35conv.facts.config import parse_json
from qwen35conv.source import Source

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_MAX_BYTES = 200_000_000
_MAX_FACTOR = 1 << 20  # of a product in a chat template


class TextError(Qwen35ConvError):
    """A prompt that can't be turned into tokens, or tokens that the model does not have."""

    usual_hint = "give another text, or tokens as --tokens 1,2,3"


def read_prompt(file: Path) -> str:
    """The text of a file. Raises TextError where it has none."""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise SourceError(f"{file}: can't be read: {error.strerror or error}", hint="check the path") from error
    except UnicodeDecodeError as error:
        raise TextError(f"{file}: is no UTF-8 text", hint="give a plain text file") from error


def read_tokenizer(source: Source) -> Tokenizer | None:
    """The checkpoint's tokenizer, or None where it has none. Raises CheckpointError for a broken one."""
    raw = _read(source, TOKENIZER)
    if raw is None:
        return None
    try:
        return Tokenizer.from_buffer(raw)
    except Exception as error:  # the library raises nothing narrower
        raise CheckpointError(
            f"{source.label}/{TOKENIZER}: not a tokenizer: {error}", hint="give the prompt as --tokens 1,2,3"
        ) from error


def encode(source: Source, tokenizer: Tokenizer | None, prompt: str, *, chat: bool) -> tuple[int, ...]:
    """The prompt's token ids. Raises TextError where the checkpoint has no tokenizer, or no usable chat template."""
    if tokenizer is None:
        raise TextError(f"{source.label}: no {TOKENIZER} in it", hint="give the prompt as --tokens 1,2,3")
    text = _in_template(source, prompt) if chat else prompt
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise TextError("the prompt is not valid Unicode", hint="give it as UTF-8, or as --prompt-file") from error
    return tuple(tokenizer.encode(text, add_special_tokens=not chat).ids)


def decode(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """The ids' text; the ids themselves where there is no tokenizer."""
    if tokenizer is None:
        return " ".join(map(str, ids))
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))


def _in_template(source: Source, prompt: str) -> str:
    """The prompt as a user's turn in the checkpoint's chat template, which runs in a sandbox."""
    if importlib.util.find_spec("jinja2") is None:
        raise TextError("a chat template needs the jinja2 package", hint="pip install jinja2, or leave --chat out")
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Nothing of Python can be reached, and no product can be made that fills the memory."""

        intercepted_binops = frozenset({"*", "**", "%"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" or not all(isinstance(x, int | float) and abs(x) < _MAX_FACTOR for x in (left, right)):
                raise SecurityError(f"{operator} of anything but small numbers")
            return super().call_binop(context, operator, left, right)

    raw = _read(source, TOKENIZER_CONFIG)
    special: dict[str, Any] = {} if raw is None else parse_json(TOKENIZER_CONFIG, raw)
    own = _read(source, TEMPLATE)
    template = special.get("chat_template") if own is None else own.decode("utf-8", "replace")
    if isinstance(template, list):  # several by name, as older tokenizers have them
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise TextError(f"{source.label}: no chat template in it", hint="leave --chat out")
    names = {key: value for key, value in special.items() if key.endswith("_token") and isinstance(value, str)}
    try:
        environment = Sandbox(trim_blocks=True, lstrip_blocks=True)
        return environment.from_string(template).render(
            messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, **names
        )
    except Exception as error:  # a template may do anything wrong that a program may
        raise TextError(f"{source.label}: its chat template fails: {error}", hint="leave --chat out") from error


def _read(source: Source, file: str) -> bytes | None:
    n_bytes = source.listing.get(file)
    if n_bytes is None or n_bytes > _MAX_BYTES:
        return None
    return source.read(file, [(0, n_bytes)])[0]
