"""``workbench invariants parity`` on every recorded case of TRL's online trainers: all match, or say why not."""

import pytest
from support import REFERENCES

KINDS = ("grpo", "rloo")
CASES = sorted(f for kind in KINDS for f in REFERENCES.glob(f"{kind}_*.json"))
# What is not the same, and the first words of why; both are checked by a run that does as TRL does.
EXPECTED = {
    "grpo_steps_per_generation": {
        "loss": "TRL divides each step of a window by the mean number of tokens",
        "grad_norm": "TRL divides each step of a window by the mean number of tokens",
    },
    "grpo_entropy_bonus": {"policy_loss": "TRL logs the mean of the micro-batches' shares"},
}


def test_there_are_cases_of_each_kind():
    assert {f.name.split("_")[0] for f in CASES} == set(KINDS) and len(CASES) == 13


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_recorded_case(file, replayed):
    """All fields of all steps match; what is rounding is less than twice the tolerance."""
    found = replayed(file)
    assert found.matches, found.deviating
    assert found.steps == 10
    expected = {f.name: f for f in found.fields if f.verdict == "expected"}
    rounding = {name for name, f in expected.items() if f.reason.startswith("rounding")}
    assert all(expected[name].used < 2 for name in rounding)
    reasons = EXPECTED.get(file.stem, {})
    assert set(expected) - rounding == set(reasons)
    assert all(expected[name].reason.startswith(reason) for name, reason in reasons.items())
    assert len([f for f in found.fields if f.verdict == "matches"]) >= 17
