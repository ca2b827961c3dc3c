"""`DataModule`: which rows it reads, apart from any trainer."""

import pytest
from datasets import Dataset

from workbench.data.inspection import inspect_sets
from workbench.data.module import DataModule, prompt_and_reference
from workbench.tiny.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ROWS = Dataset.from_list([{"prompt": f"{i}+1=", "completion": str(i + 1)} for i in range(20)])


@pytest.mark.parametrize("data_type", ["preference", "unpaired_preference", "stepwise_supervision", "prompt_completion"])
def test_a_task_follows_the_method_in_training_and_evaluation(data_type):
    data = DataModule("tiny:compare", eval="tiny:compare")
    data.prepare_train(TOKENIZER, (data_type,))
    data.prepare_eval(TOKENIZER, (data_type,))
    assert {name: report.data_type for name, report in data.reports.items()} == {"train": data_type, "eval": data_type}


def test_the_type_that_is_typed_wins():
    data = DataModule("tiny:compare", data_type="prompt_completion")
    data.prepare_train(TOKENIZER, ("language_modeling", "prompt_completion"))
    assert data.reports["train"].data_type == "prompt_completion"


def test_an_evaluation_set_may_be_called_train():
    data = DataModule(ROWS.select(range(5)), eval={"train": ROWS.select(range(5, 7))})
    assert (len(data.load_train()), len(data.load_eval("train"))) == (5, 2)


def test_inspection_sees_the_same_rows_that_are_split_off():
    data = DataModule(ROWS, eval_size=0.25)
    found = inspect_sets(data, TOKENIZER, ("prompt_completion",))
    assert [(name, s.report.rows_in, s.also_in_train) for name, s in found.items()] == [("train", 15, 0), ("eval", 5, 0)]
    assert [found["eval"].report.rows_in] == [len(data.load_eval("eval"))]


@pytest.mark.parametrize(
    ("row", "reference"),
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "2"),
        ({"prompt": "1+1=", "completion": "2", "label": True}, "2"),
        ({"prompt": "1+1=", "completion": "3", "label": False}, None),
        ({"prompt": "1+1=", "completion": "2"}, "2"),
    ],
)
def test_what_an_evaluation_row_expects(row, reference):
    found = prompt_and_reference(row)
    assert (found["prompt"], found["reference"]) == ("1+1=", reference)
