"""Counts, rows to look at and findings of an inspection, on sets small enough to count by hand.

The tokenizer of the embedded world has one token for a character and for each word of its template, so that
``chat("1+1", "2")`` is 8 tokens of the user and 6 of the assistant, of which ``2`` and the end token are trained.
"""

import numpy as np
import pytest
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from workbench.data.formats import DATA_TYPES
from workbench.data.inspection import SetInspection, inspect_sets
from workbench.data.inspection_counts import Bin, Sequences, histogram
from workbench.data.inspection_findings import find
from workbench.data.inspection_rows import ShownRow, Skipped, pieces, spread
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.tiny.tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def chat(question: str, answer: str, **flags) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer, **flags}]}


def inspect(rows: list[dict], *, tokenizer=TOKENIZER, eval_rows: list[dict] | None = None, show=4, types=DATA_TYPES, **options):
    data = DataModule(Dataset.from_list(rows), eval=eval_rows and Dataset.from_list(eval_rows), **options)
    return inspect_sets(data, tokenizer, types, rows=show)


def kinds(sets: dict[str, SetInspection], **options) -> dict[tuple[str, str], str]:
    """(set, kind) -> level."""
    return {(f.where, f.kind): f.level for f in find(sets, None, TOKENIZER, **options)}


def runs(row: ShownRow, state) -> list[str]:
    """Text of each segment for which ``state`` holds of the token."""
    return ["".join(t.text for t in s.tokens if not isinstance(t, Skipped) and state(t)) for s in row.segments]


def trained(row: ShownRow) -> list[str]:
    return runs(row, lambda t: t.weight)


def cut(row: ShownRow) -> list[str]:
    return runs(row, lambda t: t.cut)


# -- counts -----------------------------------------------------------------------------------------------------------


def test_counts_of_conversations_by_hand():
    rows = [chat("1+1", "2"), chat("1+1", "2"), chat("10+1", "11"), {"messages": [{"role": "user", "content": "hm"}]}]
    found = inspect(rows, train_on="assistant")["train"]
    counts = found.counts
    assert (found.report.rows_in, found.report.rows_out, counts.rows) == (4, 3, 3)
    assert found.report.dropped == {"untrained": 1}
    assert (counts.tokens, counts.trained) == (14 + 14 + 16, 2 + 2 + 3)
    assert found.share_trained == pytest.approx(7 / 44)
    assert (counts.duplicates, counts.unended, counts.ended, counts.blank, counts.weighted) == (1, 0, 3, 0, 0)
    assert found.raw.roles == {"user": 4, "assistant": 3}
    assert counts.percentiles() == {0: 14, 5: 14, 25: 14, 50: 14, 75: 16, 95: 16, 99: 16, 100: 16}
    assert found.bins() == [Bin(14, 14, 2), Bin(15, 15, 0), Bin(16, 16, 1)]


def test_weights_other_than_one_are_counted():
    found = inspect([chat("1+1", "2", weight=0.5), chat("1+1", "3")], train_on="assistant")["train"]
    assert (found.counts.trained, found.counts.weighted) == (4, 2)


def test_pairs_count_each_answer_and_read_the_prompt_twice():
    prompt = [{"role": "user", "content": "1+1"}]
    answers = {k: [{"role": "assistant", "content": v}] for k, v in (("chosen", "2"), ("rejected", "333"))}
    found = inspect([{"prompt": prompt, **answers, "margin": 2.0}])["train"]
    # prompt: user's 8 and the header's 3; answers: text, end token, line break
    assert (found.counts.tokens, found.counts.trained) == (11 + 3 + 5, 3 + 5)
    assert found.counts.lengths.tolist() == [11 + 5]
    sequences = Sequences.of(found.rows)
    assert (sequences.count[0], sequences.tokens[0], sequences.longest[0]) == (2, 14 + 16, 16)
    assert found.raw.roles == {"assistant": 2, "user": 1}
    shown = found.shown[0]
    assert [s.title for s in shown.segments] == ["prompt", "chosen", "rejected"]
    assert trained(shown) == ["", "2<|im_end|>\n", "333<|im_end|>\n"]
    assert shown.note == "margin 2"


def test_sides_of_pairs_and_their_margins():
    pairs = [("2", "33", 0.0), ("22", "3", 1.0), ("222", "333", 2.0), ("2", "333", 3.0)]
    rows = [{"prompt": "1+1=", "chosen": c, "rejected": r, "margin": m} for c, r, m in pairs]
    found = inspect(rows)["train"]
    assert found.counts.trained_by_role == {"chosen": 1 + 2 + 3 + 1 + 4, "rejected": 2 + 1 + 3 + 3 + 4}  # and an end token each
    assert (found.counts.chosen_longer, found.counts.rejected_longer) == (1, 2)
    assert found.margins == (0.0, 1.5, 3.0)
    without = inspect([{k: v for k, v in row.items() if k != "margin"} for row in rows])["train"]
    assert without.margins is None and without.to_dict()["trained_by_role"]["rejected"] == 13
    triple = inspect([{**rows[0], "reference": "2222"}])["train"]
    assert triple.counts.trained_by_role == {"chosen": 2, "rejected": 3, "gold": 5}
    single = inspect([{"prompt": "a", "completion": "b"}])["train"]
    assert not single.counts.trained_by_role


def test_labels_of_unpaired_and_stepwise_rows():
    rows = [{"prompt": "1+1=", "completion": str(i), "label": i == 2} for i in range(4)]
    assert inspect(rows)["train"].labels == {"true": 1, "false": 3}
    steps = {"prompt": "ab", "completions": ["c", "dd"], "labels": [True, False]}
    found = inspect([steps])["train"]
    assert found.labels == {"true": 1, "false": 1}
    assert found.counts.lengths.tolist() == [2 + 2 + 3]  # a line break after each step
    assert [s.title for s in found.shown[0].segments] == ["prompt", "step 1 (right)", "step 2 (wrong)"]
    assert not found.shown[0].note
    soft = inspect([{**steps, "labels": [0.7, -100]}])["train"].shown[0]
    assert [s.title for s in soft.segments[1:]] == ["step 1 (right with probability 0.7)", "step 2 (no label)"]
    assert trained(soft) == ["", "\n", ""]
    assert trained(found.shown[0]) == ["", "\n", "\n"]
    assert not kinds({"train": found}), "stepwise rows train no end token, and need none"


def test_a_prompt_set_has_no_faults():
    found = inspect([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}])
    assert (found["train"].counts.tokens, found["train"].counts.trained) == (8, 0)
    assert not kinds(found)


def test_rows_that_are_also_in_the_training_set():
    rows = [chat("1+1", str(i)) for i in range(8)]
    found = inspect(rows, eval_rows=[rows[3], chat("1+1", "9"), rows[5]])
    assert found["eval"].also_in_train == 2
    assert kinds(found) == {("eval", "leak"): "fault"}
    assert kinds(found, tolerance=0.7) == {("eval", "leak"): "warning"}


def test_histogram_widths_are_round_and_hold_every_row():
    lengths = np.array([3, 17, 30, 31])
    found = histogram(lengths, bins=3)
    assert found == [Bin(0, 19, 2), Bin(20, 39, 2)]
    assert sum(b.rows for b in histogram(np.arange(1000))) == 1000
    assert len(histogram(np.arange(7, 1000))) <= 12


def test_spread_keeps_both_ends():
    assert spread(5, 10) == [0, 1, 2, 3, 4]
    found = spread(1000, 11)
    assert (found[0], found[-1], len(found)) == (0, 999, 11)


# -- packing ----------------------------------------------------------------------------------------------------------


def text_rows(*lengths: int) -> list[dict]:
    """Text rows of these numbers of tokens, the end token included."""
    return [{"text": chr(97 + i) * (n - 1)} for i, n in enumerate(lengths)]


def test_best_fit_packs_by_hand():
    found = inspect(text_rows(6, 4, 5, 3), packing="bfd", max_length=10)["train"]
    packing = found.packing
    assert (packing.packs, packing.untrained, packing.dropped_tokens, packing.cuts) == (2, 0, 0, 0)
    assert (packing.efficiency, packing.documents) == (18 / 20, 2.0)
    # counted as rows, not as packs: each one's first token is untrained
    assert (found.counts.rows, found.counts.tokens, found.counts.trained) == (4, 18, 14)
    assert sorted(found.counts.lengths.tolist()) == [3, 4, 5, 6]
    pack = found.shown[0]
    assert [(s.title, s.length) for s in pack.segments] == [("document 1", 6), ("document 2", 4)]
    assert trained(pack) == ["aaaa<|im_end|>", "bb<|im_end|>"]


def test_wrapped_packs_show_the_borders_that_their_segments_do_not_have():
    found = inspect(text_rows(6, 7, 3), packing="wrapped", max_length=8)["train"]
    assert (found.packing.packs, found.packing.cuts, found.packing.documents) == (2, 1, 2.0)
    assert found.packing.efficiency == 1.0
    assert (found.counts.rows, found.counts.unended) == (3, 0), "rows are judged before they are cut into packs"
    assert [(s.title, s.length) for s in found.shown[0].segments] == [("document 1", 6), ("document 2", 2)]
    assert trained(found.shown[0])[1] == "b", "a document's first token stays untrained within a pack"


def test_split_rows_are_not_shown_as_cut_off():
    found = inspect(text_rows(9), packing="bfd_split", max_length=4, show=1)["train"]
    assert (found.packing.packs, found.packing.cuts) == (3, 2)
    assert found.packing.untrained == 1, "the last piece is one token, which has no context"
    assert cut(found.shown[1]) == [""] and found.shown[1].length == 9
    assert kinds({"train": found}) == {("train", "untrained_packs"): "warning"}


# -- rows to look at --------------------------------------------------------------------------------------------------


def test_a_cut_row_shows_what_is_kept_trained_and_lost():
    found = inspect([chat("1+1", "abcdef")], train_on="assistant", max_length=14, show=1)["train"]
    row = found.shown[0]
    assert (row.length, row.trained) == (14, 3)
    assert runs(row, lambda t: t.weight and not t.cut) == ["abc"]
    assert cut(row) == ["def<|im_end|>\n"]
    assert found.longest == 19
    assert "its end is lost" in row.note


def test_the_end_kept_shows_the_lost_start():
    found = inspect([chat("1+1", "ab")], train_on="assistant", max_length=8, truncation="keep_end", show=1)["train"]
    assert cut(found.shown[0]) == ["<|im_start|>user\n1+1<|im_end|>"]
    assert trained(found.shown[0]) == ["ab<|im_end|>"]
    assert not kinds({"train": found})


def test_a_row_that_is_left_out_shows_what_it_would_have_been():
    rows = [chat("1", "2"), {"messages": [{"role": "user", "content": "alone"}]}]
    row = next(r for r in inspect(rows, train_on="assistant")["train"].shown if "row 1" in r.title)
    assert row.note == "left out: untrained"
    assert runs(row, lambda t: True) == ["<|im_start|>user\nalone<|im_end|>\n"]
    assert trained(row) == [""]


def test_rows_by_number():
    found = inspect([chat("1", str(i)) for i in range(5)], show=[4, 2], train_on="assistant")["train"]
    assert [trained(r) for r in found.shown] == [["4<|im_end|>"], ["2<|im_end|>"]]
    with pytest.raises(UserError, match=r"no row 5.*0 to 4"):
        inspect([chat("1", str(i)) for i in range(5)], show=[5])


def test_the_first_the_longest_and_each_kind_of_trouble_are_shown():
    rows = [*(chat("1", str(i)) for i in range(6)), chat("1", "x" * 30), {"messages": [{"role": "user", "content": "alone"}]}]
    found = inspect(rows, train_on="assistant", max_length=25, show=3)["train"]
    assert [r.title for r in found.shown] == ["row 0, first", "row 6, longest", "row 7, untrained"]


def test_long_rows_are_shortened_around_what_changes():
    found = inspect([chat("q" * 2000, "a" * 1000)], train_on="assistant", max_length=None, show=1)["train"]
    tokens = found.shown[0].segments[0].tokens
    skipped = [t for t in tokens if isinstance(t, Skipped)]
    assert len(tokens) < 600
    assert len(tokens) - len(skipped) + sum(t.count for t in skipped) == found.shown[0].length
    texts = "".join(t.text for t in tokens if not isinstance(t, Skipped))
    assert "assistant\naaaa" in texts and texts.endswith("a<|im_end|>\n")


def test_pieces_join_to_the_text_where_characters_span_tokens():
    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, clean_up_tokenization_spaces=False)
    ids = tokenizer("é ü")["input_ids"]
    assert pieces(tokenizer, ids) == ["", "é", " ", "", "ü"]
    assert pieces(tokenizer, ids[:1]) == ["\ufffd"], "half a character at the end is not lost"


# -- findings ---------------------------------------------------------------------------------------------------------


def template(tokenizer: PreTrainedTokenizerFast, end: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% if m.role == 'assistant' %}" + end + "{% endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


@pytest.mark.parametrize(("bad", "level"), [(0, None), (1, "warning"), (2, "fault")])
def test_a_tenth_of_the_rows_makes_a_fault(bad, level):
    rows = [chat("1", str(i)) for i in range(20 - bad)] + [{"messages": [{"role": "user", "content": "alone"}]}] * bad
    assert kinds(inspect(rows, train_on="assistant")).get(("train", "untrained")) == level


def test_no_end_token_at_all_is_a_fault_whatever_the_tolerance():
    tokenizer = template(tiny_tokenizer(), "!")
    found = inspect([chat("1", str(i)) for i in range(3)], tokenizer=tokenizer, train_on="assistant")
    assert found["train"].counts.unended == 3
    assert kinds(found, tolerance=1.1)[("train", "no_terminator")] == "fault"


def test_an_end_token_within_the_answer_is_no_terminator():
    tokenizer = template(tiny_tokenizer(), "")
    found = inspect([chat("1", "a<|im_end|>b"), chat("1", "ab<|im_end|>")], tokenizer=tokenizer, train_on="assistant")["train"]
    assert (found.counts.unended, found.counts.ended) == (1, 1)


def test_the_end_token_may_pad_as_well():
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    found = inspect([chat("1", "2")], tokenizer=tokenizer, train_on="assistant")["train"]
    assert (found.counts.trained, found.counts.ended) == (2, 1)


def test_rows_cut_to_the_limit_are_not_counted_as_unended_too():
    found = inspect([chat("1", "2"), chat("1", "x" * 20)], train_on="assistant", max_length=20)["train"]
    assert (found.report.cut_before_terminator, found.counts.unended) == (1, 0)


def test_empty_answers():
    found = inspect([chat("1", ""), chat("1", "2"), chat("2", "")], train_on="assistant")
    assert found["train"].counts.blank == 2
    assert kinds(found) == {("train", "empty_answer"): "fault"}


def test_two_start_tokens_are_counted_where_they_are_trained():
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template
    found = inspect([chat("1", str(i)) for i in range(40)], tokenizer=tokenizer, train_on="assistant")
    assert found["train"].counts.double_bos == 40
    sentence = next(f.text for f in find(found, None, tokenizer, tolerance=1.1) if f.kind == "double_bos")
    assert sentence.startswith("40 of 40 rows start with two start tokens (<|im_start|>)")


def test_a_row_that_training_stops_at_is_told_with_all_the_others():
    rows = [chat("1", str(i)) for i in range(9)] + [{"messages": [{"role": "critic", "content": "no"}]}]
    found = inspect(rows, train_on="assistant")
    assert found["train"].report.dropped == {"bad_row": 1}
    assert found["train"].stops.startswith("Row 9")
    assert kinds(found)[("train", "bad_row")] == "fault"
    skipped = inspect(rows, train_on="assistant", on_bad_row="skip")
    assert kinds(skipped, tolerance=0.2)[("train", "bad_row")] == "warning"


def test_nothing_but_bad_rows_is_an_error_as_in_training():
    with pytest.raises(UserError, match="Row 0"):
        inspect([{"messages": [{"role": "critic", "content": "no"}]}])


def test_a_set_of_which_nothing_is_left_is_shown():
    found = inspect([chat("1+1", "2")] * 3, train_on="assistant", max_length=5)
    assert found["train"].report.dropped == {"cut_away": 3} and found["train"].rows is None
    assert len(found["train"].shown) == 3
    assert {("train", "empty"), ("train", "cut_away")} <= kinds(found).keys()


def test_columns_that_look_misspelt():
    rows = [{**chat("1", "2"), "tool": "x", "image_path": "y", "id": 3}]
    found = inspect(rows, train_on="assistant")
    assert found["train"].report.unused_columns == ["tool", "image_path", "id"]
    texts = [f.text for f in find(found, None, TOKENIZER) if f.kind == "column"]
    assert [("'tool'" in t, "'tools'" in t, "'images'" in t) for t in texts] == [(True, True, False), (False, False, True)]


def test_a_type_that_the_method_does_not_take():
    with pytest.raises(UserError, match="preference"):
        inspect([{"prompt": "a", "chosen": "b", "rejected": "c"}], types=("language_modeling",))


def test_a_stream_is_read_as_far_as_asked():
    rows = [chat("1", str(i)) for i in range(50)]
    data = DataModule(Dataset.from_list(rows), streaming=True, packing="bfd", max_length=48, train_on="assistant")
    found = inspect_sets(data, TOKENIZER, DATA_TYPES, rows=1, stream_rows=10)["train"]
    assert (found.report.rows_in, found.counts.rows, found.is_stream) == (10, 10, True)
    # 12 tokens a row, 13 from row 10 on: four rows to a pack
    assert (found.packing.packs, found.counts.tokens) == (3, 120)


def test_the_data_module_is_left_as_it_was():
    data = DataModule(Dataset.from_list([chat("1", "2")] * 4), batch_size=2)
    before = {k: v for k, v in vars(data).items() if not k.startswith("_")}
    inspect_sets(data, TOKENIZER, DATA_TYPES)
    assert all(before[k] is v for k, v in vars(data).items() if not k.startswith("_")) and not data.reports
