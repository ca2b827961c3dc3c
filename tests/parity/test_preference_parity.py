"""``workbench invariants parity`` on every recorded case of the trainers whose methods exist: all match, or say why not."""

import pytest
from support import REFERENCES

KINDS = ("sft", "dpo", "kto", "reward", "cpo", "orpo", "tpo")
CASES = sorted(f for kind in KINDS for f in REFERENCES.glob(f"{kind}_*.json"))


def test_there_are_cases_of_each_kind():
    assert {f.name.split("_")[0] for f in CASES} == set(KINDS) and len(CASES) == 31


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_recorded_case(file, replayed):
    """All fields of all steps match. TRL's ``logits/*`` of CPO and ORPO are other means; what is rounding is a little of it."""
    found = replayed(file)
    assert found.matches, found.deviating
    assert found.steps == 10
    for field in found.fields:
        if field.verdict == "expected" and not field.reason.startswith("rounding"):
            assert found.case.kind in ("cpo", "orpo") and field.name.startswith("logits/")
        elif field.verdict == "expected":
            assert field.used < 5 and (field.name in ("loss", "grad_norm") or field.name.startswith("rewards/"))
    assert len([f for f in found.fields if f.verdict == "matches"]) >= len(found.fields) - 2
