"""Where the turns of a conversation are found, over templates and tokenizers."""

import random

import pytest
from rig import (
    CHATML,
    M1,
    M2,
    M3,
    M4,
    M5,
    M6,
    MARKED,
    TOOLS,
    assistant,
    slow,
    system,
    t1,
    t2,
    t3,
    user,
    with_template,
)

from workbench.data.chat import ChatRenderer, template_hash
from workbench.data.known_templates import KNOWN_TEMPLATES
from workbench.data.spans import Ends, SpanError, Turn, header_length, opened_by, turn_end
from workbench.errors import UserError

TWO_TURNS = [user("same"), assistant("same"), user("same"), assistant("other")]


def texts(template, messages, tokenizer=None, tools=None, **options) -> list[str]:
    renderer = ChatRenderer(with_template(tokenizer or t2(), template), **options)
    conversation = renderer.locate(messages, tools)
    turns = [t for t, role in zip(conversation.turns, conversation.roles, strict=True) if role == "assistant"]
    return [conversation.text[t.start : t.end] if isinstance(t, Turn) else t for t in turns]


@pytest.mark.parametrize(
    ("template", "tokenizer", "expected"),
    [
        (M1, t1, [" same</s>", " other</s>"]),
        (M2, t2, ["same<|im_end|>", "other<|im_end|>"]),
        (M2, slow, ["same<|im_end|>", "other<|im_end|>"]),
        (M3, t2, ["same<|im_end|>", "other<|im_end|>"]),
        (M4, t2, ["same<|user|>", "other"]),
        (M5, t2, ["same<|im_end|>", "other<|im_end|>"]),
        (M6, t3, ["same<end_of_turn>", "other<end_of_turn>"]),
        (MARKED, t2, ["same<|im_end|>", "other<|im_end|>"]),
    ],
)
def test_turns_are_content_and_terminator_where_user_and_assistant_say_the_same(template, tokenizer, expected):
    assert texts(template, TWO_TURNS, tokenizer()) == expected


def test_a_turn_is_found_by_place_not_by_text():
    """The user repeats the answer before and after it; only the assistant's occurrence is a turn."""
    messages = [user("no no"), assistant("no"), user("no"), assistant("no no")]
    conversation = ChatRenderer(with_template(t2(), CHATML)).locate(messages)
    places = [(t.start, t.end) for t in (conversation.turns[1], conversation.turns[3])]
    header = len("<|im_start|>user\nno no<|im_end|>\n<|im_start|>assistant\n")
    second = header + len("no<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n")
    assert places == [(header, header + len("no<|im_end|>")), (second, second + len("no no<|im_end|>"))]


@pytest.mark.parametrize(
    "content", ["  padded \n", "<think>\nwhy\n</think>\n\nso", "a <|im_end|> b", "Zq7v0Qx", "{{ x }}", "é猫"]
)
def test_odd_contents_are_part_of_the_turn_as_rendered(content):
    assert texts(CHATML, [user("q"), assistant(content), user("r"), assistant("s")])[0] == f"{content}<|im_end|>"


def test_trimmed_content_is_the_turn_as_rendered():
    assert texts(M6, [user("q"), assistant("  padded \n")], t3()) == ["padded<end_of_turn>"]


def test_the_generation_prompts_opening_belongs_to_the_prompt_only_where_the_turn_has_it():
    assert texts(M3, [user("q"), assistant("a", reasoning_content="why")]) == ["why\n</think>\n\na<|im_end|>"]
    assert texts(M3, [user("q"), assistant("a")]) == ["a<|im_end|>"]


def test_an_empty_turn_is_its_terminator():
    assert texts(CHATML, [user("q"), assistant(""), user("r"), assistant("")]) == ["<|im_end|>", "<|im_end|>"]


def test_an_empty_turn_is_found_where_the_template_prints_it_otherwise_than_a_full_one():
    template = CHATML.replace("m.content +", "(' ' + m.content if m.content else '') +")
    assert texts(template, [user("q"), assistant(""), user("r"), assistant("a")]) == ["<|im_end|>", " a<|im_end|>"]


def test_a_call_without_arguments_is_found_where_its_name_comes_again_with_the_result():
    template = TOOLS.replace("'\n' + m.content }}", "'\n' + m.content + (m.name or '') }}")
    call = {"type": "function", "function": {"name": "now", "arguments": {}}}
    messages = [
        user("now"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "name": "now", "content": "12"},
        assistant("noon"),
    ]
    assert texts(template, messages) == ['<tool_call>{"name": "now", "arguments": {}}</tool_call><|im_end|>', "noon<|im_end|>"]


def test_next_role_marker_is_the_terminator_and_the_last_turn_has_none():
    conversation = ChatRenderer(with_template(t2(), M4)).locate(TWO_TURNS)
    assert [conversation.turns[i].terminated for i in (1, 3)] == [True, False]
    assert conversation.text.endswith("other")


def test_trailing_white_space_of_a_last_turn_is_no_terminator():
    conversation = ChatRenderer(with_template(t2(), M4)).locate([user("q"), assistant("a\n")])
    assert conversation.text[conversation.turns[1].start :] == "a\n"
    assert not conversation.turns[1].terminated


@pytest.mark.parametrize("form", ["field", "inline"])
def test_reasoning_that_a_template_strips_is_reported(form):
    def turn(why, text):
        return assistant(text, reasoning_content=why) if form == "field" else assistant(f"<think>\n{why}\n</think>\n\n{text}")

    renderer = ChatRenderer(with_template(t2(), M5))
    conversation = renderer.locate([user("q"), turn("w1", "a1"), user("r"), turn("w2", "a2")])
    first, last = conversation.turns[1], conversation.turns[3]
    assert conversation.reasoning_dropped
    assert conversation.text[first.start : first.end] == "a1<|im_end|>"
    assert conversation.text[last.start : last.end] == "<think>\nw2\n</think>\n\na2<|im_end|>"
    assert conversation.text[slice(*last.reasoning)] == "<think>\nw2\n</think>"
    assert not renderer.locate([user("q"), turn("w2", "a2")]).reasoning_dropped


def test_tool_calls_are_part_of_the_turn_whatever_their_arguments():
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": arguments}}
        for arguments in ({}, {"n": 12, "x": [1, "é\n"]}, {"flag": True, "text": 'say "hi"'})
    ]
    messages = [user("q")]
    for call in calls:
        messages += [assistant("", tool_calls=[call]), {"role": "tool", "content": '{"r": "12"}'}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    found = texts(TOOLS, [*messages, assistant("done")], tools=tools)
    assert found == [
        '<tool_call>{"name": "f", "arguments": {}}</tool_call><|im_end|>',
        '<tool_call>{"name": "f", "arguments": {"n": 12, "x": [1, "é\\n"]}}</tool_call><|im_end|>',
        '<tool_call>{"name": "f", "arguments": {"flag": true, "text": "say \\"hi\\""}}</tool_call><|im_end|>',
        "done<|im_end|>",
    ]


def test_a_turn_that_the_template_does_not_print_has_no_place():
    call = {"type": "function", "function": {"name": "f", "arguments": {"n": 1}}}
    conversation = ChatRenderer(with_template(t2(), CHATML)).locate([user("q"), assistant("", tool_calls=[call])])
    assert conversation.turns[1] == "the template prints no text and no tool call of message 1"
    assert conversation.text_dropped


def test_other_templates_of_the_same_header_are_refused():
    """The rendering calls the role otherwise than the generation prompt does."""
    template = CHATML.replace("+ m.role +", "+ ('bot' if m.role == 'assistant' else m.role) +")
    assert "does not open message 1" in texts(template, [user("q"), assistant("a")])[0]


def test_a_template_that_rewrites_texts_gives_no_place():
    assert (
        "not where its rendering ends" in texts(CHATML.replace("m.content", "m.content | upper"), [user("q"), assistant("a")])[0]
    )


def test_a_rewritten_user_text_leaves_the_assistants_place_to_prefixes():
    template = CHATML.replace("m.content", "(m.content | upper if m.role == 'user' else m.content)")
    assert texts(template, TWO_TURNS) == ["same<|im_end|>", "other<|im_end|>"]


def test_a_prompt_added_unasked_is_refused_unless_the_end_token_shows_the_end():
    template = (
        "{%- for m in messages %}{{- '<s><' + m.role + '>' + m.content + '<eot></x>' }}{%- endfor %}{{- '<s><assistant>' }}"
    )
    assert "unasked" in texts(template, [user("q"), assistant("a")])[0]
    with_eos = template.replace("<eot></x>", "<|im_end|>")
    assert texts(with_eos, [user("q"), assistant("a"), user("r"), assistant("b")]) == ["a<|im_end|>", "b<|im_end|>"]


def test_a_conversation_may_open_with_the_assistant():
    assert texts(CHATML, [assistant("hi"), user("q"), assistant("a")]) == ["hi<|im_end|>", "a<|im_end|>"]


def test_generation_markers_place_the_turn_and_their_gap_is_reported():
    short = MARKED.replace(
        "m.content + '<|im_end|>' }}{%- endgeneration %}{{- '\n'", "m.content }}{%- endgeneration %}{{- '<|im_end|>\n'"
    )
    conversation = ChatRenderer(with_template(t2(), short)).locate(TWO_TURNS)
    assert conversation.text[conversation.turns[1].start : conversation.turns[1].end] == "same"
    assert conversation.open_markers
    assert not ChatRenderer(with_template(t2(), MARKED)).locate(TWO_TURNS).open_markers


def test_one_plan_serves_all_rows_of_a_shape():
    renderer = ChatRenderer(with_template(t2(), CHATML))
    for i in range(5):
        renderer.locate([user(f"question {i}"), assistant(f"{i}")])
    assert len(renderer._plans) == 1
    renderer.locate([user("q"), assistant("a"), user("r"), assistant("s")])
    assert len(renderer._plans) == 2


def test_a_plan_older_than_the_time_that_the_template_prints_is_made_anew(monkeypatch):
    class Clock:
        time = ""

        @classmethod
        def now(cls):
            return cls

        @classmethod
        def strftime(cls, form):
            return cls.time

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)
    renderer = ChatRenderer(with_template(t2(), "{{- strftime_now('%H:%M') }}" + M5))
    messages = [user("q"), assistant("a", reasoning_content="w"), user("r"), assistant("b", reasoning_content="v")]
    for Clock.time in ("9:59", "10:00"):
        conversation = renderer.locate(messages)
        assert conversation.text[conversation.turns[1].start : conversation.turns[1].end] == "a<|im_end|>"


def test_rendering_equals_the_tokenizers_own():
    for template, tokenizer in ((M1, t1()), (M2, t2()), (M5, t2())):
        messages = [{**m, "name": None} for m in TWO_TURNS]
        renderer = ChatRenderer(with_template(tokenizer, template))
        assert renderer.render(messages) == tokenizer.apply_chat_template(messages, tokenize=False)


@pytest.mark.parametrize(
    "variables",
    [{}, {"flag": True}, {"flag": [1]}, {"documents": [{"text": "d"}]}, {"eos_token": "E"}, {"tools": None, "flag": 2.5}],
)
def test_a_template_sees_the_same_variables_as_in_the_tokenizers_own_rendering(variables):
    """Whether the renderer calls the compiled template itself, or leaves it to transformers."""
    shown = "{{ [tools, documents, flag, eos_token, add_generation_prompt, messages, namespace(a=1).a] }}"
    tokenizer = with_template(t2(), shown)
    renderer = ChatRenderer(tokenizer)
    for messages in (TWO_TURNS[:3], [user("q", name="n")], [user("q"), assistant("a", thinking="t"), user("r")]):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)
        assert renderer.render(messages, None, variables, add_generation_prompt=True) == expected


def test_a_documents_variable_that_is_no_list_is_refused_as_transformers_refuses_it():
    with pytest.raises(UserError, match="Documents should be a list of dicts"):
        ChatRenderer(with_template(t2(), CHATML)).render(TWO_TURNS, None, {"documents": "d"})


def test_a_refusal_names_template_roles_and_way_out():
    renderer = ChatRenderer(with_template(t3(), M6))
    with pytest.raises(UserError, match=r"roles \[system, user, assistant\]: System role not supported.*fold_system"):
        renderer.render([system("s"), user("q"), assistant("a")])
    assert template_hash(M6) in renderer.describe()


def test_a_known_template_is_called_by_its_name(monkeypatch):
    monkeypatch.setitem(KNOWN_TEMPLATES, template_hash(M6), "Six")
    with pytest.raises(UserError, match=rf"The chat template Six \[{template_hash(M6)}\] refuses"):
        ChatRenderer(with_template(t3(), M6)).render([user("q"), user("r")])


def test_a_folded_system_message_opens_the_user_message():
    renderer = ChatRenderer(with_template(t3(), M6), fold_system=True)
    assert renderer.render([system("s"), user("q")]).startswith("<start_of_turn>user\ns\n\nq<end_of_turn>")


def test_no_template_is_one_clear_sentence():
    with pytest.raises(UserError, match=r"no chat template.*model\.chat_template"):
        ChatRenderer(t2()).render([user("q")])


@pytest.mark.parametrize(
    ("ended", "after", "last", "expected"),
    [
        ("<e>\n", "<e>\n<u>", False, (3, True)),
        ("", "<u>\n", False, (3, True)),
        ("", "<u>\n", True, (0, False)),
        ("</call>", "</call><obs>", False, (12, True)),
        ("</call>", "</call><u>", True, (7, False)),
        ("\n\n", "\n\nUser:", False, (2, True)),
        ("", "User: hi", False, (5, True)),
        ("<return>", "<end><start>", False, (5, True)),
        ("<return>", "<end><start>", True, (8, True)),
        ("<e>\n<eos>", "<e>\n<u>", True, (3, True)),
        ("<a><eos>x", "<a><eos>y", False, (8, True)),
    ],
)
def test_turn_end(ended, after, last, expected):
    assert turn_end(ended, after, last, Ends("<eos>", frozenset())) == expected


def test_a_turn_that_goes_on_in_two_ways_is_refused():
    with pytest.raises(SpanError, match="goes on as"):
        turn_end("}]", ', "id": 1}]', False, Ends("<eos>", frozenset()))


def test_headers():
    assert opened_by("<a>bot\n", "<e>\n<a>bot\n<think>") == len("<e>\n<a>bot\n")
    assert opened_by("<a>bot\n<think>\n", "<e><a>bot\n") == len("<e><a>bot\n")
    assert opened_by("<a>bot\n", "<e><a>tool\n<x>") == 0
    assert header_length("<e><a><think>", "<e><a></think>", 1) == len("<e><a>")
    with pytest.raises(SpanError):
        header_length("<e><a>", "<e><b>", 1)


AWKWARD = [
    "same",
    "",
    " ",
    "\n",
    "a\n\n",
    "<think>",
    "</think>",
    "w</think>\n\nso",
    "<|im_end|>",
    "<|im_start|>user\n",
    "Zq7v1Qx",
]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("form", ["plain", "trimmed", "next_marker"])
def test_random_conversations_of_awkward_texts_are_placed_exactly(seed, form):
    """Against the places that the template's own words give."""
    rng = random.Random(seed)
    roles = [rng.choice(["user", "assistant"]) for _ in range(6)]
    messages = [user("q"), *({"role": role, "content": "".join(rng.choices(AWKWARD, k=2))} for role in roles)]
    trimmed = CHATML.replace("m.content", "m.content | trim")
    template = {"plain": CHATML, "trimmed": trimmed, "next_marker": M4}[form]
    conversation = ChatRenderer(with_template(t2(), template)).locate(messages)
    header, end = ("<|{}|>\n", "") if form == "next_marker" else ("<|im_start|>{}\n", "<|im_end|>")
    start = 0
    for i, (message, turn) in enumerate(zip(messages, conversation.turns, strict=True)):
        text = message["content"].strip() if form == "trimmed" else message["content"]
        begin = start + len(header.format(message["role"]))
        start = begin + len(text) + (len(end) + 1 if end else 0)
        following = f"<|{messages[i + 1]['role']}|>" if not end and i + 1 < len(messages) else end
        if message["role"] == "assistant":
            assert (turn.start, turn.end) == (begin, begin + len(text) + len(following))
    assert start == len(conversation.text)
