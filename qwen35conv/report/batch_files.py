"""A batch's results in the files that CI systems read: JUnit XML and a summary in Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from qwen35conv.batch.results import Result, State
from qwen35conv.errors import DestinationError
from qwen35conv.report.console import clean
from qwen35conv.report.words import counted, sized

_SIGNS = {State.FAILED: "❌", State.STOPPED: "⏸️", State.NOT_RUN: "⏸️"}


def check_writable(path: Path) -> None:
    """Raises DestinationError where a file can't be written, before a batch rather than after it."""
    _write(path, b"", append=True)


def write_junit(results: Sequence[Result], path: Path) -> None:
    """Write a test case for each job. Raises DestinationError where the file can't be written."""
    _write(path, build_junit(results))


def write_summary(results: Sequence[Result], path: Path) -> None:
    """Write a page for people; it is added to where it is the job summary of a GitHub workflow.

    Raises DestinationError where the file can't be written.
    """
    is_shared = os.environ.get("GITHUB_STEP_SUMMARY") == str(path)
    _write(path, build_summary(results).encode(), append=is_shared)


def build_junit(results: Sequence[Result]) -> bytes:
    """JUnit XML: a wrong checkpoint is a failure, what can't be read or written an error, a job not run is skipped."""
    n_wrong = sum(result.state is State.FAILED and result.exit_code == 1 for result in results)
    n_errors = sum(result.state is State.FAILED and result.exit_code != 1 for result in results)
    n_skipped = sum(result.state in (State.STOPPED, State.NOT_RUN) for result in results)
    counts = {
        "name": "qwen35 batch",
        "tests": str(len(results)),
        "failures": str(n_wrong),
        "errors": str(n_errors),
        "skipped": str(n_skipped),
        "time": f"{sum(result.seconds for result in results):.3f}",
    }
    root = ElementTree.Element("testsuites", counts)
    suite = ElementTree.SubElement(root, "testsuite", counts)
    for result in results:
        attributes = {"classname": "qwen35.batch", "name": clean(result.name), "time": f"{result.seconds:.3f}"}
        case = ElementTree.SubElement(suite, "testcase", attributes)
        properties = ElementTree.SubElement(case, "properties")
        for name, value in (
            ("source", result.source),
            ("destination", result.destination),
            ("state", result.state.value),
            ("verdict", result.verdict or "none"),
            ("bytes", str(result.n_bytes)),
        ):
            ElementTree.SubElement(properties, "property", {"name": name, "value": clean(value)})
        reason = clean(f"{result.verdict or 'no verdict'}: {result.reason}")
        if result.state is State.FAILED:
            tag = "failure" if result.exit_code == 1 else "error"
            attributes = {"type": result.kind or "error", "message": reason}
            ElementTree.SubElement(case, tag, attributes).text = clean(result.hint or "")
        elif not result.state.is_right:
            ElementTree.SubElement(case, "skipped", {"message": clean(result.reason or result.state.value)})
        lines = [f"{_mark(check.passed)} {check.name}: {check.summary}" for check in result.checks]
        if lines:
            ElementTree.SubElement(case, "system-out").text = "\n".join(map(clean, lines))
    ElementTree.indent(root)
    return bytes(ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)) + b"\n"


def build_summary(results: Sequence[Result]) -> str:
    """Markdown: what the jobs came to, one row each, and the reasons of those that are not right."""
    n_right = sum(result.state.is_right for result in results)
    title = "all right" if n_right == len(results) else f"{n_right} right, {len(results) - n_right} not"
    lines = [f"## qwen35 batch: {title}", "", f"{counted(len(results), 'job')}", ""]
    lines += ["| | job | verdict | state | size | time |", "| --- | --- | --- | --- | ---: | ---: |"]
    for result in results:
        sign = _SIGNS.get(result.state, "✅")
        cells = [sign, _code(result.name), result.verdict or "", result.state.value, sized(result.n_bytes)]
        lines.append("| " + " | ".join([*cells, f"{result.seconds:.1f} s"]) + " |")
    wrong = [result for result in results if result.reason is not None]
    if wrong:
        lines += ["", "### Not right", ""]
    for result in wrong:
        lines.append(f"- {_code(result.name)}: {_text(result.reason or '')}")
        if result.hint:
            lines.append(f"  {_text(result.hint)}")
    return "\n".join(lines) + "\n\n"


def _mark(passed: bool | None) -> str:
    return {True: "passed", False: "failed", None: "not judged"}[passed]


def _code(text: str) -> str:
    return "`" + clean(text).replace("`", "'").replace("|", "\\|") + "`"


def _text(text: str) -> str:
    cleaned = clean(text).replace("\\", "\\\\")
    for sign in "|<>*_[]`":
        cleaned = cleaned.replace(sign, f"\\{sign}")
    return cleaned


def _write(path: Path, content: bytes, *, append: bool = False) -> None:
    try:
        with path.open("ab" if append else "wb") as opened:
            opened.write(content)
    except OSError as error:
        raise DestinationError(
            f"{path}: can't be written: {error.strerror or error}", hint="choose another file for it"
        ) from error
