"""Messages, content blocks, tool calls, tools, reasoning and images as people write them."""

import datasets
import numpy as np
import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from workbench.data.formats import normalise_row
from workbench.data.images import count_images
from workbench.data.messages import Place, normalise_messages, normalise_tools
from workbench.errors import UserError

PLACE = Place(2, "messages")
TEMPLATE = (
    "{% for t in tools or [] %}[{{ t | tojson }}]{% endfor %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}
SUM = {"type": "function", "function": {"name": "sum", "parameters": {"properties": {"a": {"type": "number", "default": 1.5}}}}}


def messages(*given, **kwargs):
    return normalise_messages(list(given), PLACE, **kwargs)


def render(row):
    row = normalise_row(row)
    return render_jinja_template([row["messages"]], tools=row.get("tools"), chat_template=TEMPLATE)[0][0]


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("human", "user"),
        ("User", "user"),
        ("gpt", "assistant"),
        ("model", "assistant"),
        ("system", "system"),
        ("developer", "developer"),
        ("observation", "tool"),
        ("function", "tool"),
        ("ipython", "tool"),
    ],
)
def test_roles(role, expected):
    assert messages({"from": role, "value": "x"}) == [{"role": expected, "content": "x"}]


def test_roles_of_the_users_own():
    assert messages({"role": "Critic", "content": "x"}, roles={"critic": "user"}) == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "asistant", "content": "x"}, "unknown role 'asistant'. Did you mean 'assistant'?"),
        ({"content": "x"}, "message 0 has neither 'role' nor 'from'. Its keys: content."),
        ({"role": "user"}, "message 0 (role 'user') has no content. Its keys: role."),
        ({"role": "assistant", "content": None}, "message 0 (role 'assistant') has no content"),
        ({"role": "user", "content": 5}, "content of type int; expected text or blocks"),
        ({"role": "user", "content": [{"type": "audio"}]}, "content block of type 'audio'"),
        ({"role": "user", "content": [{"type": "text"}]}, "a text block without text"),
        ({"role": "assistant", "content": "", "tool_calls": [{"function": {"name": None}}]}, "has no function name"),
        ({"from": "function_call", "value": "f(x)"}, "'f(x)' is not the JSON of a tool call"),
        ({"role": "user", "content": "x", "weight": -1}, "weight=-1; expected a number of 0 or more"),
        ({"role": "user", "content": "x", "train": "maybe"}, "'maybe' is not a label"),
        ("hello", "message 0 is 'hello'; expected an object"),
    ],
)
def test_errors_name_row_and_column(message, text):
    with pytest.raises(UserError) as error:
        messages(message)
    assert str(error.value).startswith("Row 2, column 'messages': ") and text in str(error.value)


def test_training_keys_are_kept_and_typed():
    got = messages(
        {"role": "user", "content": "a", "train": 0, "loss_weight": 1},
        {"role": "assistant", "content": "b", "train": "true", "weight": np.float64(0.5), "name": None, "extra": [1]},
    )
    assert got[0] == {"role": "user", "content": "a", "train": False, "weight": 1.0}
    assert got[1] == {"role": "assistant", "content": "b", "train": True, "weight": 0.5, "extra": [1]}
    assert got[0]["train"] is False and type(got[1]["weight"]) is float


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thought"])
def test_reasoning_has_one_key(key):
    given = {"role": "assistant", "content": "4", key: "2+2"}
    assert messages(given) == [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}]
    block = {"role": "assistant", "content": [{"type": key, key: "2+2"}, {"type": "text", "text": "4"}]}
    assert messages(block) == [{"role": "assistant", "content": "4", "reasoning_content": "2+2"}]


def test_text_blocks_become_text():
    blocks = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, {"type": "text", "value": "c"}, "d"]
    assert messages({"role": "user", "content": blocks}) == [{"role": "user", "content": "abcd"}]


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
        {"role": "assistant", "tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]},
        {"role": "assistant", "tool_calls": '[{"name": "weather", "arguments": "{\\"city\\": \\"Oslo\\"}"}]'},
        {"role": "assistant", "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo", "unit": null}}'},
        {"from": "function_call", "value": '[{"name": "weather", "arguments": {"city": "Oslo"}}]'},
        {"role": "assistant", "content": [{"type": "tool_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'}]},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}]},
        {
            "role": "assistant",
            "tool_calls": [{**CALL, "function": {"name": "weather", "arguments": {"city": "Oslo", "unit": None}}}],
        },
    ],
)
def test_every_spelling_of_a_tool_call_is_one(message):
    assert messages(message) == [{"role": "assistant", "content": "", "tool_calls": [CALL]}]


def test_arguments_that_are_no_object():
    for wrong in ("[1]", [1], "3"):
        with pytest.raises(UserError, match=r"the arguments of tool call 'f' are .*; expected an object"):
            messages({"role": "assistant", "tool_calls": [{"name": "f", "arguments": wrong}]})
    with pytest.raises(UserError, match="is not the JSON of the arguments of tool call 'f'"):
        messages({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{city"}]})
    for empty in (None, "", {}, " "):
        call = messages({"role": "assistant", "tool_calls": [{"name": "f", "arguments": empty}]})[0]["tool_calls"][0]
        assert call["function"]["arguments"] == {}


def test_calls_written_as_messages_join_the_turn_they_follow():
    got = messages(
        {"from": "human", "value": "Weather?"},
        {"from": "gpt", "value": "Let me see."},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Rome"}}'},
        {"from": "observation", "value": '{"sky": "blue"}'},
        {"from": "gpt", "value": "Blue."},
    )
    rome = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}
    assert got == [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": [CALL, rome]},
        {"role": "tool", "content": '{"sky": "blue"}'},
        {"role": "assistant", "content": "Blue."},
    ]
    two = messages({"role": "assistant", "content": "a", "train": False}, {"from": "function_call", "value": '{"name": "f"}'})
    assert len(two) == 2, "a message that is not trained does not take in one that is"


def test_results_of_tools_may_be_objects():
    got = messages({"role": "tool", "content": {"sky": "blå", "wind": None}}, {"role": "tool", "content": ["a", 1]})
    assert [m["content"] for m in got] == ['{"sky": "blå"}', '["a", 1]']
    assert messages({"role": "tool", "content": None, "name": "f"}) == [{"role": "tool", "content": "", "name": "f"}]
    kind_of_monster = [{"type": "fire", "name": "x"}]
    assert messages({"role": "tool", "content": kind_of_monster})[0]["content"] == '[{"type": "fire", "name": "x"}]'


def test_tools_in_every_spelling():
    place = Place(0, "tools")
    bare = WEATHER["function"]
    for given in ([WEATHER], [bare], '[{"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}]', bare):
        assert normalise_tools(given, place) == [WEATHER]
    for nothing in (None, [], "", "[]", " "):
        assert normalise_tools(nothing, place) == []
        assert normalise_row({"text": "a", "tools": nothing}) == {"text": "a"}
    with pytest.raises(UserError, match=r"Row 5, column 'tools': '\[\{bad' is not the JSON of a list of tools"):
        normalise_row({"text": "a", "tools": "[{bad"}, index=5)
    with pytest.raises(UserError, match="Row 5, column 'tools': tool 3 is int"):
        normalise_row({"text": "a", "tools": [3]}, index=5)


def test_rows_unified_by_arrow_render_as_the_python_objects():
    """Schemas of other tools fill each other with None, which must reach no template."""
    chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Oslo"}}}]},
    ]
    other = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sum", "arguments": {"a": 1.5}}}]},
    ]
    plain = [{"messages": chat, "tools": [WEATHER]}, {"messages": other, "tools": [SUM]}]
    unified = datasets.Dataset.from_list([{**row, "tools": list(row["tools"])} for row in plain])
    assert unified[0]["tools"][0]["function"]["parameters"]["properties"]["a"] is None
    assert unified[1]["messages"][1]["tool_calls"][0]["function"]["arguments"]["city"] is None
    for row, expected in zip(unified, plain, strict=True):
        assert render(row) == render(expected)
        assert "None" not in render(row) and "null" not in render(row)


def test_tools_as_text_and_none_render_as_the_python_objects():
    chat = [{"role": "user", "content": "Hi"}]
    text = '[{"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}}}]'
    assert render({"messages": chat, "tools": text}) == render({"messages": chat, "tools": [WEATHER]})
    assert {render({"messages": chat, **t}) for t in ({}, {"tools": None}, {"tools": []}, {"tools": "[]"})} == {"<user>Hi"}


# -- images -------------------------------------------------------------------------------------------------------------

IMAGE = {"type": "image"}


def image_row(content, **columns):
    return {
        "prompt": [{"role": "user", "content": content}],
        "completion": [{"role": "assistant", "content": "A cat."}],
        **columns,
    }


def test_image_blocks_are_kept_and_counted():
    row = image_row([IMAGE, {"type": "text", "text": "What?", "image": None}], images=["a.png"])
    got = normalise_row(row)
    assert got["prompt"] == [{"role": "user", "content": [IMAGE, {"type": "text", "text": "What?"}]}]
    assert got["images"] == ["a.png"] and count_images(got) == 1
    assert normalise_row(got) == got


@pytest.mark.parametrize(
    ("content", "columns", "blocks"),
    [
        ("What?", {"images": ["a"]}, [IMAGE, {"type": "text", "text": "What?"}]),
        ("What?", {"image": "a"}, [IMAGE, {"type": "text", "text": "What?"}]),
        ("What is <image>?", {"images": ["a"]}, [{"type": "text", "text": "What is "}, IMAGE, {"type": "text", "text": "?"}]),
        ([{"type": "image", "image": "a"}], {}, [IMAGE]),
        ([{"type": "image_url", "image_url": {"url": "a"}}], {"images": []}, [IMAGE]),
    ],
)
def test_each_image_gets_its_place(content, columns, blocks):
    got = normalise_row(image_row(content, **columns))
    assert got["prompt"][0]["content"] == blocks and got["images"] == ["a"] and "image" not in got


@pytest.mark.parametrize("none", [{}, {"images": None}, {"images": []}, {"image": None}])
def test_no_image_means_text(none):
    got = normalise_row(image_row([{"type": "text", "text": "What?"}], **none))
    assert got == image_row("What?") and count_images(got) == 0


@pytest.mark.parametrize(
    ("content", "columns", "text"),
    [
        ([IMAGE, IMAGE], {"images": ["a"]}, "1 images, but 2 places"),
        ([IMAGE], {}, "0 images, but 1 places"),
        ("<image> <image>", {"images": ["a"]}, "1 images, but 2 places"),
        ("x", {"images": ["a"], "image": "b"}, "both 'image' and 'images'"),
        ([{"type": "image", "image": "a"}], {"images": ["b"]}, "some images stand inside the messages"),
        ("<audio>x", {"audios": ["a.mp3"]}, "audio and video are not supported"),
    ],
)
def test_images_and_places_must_agree(content, columns, text):
    with pytest.raises(UserError, match=f"Row 1, column '.*{text}"):
        normalise_row(image_row(content, **columns), index=1)
