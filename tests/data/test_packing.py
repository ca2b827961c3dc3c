"""Packs: what is in them, in which order, and what stays trained."""

import json
import time
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from rig import CHATML, assistant, t2, user, with_template
from transformers import AutoModelForCausalLM, AutoTokenizer

from workbench.data.packing import best_fit_decreasing, pack, plan_packs
from workbench.data.prepare import PrepareSpec, prepare

ROOT = Path(__file__).parents[1] / "parity"


def features(lengths, weights=None) -> Dataset:
    """Rows whose tokens are numbered through; all but the first of each trained."""
    rows, start = [], 0
    for i, n in enumerate(lengths):
        row_weights = weights[i] if weights else [0.0] + [1.0] * (n - 1)
        ids = list(range(start, start + n))
        rows.append({"input_ids": ids, "weights": row_weights, "lengths": [n], "parents": [-1], "roles": [0]})
        start += n
    return Dataset.from_list(rows)


def documents(row) -> list[list[int]]:
    out, start = [], 0
    for n in row["lengths"]:
        out.append(row["input_ids"][start : start + n])
        start += n
    return out


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([4, 6, 5, 5], [[1, 0], [2, 3]]),
        ([3, 3, 3, 3, 3], [[0, 1, 2], [3, 4]]),
        ([7, 8, 2, 3], [[1, 2], [0, 3]]),  # 2 goes where it fits best, after 3 went where only it fits
        ([10, 1, 10], [[0], [2], [1]]),
        ([6, 6, 4, 4], [[0, 2], [1, 3]]),  # equally full packs: the earlier one first
        ([], []),
    ],
)
def test_best_fit_decreasing(lengths, expected):
    assert best_fit_decreasing(lengths, 10) == expected


def test_best_fit_equals_a_plain_search():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 65, 300)
    packs, room = [], []
    for item in sorted(range(300), key=lambda i: (-lengths[i], i)):
        fits = [k for k in range(len(packs)) if room[k] >= lengths[item]]
        if fits:
            k = min(fits, key=lambda k: room[k])
        else:
            k = len(packs)
            packs.append([])
            room.append(64)
        packs[k].append(item)
        room[k] -= lengths[item]
    ours = best_fit_decreasing(lengths, 64)
    assert [sum(lengths[i] for i in p) for p in ours] == [sum(lengths[i] for i in p) for p in packs]
    assert sorted(chain(*ours)) == list(range(300))


def test_bfd_drops_tails_and_starts_no_row_with_one():
    packed, plan = pack(features([13, 11]), 10, "bfd")
    assert [documents(r) for r in packed] == [[list(range(10))], [list(range(13, 23))]]
    assert plan.dropped_tokens == 4


def test_bfd_split_loses_nothing():
    packed, plan = pack(features([13, 11, 4]), 10, "bfd_split")
    assert sorted(chain(*(r["input_ids"] for r in packed))) == list(range(28))
    assert [documents(r) for r in packed] == [[list(range(10))], [list(range(13, 23))], [[24, 25, 26, 27], [10, 11, 12], [23]]]
    assert (plan.dropped_tokens, plan.cuts) == (0, 2)
    assert [r["weights"] for r in packed][2] == [0, 1, 1, 1, 0, 1, 1, 0]


def test_wrapped_is_one_stream_in_order():
    packed, plan = pack(features([13, 11, 4]), 10, "wrapped")
    assert [r["input_ids"] for r in packed] == [list(range(10)), list(range(10, 20)), list(range(20, 28))]
    assert [(r["lengths"], r["parents"], r["roles"]) for r in packed] == [([n], [-1], [0]) for n in (10, 10, 8)]
    assert packed[1]["weights"] == [0, 1, 1, 0, 1, 1, 1, 1, 1, 1]
    assert (plan.dropped_tokens, plan.cuts) == (0, 2)


def test_wrapped_at_exact_ends():
    packed, plan = pack(features([10, 5, 5]), 10, "wrapped")
    assert ([r["input_ids"] for r in packed], plan.cuts) == ([list(range(10)), list(range(10, 20))], 0)


def test_weights_survive_and_the_first_token_of_a_document_has_none():
    weights = [[0.0, 0.0, 1.0, 0.5], [0.0, 0.25, 0.0]]
    packed, _ = pack(features([4, 3], weights), 7, "bfd")
    assert packed[0]["weights"] == [0.0, 0.0, 1.0, 0.5, 0.0, 0.25, 0.0]
    assert (packed[0]["lengths"], packed[0]["parents"], packed[0]["roles"]) == ([4, 3], [-1, -1], [0, 0])


def test_packed_conversations_train_the_same_tokens():
    tokenizer = with_template(t2(), CHATML)
    rows = [{"prompt": [user("q" * n)], "completion": [assistant("a" * (9 - n))]} for n in range(1, 9)]

    def trained(**spec):
        made, report = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
        texts = []
        for row in made:
            start = 0
            for n in row["lengths"]:
                pairs = list(zip(row["input_ids"], row["weights"], strict=True))[start : start + n]
                texts.append(tokenizer.decode([i for i, w in pairs if w]))
                start += n
        return sorted(texts), report

    plain, report = trained()
    packed, packed_report = trained(packing="bfd", max_length=60)
    assert plain == packed == sorted("a" * (9 - n) + "<|im_end|>\n" for n in range(1, 9))
    assert packed_report.trained_tokens == report.trained_tokens
    assert packed_report.packs == 4


def test_long_rows_are_cut_once_by_the_packing_that_cuts_them():
    rows = [{"text": "x" * 30}]
    for strategy, tokens in (("bfd", 10), ("bfd_split", 31), ("wrapped", 31)):
        made, report = prepare(Dataset.from_list(rows), t2(), PrepareSpec(max_length=10, packing=strategy), cache_dir=False)
        assert sum(map(len, made["input_ids"])) == report.tokens == tokens
        assert report.trained_tokens == tokens - len(made)
        assert (report.truncated, report.packing_cuts) == ((1, 0) if strategy == "bfd" else (0, 3))


def test_a_single_row_packs():
    made, report = prepare(Dataset.from_list([{"text": "hi"}]), t2(), PrepareSpec(packing="bfd"), cache_dir=False)
    assert (len(made), report.packs) == (1, 1)


def test_packs_and_their_order_are_the_recorded_ones():
    """Loss and accuracy of an untrained model on the first pack, as recorded for the peer on the same rows."""
    recorded = json.loads((ROOT.parents[1] / "invariant_refs/trl-1.16.0/sft_packing_bfd.json").read_text())["steps"][0]
    rows = [json.loads(line) for line in (ROOT / "data/text.jsonl").read_text().splitlines()]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "model")
    model = AutoModelForCausalLM.from_pretrained(ROOT / "model")
    made, _ = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(max_length=256, packing="bfd"), cache_dir=False)
    losses, hits = [], []
    with torch.no_grad():
        for ids in map(torch.tensor, documents(made[0])):
            logits = model(ids[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none"))
            hits.append(logits.argmax(-1) == ids[1:])
    assert torch.cat(losses).mean().item() == pytest.approx(recorded["loss"], rel=1e-5)
    assert torch.cat(hits).float().mean().item() == pytest.approx(recorded["mean_token_accuracy"], rel=1e-6)


def test_a_hundred_thousand_rows_are_planned_in_seconds():
    lengths = np.random.default_rng(0).integers(1, 1024, 100_000)
    started = time.process_time()
    plan = plan_packs(lengths, 1024, "bfd")
    assert time.process_time() - started < 10
    assert lengths.sum() / (1024 * len(plan.sizes)) > 0.99


@pytest.mark.parametrize(("least", "processes"), [(1, 2), (2, 2), (3, None), (10_000, None)])
def test_packs_are_the_same_in_processes_which_are_started_where_there_is_work_for_them(monkeypatch, least, processes):
    rows, started, plain_map = features([5, 6, 7, 8, 9, 3]), [], Dataset.map

    def counted(self, *args, num_proc=None, **kwargs):
        started.append(num_proc)
        return plain_map(self, *args, num_proc=num_proc, **kwargs)

    monkeypatch.setattr(Dataset, "map", counted)
    monkeypatch.setattr("workbench.data.packing._LEAST_PACKS", least)
    alone, _ = pack(rows, 8, "bfd_split")
    several, plan = pack(rows, 8, "bfd_split", num_proc=2)
    assert several.to_list() == alone.to_list() and len(plan.sizes) == 5
    assert started == [None, processes]
