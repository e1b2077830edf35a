"""The keys of a job: the options of convert and verify under their long names, checked and typed."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from qwen35conv.batch.job_file import Entry, JobFile
from qwen35conv.facts.config import MODE_DEFAULTS, ModuleQuantization
from qwen35conv.facts.header import shown
from qwen35conv.generation.convention import Generation
from qwen35conv.planning.packing import packing_of
from qwen35conv.planning.plan import Mtp, NormDtype, Options
from qwen35conv.quantities import parse_size, parse_token_ids
from qwen35conv.writing.sharing import Link

SOURCE, DESTINATION, PUSH = "source", "destination", "push-to-hub"


@dataclass(frozen=True, slots=True)
class Verifying:
    """What a job asks of a verification beyond the quick steps; all defaults: nothing."""

    prompt: str | None = None
    prompt_file: Path | None = None
    tokens: tuple[int, ...] | None = None
    chat: bool = False
    max_new_tokens: int | None = None
    backend: str = "auto"
    reference: Path | None = None
    atol: float | None = None
    dtype: str = "source"
    deep: bool = False
    profile: bool = False
    max_memory: int | None = None

    @property
    def is_asked(self) -> bool:
        """Whether more than the quick steps is asked for."""
        given = (self.prompt, self.prompt_file, self.tokens, self.reference)
        return self.deep or self.profile or any(value is not None for value in given)


@dataclass(frozen=True, slots=True)
class Settings:
    """A job's options."""

    options: Options = field(default_factory=Options)
    verifying: Verifying = field(default_factory=Verifying)
    jobs: int | None = None
    link: Link = Link.AUTO
    overwrite: bool = False
    checksum: bool = False
    no_verify: bool = False
    ignore_index: bool = False
    revision: str | None = None
    via_cache: bool = False
    push_to_hub: str | None = None
    private: bool = False


def make_settings(file: JobFile, entry: Entry, folder: Path) -> tuple[dict[str, Any], Settings]:
    """What a job says, defaults included, under its keys, and its options typed; paths are meant from `folder`.

    Raises JobFileError, with the line, for an unknown key, a value of the wrong kind, or options that exclude others.
    """
    values: dict[str, Any] = {}
    for given in (file.defaults, entry):
        for key, value in given.values.items():
            values[key] = _checked(file, given, key, value)
    for key in ("prompt-file", "reference"):
        if key in values:
            path = (folder / values[key]).absolute()
            if not path.is_file():  # a job would find out once everything is written
                line = (entry if key in entry.values else file.defaults).line_of(key)
                raise file.fail(line, f"{key}: no such file: {shown(str(path))}")
            values[key] = path
    _check_together(file, values, entry)
    return values, Settings(
        options=Options(
            keep_vision=values.get("keep-vision", False),
            mtp=values.get("mtp", Mtp.DROP),
            assume=values.get("assume"),
            repair=values.get("repair", False),
            norm_dtype=values.get("norm-dtype", NormDtype.SOURCE),
            max_shard_bytes=values.get("max-shard-size"),
            tie=values.get("tie-embeddings", False),
            dequantize=values.get("dequantize", False),
            quantize=_packing(file, values, entry),
        ),
        verifying=Verifying(**{key.replace("-", "_"): values[key] for key in _VERIFY if key in values}),
        **{key.replace("-", "_"): values[key] for key in _OTHERS if key in values},
    )


def _packing(file: JobFile, values: Mapping[str, Any], entry: Entry) -> ModuleQuantization | None:
    bits = values.get("quantize")
    if bits is None:
        for key in ("group-size", "mode"):
            if key in values:
                raise file.fail(entry.line_of(key if key in entry.values else None), f"{key} needs quantize")
        return None
    found = packing_of(bits, values.get("group-size"), values.get("mode", "affine"))
    if isinstance(found, str):
        raise file.fail(entry.line_of("quantize" if "quantize" in entry.values else None), f"quantize: {found}")
    return found


def _check_together(file: JobFile, values: Mapping[str, Any], entry: Entry) -> None:
    def last(*keys: str) -> int:
        return max((entry.line_of(key) for key in keys if key in entry.values), default=entry.line_of(None))

    texts = [key for key in ("prompt", "prompt-file", "tokens") if key in values]
    if len(texts) > 1:
        raise file.fail(last(*texts), f"{' and '.join(texts)} exclude each other")
    if values.get("repair") and "assume" in values:
        raise file.fail(last("repair", "assume"), "repair and assume exclude each other")
    if values.get("chat") and not {"prompt", "prompt-file"} & values.keys():
        raise file.fail(last("chat"), "chat needs prompt or prompt-file")
    if "atol" in values and "reference" not in values:
        raise file.fail(last("atol"), "atol needs reference")
    if values.get("private") and PUSH not in values:
        raise file.fail(last("private"), f"private needs {PUSH}")
    if values.get("no-verify") and PUSH in values:
        raise file.fail(last("no-verify", PUSH), f"no-verify and {PUSH} exclude each other")
    asked = [key for key in (*texts, "reference", "deep", "profile") if values.get(key)]
    if values.get("no-verify") and asked:
        raise file.fail(last("no-verify", *asked), f"no-verify and {asked[0]} exclude each other")


def _checked(file: JobFile, entry: Entry, key: str, value: Any) -> Any:
    check = KEYS.get(key)
    if check is None:
        near = difflib.get_close_matches(key, KEYS, 1)
        told = f"did you mean {near[0]}?" if near else f"keys are {', '.join(KEYS)}"
        raise file.fail(entry.line_of(key), f"unknown key {key!r}", told)
    try:
        return check(value)
    except ValueError as error:
        hint = "the list of jobs is called job" if key == "jobs" and isinstance(value, list) else None
        raise file.fail(entry.line_of(key), f"{key}: {error}", hint) from error


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, found {value!r}")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"expected a text, found {value!r}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"expected a text, found half of a sign: {value!r}") from error
    return value


def _number(low: int, high: int) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ValueError(f"expected a number from {low} to {high}, found {value!r}")
        return value

    return check


def _tolerance(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value <= 1e300:
        raise ValueError(f"expected a number from 0 on, found {value!r}")
    return float(value)


def _choice(kind: type[Enum] | tuple[str, ...]) -> Callable[[Any], Any]:
    known = {name: name for name in kind} if isinstance(kind, tuple) else {str(one.value): one for one in kind}

    def check(value: Any) -> Any:
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"expected {' or '.join(known)}, found {value!r}")
        return known[value]

    return check


def _assumed(value: Any) -> Generation:
    return Generation(_choice((Generation.RAW.value, Generation.CANONICAL.value))(value))


def _bytes(value: Any) -> int:
    return _number(1, 2**62)(value) if isinstance(value, int) else parse_size(_text(value))


def _tokens(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and value:
        return tuple(_number(0, 10**9 - 1)(token) for token in value)
    return parse_token_ids(_text(value))


_CONVERT: dict[str, Callable[[Any], Any]] = {
    "keep-vision": _flag,
    "mtp": _choice(Mtp),
    "assume": _assumed,
    "repair": _flag,
    "norm-dtype": _choice(NormDtype),
    "max-shard-size": _bytes,
    "tie-embeddings": _flag,
    "dequantize": _flag,
    "quantize": _number(1, 16),
    "group-size": _number(1, 1024),
    "mode": _choice(tuple(MODE_DEFAULTS)),
}
_VERIFY: dict[str, Callable[[Any], Any]] = {
    "prompt": _text,
    "prompt-file": _text,
    "tokens": _tokens,
    "chat": _flag,
    "max-new-tokens": _number(0, 4096),
    "backend": _choice(("auto", "metal", "cuda", "ops")),
    "reference": _text,
    "atol": _tolerance,
    "dtype": _choice(("source", "float32", "bfloat16", "float16")),
    "deep": _flag,
    "profile": _flag,
    "max-memory": _bytes,
}
_OTHERS: dict[str, Callable[[Any], Any]] = {
    "jobs": _number(1, 64),
    "link": _choice(Link),
    "overwrite": _flag,
    "checksum": _flag,
    "no-verify": _flag,
    "ignore-index": _flag,
    "revision": _text,
    "via-cache": _flag,
    PUSH: _text,
    "private": _flag,
}
KEYS: dict[str, Callable[[Any], Any]] = {SOURCE: _text, DESTINATION: _text, **_CONVERT, **_OTHERS, **_VERIFY}
