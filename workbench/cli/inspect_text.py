"""The report of an inspection in a terminal."""

import io
import os
import sys
from itertools import groupby
from typing import TYPE_CHECKING

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from workbench.cli.inspect_content import LEGEND, Facts, style_of, tables
from workbench.data.inspection_rows import ShownRow, ShownSegment, ShownToken, Skipped

if TYPE_CHECKING:
    from workbench.cli.inspect import Inspection
    from workbench.data.inspection import SetInspection

STYLES = {
    "trained": "black on green",
    "weighted": "black on yellow",
    "special": "magenta",
    "cut": "strike dim red",
    "plain": "",
}
_LEVELS = {"fault": "bold red", "warning": "yellow", "": ""}
# What surrounds a stretch of tokens where there are no colours.
_MARKS = {"trained": ("«", "»"), "weighted": ("‹", "›"), "cut": ("[cut: ", "]")}
_WIDTH = 130  # columns of what is not printed to a terminal
_BAR = 40  # characters of the longest bar


def show(found: "Inspection", console: Console | None = None) -> None:
    """Prints the whole report."""
    console = console or _console()
    colours = console.color_system is not None and not console.no_color
    for name, data in found.sets.items():
        if data.shown:
            console.print(Rule(Text(f"{name}: rows"), align="left"))
            for row in data.shown:
                _print_row(console, row, colours)
    if any(data.shown for data in found.sets.values()):
        console.print(_legend(colours))
    for facts in tables(found):
        console.print(Rule(Text(facts.title), align="left"))
        console.print(_table(facts))
        if facts.title == "data":
            for name, data in found.sets.items():
                _print_bars(console, name, data)
    _print_findings(console, found)


def _console() -> Console:
    """The terminal, or a wide page where there is none."""
    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _WIDTH
    return Console(file=sys.stdout, highlight=False, width=wide)


def plain(found: "Inspection") -> str:
    """The report without colours."""
    out = io.StringIO()
    show(found, Console(file=out, width=_WIDTH, color_system=None, highlight=False))
    return out.getvalue()


def _print_row(console: Console, row: ShownRow, colours: bool) -> None:
    head = Text(row.title, style="bold")
    if row.length:
        head.append(f"  {row.trained:,} of {row.length:,} tokens trained", style="not bold")
    if row.note:
        head.append(f"  {row.note}", style="not bold yellow")
    console.print(head)
    for segment in row.segments:
        if len(row.segments) > 1:
            console.print(Rule(Text(f"{segment.title}, {segment.length:,} tokens", style="dim"), align="left", style="dim"))
        console.print(tokens_text(segment, colours), soft_wrap=True)
    if row.more:
        console.print(Text(f"... and {row.more:,} more", style="dim"))
    console.print()


def tokens_text(segment: ShownSegment, colours: bool) -> Text:
    """A segment's tokens; without colours, stretches of one kind in marks."""
    text = Text()
    for (kind, weight), run in groupby(segment.tokens, lambda token: _look(token, colours)):
        if kind == "skipped":
            text.append("".join(f" ... {token.count:,} tokens ... " for token in run), style="dim")
        else:
            words = "".join(visible(token.text) for token in run)
            text.append(words if colours else _marked(words, kind, weight), style=STYLES[kind] if colours else "")
    return text


def _look(token: ShownToken | Skipped, colours: bool) -> tuple[str, float]:
    """Kind and weight of a token, the same for neighbours that are shown as one."""
    if isinstance(token, Skipped):
        return "skipped", 0.0
    kind = style_of(token)
    return ("plain" if kind == "special" and not colours else kind), token.weight


def _marked(words: str, kind: str, weight: float) -> str:
    """The words between their marks, which stay on the words' own lines."""
    before, after = _MARKS.get(kind, ("", ""))
    end = "\n" if words.endswith("\n") else ""
    return before + (f"{weight:g}|" if kind == "weighted" else "") + words.removesuffix("\n") + after + end


def visible(text: str) -> str:
    """Line breaks and control characters of a token made visible."""
    text = text.replace("\t", "⇥").replace("\r", "␍").replace("\n", "↵\n")
    return "".join(c if c == "\n" or c.isprintable() else f"\\x{ord(c):02x}" for c in text)


def _legend(colours: bool) -> Text:
    text = Text()
    for kind, about in LEGEND:
        if colours:
            text.append(f" {about} ", style=STYLES[kind])
            text.append("  ")
        elif kind in _MARKS:
            before, after = _MARKS[kind]
            text.append(f"{before}{about}{after}  ")
    return text


def _table(facts: Facts) -> Table:
    table = Table(box=None, show_header=any(facts.columns), pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for column in facts.columns:
        table.add_column(Text(column), overflow="fold")
    for fact in facts.facts:
        levels = fact.levels or [""] * len(fact.values)
        cells = [Text(v, style=_LEVELS[level]) for v, level in zip(fact.values, levels, strict=True)]
        table.add_row(Text(fact.label), *cells)
    return table


def _print_bars(console: Console, name: str, data: "SetInspection") -> None:
    bins = data.bins()
    if not bins:
        return
    most = max(b.rows for b in bins)
    width = max(len(b.name) for b in bins)
    console.print(Text(f"{name}: rows by length in tokens", style="dim"))
    for b in bins:
        bar = "█" * round(_BAR * b.rows / most) or ("▏" if b.rows else "")
        console.print(Text(f"{b.name:>{width}}  {bar} {b.rows:,}"))


def _print_findings(console: Console, found: "Inspection") -> None:
    faults, warnings = found.faults, found.warnings
    verdict = f"{len(faults)} fault{'s' * (len(faults) != 1)}, {len(warnings)} warning{'s' * (len(warnings) != 1)}"
    console.print(Rule(Text(verdict), align="left"))
    for finding in found.findings:
        line = Text(f"{finding.level:<8}", style=_LEVELS[finding.level])
        console.print(line.append(f" {finding.where}: {finding.text}", style="not bold default"), soft_wrap=True)
