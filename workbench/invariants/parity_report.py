"""What ``workbench invariants parity`` prints."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Protocol

from workbench.invariants.parity_cases import Case
from workbench.invariants.parity_compare import Comparison


class Report(Protocol):
    """Told of cases as they are begun and done."""

    def start(self, case: Case) -> None:
        """A case is begun."""

    def add(self, comparison: Comparison) -> None:
        """A case is done."""

    def end(self, done: Sequence[Comparison], refused: Mapping[str, str]) -> None:
        """All are."""


class Json:
    """One object on stdout, in the end."""

    def start(self, case: Case) -> None:
        """Nothing yet."""

    def add(self, comparison: Comparison) -> None:
        """Nothing yet."""

    def end(self, done: Sequence[Comparison], refused: Mapping[str, str]) -> None:
        """Prints it."""
        cases = [
            {
                "case": c.case.name,
                "file": str(c.case.path),
                "kind": c.case.kind,
                "steps": c.steps,
                "matches": c.matches,
                "fields": {f.name: {k: _number(v) for k, v in asdict(f).items() if k != "name"} for f in c.fields},
            }
            for c in done
        ]
        matches = not refused and all(c.matches for c in done)
        print(json.dumps({"matches": matches, "cases": cases, "refused": dict(refused)}, indent=1))


def _number(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value  # JSON has no infinity


class Table:
    """A line for each field as cases finish, and a last line that counts."""

    def __init__(self, cases: int) -> None:
        self.cases = cases
        self.started = 0
        self.headed = False

    def start(self, case: Case) -> None:
        """On a terminal, which one."""
        self.started += 1
        self._show(f"{self.started}/{self.cases} {case.name}")

    def add(self, comparison: Comparison) -> None:
        """The fields of a case."""
        self._show("")
        if not self.headed:
            print(f"{'case':<28} {'field':<20} {'deviation':>10} {'of tolerance':>13} {'over from step':>15}  verdict")
        self.headed = True
        name = comparison.case.name
        for found in comparison.fields:
            over = "" if found.first_over is None else str(found.first_over)
            verdict = f"{found.verdict}: {found.reason}" if found.reason else found.verdict
            print(f"{name:<28} {found.name:<20} {found.deviation:>10.1e} {found.used:>13.1%} {over:>15}  {verdict}", flush=True)
            name = ""

    def end(self, done: Sequence[Comparison], refused: Mapping[str, str]) -> None:
        """How many match, and which do not."""
        self._show("")
        deviating = [c.case.name for c in done if not c.matches]
        text = f"{len(done) - len(deviating)} of {len(done) + len(refused)} cases match"
        text += f"; deviating: {', '.join(deviating)}" if deviating else ""
        text += f"; not replayed: {len(refused)}" if refused else ""
        print(f"\n{text}. Tolerances: loss 1e-5 |x| + 1e-6, grad_norm 1e-4 |x|, others 1e-4 |x| + 1e-6.", flush=True)

    def _show(self, text: str) -> None:
        if self.cases > 1 and sys.stderr.isatty():
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
