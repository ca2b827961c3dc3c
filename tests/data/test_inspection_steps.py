"""The plan that an inspection reports is the one that a trainer follows, and its padding what the model is given."""

import lightning as L
import pytest
from datasets import Dataset
from support import QUIET, Recorder

from workbench.data.inspection import inspect_sets
from workbench.data.inspection_steps import Execution, plan_steps
from workbench.data.loader import StepDataset
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.methods.sft import SFT
from workbench.models.layouts import to_inputs
from workbench.tiny.model import tiny_model
from workbench.tiny.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
LENGTHS = (3, 9, 4, 4, 12, 7, 5, 6, 10, 3)
ROWS = Dataset.from_list([{"text": chr(97 + i) * (n - 1)} for i, n in enumerate(LENGTHS)])
PAIRS = Dataset.from_list([{"prompt": "p" * n, "chosen": "c" * 3, "rejected": "r" * n} for n in (2, 5, 7, 1)])


def planned(rows: Dataset = ROWS, execution: Execution | None = None, **options):
    """The steps, the data module that they were planned for, and its prepared rows."""
    data = DataModule(rows, **options)
    prepared = inspect_sets(data, TOKENIZER, ("language_modeling", "preference"), rows=0)["train"].rows
    return plan_steps(data, prepared, execution or Execution(max_epochs=1)), data, prepared


def test_steps_by_hand():
    steps, data, _ = planned(batch_size=4, micro_batch_size=2, shuffle=False, balance="none", drop_last=False)
    assert (steps.steps_per_epoch, steps.total_steps, steps.num_micro) == (3, 3, 2)
    # [3 9] [4 4], [12 7] [5 6], [10 3] []
    assert steps.tokens_per_epoch == sum(LENGTHS) == steps.real
    assert steps.computed == 18 + 8 + 24 + 12 + 20
    assert steps.padding == pytest.approx(1 - 63 / 82)
    assert (steps.largest, steps.micro_batches, steps.empty) == (24, 5, 1)
    assert steps.trained_per_step == (11, pytest.approx((63 - 10) / 3), 30 - 4)
    assert data.planner is None, "the data module is left as it was"


def test_epochs_and_step_limits():
    assert planned(execution=Execution(max_epochs=5), batch_size=5)[0].total_steps == 10
    assert planned(execution=Execution(max_epochs=5, max_steps=7), batch_size=5)[0].total_steps == 7
    assert planned(execution=Execution(), batch_size=5)[0].total_steps is None
    limited = planned(execution=Execution(max_epochs=2, limit_train_batches=1), batch_size=5, shuffle=False)[0]
    assert (limited.steps_per_epoch, limited.total_steps) == (1, 2)
    halved = planned(execution=Execution(max_epochs=2, limit_train_batches=0.5), batch_size=5)[0]
    assert (halved.steps_per_epoch, halved.total_steps) == (1, 2)
    assert planned(batch_size=4, drop_last=True)[0].steps_per_epoch == 2


@pytest.mark.parametrize("rows", [ROWS, PAIRS], ids=["texts", "pairs"])
@pytest.mark.parametrize(("layout", "multiple"), [("padded", None), ("padded", 8), ("packed", None), ("packed", 16)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_padding_is_that_of_the_model_inputs(rows, layout, multiple, world_size):
    execution = Execution(world_size=world_size, max_epochs=1, layout=layout, pad_to_multiple_of=multiple)
    steps, data, prepared = planned(rows, execution, batch_size=4, micro_batch_size=2)
    data.trainer, data._train = execution.trainer(), prepared
    data._plan(data.trainer)
    sizes = []
    for rank in range(world_size):
        micro = StepDataset(prepared, data.planner, rank)
        keys = [(0, step, k) for step in range(data.steps_per_epoch) for k in range(data.num_micro)]
        batches = [b for b in (micro[key] for key in keys) if not b.is_empty]
        sizes += [to_inputs(b, layout, multiple).input_ids.numel() for b in batches]
    assert (steps.computed, steps.largest, steps.micro_batches) == (sum(sizes), max(sizes), len(sizes))


def test_a_trainer_takes_the_steps_that_were_planned():
    options = {"batch_size": 4, "micro_batch_tokens": 12, "max_length": 16}
    steps, _, _ = planned(execution=Execution(max_epochs=2, max_steps=5), **options)
    data, recorder = DataModule(ROWS, **options), Recorder()
    model = tiny_model(hidden_size=32, num_hidden_layers=1)
    trainer = L.Trainer(**QUIET, devices=1, max_epochs=2, max_steps=5, callbacks=[recorder])
    trainer.fit(SFT(model=model, tokenizer=TOKENIZER), data)
    assert (data.num_micro, data.steps_per_epoch, data.total_steps) == (steps.num_micro, steps.steps_per_epoch, steps.total_steps)
    assert recorder.steps[-1]["step"] == steps.total_steps == 5
    assert recorder.steps[2]["train/num_tokens"] == steps.tokens_per_epoch


def test_a_stream_is_planned_from_the_rows_at_hand():
    steps, _, _ = planned(execution=Execution(max_steps=9), streaming=True, batch_size=4, micro_batch_size=2, balance="none")
    assert (steps.steps_per_epoch, steps.tokens_per_epoch, steps.total_steps, steps.num_micro) == (None, None, 9, 2)
    assert steps.real == sum(LENGTHS) and steps.computed == 82


def test_sizes_that_do_not_divide_are_refused_as_in_training():
    with pytest.raises(UserError, match="larger than the data set"):
        planned(batch_size=16, drop_last=True)
