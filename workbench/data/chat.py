"""Conversations to text, and which parts of the text are trained.

`ChatRenderer` renders with the tokenizer's chat template and finds each message in the result: by the template's own
generation markers, else by the derivation of `workbench.data.spans`. `train_spans` turns the training options into
weighted character spans. Texts are rendered once; nothing here tokenises.
"""

import hashlib
import inspect
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from jinja2 import Template
from jinja2.meta import find_undeclared_variables
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from workbench.data.known_templates import KNOWN_TEMPLATES
from workbench.data.skeleton import hollow_out, template_tags
from workbench.data.spans import Ends, Plan, SpanError, Turn, header_length, make_plan, prefix_turns
from workbench.errors import UserError

Messages = list[dict[str, Any]]
_FLAGS = ("train", "weight")
_MAX_PLANS = 4096
_OPTIONS = frozenset((*inspect.signature(render_jinja_template).parameters, "messages"))
_PLAIN = (str, int, float, bool)  # variables of these types reach a template as they are
_MARKERS = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


def template_hash(template: str) -> str:
    """First 12 hexadecimal digits of the SHA-256 of a template's text."""
    return hashlib.sha256(template.encode()).hexdigest()[:12]


def describe_template(template: str) -> str:
    """A template's name if its text is known, and its hash."""
    digest = template_hash(template)
    return f"{KNOWN_TEMPLATES[digest]} [{digest}]" if digest in KNOWN_TEMPLATES else f"[{digest}]"


@dataclass(frozen=True)
class Conversation:
    """A rendered conversation.

    Args:
        text: the rendering.
        roles: role of each message.
        turns: place of each message, or the reason why it has none.
        derived: the same without regard to generation markers.
        reasoning_dropped: the template leaves out reasoning that the messages hold.
        text_dropped: the template leaves out an assistant's text.
        open_markers: the template's generation markers end before the turn's terminator.
    """

    text: str
    roles: tuple[str, ...]
    turns: tuple[Turn | str, ...] = ()
    derived: tuple[Turn | str, ...] = ()
    reasoning_dropped: bool = False
    text_dropped: bool = False
    open_markers: bool = False


class _Facts(NamedTuple):
    """What is known of a template by its text: the tags it may look for, whether it has generation markers, and its code."""

    tags: re.Pattern[str]
    marked: bool
    compiled: Template


class ChatRenderer:
    """Renders conversations with a tokenizer's chat template.

    Args:
        tokenizer: its chat template is used, and its special tokens are passed to it.
        chat_template_kwargs: variables for the template; a row's own override them.
        fold_system: put a leading system message into the first user message (for templates that refuse the role).
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        fold_system: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template_kwargs = dict(chat_template_kwargs or {})
        self.fold_system = fold_system
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.ends = Ends(tokenizer.eos_token, frozenset((*tokenizer.all_special_tokens, *added)))
        self._plans: dict[str, Plan | str] = {}
        self._known: dict[str, _Facts] = {}

    def template(self, tools: Sequence[Any] | None = None) -> str:
        """The template's text for these tools; `UserError` if the tokenizer has none."""
        try:
            return self.tokenizer.get_chat_template(None, tools)
        except ValueError as error:
            raise UserError(
                "The tokenizer has no chat template, which conversations need: set model.chat_template to a path, a text or "
                f"the name of a model to take it from. ({str(error).splitlines()[0]})"
            ) from None

    def variables(self) -> set[str]:
        """Names that the template reads and does not set itself."""
        names: set[str] = set()
        for template in {self.template(), self.template([{}])}:
            environment = _compile_jinja_template(template).environment
            names |= find_undeclared_variables(environment.parse(template))
        return names

    def describe(self) -> str:
        """Name and hash of the template."""
        return describe_template(self.template())

    def render(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation, as ``apply_chat_template(tokenize=False)`` gives it; `UserError` if refused."""
        messages = self.clean(messages)
        options = {"add_generation_prompt": add_generation_prompt, "continue_final_message": continue_final_message}
        try:
            return self._render(messages, tools or None, self._variables(kwargs), **options)[0]
        except UserError:
            raise
        except Exception as error:  # templates raise what they like
            raise self._refused(messages, error) from None

    def render_prompt(
        self, messages: Messages, tools: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> str:
        """The text that the model is asked with: up to where the assistant's answer begins, or goes on if it has begun."""
        opened = bool(messages) and messages[-1]["role"] == "assistant"
        return self.render(messages, tools, kwargs, add_generation_prompt=not opened, continue_final_message=opened)

    def locate(
        self,
        messages: Messages,
        tools: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        markers: bool = True,
    ) -> Conversation:
        """Renders a conversation and finds its messages. ``markers``: generation markers, if any, place the assistant."""
        messages, tools = self.clean(messages), tools or None
        variables = self._variables(kwargs)
        text = self.render(messages, tools, kwargs)
        roles = tuple(m["role"] for m in messages)
        conversation = self._derive(Conversation(text, roles), messages, tools, variables)
        conversation = replace(conversation, derived=conversation.turns)
        if markers and self._facts(self.template(tools)).marked:
            marked = self._render(messages, tools, variables, markers=True)
            conversation = self._mark(conversation, marked)
        return conversation

    def boundary(self, conversation: Conversation, messages: Messages, count: int, tools: Any = None, kwargs: Any = None) -> int:
        """First character that follows the prompt, the first ``count`` messages with the generation prompt.

        ``conversation`` is the joint rendering, from `locate`.
        """
        if count < len(conversation.derived) and conversation.roles[count] == "assistant":
            turn = conversation.derived[count]
            if isinstance(turn, Turn):
                return turn.start
        asks = conversation.roles[count : count + 1] == ("assistant",)
        prompt = self.render(messages[:count], tools, kwargs, add_generation_prompt=asks) if count else ""
        try:
            return header_length(prompt, conversation.text, count)
        except SpanError:
            raise UserError(
                f"With the chat template {self.describe()} the prompt of this row is not the start of prompt and completion "
                "together, so the completion cannot be told apart: use train_on=all or another template."
            ) from None

    def fold(self, messages: Messages) -> Messages:
        """The messages, a leading system message folded into the user message after it if that is asked for."""
        folds = self.fold_system and [m["role"] for m in messages[:2]] == ["system", "user"]
        return [_folded(messages[0]["content"], messages[1]), *messages[2:]] if folds else messages

    def clean(self, messages: Messages) -> Messages:
        """Messages as the template gets them: no None, no training flags, the system message folded if asked for."""
        return [{k: v for k, v in m.items() if v is not None and k not in _FLAGS} for m in self.fold(messages)]

    def _variables(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Template variables of a row; those that Arrow filled with None are not the row's."""
        return {**self.chat_template_kwargs, **{k: v for k, v in (kwargs or {}).items() if v is not None}}

    def _render(
        self, messages: Messages, tools: Any, variables: Mapping[str, Any], *, markers: bool = False, **options: bool
    ) -> tuple[str, list[tuple[int, int]]]:
        template, variables = self.template(tools), {**self.tokenizer.special_tokens_map, **variables}
        special = tools or markers or options.get("continue_final_message")
        if not special and _are_texts(messages) and _are_plain(variables):
            # nothing that `render_jinja_template` would check or convert, which takes it as long as rendering
            asks = options.get("add_generation_prompt", False)
            plain = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": asks}
            return self._facts(template).compiled.render(plain, **variables), []
        texts, marks = render_jinja_template(
            conversations=[messages],
            tools=tools,
            chat_template=template,
            return_assistant_tokens_mask=markers,
            **options,
            **variables,
        )
        return texts[0], [tuple(span) for span in marks[0]] if markers else []

    def _derive(self, rendered: Conversation, messages: Messages, tools: Any, variables: Mapping[str, Any]) -> Conversation:
        """``rendered`` with the turns that sentinels, else prefixes, give."""
        tags = self._facts(self.template(tools)).tags

        def render(part: Messages, prompt: bool) -> str:
            return self._render(part, tools, variables, add_generation_prompt=prompt)[0]

        for keep_empty in (True, False):
            skeleton = hollow_out(messages, tags, keep_empty)
            key = json.dumps([skeleton.messages, tools, variables], default=str)
            # a stored plan can be out of date where the template prints the time
            for fresh in (False, True) if key in self._plans else (True,):
                plan = self._plan(key, skeleton, render, fresh)
                starts = None if isinstance(plan, str) else plan.locate(rendered.text, skeleton.slots)
                if starts is not None:
                    return self._with_turns(rendered, messages, plan, starts, skeleton, render)
        return replace(rendered, turns=tuple(prefix_turns(messages, rendered.text, render, self.ends)))

    def _facts(self, template: str) -> "_Facts":
        if template not in self._known:
            compiled = _compile_jinja_template(template).environment.from_string(template)
            compiled.globals = dict(compiled.globals)  # copied for each rendering: a chain of mappings takes long
            self._known[template] = _Facts(template_tags(template), bool(_MARKERS.search(template)), compiled)
        return self._known[template]

    def _plan(self, key: str, skeleton: Any, render: Any, fresh: bool) -> Plan | str:
        plan = None if fresh else self._plans.get(key)
        if plan is None:
            try:
                plan = make_plan(skeleton, render, self.ends)
            except Exception as error:  # the template refuses sentinels where it took the texts
                plan = str(error)
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def _with_turns(
        self, rendered: Conversation, messages: Messages, plan: Plan, starts: list[int], skeleton: Any, render: Any
    ) -> Conversation:
        turns = [plan.turn(i, starts) for i in range(len(messages))]
        missed = [role for turn, role in zip(turns, rendered.roles, strict=True) if isinstance(turn, str)]
        if "assistant" in missed and not plan.final:
            others = prefix_turns(messages, rendered.text, render, self.ends)
            turns = [b if isinstance(a, str) and isinstance(b, Turn) else a for a, b in zip(turns, others, strict=True)]
        lost = [skeleton.slots[i] for i in plan.dropped]
        return replace(
            rendered,
            turns=tuple(turns),
            reasoning_dropped=any(s.kind == "reasoning" for s in lost),
            text_dropped=any(s.kind != "reasoning" and s.text and rendered.roles[s.message] == "assistant" for s in lost),
        )

    def _mark(self, conversation: Conversation, marked: tuple[str, list[tuple[int, int]]]) -> Conversation:
        """``conversation`` with the assistant turns where the template's generation markers put them."""
        text, marks = marked
        if text != conversation.text:
            raise UserError(f"The chat template {self.describe()} renders otherwise when its generation markers are read.")
        turns: list[Turn | str] = list(conversation.turns)
        asked = [i for i, role in enumerate(conversation.roles) if role == "assistant"]
        open_markers = False
        for i, spans in zip(asked, _share(marks, asked, turns), strict=True):
            derived = turns[i]
            if not spans:
                turns[i] = f"message {i} has no generation marker in the template"
                continue
            start, end = spans[0][0], spans[-1][1]
            if isinstance(derived, Turn):
                open_markers |= derived.terminated and end < derived.end
                turns[i] = replace(derived, start=start, end=end)
            else:
                turns[i] = Turn(i, start, end)
        return replace(conversation, turns=tuple(turns), open_markers=open_markers)

    def _refused(self, messages: Messages, error: Exception) -> UserError:
        roles = ", ".join(str(m.get("role")) for m in messages)
        fold = " or data.fold_system=true" if messages and messages[0].get("role") == "system" else ""
        return UserError(
            f"The chat template {self.describe()} refuses the roles [{roles}]: {error}. "
            f"Correct the row, or set data.on_bad_row=skip{fold}."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plans": {}, "_known": {}}


def _are_texts(messages: Messages) -> bool:
    """Whether the messages are nothing but roles and texts."""
    return all(len(m) == 2 and type(m.get("role")) is str and type(m.get("content")) is str for m in messages)


def _are_plain(variables: Mapping[str, Any]) -> bool:
    """Whether these variables reach a template as they are, and none is an option of rendering."""
    return all(type(value) in _PLAIN for value in variables.values()) and _OPTIONS.isdisjoint(variables)


def _folded(system: Any, user: dict[str, Any]) -> dict[str, Any]:
    content = user.get("content", "")
    if isinstance(system, str) and isinstance(content, str):
        return {**user, "content": f"{system}\n\n{content}"}
    blocks = lambda c: [{"type": "text", "text": c}] if isinstance(c, str) else list(c)  # noqa: E731
    return {**user, "content": [*blocks(system), {"type": "text", "text": "\n\n"}, *blocks(content)]}


def _share(marks: list[tuple[int, int]], asked: list[int], turns: list[Turn | str]) -> list[list[tuple[int, int]]]:
    """Which generation markers belong to which of the assistant messages ``asked``."""
    if len(marks) == len(asked):
        return [[mark] for mark in marks]
    shares = []
    for i in asked:
        turn = turns[i]
        shares.append([m for m in marks if m[0] < turn.end and m[1] > turn.start] if isinstance(turn, Turn) else [])
    if sum(map(len, shares)) != len(marks):
        raise UserError(f"The chat template's {len(marks)} generation markers do not match {len(asked)} assistant messages.")
    return shares
