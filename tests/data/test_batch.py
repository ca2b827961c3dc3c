"""`MicroBatch`: assembly, who predicts whom, empty micro-batches."""

import numpy as np
import torch

from workbench.data.batch import MicroBatch, Role
from workbench.losses.reduce import Normalisers

NORM = Normalisers(1.0, 1.0, 1.0, 1.0, num_micro=2)


def pair(prompt=3, chosen=2, rejected=4, offset=10):
    n = prompt + chosen + rejected
    return {
        "input_ids": list(range(offset, offset + n)),
        "weights": [0.0] * prompt + [1.0] * (chosen + rejected),
        "lengths": [prompt, chosen, rejected],
        "parents": [-1, 0, 0],
        "roles": [Role.PROMPT, Role.CHOSEN, Role.REJECTED],
        "margin": 0.5,
        "note": "text columns are left out",
    }


def test_rows_are_joined_and_parents_shifted():
    batch = MicroBatch.from_rows([pair(), pair(offset=50)], [7, 3], NORM, step=4, k=1)
    assert batch.tokens.tolist() == [*range(10, 19), *range(50, 59)]
    assert batch.starts.tolist() == [0, 3, 5, 9, 12, 14, 18]
    assert batch.parent.tolist() == [-1, 0, 0, -1, 3, 3]
    assert batch.row.tolist() == [7, 7, 7, 3, 3, 3]
    assert batch.role.tolist()[:3] == [1, 3, 4]
    assert batch.extras.keys() == {"margin"}
    assert batch.extras["margin"].tolist() == [0.5, 0.5]
    assert (batch.num_rows, batch.num_tokens, batch.step, batch.closes_step) == (2, 18, 4, True)


def test_first_token_of_a_completion_is_predicted_by_the_prompts_last():
    batch = MicroBatch.from_rows([pair()], [0], NORM)
    assert batch.trained.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.predictors().tolist() == [2, 3, 2, 5, 6, 7]


def test_first_token_of_a_root_is_never_trained():
    row = {"input_ids": [5, 6, 7], "weights": [1.0, 1.0, 0.5], "lengths": [3], "parents": [-1], "roles": [0]}
    batch = MicroBatch.from_rows([row], [0], NORM)
    assert batch.weights.tolist() == [0.0, 1.0, 0.5]
    assert batch.predictors().tolist() == [0, 1]


def test_documents_of_a_packed_row_are_apart():
    row = {"input_ids": [1, 2, 3, 4], "weights": np.ones(4), "lengths": [2, 2], "parents": [-1, -1], "roles": [0, 0]}
    batch = MicroBatch.from_rows([row], [0], NORM)
    assert batch.weights.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.num_rows == 1


def test_a_device_is_not_asked_whether_a_micro_batch_is_empty():
    full, empty = (MicroBatch.from_rows(rows, range(len(rows)), NORM).to("meta") for rows in ([pair()], []))
    assert (full.is_empty, full.num_tokens) == (False, 9) and (empty.is_empty, empty.num_tokens) == (True, 0)


def test_empty_micro_batch_trains_nothing():
    batch = MicroBatch.from_rows([], [], NORM, step=2, k=0)
    assert batch.is_empty
    assert (batch.num_tokens, batch.num_rows, len(batch.trained), batch.closes_step) == (0, 0, 0, False)


def test_moves_every_tensor():
    batch = MicroBatch.from_rows([pair()], [0], NORM).to("meta")
    tensors = [v for v in vars(batch).values() if isinstance(v, torch.Tensor)] + list(batch.extras.values())
    assert {t.device.type for t in tensors} == {"meta"}
