"""Triples (a pair with a gold answer), and prompts of pairs that are trained: rows, features, normalisers, what refuses them."""

from itertools import pairwise

import numpy as np
import pytest
from datasets import Dataset
from rig import CHATML, assistant, t2, t4, user, with_template

from workbench.data.batch import MicroBatch, Role
from workbench.data.conversions import convert
from workbench.data.formats import detect_type, drop_reason, normalise_row
from workbench.data.inspection import inspect_sets
from workbench.data.loader import row_sizes, sizes_of
from workbench.data.module import DataModule
from workbench.data.prepare import PrepareSpec, prepare
from workbench.data.sources import load_source
from workbench.data.targets import check_prompts_read
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.methods.dpo import DPO
from workbench.methods.orpo import ORPO
from workbench.methods.sft import SFT
from workbench.tiny.tokenizer import tiny_tokenizer

ASK = user("What color is the sky?")
BLUE, GREEN, CLEAR = assistant("It is blue."), assistant("It is green."), assistant("Clear.")
EXPLICIT = {"prompt": [ASK], "chosen": [BLUE], "rejected": [GREEN], "reference": [CLEAR]}
TEXT = {"prompt": "0123", "chosen": "good", "rejected": "bad", "reference": "golden"}


def run(rows, tokenizer, **spec):
    made, report = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
    return list(made), report


def texts(row, tokenizer):
    ends = np.cumsum([0, *row["lengths"]])
    return [tokenizer.decode(row["input_ids"][a:b]) for a, b in pairwise(ends)]


def trained(row, tokenizer):
    ends = np.cumsum([0, *row["lengths"]])
    ids, weights = np.array(row["input_ids"]), np.array(row["weights"])
    return [tokenizer.decode(ids[a:b][weights[a:b] != 0]) for a, b in pairwise(ends)]


# -- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [ASK, BLUE], "rejected": [ASK, GREEN], "reference": [ASK, CLEAR]},
        {"chosen": [ASK, BLUE], "rejected": [ASK, GREEN], "reference": [CLEAR]},
        {"prompt": [ASK], "chosen": [ASK, BLUE], "rejected": [ASK, GREEN], "reference": [ASK, CLEAR]},
        {"prompt": ASK["content"], "chosen": [BLUE], "rejected": [GREEN], "reference": {"from": "gpt", "value": "Clear."}},
    ],
)
def test_every_form_of_a_triple_is_one(row):
    assert normalise_row(row) == EXPLICIT


def test_the_prompt_inside_three_texts():
    row = {"chosen": "The sky is blue.", "rejected": "The sky is green.", "reference": "The sky is clear."}
    assert normalise_row(row) == {"prompt": "The sky is", "chosen": " blue.", "rejected": " green.", "reference": " clear."}
    assert normalise_row(TEXT) == TEXT, "an explicit prompt is not looked for in the answers"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({**TEXT, "reference": None}, "column 'reference': missing for triple_preference"),
        ({"prompt": "p", "chosen": "c", "rejected": "r", "gold": "g"}, r"Rename with columns=\{gold: reference\}"),
        ({**TEXT, "reference": 12}, "12 is int; expected text or a list of messages"),
        ({**TEXT, "reference": [CLEAR]}, "one of chosen and reference is text, the other messages"),
        (
            {"chosen": "The sky is blue.", "rejected": "The sky is green.", "reference": "Clear."},
            "give the prompt its own column",
        ),
        ({"chosen": [ASK, BLUE], "rejected": [ASK, GREEN], "reference": [user("Why?"), CLEAR]}, "give the prompt its own column"),
    ],
)
def test_mistakes_name_the_column(row, message):
    with pytest.raises(UserError, match=message):
        normalise_row(row, "triple_preference", index=2)


def test_pairs_with_a_reference_column_stay_pairs_for_what_asks_for_pairs():
    rows = [{**TEXT, "reference": reference} for reference in ("golden", "other")]
    assert (detect_type(TEXT), detect_type(TEXT, ["preference"])) == ("triple_preference", "preference")
    assert normalise_row({**TEXT, "reference": 12}, "preference") == {**TEXT, "reference": 12}
    assert convert(rows, "preference") is rows
    assert convert(rows, "triple_preference") is rows
    assert convert(rows[:1], "unpaired_preference")[1] == {
        "prompt": "0123",
        "completion": "bad",
        "label": False,
        "reference": "golden",
    }
    plain = [{k: v for k, v in row.items() if k != "reference"} for row in rows]
    mixed = load_source([Dataset.from_list(rows), Dataset.from_list(plain)], interleave="concatenate")
    assert mixed["reference"] == ["golden", "other", None, None]
    made, report = run(rows, t2(), data_types=("preference",))
    assert (report.data_type, made[0]["roles"]) == ("preference", [Role.PROMPT, Role.CHOSEN, Role.REJECTED])
    assert report.unused_columns == ["reference"]
    with pytest.raises(UserError, match=r"make preference, but this needs triple_preference.*missing: reference"):
        run(plain, t2(), data_types=("triple_preference",))
    with pytest.raises(UserError, match="preference cannot be converted to triple_preference"):
        convert(plain, "triple_preference")


# -- features -------------------------------------------------------------------------------------------------------


def test_a_triple_shares_its_prompt_among_three():
    tokenizer = with_template(t2(), CHATML)
    made, report = run([EXPLICIT], tokenizer)
    prompt = f"<|im_start|>user\n{ASK['content']}<|im_end|>\n<|im_start|>assistant\n"
    answers = [f"{m['content']}<|im_end|>\n" for m in (BLUE, GREEN, CLEAR)]
    assert texts(made[0], tokenizer) == [prompt, *answers]
    assert trained(made[0], tokenizer) == ["", *answers]
    assert (made[0]["parents"], made[0]["roles"]) == ([-1, 0, 0, 0], [Role.PROMPT, Role.CHOSEN, Role.REJECTED, Role.GOLD])
    assert report.unused_columns == []
    shown = inspect_sets(DataModule(Dataset.from_list([EXPLICIT])), tokenizer, ("triple_preference",))["train"]
    assert [s.title for s in shown.shown[0].segments] == ["prompt", "chosen", "rejected", "gold"]
    assert shown.raw.roles == {"assistant": 3, "user": 1}


def test_a_triple_shares_what_all_three_agree_on():
    """The gold answer merges with the prompt's last character."""
    tokenizer = t4()
    made, _ = run([{"prompt": "xyn", "chosen": "a!", "rejected": "i!", "reference": "o!"}], tokenizer)
    assert texts(made[0], tokenizer) == ["xy", "na!<eos>", "ni!<eos>", "no!<eos>"]
    assert trained(made[0], tokenizer) == ["", "a!<eos>", "i!<eos>", "no!<eos>"]


def test_each_answer_of_a_triple_is_cut_on_its_own():
    made, report = run([TEXT], t2(), max_length=8)
    assert texts(made[0], t2()) == ["0123", "good", "bad<|im_end|>", "gold"]
    assert report.truncated == 1
    same = [{**TEXT, "rejected": "good"}, {**TEXT, "reference": "good"}, TEXT]
    assert [drop_reason(normalise_row(row)) for row in same] == ["identical_pair", None, None]
    assert run(same, t2())[1].dropped == {"identical_pair": 1}
    assert inspect_sets(DataModule(Dataset.from_list([TEXT, {**TEXT, "prompt": "0" * 9}]), max_length=8), t2(),
                        ("triple_preference",))["train"].shown[-1].segments[-1].title == "gold"  # fmt: skip


def test_the_embedded_world_has_triples():
    data = DataModule("tiny:compare", eval="tiny:compare")
    data.prepare_train(tiny_tokenizer(), ("triple_preference",))
    data.prepare_eval(tiny_tokenizer(), ("triple_preference",))
    assert data.reports["train"].data_type == "triple_preference"
    (row,) = data.eval_rows(limit=1)
    numbers = row["prompt"][0]["content"].removesuffix("=").split()[1:]
    assert row["reference"] == max(numbers, key=int)


def test_what_a_triple_expects_is_its_gold_answer():
    data = DataModule([TEXT], eval=[{"chosen": "1+1=2", "rejected": "1+1=3", "reference": "1+1=4"}])
    data.prepare_eval(t2(), ("triple_preference",))
    assert data.eval_rows() == [{"prompt": "1+1=", "reference": "4"}]


def test_the_prepared_rows_count_gold_tokens_apart():
    made, _ = prepare(Dataset.from_list([TEXT, {**TEXT, "reference": "g"}]), t2(), PrepareSpec(), cache_dir=False)
    for sizes in (row_sizes(made), sizes_of(list(made))):
        assert sizes.by_role["chosen"].tolist() == [5, 5]
        assert sizes.by_role["gold"].tolist() == [7, 2]
        assert sizes.weight.tolist() == [5 + 4 + 7, 5 + 4 + 2]
    batch = MicroBatch.from_rows(list(made), [0, 1], Normalisers(1.0, 1.0, 1.0, 1.0))
    assert batch.segments_of(Role.GOLD).tolist() == [3, 7]


# -- prompts of pairs that are trained ------------------------------------------------------------------------------


def pair(**columns):
    return {"prompt": "0123", "chosen": "good", "rejected": "bad", **columns}


def test_a_trained_prompt_is_trained_once_and_counted_with_the_chosen_answer():
    made, _ = prepare(Dataset.from_list([pair()]), t2(), PrepareSpec(train_on="all"), cache_dir=False)
    assert trained(made[0], t2()) == ["123", "good<|im_end|>", "bad<|im_end|>"]
    assert row_sizes(made).by_role == {"chosen": [3 + 5]}
    tokenizer = with_template(t2(), CHATML)
    row = {"prompt": [ASK], "chosen": [BLUE], "rejected": [GREEN]}
    made, _ = run([row], tokenizer, train_on="all")
    assert trained(made[0], tokenizer)[0].endswith(f"user\n{ASK['content']}<|im_end|>\n<|im_start|>assistant\n")
    assert sum(made[0]["weights"][: made[0]["lengths"][0]]) == made[0]["lengths"][0] - 1


def test_a_prompt_that_is_not_shared_is_no_part_of_the_answers():
    """Tokens of the prompt within a side's own segment would count in that side's log-probability."""
    tokenizer = t4()
    made, _ = run([{"prompt": "xyn", "chosen": "o!", "rejected": "a!"}], tokenizer, train_on="all")
    assert texts(made[0], tokenizer) == ["xy", "no!<eos>", "na!<eos>"]
    assert trained(made[0], tokenizer) == ["y", "no!<eos>", "a!<eos>"]
    made, _ = run([pair(chosen="longer")], t2(), train_on="all", max_length=8, truncation="keep_end")
    assert texts(made[0], t2()) == ["3longer<|im_end|>", "0123bad<|im_end|>"]
    assert trained(made[0], t2()) == ["longer<|im_end|>", "bad<|im_end|>"]


def test_a_trained_prompt_does_not_keep_a_row_whose_answer_is_cut_away():
    rows = [pair(), pair(prompt="0123456789")]
    assert run(rows, t2(), train_on="all", max_length=9)[1].dropped == {"cut_away": 1}


def test_trained_prompts_are_refused_where_only_answers_are_read():
    check_prompts_read("all", ORPO)
    check_prompts_read("all", SFT)
    check_prompts_read("completion", DPO)
    with pytest.raises(UserError, match=r"data.train_on=all has no effect with DPO, which reads the answers of a pair alone"):
        check_prompts_read("all", DPO)
