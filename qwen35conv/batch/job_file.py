"""A job file as entries of keys and values, each with its line: TOML, YAML or JSON Lines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from qwen35conv.errors import Qwen35ConvError

_JOBS, _DEFAULTS = "job", "defaults"


class JobFileError(Qwen35ConvError):
    """A job file that says what can't be done: a usage error."""

    exit_code = 2
    usual_hint = "keys are the long names of options of `convert` and `verify`; `qwen35 batch --init` writes an example"


@dataclass(frozen=True, slots=True)
class Entry:
    """What one job says, or what is said for all. `line_of` finds the line of a key, and for none that of the entry."""

    values: Mapping[str, Any]
    line_of: Callable[[str | None], int]


@dataclass(frozen=True, slots=True)
class JobFile:
    """A parsed job file."""

    name: str
    defaults: Entry
    jobs: tuple[Entry, ...]

    def fail(self, line: int, message: str, hint: str | None = None) -> JobFileError:
        """The error to raise for a line."""
        return JobFileError(f"{self.name}:{line}: {message}", hint=hint)


def parse_job_file(name: str, text: str) -> JobFile:
    """The entries of a job file, by its suffix: .toml, .yaml, .yml, .jsonl or .ndjson.

    Raises JobFileError, with the line, for what is no such document.
    """
    parse = _PARSERS.get(PurePath(name).suffix.lower())
    if parse is None:
        raise JobFileError(f"{name}: no job file", hint="name it .toml, .yaml or .jsonl, for the language it is in")
    file = parse(name, text.removeprefix("\ufeff"))
    if not file.jobs:
        raise JobFileError(f"{name}: no jobs", hint="`qwen35 batch --init` writes an example")
    return file


def _parse_toml(name: str, text: str) -> JobFile:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    def load(part: str) -> dict[str, Any] | None:
        try:
            return tomllib.loads(part)
        except (ValueError, RecursionError):
            return None

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = int(place[1]) if place else text.count("\n") + 1
        reason = str(error).partition(" (at")[0]
        raise JobFileError(f"{name}:{line}: no valid TOML: {reason}", hint="strings stand in quotes") from error
    except (ValueError, RecursionError) as error:  # numbers too long, and lists too deep, for the parser
        raise JobFileError(f"{name}: no valid TOML: {error}", hint="`qwen35 batch --init` writes an example") from error
    rows = text.splitlines(keepends=True)
    jobs = document.pop(_JOBS, [])
    if not _is_list_of_tables(jobs):
        line = _toml_line(rows, load, _JOBS, lambda found: _JOBS in found)
        raise JobFileError(f"{name}:{line}: {_JOBS} is no list of jobs", hint="a job begins with a line [[job]]")

    def line_of_default(key: str | None) -> int:
        return 1 if key is None else _toml_line(rows, load, key, lambda found: key in found)

    def entry(i: int, values: dict[str, Any]) -> Entry:
        def line_of(key: str | None) -> int:
            if key is None:
                return _toml_line(rows, load, _JOBS, lambda found: len(found.get(_JOBS, ())) > i)
            return _toml_line(rows, load, key, lambda found: _has(found, i, key))

        return Entry(values, line_of)

    return JobFile(name, Entry(document, line_of_default), tuple(entry(i, values) for i, values in enumerate(jobs)))


def _has(document: Mapping[str, Any], i: int, key: str) -> bool:
    jobs = document.get(_JOBS, [])
    return len(jobs) > i and key in jobs[i]


def _toml_line(
    rows: Sequence[str],
    load: Callable[[str], dict[str, Any] | None],
    word: str,
    is_there: Callable[[dict[str, Any]], bool],
) -> int:
    """The line that brings something in, by reading the file up to each line that holds `word`."""
    # The parser knows no lines. What stands before the line parses without it, what ends with it parses with it.
    for n, row in enumerate(rows, 1):
        if word not in row:
            continue
        for end in range(n, len(rows) + 1):
            found = load("".join(rows[:end]))
            if found is not None:
                if is_there(found):
                    return n
                break
    return 1


def _parse_yaml(name: str, text: str) -> JobFile:
    import yaml

    def fail(node: yaml.Node, message: str) -> JobFileError:
        return JobFileError(f"{name}:{_line(node)}: {message}")

    def entry(node: yaml.Node) -> Entry:
        if not isinstance(node, yaml.MappingNode):
            raise fail(node, "expected keys and values")
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key in values:
                raise fail(key_node, "a key that is no word" if key is None else f"{key} stands here twice")
            values[key] = value_node if key == _JOBS else loader.construct_object(value_node, deep=True)
            lines[key] = _line(key_node)
        begin = _line(node)
        return Entry(values, lambda key: begin if key is None else lines[key])

    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # characters that no YAML holds
        raise _no_yaml(name, error) from error
    try:
        root = loader.get_single_node()
        if root is None:
            return JobFile(name, _nothing(), ())
        top = entry(root)
        listed = top.values.get(_JOBS)
        if listed is not None and not isinstance(listed, yaml.SequenceNode):
            raise fail(listed, f"{_JOBS} is no list of jobs")
        jobs = tuple(entry(node) for node in listed.value) if listed is not None else ()
        values = {key: value for key, value in top.values.items() if key != _JOBS}
        return JobFile(name, Entry(values, top.line_of), jobs)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark is not None else 1
        raise JobFileError(f"{name}:{line}: no valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date that is none
        raise _no_yaml(name, error) from error
    finally:
        loader.dispose()


def _no_yaml(name: str, error: Exception) -> JobFileError:
    told = str(error).partition("\n")[0]
    return JobFileError(f"{name}: no valid YAML: {told}", hint="`qwen35 batch --init` writes an example")


def _line(node: Any) -> int:
    return int(node.start_mark.line) + 1


def _parse_lines(name: str, text: str) -> JobFile:
    defaults = _nothing()
    jobs: list[Entry] = []
    for n, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        values = _object(name, n, line)
        if _DEFAULTS in values:
            if jobs or defaults.values or len(values) > 1 or not isinstance(values[_DEFAULTS], dict):
                raise JobFileError(
                    f"{name}:{n}: {_DEFAULTS} is an object that stands alone, before the jobs",
                    hint='the first line may be {"defaults": {...}}',
                )
            values = values[_DEFAULTS]
            defaults = _on_line(values, n)
        else:
            jobs.append(_on_line(values, n))
    return JobFile(name, defaults, tuple(jobs))


def _on_line(values: Mapping[str, Any], n: int) -> Entry:
    return Entry(values, lambda key: n)


def _nothing() -> Entry:
    return _on_line({}, 1)


def _object(name: str, n: int, line: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise JobFileError(f"{name}:{n}: a key stands here twice")
        return found

    try:
        values = json.loads(line, object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise JobFileError(f"{name}:{n}: no valid JSON: {error}", hint="each line is one object") from error
    if not isinstance(values, dict):
        raise JobFileError(f"{name}:{n}: expected an object", hint='such as {"source": "...", "destination": "..."}')
    return values


def _is_list_of_tables(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


_PARSERS: dict[str, Callable[[str, str], JobFile]] = {
    ".toml": _parse_toml,
    ".yaml": _parse_yaml,
    ".yml": _parse_yaml,
    ".jsonl": _parse_lines,
    ".ndjson": _parse_lines,
}
