"""Further runs of TRL 1.16.0, with the options that the others leave out: they match, or deviate for the reason stated."""

import pytest
from support import REFERENCES

CASES = sorted((REFERENCES / "more").glob("*.json"))
LOGITS = "TRL averages logits over prompt and padding"
WHOLE = {  # cases that follow another trajectory, and why
    "dpo_keep_end": "TRL divides a completion that fills its row",
    "sft_wrapped": "TRL trains the first token of a document",
    "tpo_cut_away": "TRL keeps rows whose completions",
}


@pytest.mark.parametrize("file", CASES, ids=lambda f: f.stem)
def test_recorded_case(file, replayed):
    found = replayed(file)
    assert found.matches, found.deviating
    expected = {f.name: f.reason for f in found.fields if f.verdict == "expected" and not f.reason.startswith("rounding")}
    if file.stem in WHOLE:
        assert expected["loss"].startswith(WHOLE[file.stem]) and found.field("loss").used > 100
    else:
        sides = {"logits/chosen", "logits/rejected"} if found.case.kind in ("cpo", "orpo") else set()
        assert set(expected) == sides and all(reason.startswith(LOGITS) for reason in expected.values())
        assert found.field("loss").used < 5
