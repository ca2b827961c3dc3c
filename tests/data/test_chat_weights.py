"""Which tokens are trained, decoded."""

import json

import pytest
from datasets import Dataset
from rig import CHATML, M4, M5, MARKED, TOOLS, assistant, slow, system, t1, t2, t4, user, with_template

from workbench.data.prepare import PrepareSpec, prepare
from workbench.errors import UserError


def rows_of(rows, tokenizer, **spec):
    made, report = prepare(Dataset.from_list(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
    return list(made), report


def weighted(row, tokenizer) -> list[tuple[str, float]]:
    """Runs of tokens of one weight above 0."""
    runs: list[tuple[str, float]] = []
    for index, weight in zip(row["input_ids"], row["weights"], strict=True):
        text = tokenizer.decode([index])
        if runs and runs[-1][1] == weight:
            runs[-1] = (runs[-1][0] + text, weight)
        else:
            runs.append((text, weight))
    return [(text, weight) for text, weight in runs if weight]


def chat(messages, template=CHATML, tokenizer=None, **spec):
    tokenizer = with_template(tokenizer or t2(), template)
    rows, _ = rows_of([{"messages": messages}], tokenizer, **spec)
    return weighted(rows[0], tokenizer)


TALK = [system("S"), user("same"), assistant("same"), user("more"), assistant("last")]
TOOL = {"role": "tool", "content": "result"}


@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("make", [t2, slow])
def test_assistant_and_last_turn(template, make):
    both = [("same<|im_end|>", 1.0), ("last<|im_end|>", 1.0)]
    assert chat(TALK, template, make(), train_on="assistant") == both
    assert chat(TALK, template, make(), train_on="last_turn") == both[1:]


def test_auto_trains_all_of_a_conversation_but_its_first_token():
    assert chat([user("q"), assistant("a")]) == [("user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n", 1.0)]


def test_weights_by_role():
    messages = [user("ask"), assistant("call"), TOOL, assistant("answer")]
    assert chat(messages, role_weights={"assistant": 1, "tool": 0.25}) == [
        ("call<|im_end|>", 1.0),
        ("result<|im_end|>", 0.25),
        ("answer<|im_end|>", 1.0),
    ]
    assert chat(messages, role_weights={"user": 2}) == [("ask<|im_end|>", 2.0)]
    assert chat(messages, role_weights={"assistant": 0.5, "user": 1}, train_on="last_turn") == [("answer<|im_end|>", 0.5)]


def test_reasoning_has_a_weight_of_its_own():
    messages = [user("q"), assistant("a", reasoning_content="why")]
    assert chat(messages, M5, role_weights={"assistant": 1, "reasoning": 0.5}) == [
        ("<think>\nwhy\n</think>", 0.5),
        ("\n\na<|im_end|>", 1.0),
    ]
    assert chat(messages, M5, role_weights={"assistant": 1, "reasoning": 0}) == [("\n\na<|im_end|>", 1.0)]


def test_flags_of_a_message():
    def flagged(**flags):
        return [user("q"), assistant("one", **flags), user("r"), assistant("two")]

    two = ("two<|im_end|>", 1.0)
    assert chat(flagged(train=False), train_on="assistant") == [two]
    assert chat(flagged(weight=0.5), train_on="assistant") == [("one<|im_end|>", 0.5), two]
    assert chat(flagged(train=True), train_on="last_turn") == [("one<|im_end|>", 1.0), two]
    assert chat(flagged(weight=0.5), train_on="last_turn") == [two]
    assert chat([user("q", train=True), assistant("a")], train_on="assistant") == [("q<|im_end|>", 1.0), ("a<|im_end|>", 1.0)]
    assert chat(flagged(train=False), train_on="all") == [
        ("user\nq<|im_end|>\n<|im_start|>assistant\n", 1.0),
        ("\n<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\ntwo<|im_end|>\n", 1.0),
    ]


def test_flags_do_not_leak_to_other_rows_or_into_the_text():
    tokenizer = with_template(t2(), CHATML)
    rows = [{"messages": [user("q"), assistant("a", train=False), user("r"), assistant("b", weight=0.5)]}, {"messages": TALK}]
    made, _ = rows_of(rows, tokenizer, train_on="assistant")
    assert weighted(made[0], tokenizer) == [("b<|im_end|>", 0.5)]
    assert weighted(made[1], tokenizer) == [("same<|im_end|>", 1.0), ("last<|im_end|>", 1.0)]
    assert "train" not in tokenizer.decode(made[0]["input_ids"])


def test_next_role_marker_is_trained_as_the_end_and_missing_ends_are_reported():
    tokenizer = with_template(t2(), M4)
    made, report = rows_of([{"messages": TALK}], tokenizer, train_on="assistant")
    assert weighted(made[0], tokenizer) == [("same<|user|>", 1.0), ("last", 1.0)]
    assert report.unterminated == 1
    assert any("without a terminator" in warning for warning in report.warnings)
    assert rows_of([{"prompt": TALK[:2], "completion": TALK[2:3]}], tokenizer)[1].unterminated == 1
    assert rows_of([{"prompt": TALK[:2], "completion": TALK[2:]}], with_template(t2(), CHATML))[1].unterminated == 0


def test_reasoning_lost_by_the_template_is_reported():
    messages = [user("q"), assistant("a", reasoning_content="w"), user("r"), assistant("b", reasoning_content="v")]
    for train_on in ("assistant", "all"):
        _, report = rows_of([{"messages": messages}], with_template(t2(), M5), train_on=train_on)
        assert report.reasoning_dropped == 1
        assert any("leaves out reasoning in 1 of 1 rows" in warning for warning in report.warnings)


def test_a_prompt_of_n_turns_starts_the_next_ones_tokens():
    """Where the template keeps what was said, turn after turn extends the same tokens."""
    tokenizer = with_template(t2(), CHATML)
    prompts = [{"prompt": TALK[:n]} for n in (2, 4)]
    made, _ = rows_of(prompts, tokenizer)
    whole = rows_of([{"messages": TALK}], tokenizer)[0][0]["input_ids"]
    for row in made:
        assert row["input_ids"] == whole[: len(row["input_ids"])]


def test_untrained_rows_are_counted_dropped_and_an_error_if_there_are_no_others():
    tokenizer = with_template(t2(), CHATML)
    rows = [{"messages": [user("q"), assistant("a")]}, {"messages": [user("only")]}, {"messages": TALK}]
    made, report = rows_of(rows, tokenizer, train_on="assistant")
    assert len(made) == 2
    assert (report.untrained_rows, report.dropped) == (1, {"untrained": 1})
    assert any("1 of 3 rows are left out" in warning for warning in report.warnings)
    with pytest.raises(UserError, match=r"train_on=assistant with the chat template \[[0-9a-f]{12}\]"):
        rows_of(rows[1:2], tokenizer, train_on="assistant")


def test_a_template_that_hides_the_assistant_is_an_error_before_training():
    tokenizer = with_template(t2(), CHATML.replace("m.content", "m.content | upper"))
    with pytest.raises(
        UserError, match=r"Row 0, column 'messages'.*train_on=assistant.*\[[0-9a-f]{12}\].*message 1 is not where"
    ):
        rows_of([{"messages": [user("q"), assistant("a")]}], tokenizer, train_on="assistant")


@pytest.mark.parametrize(
    ("row", "spec", "message"),
    [
        ({"text": "plain"}, {"train_on": "assistant"}, "train_on=assistant is impossible with plain text language_modeling"),
        ({"text": "plain"}, {"train_on": "completion"}, "Allowed here: auto, all"),
        ({"prompt": "p", "completion": "c"}, {"train_on": "last_turn"}, "Allowed here: auto, completion, all"),
        ({"prompt": "p", "chosen": "c", "rejected": "r"}, {"train_on": "assistant"}, "Allowed here: auto, completion, all"),
        (
            {"prompt": "p", "chosen": "c", "rejected": "r", "reference": "g"},
            {"train_on": "all"},
            "Allowed here: auto, completion",
        ),
        ({"prompt": "p"}, {"train_on": "completion"}, "impossible with plain text prompt_only"),
        ({"text": "plain"}, {"role_weights": {"user": 1.0}}, "role_weights has no effect"),
        ({"prompt": TALK[:2]}, {"role_weights": {"user": 1.0}}, "role_weights has no effect on conversational prompt_only"),
        ({"text": "plain"}, {"fold_system": True}, "fold_system has no effect"),
        ({"prompt": "p"}, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs has no effect"),
        ({"messages": TALK}, {"role_weights": {"user": 1.0}, "train_on": "all"}, "exclude each other"),
        ({"messages": TALK}, {"role_weights": {"user": 0.0}}, "trains nothing"),
        ({"messages": TALK}, {"role_weights": {"user": -1.0}}, "is not a weight"),
        ({"messages": TALK}, {"train_on": "asistant"}, "Did you mean 'assistant'"),
    ],
)
def test_impossible_targets_are_refused_before_anything_is_tokenised(row, spec, message, monkeypatch):
    monkeypatch.setattr("workbench.data.align.TextEncoder.encode", None)
    with pytest.raises(UserError, match=message):
        rows_of([row], with_template(t2(), CHATML), **spec)


def test_tools_none_empty_and_json_text_render_alike():
    """Two schemas in one column, which Arrow would fill up with None, and the same schema as text."""
    one = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "int"}}}}
    two = {"type": "function", "function": {"name": "g", "strict": True}}
    tokenizer = with_template(t2(), TOOLS)
    talk = [user("q"), assistant("a")]
    mixed = [{"messages": talk, "tools": t} for t in ([one], [two], None, [])]
    made, _ = rows_of(mixed, tokenizer)
    as_text, _ = rows_of([{"messages": talk, "tools": t} for t in (json.dumps([one]), "")], tokenizer)
    texts = [tokenizer.decode(row["input_ids"]) for row in (*made, *as_text)]
    assert texts[0] == tokenizer.apply_chat_template(talk, tools=[one], tokenize=False) == texts[4]
    assert texts[1] == tokenizer.apply_chat_template(talk, tools=[two], tokenize=False)
    assert texts[2] == texts[3] == texts[5] == tokenizer.apply_chat_template(talk, tokenize=False)
    assert not any("None" in text or "null" in text for text in texts)


def test_arguments_as_text_and_as_objects_render_alike():
    tokenizer = with_template(t2(), TOOLS)
    rows = [
        {"messages": [user("q"), assistant("", tool_calls=[{"type": "function", "function": {"name": "f", "arguments": a}}])]}
        for a in ('{"n": 1}', {"n": 1})
    ]
    first, second = (rows_of([row], tokenizer)[0][0]["input_ids"] for row in rows)
    assert first == second
    assert '"arguments": {"n": 1}' in tokenizer.decode(first)


def test_bad_tools_name_their_row():
    rows = [{"messages": TALK, "tools": "[]"}, {"messages": TALK, "tools": "{not json"}]
    with pytest.raises(UserError, match="Row 1, column 'tools'"):
        rows_of(rows, with_template(t2(), TOOLS))


def test_block_content_of_text_renders_as_text_and_images_are_refused_by_row():
    tokenizer = with_template(t2(), CHATML)
    blocks = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    made, _ = rows_of([{"messages": [user(blocks), assistant([{"type": "text", "text": "a"}])]}], tokenizer)
    assert "user\none two<|im_end|>" in tokenizer.decode(made[0]["input_ids"])
    image = [{"type": "image", "image": "cat.png"}, {"type": "text", "text": "what?"}]
    with pytest.raises(UserError, match=r"Row 0, column 'messages'.*1 image"):
        rows_of([{"messages": [user(image)]}], tokenizer)


def test_start_tokens_are_never_doubled():
    """A template that prints the start token, and a text that does, on a tokenizer that adds one."""
    tokenizer = with_template(t1(), "{{- bos_token }}" + CHATML)
    messages = [user("q"), assistant("a")]
    made, report = rows_of([{"messages": messages}], tokenizer)
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert made[0]["input_ids"] == expected
    assert (made[0]["input_ids"].count(0), report.double_bos) == (1, 0)
    made, report = rows_of([{"text": "<s>hi"}, {"text": "hi"}], tokenizer)
    assert made[0]["input_ids"] == made[1]["input_ids"] == [0, *tokenizer.encode("hi", add_special_tokens=False), 1]
    assert report.double_bos == 1


def test_a_template_that_prints_two_start_tokens_is_counted():
    tokenizer = with_template(t1(), "{{- bos_token + bos_token }}" + CHATML)
    assert rows_of([{"messages": TALK}], tokenizer)[1].double_bos == 1


def test_merges_across_the_end_of_a_turn_keep_the_terminator():
    """The tokenizer joins the newline of the header to one in the answer: the joint token is trained."""
    tokenizer = with_template(t4(), "{%- for m in messages %}{{- m.role + ':\n' + m.content + '<eos>' }}{%- endfor %}"
                              "{%- if add_generation_prompt %}{{- 'assistant:\n' }}{%- endif %}")  # fmt: skip
    made, _ = rows_of([{"messages": [user("q"), assistant("\nno")]}], tokenizer, train_on="assistant")
    assert weighted(made[0], tokenizer) == [("\n\nno<eos>", 1.0)]
