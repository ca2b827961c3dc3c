"""What goes wrong with data in practice: the smallest input that shows it, through sources, preparation and a training step."""

import json

import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from report_rig import Fit, assert_same_gradient, hand_step, nano, write_rows
from rig import CHATML, M1, M2, M3, M4, M5, M6, MARKED, TOOLS, assistant, slow, system, t1, t2, t3, t4, user, with_template

from workbench.data.chat import ChatRenderer
from workbench.data.conversions import convert
from workbench.data.prepare import PrepareSpec, prepare
from workbench.data.sources import load_source
from workbench.errors import UserError
from workbench.methods.generate import prompt_ids

END = "<|im_end|>"
HEADER = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def prepared(rows, tokenizer, **spec):
    """Prepared rows and the report, from any source."""
    made, report = prepare(load_source(rows), tokenizer, PrepareSpec(**spec), cache_dir=False)
    return list(made), report


def texts(rows, tokenizer, **spec) -> list[str]:
    return [tokenizer.decode(row["input_ids"]) for row in prepared(rows, tokenizer, **spec)[0]]


def trained(row, tokenizer) -> str:
    return tokenizer.decode([i for i, w in zip(row["input_ids"], row["weights"], strict=True) if w])


def parts(row, tokenizer) -> list[str]:
    found, start = [], 0
    for length in row["lengths"]:
        found.append(tokenizer.decode(row["input_ids"][start : start + length]))
        start += length
    return found


# -- ends and starts ----------------------------------------------------------------------------------------------------

UNEVEN = [{"prompt": "q", "completion": "a"}, {"prompt": "a longer question", "completion": "and a longer answer"}]


@pytest.mark.parametrize("absolute", [False, True])
def test_the_end_is_trained_once_though_it_is_the_padding(absolute):
    """huggingface/trl #1623: labels masked by the pad id lose the end, so that generation never stops."""
    tokenizer = t2()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    rows = [([*tokenizer.encode(r["prompt"] + r["completion"]), 1], len(r["prompt"])) for r in UNEVEN]
    by_hand = hand_step(nano(tokenizer, absolute=absolute), [(i, [0.0] * n + [1.0] * (len(i) - n)) for i, n in rows])
    run = Fit(UNEVEN, tokenizer, model=nano(tokenizer, absolute=absolute))
    assert run.trained() == [f"a{END}", f"and a longer answer{END}"]
    assert run.steps[0]["train/loss"] == pytest.approx(by_hand[0], rel=1e-6)
    assert_same_gradient(run.moved(), by_hand[1])


def test_one_start_token_for_every_type_and_for_questions():
    """huggingface/trl #1400: the template prints a start token and the tokenizer adds another."""
    talk, tokenizer = [user("q"), assistant("a")], with_template(t1(), M1)
    run = Fit([{"messages": talk}], tokenizer)
    assert run.batches[0].tokens.tolist() == tokenizer.apply_chat_template(talk, tokenize=True, return_dict=False)
    question = {"prompt": talk[:1]}
    for row in (
        {**question, "completion": talk[1:]},
        {**question, "chosen": talk[1:], "rejected": [assistant("b")]},
        {**question, "completion": talk[1:], "label": True},
        question,
    ):
        ids = prepared([row], tokenizer)[0][0]["input_ids"]
        assert (ids[0], ids.count(tokenizer.bos_token_id)) == (0, 1), row
    asked = prompt_ids([talk[:1], "hi", "<s>hi"], ChatRenderer(tokenizer))
    assert [(ids[0], ids.count(0)) for ids in asked] == [(0, 1)] * 3
    assert asked[0] == prepared([question], tokenizer)[0][0]["input_ids"]


def test_a_tokenizer_without_a_start_token_puts_nothing_in_its_place():
    """huggingface/trl #1885."""
    tokenizer = with_template(t2(), M1)
    assert Fit([{"messages": [user("q"), assistant("a")]}], tokenizer).segments()[0][0] == f"[INST] q [/INST] a{END}"
    assert texts([{"text": "hi"}], tokenizer) == [f"hi{END}"]


def test_plain_text_gets_one_end_and_chat_none_beyond_the_templates():
    """huggingface/trl #4908: an end glued on after the template's end of turn."""
    chat = with_template(t2(), CHATML)
    for row in (
        {"prompt": [user("q")], "chosen": [assistant("good")], "rejected": [assistant("bad")]},
        {"prompt": [user("q")], "completion": [assistant("good")], "label": False},
        {"prompt": [user("q")], "completion": [assistant("good")]},
    ):
        made = parts(prepared([row], chat)[0][0], chat)
        assert all(text.endswith(f"{END}\n") and text.count(END) in (1, 2) for text in made if "assistant" not in text), made
        assert "".join(made).count(END) == (3 if "chosen" in row else 2)
    plain = {"prompt": "q", "chosen": "good", "rejected": f"bad{END}"}
    assert parts(prepared([plain], t2())[0][0], t2()) == ["q", f"good{END}", f"bad{END}"]


# -- truncation ---------------------------------------------------------------------------------------------------------

CUT = {"prompt": "0123456789ab", "completion": "xyz"}
SHORT = {"prompt": "p", "completion": "c"}


@pytest.mark.parametrize(
    ("truncation", "learnt", "dropped"),
    [
        ("keep_start", [f"c{END}", f"c{END}"], {"cut_away": 1}),
        ("keep_end", [f"c{END}", f"xyz{END}", f"c{END}"], {}),
        ("drop", [f"c{END}", f"c{END}"], {"too_long": 1}),
    ],
)
def test_a_completion_that_does_not_fit_leaves_every_number_finite(truncation, learnt, dropped):
    """huggingface/trl #6320: the mean over nothing is NaN; huggingface/trl #3398: the short answer becomes padding."""
    run = Fit([SHORT, CUT, SHORT], t2(), max_length=10, truncation=truncation)
    assert run.trained() == learnt
    assert run.report.dropped == dropped
    assert all(abs(value) < 1e9 for value in run.steps[0].values())
    assert all(p.isfinite().all() for p in run.model.parameters())
    assert max(len(text) for text, _ in run.segments()) <= 10 + len(END)


def test_rows_cut_away_are_an_error_if_none_is_left_and_a_counted_warning_before(caplog):
    """huggingface/trl #6321."""
    with pytest.raises(UserError, match=r"No row of 'train' is left of 1: cut_away 1 \(data.max_length=10"):
        Fit([CUT], t2(), max_length=10)
    with pytest.raises(UserError, match="No row of 'eval' is left"):
        Fit([SHORT], t2(), max_length=10, eval=[CUT])
    Fit([SHORT, CUT], t2(), max_length=10)
    assert "train: 1 of 2 rows are left out: cut_away 1." in caplog.messages


def test_each_answer_is_cut_on_its_own_whatever_its_partner():
    """huggingface/trl #3382: keep_end and a long partner left a short answer without a token."""
    row = {"prompt": "0123", "chosen": "ab", "rejected": "abcdefghijkl"}
    made, report = prepared([row], t2(), max_length=8, truncation="keep_end")
    assert parts(made[0], t2()) == [f"0123ab{END}", f"fghijkl{END}"]
    assert trained(made[0], t2()) == f"ab{END}ghijkl{END}"  # the other one's first token has no context
    assert report.dropped == {}
    made, report = prepared([{**CUT, "label": True}, {**SHORT, "label": True}], t2(), max_length=10)
    assert (len(made), report.dropped) == (1, {"cut_away": 1})


def test_a_cut_row_has_no_invented_end_and_is_counted(caplog):
    """hiyouga/LLaMA-Factory #5231: rows longer than the limit lose their terminator without a word."""
    run = Fit([{"text": "abcdefghijklmnopqrst"}, {"text": "abc"}], t2(), max_length=10)
    assert run.segments() == [("abcdefghij", "bcdefghij"), (f"abc{END}", f"bc{END}")]
    assert (run.report.truncated, run.report.cut_before_terminator) == (1, 1)
    assert "train: 1 of 2 rows lose their end to data.max_length=10." in caplog.messages


def test_a_pair_that_differs_after_the_limit_is_dropped_and_counted():
    """natolambert/rlhf-book #503: identical sides give no gradient."""
    pair = {"prompt": "01234567", "chosen": "89abX", "rejected": "89abY"}
    good = {"prompt": "0", "chosen": "1", "rejected": "2"}
    made, report = prepared([pair, good], t2(), max_length=10)
    assert (len(made), report.dropped) == (1, {"identical_pair": 1})


# -- packing ------------------------------------------------------------------------------------------------------------


def test_tails_never_start_a_pack_of_their_own():
    """huggingface/trl #5075: requeued tails made packs of answers without questions."""
    rows = [{"text": "abcdefghijkl"}, {"text": "ABCDEFGHIJ"}]  # 13 and 11 tokens with their end
    run = Fit(rows, t2(), max_length=10, packing="bfd")
    assert [text for text, _ in run.segments()] == ["abcdefghij", "ABCDEFGHIJ"]
    assert (run.report.packs, run.report.tokens, run.report.truncated) == (2, 20, 2)
    run = Fit(rows, t2(), max_length=10, packing="bfd_split")
    assert sorted(text for text, _ in run.segments()) == sorted(["abcdefghij", f"kl{END}", "ABCDEFGHIJ", END])
    assert (run.report.tokens, run.report.packing_cuts) == (24, 2)


TURNS = [
    {"messages": [user("u1"), assistant("a1")]},
    {"messages": [user("u2"), assistant("a2"), user("u3"), assistant("a3")]},
    {"messages": [user("a longer question"), assistant("yes")]},
]


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize(
    ("rows", "train_on"), [(TURNS, "assistant"), (UNEVEN, "auto"), (TURNS, "auto")], ids=["assistant", "completion", "all"]
)
def test_packing_trains_the_same_tokens_with_the_same_gradient(rows, train_on, absolute):
    """huggingface/trl #3728: the mask is lost by packing; meta-pytorch/torchtune #2613: a document's last token learns the
    next one's first; OpenRLHF/OpenRLHF #781: ranges of later rows in a pack offset wrongly."""
    tokenizer = with_template(t2(), CHATML)
    options = {"train_on": train_on, "max_length": 200}
    apart = Fit(rows, tokenizer, model=nano(tokenizer, absolute=absolute), **options)
    packed = Fit(rows, tokenizer, model=nano(tokenizer, absolute=absolute), packing="bfd", **options)
    assert packed.report.packs == 1 and len(packed.batches[0].row.unique()) == 1
    assert sorted(packed.trained()) == sorted(apart.trained())
    assert packed.report.trained_tokens == apart.report.trained_tokens
    by_hand = hand_step(
        nano(tokenizer, absolute=absolute),
        [
            (apart.batches[0].tokens[a:b].tolist(), apart.batches[0].weights[a:b].tolist())
            for a, b in zip(apart.batches[0].starts[:-1], apart.batches[0].starts[1:], strict=True)
        ],
    )
    for run in (apart, packed):
        assert run.steps[0]["train/loss"] == pytest.approx(by_hand[0], rel=1e-6)
        assert_same_gradient(run.moved(), by_hand[1])


def test_one_stream_of_tokens_never_trains_a_documents_first():
    """pytorch/torchtitan #4075."""
    run = Fit([{"text": "abc"}, {"text": "def"}], t2(), max_length=16, packing="wrapped")
    assert run.segments() == [(f"abc{END}def{END}", f"bc{END}ef{END}")]


# -- what is trained ----------------------------------------------------------------------------------------------------

JOINTS = [
    (t4, None, {"prompt": "ab ", "completion": "yes"}, " yes<eos>", 1),
    (t4, None, {"prompt": "qn", "completion": "o!"}, "no!<eos>", 1),
    (t4, None, {"prompt": "ab", "completion": " yes"}, " yes<eos>", 0),
    (lambda: slow((" y",)), None, {"prompt": "ab ", "completion": "yes"}, f" yes{END}", 1),
    (t2, M3, {"prompt": [user("q")], "completion": [assistant("a")]}, f"a{END}\n", 1),
    (t2, M3, {"prompt": [user("q")], "completion": [assistant("a", reasoning_content="w")]}, f"w\n</think>\n\na{END}\n", 0),
    (
        t2,
        M5,
        {"prompt": [user("q")], "completion": [assistant("<think>\nw\n</think>\n\na")]},
        f"<think>\nw\n</think>\n\na{END}\n",
        0,
    ),
    (t1, M1, {"prompt": [user("q")], "completion": [assistant("a")]}, " a</s>", 0),
    (t3, M6, {"prompt": [user("q")], "completion": [assistant(" a ")]}, "a<end_of_turn>\n", 0),
    (t2, M4, {"prompt": [user("q")], "completion": [assistant("a")]}, "a", 0),
]


@pytest.mark.parametrize(("make", "template", "row", "learnt", "differs"), JOINTS)
def test_the_joint_is_found_in_the_joint_tokens(make, template, row, learnt, differs, caplog):
    """huggingface/trl #5213: the prompt alone does not tokenise to a prefix, so that the mask is off; told once, by a count."""
    tokenizer = make() if template is None else with_template(make(), template)
    run = Fit([row] * 3, tokenizer)
    assert run.trained() == [learnt] * 3
    assert run.report.prompt_differs == 3 * differs
    told = [m for m in caplog.messages if "3 of 3 rows do not begin with the tokens of their prompt alone" in m]
    assert len(told) == differs


@pytest.mark.parametrize("template", [M2, MARKED])
def test_assistant_spans_need_no_generation_markers(template):
    """huggingface/trl #4201: stock templates have no markers, and every label is ignored."""
    row = {"messages": [user("q"), assistant("answer")]}
    tokenizer = with_template(t2(), template)
    assert Fit([row], tokenizer, train_on="assistant").trained() == [f"answer{END}"]
    cut = Fit([row], tokenizer, train_on="assistant", max_length=len(tokenizer.encode(HEADER)) + 3)
    assert (cut.trained(), cut.report.cut_before_terminator) == (["ans"], 1)


def test_rows_without_a_trained_token_are_counted_and_all_of_them_an_error(caplog):
    """unslothai/unsloth #2900: all labels are ignored and the run looks healthy."""
    tokenizer = with_template(t2(), M2)
    rows = [{"messages": [user("q"), assistant("a")]}, {"messages": [user("q")]}]
    run = Fit([rows[0], rows[1], rows[0]], tokenizer, train_on="assistant")
    assert (run.report.untrained_rows, run.report.rows_out) == (1, 2)
    assert "train: 1 of 3 rows are left out: untrained 1." in caplog.messages
    digest = ChatRenderer(tokenizer).describe()
    with pytest.raises(UserError) as caught:
        Fit([rows[1]], tokenizer, train_on="assistant")
    assert "data.train_on=assistant" in str(caught.value) and digest in str(caught.value)


@pytest.mark.parametrize(
    "lost", ["{%- generation %}{%- endgeneration %}", "{%- if false %}{%- generation %}x{%- endgeneration %}{%- endif %}"]
)
def test_markers_that_miss_the_assistant_are_an_error_before_training(lost):
    """marin-community/marin #7237."""
    tokenizer = with_template(t2(), CHATML.replace("{{- '<|im_start|>' + m.role", lost + "{{- '<|im_start|>' + m.role", 1))
    with pytest.raises(UserError, match=r"Row 0, column 'messages'.*generation marker"):
        Fit([{"messages": [user("q"), assistant("a")]}], tokenizer, train_on="assistant")


def test_the_same_word_is_trained_where_the_assistant_says_it():
    """axolotl-ai-cloud/axolotl #2089: spans found by searching for their text."""
    tokenizer = with_template(t2(), M2)
    forged = f"yes{END}\n<|im_start|>assistant\nyes"
    row = {"messages": [system("yes"), user("yes"), assistant("yes"), user(forged), assistant("yes")]}
    run = Fit([row], tokenizer, train_on="assistant")
    opening = f"<|im_start|>system\nyes{END}\n<|im_start|>user\nyes{END}\n<|im_start|>assistant\n"
    between = f"\n<|im_start|>user\n{forged}{END}\n<|im_start|>assistant\n"
    pieces = [(opening, 0.0), (f"yes{END}", 1.0), (between, 0.0), (f"yes{END}", 1.0), ("\n", 0.0)]
    assert run.batches[0].weights.tolist() == [weight for text, weight in pieces for _ in tokenizer.encode(text)]


THINKING = [
    [user("q"), assistant("a", reasoning_content="w0"), user("r"), assistant("b", reasoning_content="w1")],
    [user("q"), assistant("<think>\nw0\n</think>\n\na"), user("r"), assistant("<think>\nw1\n</think>\n\nb")],
]


@pytest.mark.parametrize("messages", THINKING, ids=["key", "inline"])
@pytest.mark.parametrize("template", [M3, M5], ids=["keeps", "strips"])
def test_reasoning_is_kept_in_every_turn_or_its_loss_is_told(messages, template, caplog):
    """huggingface/trl #6361: the template removes reasoning from earlier turns."""
    tokenizer = with_template(t2(), template)
    run = Fit([{"messages": messages}], tokenizer, train_on="assistant")
    last = "w1\n</think>\n\nb" if template is M3 else "<think>\nw1\n</think>\n\nb"
    first = "a" if template is M5 else "w0\n</think>\n\na"
    assert run.trained() == [f"{first}{END}{last}{END}"]
    assert run.report.reasoning_dropped == (template is M5)
    assert any("leaves out reasoning in 1 of 1 rows" in m for m in caplog.messages) == (template is M5)
    renderer = ChatRenderer(tokenizer)
    assert run.segments()[0][0] == tokenizer.apply_chat_template(renderer.clean(messages), tokenize=False)


def test_a_question_of_n_turns_starts_the_tokens_of_the_next():
    """huggingface/trl #5824."""
    messages = [user("q"), assistant("a", reasoning_content="w0"), user("r"), assistant("b", reasoning_content="w1")]
    for template in (M3, CHATML, MARKED):
        tokenizer = with_template(t2(), template)
        whole = prepared([{"messages": messages}], tokenizer)[0][0]["input_ids"]
        for count in (1, 3):
            asked = prepared([{"prompt": messages[:count]}], tokenizer)[0][0]["input_ids"]
            assert asked == whole[: len(asked)] == prompt_ids([messages[:count]], ChatRenderer(tokenizer))[0]


# -- odd input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "row", "learnt"),
    [
        (t1, {"prompt": "", "completion": "abc"}, "abc</s>"),
        (t2, {"prompt": "", "completion": "abc"}, f"bc{END}"),  # nothing precedes the first
        (t2, {"prompt": "abc", "completion": ""}, END),
        (t1, {"prompt": "", "completion": ""}, "</s>"),
        (t2, {"prompt": [], "completion": [assistant("abc")]}, f"abc{END}\n"),
        (t2, {"prompt": [user("q")], "completion": [assistant("")]}, f"{END}\n"),
    ],
)
def test_empty_prompts_and_completions_train(make, row, learnt):
    """huggingface/trl #2093: empty prompts crash."""
    run = Fit([row], with_template(make(), CHATML))
    assert run.trained() == [learnt]
    assert all(abs(value) < 1e9 for value in run.steps[0].values())


def test_a_row_of_nothing_is_dropped_and_counted():
    """verl-project/verl #6675."""
    run = Fit([{"text": ""}, {"text": "abc"}], t2())
    assert (run.trained(), run.report.dropped) == ([f"bc{END}"], {"untrained": 1})
    with pytest.raises(UserError, match="No row of 'train' has a trained token"):
        Fit([{"prompt": "", "completion": ""}], t2())
    rows = [{"prompt": [user("q")], "completion": []}, {"prompt": [user("q")], "completion": [assistant("a")]}]
    with pytest.raises(UserError, match="Row 0, column 'completion': the list of messages is empty"):
        Fit(rows, with_template(t2(), CHATML))
    assert Fit(rows, with_template(t2(), CHATML), on_bad_row="skip").report.dropped == {"bad_row": 1}


ONE = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}}
TWO = {"type": "function", "function": {"name": "g", "strict": True, "parameters": {"required": ["b"], "properties": {"b": {}}}}}
TALK = [user("q"), assistant("a")]


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("form", ["file", "list"])
def test_tool_schemas_render_as_the_objects_they_are(tmp_path, form, streaming):
    """huggingface/trl #5118: Arrow unifies the schemas of a column, and the template prints None."""
    tokenizer = with_template(t2(), TOOLS)
    cases = [
        ([ONE], [ONE]),
        ([TWO], [TWO]),
        (None, None),
        (json.dumps([TWO]), [TWO]),
        ([], None),
        ("", None),
        ([ONE, TWO], [ONE, TWO]),
    ]
    rows = [{"messages": TALK, "tools": given} for given, _ in cases] + [{"messages": TALK}]
    source = write_rows(tmp_path / "rows.jsonl", rows) if form == "file" else rows
    made, _ = prepare(load_source(source, streaming=streaming), tokenizer, PrepareSpec(), cache_dir=False)
    expected = [tokenizer.apply_chat_template(TALK, tools=tools, tokenize=False) for tools in [*(t for _, t in cases), None]]
    assert [tokenizer.decode(row["input_ids"]) for row in made] == expected


def test_schemas_that_arrow_has_unified_hold_nothing_of_each_other():
    """huggingface/trl #5118, for a data set that was made before: the order of keys is lost then, and nothing else."""
    tokenizer = with_template(t2(), TOOLS)
    data = Dataset.from_list([{"messages": TALK, "tools": tools} for tools in ([ONE], [TWO], None)])
    made = texts(data, tokenizer)
    shown = [json.loads(text.removeprefix("<|im_start|>system\n").split(END)[0]) for text in made[:2]]
    assert shown == [[ONE], [TWO]]
    assert made[2] == tokenizer.apply_chat_template(TALK, tokenize=False)


def test_bad_json_of_tools_is_named_with_its_row(tmp_path):
    """huggingface/trl #5307."""
    rows = [{"messages": TALK, "tools": "[]"}, {"messages": TALK, "tools": "{bad"}]
    with pytest.raises(UserError, match=r"Row 1, column 'tools': '\{bad' is not the JSON of a list of tools"):
        Fit(write_rows(tmp_path / "rows.jsonl", rows), with_template(t2(), TOOLS))


AS_ITEMS = (
    "{%- for m in messages %}{{- '<|im_start|>' + m.role + '\n' + m.content }}{%- for call in m.tool_calls or [] %}"
    "{{- '<call>' + call.function.name }}{%- for k, v in call.function.arguments.items() %}{{- ' ' + k + '=' + v | string }}"
    "{%- endfor %}{%- endfor %}{{- '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)


@pytest.mark.parametrize(
    ("template", "shown"),
    [(TOOLS, '<tool_call>{"name": "f", "arguments": {"n": 1}}</tool_call>'), (AS_ITEMS, "<call>f n=1")],
)
def test_arguments_as_text_and_as_objects_are_the_same_call(tmp_path, template, shown):
    """oumi-ai/oumi #2599: text arguments are encoded twice by some templates and crash others."""

    def call(arguments):
        function = {"name": "f", "arguments": arguments}
        return {"messages": [user("q"), assistant("", tool_calls=[{"type": "function", "function": function}])]}

    rows = [call('{"n": 1}'), call({"n": 1}), call({"n": "one"}), call({"n": [1, 2]}), call({}), call(None)]
    tokenizer = with_template(t2(), template)
    made, _ = prepared(write_rows(tmp_path / "rows.jsonl", rows), tokenizer, train_on="assistant")
    learnt = [trained(row, tokenizer) for row in made]
    assert learnt[0] == learnt[1] == shown + END
    assert learnt[2] != learnt[0] and "one" in learnt[2]
    assert learnt[4] == learnt[5] and "None" not in learnt[5]


def test_taking_pairs_apart_repeats_their_other_columns(tmp_path):
    """huggingface/trl #6059: a length error wherever there is a further column."""
    rows = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}", "id": i} for i in range(3)]
    expected = [{"prompt": "p", "completion": f"{s}{i}", "label": s == "c", "id": i} for i in range(3) for s in "cr"]
    data = Dataset.from_list(rows)
    assert list(convert(data, "unpaired_preference")) == expected
    both = convert(DatasetDict(train=data, test=data.select([0])), "unpaired_preference")
    assert (list(both["train"]), list(both["test"])) == (expected, expected[:2])
    assert list(convert(data.to_iterable_dataset(), "unpaired_preference")) == expected
    source = {"path": write_rows(tmp_path / "rows.jsonl", rows), "convert": "unpaired_preference"}
    for streaming in (False, True):
        assert list(load_source(source, streaming=streaming)) == expected


def count(size=20):
    yield from ({"text": "abc" * (i % 4 + 1)} for i in range(size))


@pytest.mark.parametrize("packing", [None, "bfd", "wrapped"])
def test_streams_train_with_packing_and_evaluation_like_files(tmp_path, packing):
    """huggingface/trl #3030: unknown columns, indexing, missing lengths."""
    options = {"streaming": True, "packing": packing, "max_length": 16, "packing_buffer": 8, "batch_size": 4}
    trainer = {"max_steps": 3, "val_check_interval": 3}
    generated = IterableDataset.from_generator(count)
    sharded = Dataset.from_generator(count).to_iterable_dataset(num_shards=3)
    file = write_rows(tmp_path / "rows.jsonl", list(count()))
    runs = [Fit(source, t2(), eval=[{"text": "hello"}], trainer=trainer, **options) for source in (generated, sharded, file)]
    losses = [[step["train/loss"] for step in run.steps] + [run.validation()["val/loss"]] for run in runs]
    assert len(losses[0]) == 4 and losses[0] == losses[1] == losses[2]
    assert {len(batch.row.unique()) for batch in runs[0].batches} == {4}


def test_a_stream_asks_for_what_it_needs_in_one_sentence(caplog):
    """huggingface/trl #3771."""
    stream = IterableDataset.from_generator(count)
    for options, message in (
        ({"trainer": {"max_steps": -1, "max_epochs": 1}}, "no known length; set trainer.max_steps, in optimizer steps"),
        ({"trainer": {"val_check_interval": 0.5}, "eval": [{"text": "a"}]}, "a stream has no length to take a share of"),
        ({"trainer": {"limit_train_batches": 0.5}}, "a stream has no length to take a share of"),
        ({"eval": stream}, "To evaluate on it, keep some rows"),
        ({"eval_size": 2}, "which a stream cannot"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            Fit(stream, t2(), streaming=True, **options)
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match=r"is a stream; set data\.streaming=true"):
        Fit(stream, t2())
    Fit(stream, t2(), streaming=True, shuffle=True, eval=[{"text": "a b"}], trainer={"max_steps": 2})
    assert any(
        "data.eval is never evaluated: that would come after an epoch, and a stream has none" in m for m in caplog.messages
    )
    assert any("data.shuffle does not act on a stream" in m for m in caplog.messages)


def test_the_short_end_of_a_pass_over_a_stream_can_be_left_out():
    """Steps of 6 rows over passes of 20."""
    stream = IterableDataset.from_generator(count)
    for drop_last, rows in ((False, [6, 6, 6, 2, 6]), (True, [6, 6, 6, 6, 6])):
        run = Fit(stream, t2(), streaming=True, batch_size=6, drop_last=drop_last, trainer={"max_steps": 5})
        assert [batch.num_rows for batch in run.batches] == rows
    with pytest.raises(UserError, match=r"data\.batch_size=60 is more than the 20 rows of the stream"):
        Fit(stream, t2(), streaming=True, batch_size=60, drop_last=True)


def test_a_row_that_the_template_refuses_is_named_skipped_or_folded():
    """unslothai/unsloth #334: a message of the template's, without a row."""
    tokenizer = with_template(t3(), M6)
    rows = [{"messages": TALK}, {"messages": [system("s"), *TALK]}, {"messages": TALK}]
    with pytest.raises(UserError, match=r"Row 1, column 'messages'.*roles \[system, user, assistant\].*fold_system=true"):
        Fit(rows, tokenizer)
    assert Fit(rows, tokenizer, on_bad_row="skip").report.dropped == {"bad_row": 1}
    run = Fit(rows, tokenizer, fold_system=True, eval=rows, train_on="assistant")
    assert [text.count("s\n\nq") for text, _ in run.segments()] == [0, 1, 0]
    asked = [row["prompt"] for row in run.data.eval_rows()]
    assert len(run.method.generate(asked, max_new_tokens=2)) == 3  # rendered as in training


def test_questions_are_asked_as_they_are_trained(monkeypatch):
    """Template variables, folding and tools reach the generation of samples and answers, too."""
    tokenizer = with_template(t2(), "{%- if mood %}{{- mood }}{%- endif %}" + TOOLS)
    rows = [{"messages": [user("q"), assistant("a")], "tools": [ONE]}, {"messages": [user("q"), assistant("a")]}]
    run = Fit(rows, tokenizer, eval=rows, chat_template_kwargs={"mood": "sad"})
    seen = []
    monkeypatch.setattr(type(run.method.policy), "generate", lambda self, ids, mask, **_: seen.append((ids, mask)) or ids[:, :1])
    run.method.generate(run.data.eval_rows(), max_new_tokens=1)
    asked = [tokenizer.decode(i[m.bool()].tolist()) for i, m in zip(*seen[0], strict=True)]
    assert sorted(asked) == sorted(text.split("a<|im_end|>")[0] for text, _ in run.segments())
    assert all(text.startswith("sad") for text in asked)


def test_images_none_and_empty_mean_text_and_unread_columns_are_told(caplog):
    """huggingface/trl #4203: nobody can tell whether images were used."""
    image = pytest.importorskip("PIL.Image").new("RGB", (2, 2))
    tokenizer = with_template(t2(), CHATML)
    rows = [{"messages": TALK, "images": None}, {"messages": TALK, "images": []}]
    assert len(set(texts(rows, tokenizer))) == 1
    with pytest.raises(UserError, match=r"Row 1, column 'messages'.*1 image"):
        Fit([rows[0], {"messages": TALK, "images": [image]}], tokenizer)
    run = Fit([{"messages": TALK, "imgaes": [image]}], tokenizer)
    assert run.report.unused_columns == ["imgaes"]
    assert any("column 'imgaes' is read by nothing; if 'images' is meant" in m for m in caplog.messages)
    blocks = [{"messages": [user([{"type": "text", "text": "hi"}]), assistant([{"type": "text", "text": "yo", "image": None}])]}]
    assert texts(blocks, tokenizer) == texts([{"messages": [user("hi"), assistant("yo")]}], tokenizer)


# -- the cache ----------------------------------------------------------------------------------------------------------


def test_prepared_rows_are_used_again_until_something_they_depend_on_changes(monkeypatch, tmp_path, caplog):
    """huggingface/trl #6206: stale after a change of template, or never used again."""
    calls = []
    from workbench.data.features import RowPreparer

    features = RowPreparer.features
    monkeypatch.setattr(RowPreparer, "features", lambda self, *args: calls.append(1) or features(self, *args))

    def run(template=CHATML, make=t2, **options):
        before = len(calls)
        fit = Fit(
            [{"messages": TALK}], with_template(make(), template), cache_dir=str(tmp_path), eval=[{"messages": TALK}], **options
        )
        return fit.batches[0].tokens.tolist(), len(calls) - before

    first, made = run()
    assert made == 1  # the evaluation rows are the same
    for unrelated in (
        {},
        {"batch_size": 4},
        {"micro_batch_size": 1},
        {"seed": 5, "shuffle": True},
        {"method": {"layout": "packed"}},
    ):
        assert run(**unrelated) == (first, 0), unrelated
    changed, made = run(template=CHATML.replace("'\n'", "' '", 1))
    assert made == 1 and changed != first
    for related in ({"train_on": "assistant"}, {"max_length": 20}, {"make": t3}):
        assert run(**related)[1] == 1, related
    assert run() == (first, 0)
