"""Features of every type: ids, boundaries, ends, truncation."""

import pytest
from datasets import Dataset
from rig import CHATML, M1, M3, M6, assistant, slow, system, t1, t2, t3, t4, user, with_template

from workbench.data.batch import Role
from workbench.data.prepare import PrepareSpec, prepare
from workbench.errors import UserError


def run(rows, tokenizer, **spec):
    made, report = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
    return list(made), report


def decoded(row, tokenizer) -> list[str]:
    """Text of each segment."""
    texts, start = [], 0
    for length in row["lengths"]:
        texts.append(tokenizer.decode(row["input_ids"][start : start + length]))
        start += length
    return texts


def trained(row, tokenizer) -> str:
    return tokenizer.decode([i for i, w in zip(row["input_ids"], row["weights"], strict=True) if w])


PC = {"prompt": "ab ", "completion": "yes"}


# -- plain text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "start"), [(t1, "<s>"), (t2, ""), (slow, "")])
def test_text_gets_the_tokenizers_start_and_one_end(make, start):
    tokenizer = make()
    eos = tokenizer.eos_token
    made, _ = run([{"text": "hi"}, {"text": f"hi{eos}"}, {"text": "é猫"}], tokenizer)
    assert [tokenizer.decode(r["input_ids"]) for r in made] == [f"{start}hi{eos}", f"{start}hi{eos}", f"{start}é猫{eos}"]
    assert made[0]["weights"] == [0.0] + [1.0] * (len(made[0]["weights"]) - 1)
    assert (made[0]["lengths"], made[0]["parents"], made[0]["roles"]) == ([len(made[0]["weights"])], [-1], [int(Role.TEXT)])


def test_a_text_tokenizer_without_end_token_is_refused_by_option():
    tokenizer = t2()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match=r"set model\.eos_token"):
        run([{"text": "hi"}], tokenizer)


@pytest.mark.parametrize("make", [t1, t2, slow])
def test_completion_and_its_end_are_trained_and_the_prompt_is_not(make):
    tokenizer = make()
    made, report = run([PC], tokenizer)
    assert trained(made[0], tokenizer) == f"yes{tokenizer.eos_token}"
    assert report.trained_tokens == 4
    made, _ = run([PC], tokenizer, train_on="all")
    assert trained(made[0], tokenizer).endswith(f"b yes{tokenizer.eos_token}")


@pytest.mark.parametrize("make", [t4, lambda: slow(("no", " y", "\n\n"))])
@pytest.mark.parametrize(
    ("prompt", "completion", "expected"),
    [("ab ", "yes", " yes"), ("n", "o!", "no!"), ("ab", "yes", "yes"), ("ab", " yes", " yes"), ("q\n", "\na", "\n\na")],
)
def test_a_token_across_the_joint_belongs_to_the_completion(make, prompt, completion, expected):
    """The ids are those of the joint text; the token that holds the completion's first character is trained."""
    tokenizer = make()
    made, _ = run([{"prompt": "x" + prompt, "completion": completion}], tokenizer)
    assert made[0]["input_ids"] == [*tokenizer.encode("x" + prompt + completion), tokenizer.eos_token_id]
    assert trained(made[0], tokenizer) == expected + tokenizer.eos_token


@pytest.mark.parametrize(("make", "count"), [(t1, 4), (t2, 3)])
def test_an_empty_prompt_trains_as_far_as_there_is_context(make, count):
    """With a start token all of the completion and its end; without one, all but the first token."""
    _, report = run([{"prompt": "", "completion": "yes"}], make())
    assert report.trained_tokens == count


def test_an_empty_completion_trains_the_end_only():
    tokenizer = t2()
    made, _ = run([{"prompt": "ab", "completion": ""}], tokenizer)
    assert trained(made[0], tokenizer) == "<|im_end|>"
    tokenizer = with_template(t2(), CHATML)
    made, _ = run([{"prompt": [user("q")], "completion": [assistant("")]}], tokenizer)
    assert trained(made[0], tokenizer) == "<|im_end|>\n"


# -- conversations ------------------------------------------------------------------------------------------------------


def test_chat_ids_are_the_templates_and_nothing_is_added():
    for template, make in ((M1, t1), (CHATML, t2), (CHATML, slow), (M6, t3)):
        tokenizer = with_template(make(), template)
        talk = [user("q"), assistant("a"), user("r"), assistant("b")]
        expected = tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
        assert run([{"messages": talk}], tokenizer)[0][0]["input_ids"] == expected
        row = run([{"prompt": talk[:3], "completion": talk[3:]}], tokenizer)[0][0]
        assert row["input_ids"] == expected


@pytest.mark.parametrize("make", [t2, slow])
def test_completion_of_a_conversation_starts_after_the_generation_prompt(make):
    tokenizer = with_template(make(), CHATML)
    row = {"prompt": [system("s"), user("same")], "completion": [assistant("same")]}
    assert trained(run([row], tokenizer)[0][0], tokenizer) == "same<|im_end|>\n"
    assert trained(run([row], tokenizer, train_on="assistant")[0][0], tokenizer) == "same<|im_end|>"


def test_a_generation_prompt_that_opens_thinking_is_no_part_of_an_answer_without():
    tokenizer = with_template(t2(), M3)
    rows = [
        {"prompt": [user("q")], "completion": [assistant("a")]},
        {"prompt": [user("q")], "completion": [assistant("a", reasoning_content="w")]},
    ]
    assert [trained(run([row], tokenizer)[0][0], tokenizer) for row in rows] == ["a<|im_end|>\n", "w\n</think>\n\na<|im_end|>\n"]


def test_assistant_turns_of_the_prompt_are_trained_if_asked_for():
    tokenizer = with_template(t2(), CHATML)
    row = {"prompt": [user("q"), assistant("one"), user("r")], "completion": [assistant("two")]}
    assert trained(run([row], tokenizer)[0][0], tokenizer) == "two<|im_end|>\n"
    assert trained(run([row], tokenizer, train_on="assistant")[0][0], tokenizer) == "one<|im_end|>two<|im_end|>"
    assert trained(run([row], tokenizer, train_on="last_turn")[0][0], tokenizer) == "two<|im_end|>"


def test_other_roles_within_a_completion_are_reported():
    tokenizer = with_template(t2(), CHATML)
    row = {"prompt": [user("q")], "completion": [assistant("c"), {"role": "tool", "content": "t"}, assistant("d")]}
    made, report = run([row], tokenizer)
    assert trained(made[0], tokenizer) == "c<|im_end|>\n<|im_start|>tool\nt<|im_end|>\n<|im_start|>assistant\nd<|im_end|>\n"
    assert report.other_roles == 1
    made, report = run([row], tokenizer, train_on="assistant")
    assert (trained(made[0], tokenizer), report.other_roles) == ("c<|im_end|>d<|im_end|>", 0)


def test_template_variables_come_from_the_config_and_the_row():
    tokenizer = with_template(t2(), "{{- mood }}" + CHATML)
    rows = [{"prompt": [user("q")], "chat_template_kwargs": kwargs} for kwargs in ({"mood": "glad"}, {"other": 1})]
    made, _ = run(rows, tokenizer, chat_template_kwargs={"mood": "sad"})
    assert [tokenizer.decode(r["input_ids"])[:4] for r in made] == ["glad", "sad<"]


def test_bad_rows_are_an_error_by_row_or_skipped_and_counted():
    tokenizer = with_template(t3(), M6)
    good = {"messages": [user("q"), assistant("a")]}
    rows = [good, {"messages": [user("q"), user("q2")]}, good]
    with pytest.raises(UserError, match=r"Row 1, column 'messages'.*roles \[user, user\]: Conversation roles must alternate"):
        run(rows, tokenizer)
    made, report = run(rows, tokenizer, on_bad_row="skip")
    assert (len(made), report.dropped) == (2, {"bad_row": 1})
    assert report.bad_rows[0].startswith("Row 1, column 'messages'")


def test_a_system_message_is_folded_for_templates_that_refuse_it():
    tokenizer = with_template(t3(), M6)
    rows = [{"messages": [system("s"), user("q"), assistant("a")]}]
    with pytest.raises(UserError, match="fold_system=true"):
        run(rows, tokenizer)
    made, _ = run(rows, tokenizer, fold_system=True, train_on="assistant")
    assert "user\ns\n\nq<end_of_turn>" in tokenizer.decode(made[0]["input_ids"])
    assert trained(made[0], tokenizer) == "a<end_of_turn>"


# -- the other types ----------------------------------------------------------------------------------------------------


def test_a_pair_shares_its_prompt():
    tokenizer = with_template(t2(), CHATML)
    row = {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")], "margin": 2}
    made, report = run([row], tokenizer)
    prompt = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert decoded(made[0], tokenizer) == [prompt, "good<|im_end|>\n", "bad<|im_end|>\n"]
    assert (made[0]["parents"], made[0]["roles"]) == ([-1, 0, 0], [Role.PROMPT, Role.CHOSEN, Role.REJECTED])
    assert trained(made[0], tokenizer) == "good<|im_end|>\nbad<|im_end|>\n"
    assert (made[0]["margin"], report.trained_tokens) == (2.0, 6 + 5)


def test_a_pair_whose_joint_tokens_differ_shares_what_they_agree_on():
    """The chosen answer merges with the prompt's last character: its token is the answer's, the other keeps it untrained."""
    tokenizer = t4()
    made, _ = run([{"prompt": "xyn", "chosen": "o!", "rejected": "a!"}], tokenizer)
    assert decoded(made[0], tokenizer) == ["xy", "no!<eos>", "na!<eos>"]
    assert trained(made[0], tokenizer) == "no!<eos>a!<eos>"


def test_a_pair_with_nothing_shared_is_two_roots():
    made, _ = run([{"prompt": "", "chosen": "good", "rejected": "bad"}], t2())
    assert (made[0]["parents"], made[0]["roles"]) == ([-1, -1], [Role.CHOSEN, Role.REJECTED])
    assert made[0]["weights"] == [0.0, 1, 1, 1, 1, 0.0, 1, 1, 1]


def test_identical_pairs_are_dropped_and_counted_before_and_after_truncation():
    pair = {"prompt": "0123456789", "chosen": "good", "rejected": "bad"}
    made, report = run([pair, {**pair, "rejected": "good"}], t2())
    assert (len(made), report.dropped) == (1, {"identical_pair": 1})
    same_start = [{"prompt": "0", "chosen": "123456789a", "rejected": "123456789b"}, pair]
    _, report = run([*same_start, {"prompt": "0", "chosen": "1", "rejected": "2"}], t2(), max_length=10)
    assert report.dropped == {"identical_pair": 1, "cut_away": 1}


def test_unpaired_rows_carry_their_label():
    rows = [{"prompt": "p", "completion": "c", "label": True}, {"prompt": "", "completion": "cd", "label": False}]
    made, _ = run(rows, t2())
    assert [r["label"] for r in made] == [True, False]
    assert (made[0]["roles"], made[0]["parents"]) == ([Role.PROMPT, Role.COMPLETION], [-1, 0])
    assert (made[1]["roles"], made[1]["weights"]) == ([Role.COMPLETION], [0.0, 1.0, 1.0])


def test_steps_are_chained_and_judged_at_their_last_token():
    tokenizer = t1()
    row = {"prompt": "q", "completions": ["one", "two", "three"], "labels": [True, False, None]}
    made, _ = run([row], tokenizer)
    assert decoded(made[0], tokenizer) == ["<s>q", "one\n", "two\n", "three\n"]
    assert (made[0]["parents"], made[0]["roles"]) == ([-1, 0, 1, 2], [Role.PROMPT, *[Role.STEP] * 3])
    assert made[0]["labels"] == [1.0, 0.0, -100.0]
    assert [i for i, w in enumerate(made[0]["weights"]) if w] == [5, 9]
    made, report = run([row], tokenizer, max_length=8)
    assert (decoded(made[0], tokenizer), made[0]["labels"]) == (["<s>q", "one\n"], [1.0])
    assert report.truncated == 1
    with pytest.raises(UserError, match="Row 0: A step of a stepwise row has no token of its own"):
        run([{**row, "completions": ["one", "", "three"]}], tokenizer, step_separator="")


def test_prompts_keep_the_rows_other_columns():
    tokenizer = with_template(t2(), CHATML)
    rows = [
        {"prompt": [user("q")], "answer": 7, "prompt_id": "x"},
        {"prompt": [user("q"), assistant("so")], "answer": 8, "prompt_id": "y"},
    ]
    made, report = run(rows, tokenizer)
    assert [(r["answer"], r["prompt_id"]) for r in made] == [(7, "x"), (8, "y")]
    assert made[0]["prompt"][0]["content"] == "q"
    assert tokenizer.decode(made[0]["input_ids"]).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(made[1]["input_ids"]).endswith("<|im_start|>assistant\nso")
    assert (set(made[0]["weights"]), report.trained_tokens) == ({0.0}, 0)


# -- truncation ---------------------------------------------------------------------------------------------------------

LONG = {"prompt": "0123456789ab", "completion": "xyz"}  # 12 + 3 + end


def test_a_completion_cut_away_is_dropped_and_counted_in_any_company():
    short = {"prompt": "p", "completion": "c"}
    made, report = run([short, LONG, short], t2(), max_length=10)
    assert (len(made), report.dropped, report.truncated) == (2, {"cut_away": 1}, 0)
    made, report = run([short, LONG], t2(), max_length=10, truncation="keep_end")
    assert (len(made), report.dropped, report.truncated) == (2, {}, 1)
    assert t2().decode(made[1]["input_ids"]) == "6789abxyz<|im_end|>"
    assert trained(made[1], t2()) == "xyz<|im_end|>"
    made, report = run([short, LONG], t2(), max_length=10, truncation="drop")
    assert (len(made), report.dropped) == (1, {"too_long": 1})


def test_no_row_left_is_an_error_that_says_why():
    with pytest.raises(UserError, match=r"No row of 'train' is left of 1: cut_away 1 \(data.max_length=10"):
        run([LONG], t2(), max_length=10)
    with pytest.raises(UserError, match="no rows"):
        prepare(Dataset.from_dict({"text": []}), t2(), PrepareSpec(), cache_dir=False)


def test_a_cut_rows_end_is_not_invented_and_is_counted():
    made, report = run([{"text": "x" * 20}, {"text": "x" * 9}], t2(), max_length=10)
    assert t2().decode(made[0]["input_ids"]) == "x" * 10
    assert made[1]["input_ids"][-1] == t2().eos_token_id
    assert (report.truncated, report.cut_before_terminator) == (1, 1)
    _, report = run([{"text": "x" * 20}], t2(), max_length=10, truncation="keep_end")
    assert (report.truncated, report.cut_before_terminator) == (1, 0)


def test_a_cut_turn_trains_what_is_left_of_it():
    tokenizer = with_template(t2(), CHATML)
    header = len(tokenizer.encode("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"))
    made, report = run([{"messages": [user("q"), assistant("answer")]}], tokenizer, train_on="assistant", max_length=header + 3)
    assert trained(made[0], tokenizer) == "ans"
    assert report.cut_before_terminator == 1


def test_each_side_of_a_pair_is_cut_on_its_own():
    row = {"prompt": "0123", "chosen": "ab", "rejected": "abcdefghij"}
    alone, _ = run([{**row, "rejected": "zz"}], t2(), max_length=8, truncation="keep_end")
    made, _ = run([row], t2(), max_length=8, truncation="keep_end")
    assert decoded(alone[0], t2()) == ["0123", "ab<|im_end|>", "zz<|im_end|>"]
    assert decoded(made[0], t2()) == ["0123ab<|im_end|>", "defghij<|im_end|>"]
    assert trained(made[0], t2()) == "ab<|im_end|>efghij<|im_end|>"


# -- options ------------------------------------------------------------------------------------------------------------


def test_the_methods_types_choose_among_columns_that_fit_several():
    row = {"prompt": "p", "chosen": "c", "rejected": "r", "completion": "d"}
    assert run([row], t2())[1].data_type == "preference"
    assert run([row], t2(), data_types=("prompt_completion",))[1].data_type == "prompt_completion"
    with pytest.raises(UserError, match="not what this method takes"):
        run([row], t2(), data_type="preference", data_types=("prompt_completion",))


def test_unused_columns_are_reported():
    assert run([{"text": "hi", "imgae": "x"}], t2())[1].unused_columns == ["imgae"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"max_length": 1}, "two tokens"),
        ({"truncation": "keep_strat"}, "Did you mean 'keep_start'"),
        ({"packing": "bfd", "max_length": None}, "set data.max_length"),
        ({"packing": "wrapped", "truncation": "keep_end"}, "has no effect"),
        ({"packing": "best"}, "bfd, bfd_split, wrapped"),
    ],
)
def test_bad_options_are_refused(spec, message):
    with pytest.raises(UserError, match=message):
        PrepareSpec(**spec)


def test_packing_is_for_rows_of_one_text():
    with pytest.raises(UserError, match="not preference"):
        run([{"prompt": "p", "chosen": "c", "rejected": "r"}], t2(), packing="bfd")


def test_specs_are_hashable_and_compare_by_value():
    a, b = (PrepareSpec(role_weights={"user": w}, chat_template_kwargs={"x": [1]}) for w in (1.0, 1.0))
    assert a == b and hash(a) == hash(b)
    assert a != PrepareSpec(role_weights={"user": 0.5}, chat_template_kwargs={"x": [1]})


@pytest.mark.parametrize("truncation", ["keep_start", "drop"])
def test_a_prompt_that_is_too_long_is_left_out_rather_than_cut(truncation):
    """What is left of it would not ask its question, nor end where an answer begins (report 74)."""
    rows = Dataset.from_list([{"prompt": "12+34="}, {"prompt": "1+1=" * 20}])
    made, report = prepare(rows, t1(), PrepareSpec(max_length=12, truncation=truncation), cache_dir=False)
    assert len(made) == 1 and report.dropped == {"too_long": 1}
    kept, report = prepare(rows, t1(), PrepareSpec(max_length=12, truncation="keep_end"), cache_dir=False)
    assert len(kept) == 2 and report.truncated == 1
