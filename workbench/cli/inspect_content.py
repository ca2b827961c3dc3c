"""The report of an inspection as plain rows of text, which the terminal and the page both show."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from workbench.data.inspection_counts import PERCENTILES

if TYPE_CHECKING:
    from workbench.cli.inspect import Inspection
    from workbench.cli.inspect_cost import Cost
    from workbench.data.inspection import SetInspection
    from workbench.data.inspection_findings import Finding
    from workbench.data.inspection_steps import Steps

LEGEND = (
    ("trained", "trained"),
    ("weighted", "trained at another weight than 1"),
    ("special", "special token"),
    ("cut", "lost to the length limit"),
)


@dataclass
class Fact:
    """A line of a table: what it says, a value for each column, and how bad each one is."""

    label: str
    values: list[str]
    levels: list[str] = field(default_factory=list)


@dataclass
class Facts:
    """A table."""

    title: str
    columns: list[str]
    facts: list[Fact]


def tables(found: "Inspection") -> list[Facts]:
    """All tables of the report."""
    return [_data(found), *_steps(found.steps), *_cost(found.cost)]


def style_of(token: Any) -> str:
    """How a token is shown: one of the legend's kinds or ``plain``; special tokens that are trained are ``trained``."""
    if token.cut:
        return "cut"
    if token.weight:
        return "trained" if token.weight == 1 else "weighted"
    return "special" if token.special else "plain"


def _data(found: "Inspection") -> Facts:
    sets, lines = list(found.sets.values()), []
    for label, kind, value in _LINES:
        values = [value(data) for data in sets]
        if any(values):
            levels = [_level(found.findings, name, kind) for name in found.sets]
            lines.append(Fact(label, [v or "–" for v in values], levels))
    if found.read_at:  # the trained part, which the method does not train as such, is what it compares
        lines.insert(2, Fact("score read at", [found.read_at] * len(sets)))
    return Facts("data", list(found.sets), lines)


def _level(findings: "list[Finding]", where: str, kind: str) -> str:
    return next((f.level for f in findings if f.where == where and f.kind in kind.split()), "")


# -- one line for each thing counted, the kinds of findings about it, and its value: empty where it does not apply --------

Line = tuple[str, str, Callable[["SetInspection"], str]]


def _of_rows(count: int, data: "SetInspection") -> str:
    rows = data.report.rows_in
    return f"{count:,} ({count / rows:.1%})" if count and rows else str(count)


def _rows(data: "SetInspection") -> str:
    report = data.report
    packed = f" -> {data.packing.packs:,} packs" if data.packing else ""
    stream = " (first of a stream)" if data.is_stream else ""
    return f"{report.rows_in:,} -> {report.rows_out:,}{packed}{stream}"


def _left_out(data: "SetInspection") -> str:
    return ", ".join(f"{k.replace('_', ' ')} {v:,}" for k, v in data.report.dropped.items()) or "0"


def _trained(data: "SetInspection") -> str:
    if not data.counts.tokens:
        return ""
    return f"{data.counts.trained:,} ({data.share_trained:.1%})"


def _sides(data: "SetInspection") -> str:
    rows = max(1, data.counts.rows)
    return ", ".join(f"{role} {count / rows:,.1f}" for role, count in data.counts.trained_by_role.items())


def _longer(data: "SetInspection") -> str:
    counts = data.counts
    if not counts.trained_by_role:
        return ""
    return (
        f"chosen in {counts.chosen_longer / counts.rows:.1%} of the rows, rejected in {counts.rejected_longer / counts.rows:.1%}"
    )


def _margins(data: "SetInspection") -> str:
    return " / ".join(f"{value:.4g}" for value in data.margins) if data.margins else ""


def _counter(values: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in values.items())


def _roles(data: "SetInspection") -> str:
    more = f" (first {data.raw.rows:,} rows)" if data.raw.rows < data.report.rows_in else ""
    return _counter(data.raw.roles) + more if data.raw.roles else ""


def _images(data: "SetInspection") -> str:
    return f"{data.raw.images:,} in {data.raw.with_images:,} rows" if data.raw.images else "0"


def _lengths(data: "SetInspection") -> str:
    found = data.counts.percentiles()
    return " / ".join(f"{found[p]:,}" for p in PERCENTILES) if found else ""


def _mean(data: "SetInspection") -> str:
    return f"{data.counts.lengths.mean():,.1f}" if data.counts.rows else ""


def _packed(data: "SetInspection") -> str:
    packing = data.packing
    if packing is None:
        return ""
    return (
        f"{packing.efficiency:.1%} of {packing.packs:,} x {data.spec.max_length:,} places, {packing.documents:.1f} documents each"
    )


def _packing_loss(data: "SetInspection") -> str:
    packing = data.packing
    return "" if packing is None else f"{packing.dropped_tokens:,} tokens left out, {packing.cuts:,} rows cut in two"


def _ended(data: "SetInspection", value: Callable[["SetInspection"], int]) -> str:
    return _of_rows(value(data), data) if data.ends_expected and data.counts.rows else ""


_LINES: tuple[Line, ...] = (
    ("type", "", lambda d: d.report.data_type.replace("_", " ")),
    ("trained part", "", lambda d: d.report.train_on),
    ("chat template", "date", lambda d: d.report.template),
    ("rows in -> out", "empty", _rows),
    ("left out", "untrained bad_row cut_away too_long identical_pair empty", _left_out),
    ("rows with no trained token", "untrained", lambda d: _of_rows(d.report.untrained_rows, d)),
    ("cut to the limit", "cut_away", lambda d: _of_rows(d.report.truncated, d)),
    ("cut before their end", "cut", lambda d: _of_rows(d.report.cut_before_terminator, d)),
    ("no end token trained", "no_terminator", lambda d: _ended(d, lambda d: d.counts.unended)),
    ("empty answers", "empty_answer", lambda d: _ended(d, lambda d: d.counts.blank)),
    ("two start tokens", "double_bos", lambda d: _of_rows(d.report.double_bos, d)),
    ("duplicates", "duplicates", lambda d: _of_rows(d.counts.duplicates, d) if d.counts.rows else ""),
    ("also in train", "leak", lambda d: _of_rows(d.also_in_train, d) if d.name != "train" and d.counts.rows else ""),
    ("text the template drops", "text_dropped", lambda d: _of_rows(d.report.text_dropped, d) if d.report.template else ""),
    ("reasoning it drops", "reasoning_dropped", lambda d: _of_rows(d.report.reasoning_dropped, d) if d.report.template else ""),
    ("tokens", "", lambda d: f"{d.counts.tokens:,}" if d.counts.tokens else ""),
    ("trained tokens", "", _trained),
    ("  of weight other than 1", "", lambda d: f"{d.counts.weighted:,}" if d.counts.tokens else ""),
    ("  per row, mean", "", _sides),
    ("longer side", "", _longer),
    ("margins, least / mean / most", "margin", _margins),
    ("messages", "", _roles),
    ("labels", "labels", lambda d: _counter(d.labels)),
    ("images", "", _images),
    ("columns not read", "column", lambda d: ", ".join(d.report.unused_columns) or "none"),
    ("mean length", "", _mean),
    ("length at " + "/".join(map(str, PERCENTILES)) + " %", "", _lengths),
    ("packing", "", _packed),
    ("packing loses", "untrained_packs", _packing_loss),
)

# -- steps and cost ---------------------------------------------------------------------------------------------------


def _steps(steps: "Steps | None") -> list[Facts]:
    if steps is None:
        return []
    devices = f" on {steps.world_size} devices" if steps.world_size > 1 else ""
    low, mean, high = steps.trained_per_step
    empty = f", {steps.empty:,} of {steps.micro_batches + steps.empty:,} empty" if steps.empty else ""
    what = "rows" if not steps.completions else f"completions of up to {steps.completions:,} tokens"
    lines = [
        (f"{what} per step", f"{steps.batch_size:,}{devices}"),
        ("micro-batches per step and device (K)", f"{steps.num_micro:,}{empty}"),
        ("steps per epoch", "unknown (stream)" if steps.steps_per_epoch is None else f"{steps.steps_per_epoch:,}"),
        ("steps in all", "no limit" if steps.total_steps is None else f"{steps.total_steps:,}"),
        ("tokens per epoch", "unknown (stream)" if steps.tokens_per_epoch is None else f"{steps.tokens_per_epoch:,}"),
        ("tokens per step", f"{steps.tokens_per_step:,.0f}"),
        ("trained tokens per step, least / mean / most", f"{low:,.0f} / {mean:,.0f} / {high:,.0f}"),
        ("tokens per micro-batch, real / with padding", _per_micro(steps)),
        ("padding", f"{steps.padding:.1%}"),
    ]
    return [Facts("steps", [""], [Fact(label, [value]) for label, value in lines])]


def _per_micro(steps: "Steps") -> str:
    number = max(1, steps.micro_batches)
    return f"{steps.real / number:,.0f} / {steps.computed / number:,.0f} (at most {steps.largest:,})"


def _cost(cost: "Cost | None") -> list[Facts]:
    if cost is None:
        return []
    parameters = cost.parameters
    share = parameters.trainable / max(1, parameters.total)
    lines = [("parameters", f"{si(parameters.total)}, trained {si(parameters.trainable)} ({share:.1%})")]
    if cost.memory is not None:
        names = ("weights", "gradients", "optimizer", "activations", "logits")
        parts = ", ".join(f"{name} {size(getattr(cost.memory, name))}" for name in names)
        lines.append(("memory per device, roughly", f"{size(cost.memory.total)}: {parts}"))
    experts = ", with all experts" if cost.counts_all_experts else ""
    lines.append(("operations per token, roughly", f"{si(cost.flops_per_token)}FLOP{experts}"))
    if cost.flops_per_epoch is not None:
        lines.append(("operations per epoch", f"{si(cost.flops_per_epoch)}FLOP"))
    if cost.flops is not None:
        lines.append(("operations in all", f"{si(cost.flops)}FLOP"))
    return [Facts("cost", [""], [Fact(label, [value]) for label, value in lines])]


def si(value: float) -> str:
    """A number with three digits and a unit prefix."""
    for prefix in ("", "K", "M", "G", "T", "P", "E"):
        if abs(value) < 999.5:
            return f"{value:.3g} {prefix}".strip() if prefix == "" else f"{value:.3g} {prefix}"
        value /= 1000
    return f"{value:.3g} Z"


def size(value: float) -> str:
    """Bytes in a binary unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
