"""How rows become tokens (`PrepareSpec`), and what came of it (`PrepareReport`)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

from workbench.data.formats import DATA_TYPES
from workbench.data.messages import ROLES
from workbench.data.targets import TrainOn
from workbench.errors import UserError, check_choice

Truncation = Literal["keep_start", "keep_end", "drop"]
Packing = Literal["bfd", "bfd_split", "wrapped"]
OnBadRow = Literal["error", "skip"]


@dataclass(frozen=True)
class PrepareSpec:
    """Everything that prepared rows depend on besides the rows and the tokenizer. Hashable, and JSON by `to_json`.

    Args:
        max_length: longest sequence in tokens, prompt and completion together; with ``packing`` the size of a pack. None: any.
        truncation: what a longer one keeps, its start or its end; ``drop`` leaves the row out. Prompts alone are left out rather
            than lose their end.
        train_on: ``all`` tokens, the ``completion``, every ``assistant`` turn, or the ``last_turn`` of the assistant; of
            stepwise supervision ``all`` labelled steps, or the ``last_step`` in training and all of them in evaluation.
            ``auto``: the completion where there is one, else all.
        role_weights: train messages by role, for example ``{assistant: 1, tool: 0.1}``; others weigh 0. ``reasoning`` is
            the reasoning within assistant turns.
        packing: put several rows into one of ``max_length`` tokens: ``bfd`` (best fit, rows whole), ``bfd_split`` (best
            fit, long rows cut into several) or ``wrapped`` (one stream of tokens cut at every ``max_length``; attends
            across documents). A pack counts as one row of the batch.
        packing_buffer: rows of a stream that are packed together.
        on_bad_row: ``error`` stops at a row that cannot be read or rendered; ``skip`` leaves it out and counts it.
        fold_system: put the system message into the first user message, for templates that refuse the role.
        chat_template_kwargs: variables for the chat template, for example ``{enable_thinking: false}``.
        role_names: roles of the data that have other names, for example ``{critic: user}``.
        step_separator: text after each step of stepwise supervision.
        data_type: type of the rows; None: by their columns.
        data_types: types that the method can use, set by it.
    """

    max_length: int | None = 1024
    truncation: Truncation = "keep_start"
    train_on: TrainOn = "auto"
    role_weights: dict[str, float] | None = None
    packing: Packing | None = None
    packing_buffer: int = 1000
    on_bad_row: OnBadRow = "error"
    fold_system: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    role_names: dict[str, str] | None = None
    step_separator: str = "\n"
    data_type: str | None = None
    data_types: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_choice("data.truncation", self.truncation, get_args(Truncation))
        check_choice("data.train_on", self.train_on, get_args(TrainOn))
        check_choice("data.on_bad_row", self.on_bad_row, get_args(OnBadRow))
        check_choice("data.packing", self.packing, (None, *get_args(Packing)))
        check_choice("data.data_type", self.data_type, (None, *DATA_TYPES))
        if self.max_length is not None and self.max_length < 2:
            raise UserError(f"data.max_length={self.max_length}: a row needs two tokens to train one. Use 2 or more, or null.")
        if self.packing and self.max_length is None:
            raise UserError(f"data.packing={self.packing} fills packs of data.max_length tokens: set data.max_length.")
        if self.packing in ("bfd_split", "wrapped") and self.truncation != "keep_start":
            raise UserError(
                f"data.truncation={self.truncation} has no effect with data.packing={self.packing}, which cuts nothing off: "
                "leave it out, or use data.packing=bfd."
            )
        if self.packing_buffer < 1:
            raise UserError(f"data.packing_buffer={self.packing_buffer}: use 1 or more.")
        self._check_weights()
        if self.data_types is not None:
            object.__setattr__(self, "data_types", tuple(self.data_types))

    def _check_weights(self) -> None:
        for role in self.role_weights or {}:
            check_choice("data.role_weights", role, (*ROLES, "reasoning"))
        for role in (self.role_names or {}).values():
            check_choice("data.role_names", role, ROLES)
        for role, weight in (self.role_weights or {}).items():
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < float("inf"):
                raise UserError(f"data.role_weights: {role}={weight!r} is not a weight. Use a number of 0 or more.")
        if self.role_weights is not None and not any(self.role_weights.values()):
            raise UserError("data.role_weights trains nothing: give a role a weight above 0, or leave it out.")

    def __hash__(self) -> int:
        return hash(self.to_json())

    def to_json(self) -> str:
        """The fields as JSON text, the same for equal specs."""
        return json.dumps(asdict(self), sort_keys=True)

    @property
    def row_limit(self) -> int | None:
        """Longest row before packing: packings that cut rows themselves get them whole."""
        return None if self.packing in ("bfd_split", "wrapped") else self.max_length


@dataclass
class PrepareReport:
    """What preparing a data set came to. JSON by ``asdict``; kept beside the prepared rows.

    Args:
        data_type: type of the rows.
        train_on: what is trained, resolved.
        template: name and hash of the chat template, if conversations were rendered.
        rows_in: rows read.
        rows_out: rows to train on, before packing.
        dropped: rows left out, by reason (``bad_row``, ``untrained``, ``cut_away``, ``too_long``, ``identical_pair``).
        bad_rows: messages of the first bad rows.
        truncated: rows cut to ``max_length`` and kept.
        cut_before_terminator: rows among them that lost trained tokens at their end, and so the end of the turn or text.
        double_bos: rows with two start tokens; in text rows, one of them was taken out.
        untrained_rows: rows with no trained token even before truncation.
        unterminated: rows whose last trained turn has no terminator in the template.
        open_markers: rows where the template's generation markers leave the turn's terminator out.
        reasoning_dropped: rows with reasoning that the template does not print.
        text_dropped: rows with an assistant's text or tool calls that the template does not print.
        other_roles: rows whose trained completion holds messages of other roles.
        prompt_differs: rows that do not begin with the tokens of their prompt alone.
        no_margin: pairs without a margin, where others have one.
        tokens: tokens of the rows kept, or of the packs.
        trained_tokens: those of weight above 0.
        packs: packed rows, 0 without packing.
        packing_dropped_tokens: tokens of tails that packing left out.
        packing_cuts: places where packing cut a row in two; each costs one trained token at most.
        unused_columns: columns that nothing reads.
        warnings: what the user should know, in sentences.
    """

    data_type: str = ""
    train_on: str = ""
    template: str = ""
    rows_in: int = 0
    rows_out: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    bad_rows: list[str] = field(default_factory=list)
    truncated: int = 0
    cut_before_terminator: int = 0
    double_bos: int = 0
    untrained_rows: int = 0
    unterminated: int = 0
    open_markers: int = 0
    reasoning_dropped: int = 0
    text_dropped: int = 0
    other_roles: int = 0
    prompt_differs: int = 0
    no_margin: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    packs: int = 0
    packing_dropped_tokens: int = 0
    packing_cuts: int = 0
    unused_columns: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "PrepareReport":
        """Inverse of ``asdict``."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})

    def drop(self, reason: str, count: int = 1) -> None:
        """Counts dropped rows."""
        self.dropped[reason] = self.dropped.get(reason, 0) + count

    def drops(self) -> str:
        """The dropped rows in words."""
        return ", ".join(f"{reason} {count}" for reason, count in self.dropped.items()) or "none"
