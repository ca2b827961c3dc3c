"""Which parts of a row are trained, as weighted spans of characters."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from workbench.data.chat import Conversation
from workbench.data.spans import SpanError, Turn
from workbench.errors import UserError, check_choice

TrainOn = Literal["auto", "all", "completion", "assistant", "last_turn", "last_step"]
Span = tuple[int, int, float]
END = 1 << 30  # past every text's end: such a span takes the end-of-sequence token in, too

# what can be trained, by (type, conversational); the first is what ``auto`` means
_CHOICES: dict[tuple[str, bool], tuple[str, ...]] = {
    ("language_modeling", False): ("all",),
    ("language_modeling", True): ("all", "assistant", "last_turn"),
    ("prompt_completion", False): ("completion", "all"),
    ("prompt_completion", True): ("completion", "all", "assistant", "last_turn"),
    # ``all`` trains the prompt too, once: a pair's own terms read the answers alone
    ("preference", False): ("completion", "all"),
    ("preference", True): ("completion", "all", "assistant", "last_turn"),
    ("triple_preference", False): ("completion",),
    ("triple_preference", True): ("completion", "assistant", "last_turn"),
    ("unpaired_preference", False): ("completion",),
    ("unpaired_preference", True): ("completion", "assistant", "last_turn"),
    # of the steps that are labelled
    ("stepwise_supervision", False): ("all", "last_step"),
    ("stepwise_supervision", True): ("all", "last_step"),
}


def resolve_train_on(train_on: TrainOn, data_type: str, conversational: bool, weighted_roles: bool = False) -> str:
    """What ``train_on`` means for rows of this kind; `UserError` if they have no such part.

    Args:
        train_on: as configured.
        data_type: type of the rows.
        conversational: whether they hold messages.
        weighted_roles: whether weights per role are configured, which ask for messages.
    """
    check_choice("data.train_on", train_on, get_args(TrainOn))
    choices = _CHOICES.get((data_type, conversational), ())
    form = "conversational" if conversational else "plain text"
    if train_on == "auto" and not weighted_roles:
        return choices[0] if choices else "auto"
    if train_on != "auto" and train_on not in choices:
        allowed = ", ".join(("auto", *choices))
        raise UserError(f"data.train_on={train_on} is impossible with {form} {data_type} rows. Allowed here: {allowed}.")
    if weighted_roles and (not (conversational and choices) or data_type == "stepwise_supervision"):
        raise UserError(f"data.role_weights has no effect on {form} {data_type} rows: leave it out.")
    if weighted_roles and train_on == "all":
        raise UserError("data.role_weights and data.train_on=all exclude each other: leave train_on out to train by role.")
    if train_on != "auto":
        return train_on
    return "assistant" if data_type == "language_modeling" else "completion"


def check_tokens_read(train_on: TrainOn, role_weights: Mapping[str, float] | None, method: Any) -> None:
    """Raises `UserError` where these options choose tokens for a method (or a class of one) that reads a score at the end of each
    answer, or that trains what it writes itself."""
    if not getattr(method, "trains_tokens", True) and (train_on != "auto" or role_weights):
        option = f"train_on={train_on}" if train_on != "auto" else "role_weights"
        name = method.__name__ if isinstance(method, type) else type(method).__name__
        does = "trains what it writes itself" if getattr(method, "generates", False) else "scores whole answers at their end"
        raise UserError(f"data.{option} has no effect with {name}, which {does}: leave it out.")


def check_prompts_read(train_on: TrainOn, method: Any) -> None:
    """Raises `UserError` where ``train_on=all`` would train the prompts of pairs for a method (or a class of one) that reads
    their answers alone."""
    if train_on == "all" and "preference" in getattr(method, "data_types", ()) and not method.trains_prompts:
        name = method.__name__ if isinstance(method, type) else type(method).__name__
        raise UserError(f"data.train_on=all has no effect with {name}, which reads the answers of a pair alone: leave it out.")


@dataclass(frozen=True)
class Targets:
    """What is trained in conversations.

    ``all`` and ``completion`` without role weights train a stretch of text as it stands, headers of turns included;
    everything else trains messages, from what the model writes to the turn's terminator. A message's own flags come
    last: ``train: false`` takes it out, ``train: true`` takes it in, ``weight`` multiplies.

    Args:
        train_on: resolved, see `resolve_train_on`.
        role_weights: weight of each role's messages; ``reasoning`` for the reasoning within assistant turns.
    """

    train_on: str
    role_weights: Mapping[str, float] = field(default_factory=dict)

    def need_turns(self, messages: list[dict[str, Any]]) -> bool:
        """Whether the messages have to be located."""
        by_message = self.train_on in ("assistant", "last_turn") or bool(self.role_weights)
        return by_message or any("train" in m or "weight" in m for m in messages)

    def spans(self, conversation: Conversation, messages: list[dict[str, Any]], first: int, boundary: int) -> list[Span]:
        """Weighted spans; where two overlap, the later one holds.

        Args:
            conversation: with its turns located if `need_turns`.
            messages: as cleaned for the template (one per turn), but with their flags.
            first: first message that may be trained.
            boundary: first character that may be trained.

        Raises:
            SpanError: a message to train has no place in the rendering.
        """
        stretch = self.train_on in ("all", "completion") and not self.role_weights
        spans: list[Span] = [(boundary, END, 1.0)] if stretch else []
        for i in range(first, len(messages)):
            weight = 1.0 if stretch else self._weight(conversation.roles, i, first)
            flagged = self._flagged(weight, messages[i])
            if flagged != weight or (flagged and not stretch):
                spans += self._message(conversation, i, flagged, stretch)
        return spans

    def _weight(self, roles: tuple[str, ...], i: int, first: int) -> float:
        if self.train_on == "last_turn":
            asked = [k for k in range(first, len(roles)) if roles[k] == "assistant"]
            if not asked or i != asked[-1]:
                return 0.0
        return float(self.role_weights.get(roles[i], 0.0) if self.role_weights else roles[i] == "assistant")

    def _flagged(self, weight: float, message: dict[str, Any]) -> float:
        if message.get("train") is False:
            return 0.0
        weight = 1.0 if message.get("train") and not weight else weight
        return weight * float(message.get("weight", 1.0))

    def _message(self, conversation: Conversation, i: int, weight: float, stretch: bool) -> list[Span]:
        turn = conversation.turns[i]
        if not isinstance(turn, Turn):
            raise SpanError(turn)
        spans = [(turn.start, turn.end, weight)]
        if turn.reasoning and weight and not stretch and "reasoning" in self.role_weights:
            spans.append((*turn.reasoning, float(self.role_weights["reasoning"])))
        return spans
