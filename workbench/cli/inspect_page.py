"""The report of an inspection as a page: one file, no script, light and dark."""

from html import escape
from typing import TYPE_CHECKING

from workbench.cli.inspect_content import LEGEND, Facts, style_of, tables
from workbench.cli.inspect_text import visible
from workbench.data.inspection_rows import ShownRow, ShownSegment, Skipped

if TYPE_CHECKING:
    from workbench.cli.inspect import Inspection
    from workbench.data.inspection import SetInspection

_STYLE = """
.wb { --text: #1d2126; --dim: #6a737d; --line: #d8dee4; --page: #ffffff; --trained: #b9e8c5; --weighted: #f7e3a1;
  --special: #8250df; --cut: #c2403a; --bar: #6fa8dc; --fault: #b3261e; --warning: #8a6100;
  color: var(--text); background: var(--page); font: 14px/1.5 system-ui, sans-serif; }
@media (prefers-color-scheme: dark) {
  .wb { --text: #e4e7eb; --dim: #97a1ac; --line: #3b434c; --page: #16191d; --trained: #1f5c33; --weighted: #6b5410;
    --special: #c9a6ff; --cut: #ff8f87; --bar: #3f77ab; --fault: #ff8f87; --warning: #f0c75e; } }
.wb h1 { font-size: 20px; } .wb h2 { font-size: 16px; border-bottom: 1px solid var(--line); margin: 24px 0 8px; }
.wb h3 { font-size: 14px; margin: 12px 0 4px; } .wb .dim { color: var(--dim); font-weight: normal; }
.wb table { border-collapse: collapse; color: inherit; } .wb .wide { overflow-x: auto; }
.wb th, .wb td { text-align: left; vertical-align: top; padding: 2px 20px 2px 0; font-variant-numeric: tabular-nums;
  color: inherit; background: none; }
.wb th { font-weight: 600; } .wb tbody th { font-weight: normal; color: var(--dim); white-space: nowrap; }
.wb pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 ui-monospace, monospace; margin: 0; padding: 6px 10px;
  border-left: 3px solid var(--line); color: inherit; background: none; }
.wb .segment { color: var(--dim); font-size: 12px; margin: 6px 0 2px; }
.wb .trained { background: var(--trained); } .wb .weighted { background: var(--weighted); }
.wb .special { color: var(--special); } .wb .cut { color: var(--cut); text-decoration: line-through; opacity: .75; }
.wb .trained, .wb .weighted { box-shadow: inset -1px 0 var(--page); } .wb .legend span { padding: 0 4px; margin-right: 12px; }
.wb .fault { color: var(--fault); font-weight: 600; } .wb .warning { color: var(--warning); }
.wb .bar { background: var(--bar); height: 12px; min-width: 1px; display: inline-block; vertical-align: middle;
  margin-right: 8px; }
"""


def page(found: "Inspection") -> str:
    """A whole HTML document."""
    title = escape(f"{found.title}: what would be trained")
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>{title}</title>\n<style>body {{ margin: 0; }} body > .wb {{ padding: 16px 24px; min-height: 100vh; "
        f"box-sizing: border-box; }}</style>\n</head>\n<body>\n{fragment(found)}\n</body>\n</html>\n"
    )


def fragment(found: "Inspection") -> str:
    """The report as a part of a page, such as a notebook's output."""
    parts = [f"<style>{_STYLE}</style>", '<div class="wb">', f"<h1>{escape(found.title)}</h1>", _findings(found)]
    for name, data in found.sets.items():
        if data.shown:
            parts += [f"<h2>{escape(name)}: rows</h2>", _legend(), *map(_row, data.shown)]
    for facts in tables(found):
        parts += [f"<h2>{escape(facts.title)}</h2>", _table(facts)]
        if facts.title == "data":
            parts += [_bars(name, data) for name, data in found.sets.items() if data.counts.rows]
    return "\n".join([*parts, "</div>"])


def _findings(found: "Inspection") -> str:
    items = [f'<li><span class="{f.level}">{f.level}</span> {escape(f.where)}: {escape(f.text)}</li>' for f in found.findings]
    head = f"{len(found.faults)} faults, {len(found.warnings)} warnings"
    return f"<h2>{head}</h2>" + (f"<ul>{''.join(items)}</ul>" if items else "")


def _legend() -> str:
    return '<p class="legend">' + "".join(f'<span class="{kind}">{escape(about)}</span>' for kind, about in LEGEND) + "</p>"


def _row(row: ShownRow) -> str:
    trained = f"{row.trained:,} of {row.length:,} tokens trained" if row.length else ""
    head = f'<h3>{escape(row.title)} <span class="dim">{trained}</span> <span class="warning">{escape(row.note)}</span></h3>'
    titled = len(row.segments) > 1
    segments = "".join(_segment(segment, titled) for segment in row.segments)
    return head + segments + (f'<p class="dim">and {row.more:,} more</p>' if row.more else "")


def _segment(segment: ShownSegment, titled: bool) -> str:
    title = f'<div class="segment">{escape(segment.title)}, {segment.length:,} tokens</div>' if titled else ""
    return f"{title}<pre>{''.join(map(_token, segment.tokens))}</pre>"


def _token(token: object) -> str:
    if isinstance(token, Skipped):
        return f'<span class="dim"> ... {token.count:,} tokens ... </span>'
    about = f"id {token.id}, weight {token.weight:g}"
    return f'<span class="{style_of(token)}" title="{about}">{escape(visible(token.text))}</span>'


def _table(facts: Facts) -> str:
    head = ""
    if any(facts.columns):
        head = "<thead><tr><th></th>" + "".join(f"<th>{escape(c)}</th>" for c in facts.columns) + "</tr></thead>"
    lines = []
    for fact in facts.facts:
        levels = fact.levels or [""] * len(fact.values)
        cells = "".join(
            f'<td class="{level}">{escape(value)}</td>' if level else f"<td>{escape(value)}</td>"
            for value, level in zip(fact.values, levels, strict=True)
        )
        lines.append(f'<tr><th scope="row">{escape(fact.label.strip())}</th>{cells}</tr>')
    return f'<div class="wide"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>'


def _bars(name: str, data: "SetInspection") -> str:
    bins = data.bins()
    most = max(b.rows for b in bins)
    lines = "".join(
        f'<tr><th scope="row">{b.name}</th><td><span class="bar" style="width: {240 * b.rows / most:.0f}px"></span>'
        f"{b.rows:,}</td></tr>"
        for b in bins
    )
    return f"<h3>{escape(name)}: rows by length in tokens</h3><table><tbody>{lines}</tbody></table>"
