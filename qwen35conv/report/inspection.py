"""The inspect screen: what it is, on which numbers, what would become of it, and who would ruin it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from qwen35conv.errors import ConventionError, DestinationError, Qwen35ConvError
from qwen35conv.facts.checkpoint import Severity
from qwen35conv.facts.layout import Region
from qwen35conv.generation.loaders import LOADERS, Outcome
from qwen35conv.inspection import dtype_shares, is_named, needs_conversion, next_command, sketch
from qwen35conv.planning.scheme import SchemeError
from qwen35conv.report.console import show_document
from qwen35conv.report.documents import inspection_document
from qwen35conv.report.gain_picture import Cell, Strip, Tone, folds, glyph_of, histogram, make_strips, odd_marks, ruler
from qwen35conv.report.page import Page, Span, build_picture, show_page
from qwen35conv.report.plan_table import show_files, show_tallies, stored_lines, tensor_lines
from qwen35conv.report.words import MEANING, control_line, counted, head_spans, overruled, sized, style_of

if TYPE_CHECKING:
    from qwen35conv.generation.convention import Verdict
    from qwen35conv.generation.loaders import Forecast
    from qwen35conv.inspection import Inspection
    from qwen35conv.planning.plan import Plan

_TONES = {
    Tone.DELTA: "blue",
    Tone.GAMMA: "green",
    Tone.TWICE: "red",
    Tone.DOUBT: "yellow",
    Tone.BROKEN: "bold red",
    Tone.QUIET: "dim",
}
_LEGEND: tuple[Span, ...] = (
    ("  cell: a layer's mean, ", "dim"),
    (glyph_of(0), _TONES[Tone.DELTA]),
    (" 0  ", "dim"),
    (glyph_of(1), _TONES[Tone.GAMMA]),
    (" 1  ", "dim"),
    (glyph_of(2), _TONES[Tone.TWICE]),
    (" 2; input and post decide", "dim"),
)
_LABEL_COLUMNS = 9
_MEANS_COLUMNS = 23  # "  -0.12 (-0.15 to 0.98)"
_NARROW = 72  # columns below which a table of three wide columns would only be shreds


class ReportNameError(Qwen35ConvError):
    """A --report file whose name says no format that can be written."""

    exit_code = 2
    usual_hint = "name it .html or .svg"


def check_report(report: Path) -> None:
    """Raises ReportNameError for a file that is neither .html nor .svg."""
    if report.suffix.lower() not in (".html", ".svg"):
        raise ReportNameError(
            f"--report {report}: expected a name that ends in .html or .svg, found {report.suffix or 'no suffix'!r}",
            hint="the screen is saved as a picture of text; --json has the same as data",
        )


def show_inspection(inspection: Inspection, *, as_json: bool, all_tensors: bool, report: Path | None) -> None:
    """Write an inspection to stdout, and to `report` where that is given.

    Raises ReportNameError for another suffix, DestinationError where the file can't be written.
    """
    import sys

    def build(page: Page) -> None:
        _build(page, inspection, all_tensors)

    if report is not None:
        check_report(report)
        picture = build_picture(build, report.suffix.lower(), f"qwen35 inspect {inspection.checkpoint.label}")
        try:
            report.write_text(picture, encoding="utf-8")
        except OSError as error:
            raise DestinationError(
                f"{report}: can't be written: {error.strerror or error}", hint="choose another name for --report"
            ) from error
    if as_json:
        show_document(inspection_document(inspection, all_tensors=all_tensors))
    else:
        show_page(build, sys.stdout)


def _build(page: Page, inspection: Inspection, all_tensors: bool) -> None:
    _show_headline(page, inspection)
    _show_verdicts(page, inspection)
    _show_gains(page, inspection)
    _show_fate(page, inspection, all_tensors)
    _show_findings(page, inspection)
    _show_loaders(page, inspection)
    _show_next(page, inspection)


def _show_headline(page: Page, inspection: Inspection) -> None:
    checkpoint = inspection.checkpoint
    page.heading(sketch(checkpoint.config))
    shares = dtype_shares(checkpoint)
    total = sum(share.n_bytes for share in shares) or 1
    mix = ", ".join(f"{share.what} {_percent(share.n_bytes / total)}" for share in shares)
    size = f"{sized(checkpoint.n_bytes)} in {counted(len(checkpoint.shards), 'shard')}"
    page.line((checkpoint.label, "cyan"), f"  {size} · {mix}")
    if (origin := checkpoint.origin) is not None:
        page.line(f"revision {origin.revision}, commit ", (origin.commit, "cyan"))
    planned = inspection.shown_plan is not None  # then every name has a rule
    regions = Counter(
        tensor.place.region if tensor.place and (planned or is_named(tensor)) else None for tensor in checkpoint.tensors
    )
    parts = [f"{region.value} {regions[region]:,}" for region in Region if regions[region]]
    if n := regions[None]:
        parts.append(f"names that no rule knows {n:,}")
    page.line(f"{counted(len(checkpoint.tensors), 'tensor')}: {', '.join(parts)}")
    for scheme in inspection.schemes:
        page.line(("quantised  ", "yellow"), str(scheme), hang=11)
        page.line(f"{'':11}", scheme.advice, hang=11)


def _percent(share: float) -> str:
    if share in (0, 1):
        return f"{share:.0%}"
    return "<0.1%" if share < 0.001 else ">99.9%" if share > 0.999 else f"{share:.1%}"


def _show_verdicts(page: Page, inspection: Inspection) -> None:
    verdicts, plan = inspection.verdicts, inspection.plan
    trunk = verdicts.trunk
    name = (trunk.generation.value.upper(), style_of(trunk.generation))
    page.heading("Verdict  ", name, f"  {MEANING[trunk.generation]}")
    for reason in trunk.reasons:
        page.line(reason, hang=2)
    if (control := control_line(trunk)) is not None:
        page.line(control, hang=2)
    page.line((f"decided by {trunk.by}", "dim"))
    if plan is not None and (told := overruled(plan)) is not None:
        page.line((told, "bold yellow"), hang=2)
    if verdicts.head is not None:
        page.line(*head_spans("draft head (mtp)", verdicts.head), hang=2)
    for file, verdict in verdicts.sidecars.items():
        page.line(*head_spans(f"beside the shards: {file}", verdict), hang=2)


def _show_gains(page: Page, inspection: Inspection) -> None:
    trunk, n_layers = inspection.verdicts.trunk, inspection.checkpoint.config.n_layers
    strips = make_strips(trunk.stats, n_layers, trunk.outliers)
    if not strips:
        return
    page.heading("Norm gains", *_LEGEND)
    beside = page.width >= _LABEL_COLUMNS + n_layers + _MEANS_COLUMNS
    for layers in folds(n_layers, page.width - _LABEL_COLUMNS):
        page.line((f"{'layer':{_LABEL_COLUMNS}}{ruler(layers)}", "dim"))
        for strip in strips:
            told = f"  {_means(strip)}" if beside else ""
            page.line(f"{strip.label:{_LABEL_COLUMNS}}", *_cells(strip.cells, layers), (told, "dim"))
        if marks := odd_marks(strips, layers):
            page.line((f"{'odd':{_LABEL_COLUMNS}}{marks}", "bold red"))
    if not beside:
        told = ", ".join(f"{strip.label} {_means(strip)}" for strip in strips)
        page.line((f"{'means':{_LABEL_COLUMNS}}{told}", "dim"), hang=_LABEL_COLUMNS)
    if trunk.converts:
        _show_odd(page, trunk, inspection.shown_plan)
    _show_histogram(page, trunk)


def _show_histogram(page: Page, trunk: Verdict) -> None:
    wide = page.width >= _NARROW
    drawn = histogram(trunk.stats, 2 if wide else 1)
    if drawn is not None:
        told = f"  {drawn.n_values:,} of input and post" if wide else ""
        page.line(f"{'values':{_LABEL_COLUMNS}}{drawn.bars}", (told, "dim"))
        page.line((f"{'':{_LABEL_COLUMNS}}{drawn.axis}", "dim"))


def _cells(cells: tuple[Cell, ...], layers: range) -> list[Span]:
    return [
        (cells[i].glyph, f"{_TONES[cells[i].tone]} reverse" if cells[i].odd else _TONES[cells[i].tone]) for i in layers
    ]


def _means(strip: Strip) -> str:
    return f"{strip.median:.2f} ({strip.lowest:.2f} to {strip.highest:.2f})"


def _show_odd(page: Page, trunk: Verdict, plan: Plan | None) -> None:
    odd = [s for s in trunk.stats if s.name in trunk.outliers]
    for s in odd[:3]:
        told = f"layer {s.layer} {s.role.value}: mean {s.mean:.2f}, {s.negative_share:.0%} negative"
        after = f"; it would become {s.mean + plan.shift:.2f}" if plan is not None and plan.shift else ""
        page.line(("odd      ", "bold red"), f"{told}: looks {s.label.value}{after}", hang=_LABEL_COLUMNS)
    if len(odd) > 3:
        page.line(f"{'':{_LABEL_COLUMNS}}and {len(odd) - 3} more")


def _show_fate(page: Page, inspection: Inspection, all_tensors: bool) -> None:
    plan = inspection.shown_plan
    problem = inspection.problem
    if problem is not None:
        page.heading(("Does not convert", "bold red"), f"  {_why(inspection)}")
    if plan is None:
        if all_tensors:
            page.heading("Tensors")
            page.list(stored_lines(inspection.checkpoint))
        return
    if plan.is_identity:
        page.heading("Nothing to do", ("  every tensor is as it should be", ""))
    else:
        option = "--repair" if inspection.is_repair else "--dequantize"
        page.heading(f"What {option} would do" if inspection.plan is None else "What converting would do")
        show_tallies(page, plan)
        show_files(page, plan, inspection.edits, inspection.files, brief=True)
    if all_tensors:
        page.heading("Tensors")
        page.list(tensor_lines(plan))


def _why(inspection: Inspection) -> str:
    """Why a checkpoint does not convert, as far as it does not stand above."""
    if inspection.remedy is not None:
        return "without --repair" if inspection.is_repair else "without --dequantize"
    if isinstance(inspection.problem, SchemeError):
        return "MLX cannot read the quantisation named above"
    return str(inspection.problem) if _is_news(inspection) else "as the verdict stands"


def _is_news(inspection: Inspection) -> bool:
    """Whether the problem is another than the trunk's verdict, which stands above."""
    return inspection.verdicts.trunk.converts or not isinstance(inspection.problem, ConventionError)


def _show_findings(page: Page, inspection: Inspection) -> None:
    verdicts = inspection.verdicts
    groups = [("", verdicts.trunk), ("draft head: ", verdicts.head)]
    groups += [(f"{file}: ", verdict) for file, verdict in verdicts.sidecars.items()]
    warnings = [f"{name}{text}" for name, verdict in groups if verdict is not None for text in verdict.warnings]
    warnings += [found.text for found in inspection.findings if found.severity is Severity.WARNING]
    notes = [found.text for found in inspection.findings if found.severity is Severity.NOTE]
    if not warnings and not notes:
        return
    page.heading("Findings")
    for text in warnings:
        page.line(("warning  ", "yellow"), text, hang=_LABEL_COLUMNS)
    for text in notes:
        page.line(("note     ", "dim"), text, hang=_LABEL_COLUMNS)


def _show_loaders(page: Page, inspection: Inspection) -> None:
    results = {(found.loader, found.versions): found for found in inspection.result_forecasts}
    page.heading("What each loader makes of its gains")
    rows: list[list[Span]] = []
    for found in inspection.forecasts:
        result = results.get((found.loader, found.versions))
        cells = [_outcome(found)]
        if result is not None:
            cells.append(_outcome(result))
        name = f"{found.loader} {found.versions}"
        if page.width < _NARROW:
            page.line(name)
            for when, cell in zip(("now: ", "converted: "), cells, strict=False):
                page.line(f"  {when}", cell, hang=4)
        else:
            rows.append([name, *cells])
    if rows:
        head = ["", "as it is", "converted"][: len(rows[0])]
        page.table(rows, align="l" * len(head), head=head)
    for rule, loaders in _rules_that_fail(inspection.forecasts).items():
        page.line((f"✗ {', '.join(loaders)}: {rule}", "dim"), hang=2)


def _rules_that_fail(forecasts: Sequence[Forecast]) -> dict[str, list[str]]:
    """The rules by which loaders shift these gains wrongly, each with its loaders."""
    wrong = (Outcome.SHIFTS_TWICE, Outcome.SHIFTS_NOT, Outcome.SHIFTS_SOME)
    failing = {(found.loader, found.versions) for found in forecasts if found.outcome in wrong}
    rules: dict[str, list[str]] = {}
    for loader in LOADERS:
        if (loader.name, loader.versions) in failing:
            rules.setdefault(loader.rule, []).append(f"{loader.name} {loader.versions}")
    return rules


def _outcome(found: Forecast) -> tuple[str, str]:
    if found.outcome is Outcome.RIGHT:
        return f"✓ {found.text}", "green"
    return (f"? {found.text}", "yellow") if found.outcome is Outcome.UNKNOWN else (f"✗ {found.text}", "red")


def _show_next(page: Page, inspection: Inspection) -> None:
    command = next_command(inspection)
    problem = inspection.problem
    page.heading("Next")
    if command is not None:
        page.line((command, "bold"), hang=4)
    elif problem is not None and not _is_news(inspection):
        page.line("fetch or export it again; --assume raw|canonical overrides, if you know better", hang=2)
    elif problem is not None:
        page.line(problem.hint or "see above: this checkpoint can't be converted", hang=2)
    elif not needs_conversion(inspection):
        page.line("nothing: it loads right as it is")
