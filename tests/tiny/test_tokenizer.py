import json
import string
from itertools import groupby
from operator import itemgetter

import pytest
from jinja2.exceptions import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from workbench.tiny.model import ARCHITECTURES, tiny_model
from workbench.tiny.tokenizer import CHARACTERS, WORDS, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 47, "b": 85}}}
CHAT = [
    {"role": "system", "content": "Be <b>brief</b> & exact."},
    {"role": "user", "content": [{"type": "text", "text": "47+"}, {"type": "text", "text": "85="}]},
    {"role": "assistant", "content": None, "reasoning_content": "a tool", "tool_calls": [ADD]},
    {"role": "tool", "name": "add", "content": "132"},
    {"role": "assistant", "content": " 132\n"},
]
CHAT_TEXT = (
    "<|im_start|>system\nBe <b>brief</b> & exact.<|im_end|>\n"
    "<|im_start|>user\n47+85=<|im_end|>\n"
    "<|im_start|>assistant\n<think>a tool</think>\n"
    '<tool_call>{"name": "add", "arguments": {"a": 47, "b": 85}}</tool_call><|im_end|>\n'
    "<|im_start|>tool\n132<|im_end|>\n"
    "<|im_start|>assistant\n 132\n<|im_end|>\n"
)


def render(messages, **options):
    return TOKENIZER.apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize(
    "text",
    [
        string.printable[:95] + "\n\t",
        "users of a tool assist the assistant's system.",
        " leading, double  spaces and trailing \n\n",
        "don 't ! ?",
        "<|im_start|>user\nhi<|im_end|>\n",
        "a<tool_call>b</tool_call><think>c</think>",
        "",
    ],
)
def test_text_survives_a_round_trip(text):
    assert TOKENIZER.decode(TOKENIZER(text).input_ids) == text


def test_every_token_decodes_to_itself_and_back():
    tokens = TOKENIZER.convert_ids_to_tokens(range(len(TOKENIZER)))
    assert len(TOKENIZER) == 4 + len(WORDS) + len(CHARACTERS) == 109
    assert [TOKENIZER(token).input_ids for token in tokens] == [[index] for index in range(109)]


def test_one_token_per_character_but_for_words():
    assert TOKENIZER.tokenize("users\t<think>\n") == ["user", "s", "\t", "<think>", "\n"]
    assert TOKENIZER.tokenize("<think") == list("<think")


def test_unknown_characters_are_marked_one_by_one():
    assert TOKENIZER.tokenize("né\u4e2d") == ["n", "<|unk|>", "<|unk|>"]


def test_special_tokens():
    assert (TOKENIZER.pad_token_id, TOKENIZER.unk_token_id, TOKENIZER.eos_token_id) == (0, 1, 3)
    assert TOKENIZER.eos_token == "<|im_end|>" and TOKENIZER.bos_token is None
    assert TOKENIZER.decode(TOKENIZER(CHAT_TEXT).input_ids[:8], skip_special_tokens=True) == "system\nBe <b"
    assert TOKENIZER("ab", add_special_tokens=True).input_ids == TOKENIZER("ab", add_special_tokens=False).input_ids


def test_padding_is_on_the_right():
    assert TOKENIZER(["a", "abc"], padding=True).input_ids[0][1:] == [0, 0]


def test_objects_are_independent():
    changed = tiny_tokenizer()
    changed.add_tokens(["zz"])
    changed.chat_template = "x"
    assert len(tiny_tokenizer()) == 109 and tiny_tokenizer().chat_template == TOKENIZER.chat_template


def test_saved_tokenizer_is_the_same(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(CHAT_TEXT).input_ids == TOKENIZER(CHAT_TEXT).input_ids
    assert loaded.decode(loaded("a <b> ' s").input_ids) == "a <b> ' s"
    assert loaded.get_vocab() == TOKENIZER.get_vocab()
    assert loaded.special_tokens_map == TOKENIZER.special_tokens_map
    assert loaded.apply_chat_template(CHAT, tokenize=False) == CHAT_TEXT
    assert loaded.model_max_length == 1024


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_tokenizer_saved_beside_a_model_is_not_replaced_by_the_architectures_own(architecture, tmp_path):
    tiny_model(architecture, size="pico").save_pretrained(tmp_path)
    TOKENIZER.save_pretrained(tmp_path)
    # Beside a Qwen2 config AutoTokenizer (transformers 5) builds a Qwen2Tokenizer whatever the saved class is.
    auto = PreTrainedTokenizerFast if architecture == "qwen2" else AutoTokenizer
    loaded = auto.from_pretrained(tmp_path)
    assert loaded(CHAT_TEXT).input_ids == TOKENIZER(CHAT_TEXT).input_ids
    assert loaded.decode(loaded(CHAT_TEXT).input_ids) == CHAT_TEXT
    assert loaded.eos_token_id == 3 and loaded.bos_token_id is None


def test_chat_renders_every_role():
    assert render(CHAT) == CHAT_TEXT


def test_generation_prompt_is_the_prefix_of_the_answer():
    assert render(CHAT[:4], add_generation_prompt=True) + " 132\n<|im_end|>\n" == CHAT_TEXT
    for end in range(1, len(CHAT)):
        assert CHAT_TEXT.startswith(render(CHAT[:end]))


def test_tools_are_listed_in_the_system_turn():
    tool = {"type": "function", "function": {"name": "add", "description": "<sum>"}}
    listed = (
        "Tools, one JSON schema a line:\n" + 2 * (json.dumps(tool) + "\n") + "A call reads <tool_call>"
        '{"name": ..., "arguments": {...}}</tool_call>.<|im_end|>\n'
    )
    with_system = render(CHAT, tools=[tool, tool])
    rest = CHAT_TEXT.partition("<|im_end|>\n")[2]
    assert with_system == f"<|im_start|>system\nBe <b>brief</b> & exact.\n\n{listed}{rest}"
    assert render(CHAT[1:], tools=[tool, tool]) == f"<|im_start|>system\n{listed}{rest}"


def test_tool_calls_follow_content_and_each_other_on_lines_of_their_own():
    flat = {"name": "f", "arguments": '{"raw": 1}'}
    text = render([{"role": "assistant", "content": "so", "tool_calls": [ADD, flat]}])
    assert text == (
        '<|im_start|>assistant\nso\n<tool_call>{"name": "add", "arguments": {"a": 47, "b": 85}}</tool_call>\n'
        '<tool_call>{"name": "f", "arguments": {"raw": 1}}</tool_call><|im_end|>\n'
    )


def test_reasoning_stays_in_every_turn():
    turn = {"role": "assistant", "content": "y", "reasoning_content": "x"}
    ask = {"role": "user", "content": "q"}
    assert render([ask, turn, ask, turn]).count("<|im_start|>assistant\n<think>x</think>\ny<|im_end|>\n") == 2


def test_generation_mask_covers_the_assistants_words_and_terminator_only():
    encoded = TOKENIZER.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(encoded["assistant_masks"], encoded["input_ids"], strict=True)
    spans = [[token for _, token in run] for trained, run in groupby(pairs, key=itemgetter(0)) if trained]
    assert [TOKENIZER.decode(span) for span in spans] == [
        '<think>a tool</think>\n<tool_call>{"name": "add", "arguments": {"a": 47, "b": 85}}</tool_call><|im_end|>',
        " 132\n<|im_end|>",
    ]


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ({"role": "critic", "content": "x"}, "not critic"),
        ({"role": "user", "content": [{"type": "image"}]}, "not image"),
    ],
)
def test_what_the_template_cannot_render_is_an_error(message, named):
    with pytest.raises(TemplateError, match=named):
        render([message])
