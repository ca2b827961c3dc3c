"""`load_tokenizer`: the tokenizer that goes with a model, its chat template and its special tokens.

A template is taken from a file, from text, or cloned from another tokenizer together with the special tokens that it
writes. Cloning is the one way by which a vocabulary grows; the model's embedding then grows with it (`fit_vocabulary`).
"""

import json
import logging
from collections.abc import Iterable
from pathlib import Path

import jinja2
from torch import nn
from transformers import AddedToken, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from workbench.errors import UserError, nearest
from workbench.models import gguf
from workbench.models.checkpoint import LOAD_ERRORS, quiet, readable_errors
from workbench.models.gguf import first_line
from workbench.models.load import ModelSpec, as_spec, base_spec, record_of, unwrap
from workbench.models.locate import Location, locate, why_missing
from workbench.models.seeding import local_rng

log = logging.getLogger(__name__)

# One of these is in every folder that holds a tokenizer.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")

# Classes that hold nothing but the saved tokenizer.json.
_PLAIN_CLASSES = ("TokenizersBackend", "PreTrainedTokenizerFast")


def load_tokenizer(spec: str | ModelSpec | PreTrainedModel, model: PreTrainedModel | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of ``spec`` with the template and special tokens it asks for.

    Args:
        spec: as for `workbench.models.load.load_model`; a model object must have been loaded by name.
        model: the loaded model, whose embedding is then fitted to the vocabulary (`fit_vocabulary`).

    Raises:
        UserError: no tokenizer there, an unknown token, a template that is missing or has a syntax error.
    """
    spec = _spec_of(spec) if isinstance(spec, nn.Module) else as_spec(spec)
    tokenizer = _read(spec)
    _set_chat_template(tokenizer, spec)
    for role in ("eos_token", "pad_token"):
        if (token := getattr(spec, role)) is not None:
            _check_known(tokenizer, spec, role, token)
            setattr(tokenizer, role, token)
    _choose_pad(tokenizer)
    if model is not None:
        fit_vocabulary(model, tokenizer, spec)
    return tokenizer


def fit_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    """Gives every token of ``tokenizer`` a row in the model's embedding and head.

    Rows are added where ``spec`` clones a chat template. An embedding that is larger already is left as it is: many models
    pad theirs.

    Raises:
        UserError: the tokenizer has more tokens than the model, for another reason; it belongs to another model.
    """
    rows = unwrap(model).get_input_embeddings().weight.shape[0]
    if len(tokenizer) <= rows:
        return
    if not _is_clone(spec.chat_template):
        raise UserError(
            f"The tokenizer has {len(tokenizer)} tokens and model {spec.name!r} has rows for {rows}: they do not belong "
            "together; check model.tokenizer."
        )
    resize_embeddings(model, tokenizer, seed=spec.init_seed)


def resize_embeddings(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, *, seed: int = 0) -> bool:
    """Adds the rows that ``tokenizer`` needs to the model's embedding and head, and says whether there were any.

    New rows are drawn around the mean of the old ones with (next to) no variance, as transformers does it: the new tokens
    then start with an average logit rather than a random, often dominating one. The draw is made under ``seed`` alone.

    Raises:
        UserError: the model carries an adapter already; its embedding must be sized first.
    """
    return grow_embeddings(model, len(tokenizer), seed=seed)


def grow_embeddings(model: PreTrainedModel, rows: int, *, seed: int = 0) -> bool:
    """`resize_embeddings` to a number of rows; never fewer than there are."""
    present = model.get_input_embeddings().weight.shape[0]
    if rows <= present:
        return False
    if unwrap(model) is not model:
        raise UserError("The model carries an adapter already; load the tokenizer with it before the adapter is added.")
    with quiet(), local_rng(seed):
        model.resize_token_embeddings(rows, mean_resizing=True)
    model.rows_before_resize = getattr(model, "rows_before_resize", present)
    log.info("The embedding grew from %d to %d rows for the tokenizer's new tokens.", present, rows)
    return True


def require_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises `UserError` where the tokenizer cannot render a conversation."""
    if not tokenizer.chat_template:
        raise UserError(
            f"The tokenizer of {tokenizer.name_or_path!r} has no chat template, which conversations need; "
            "set model.chat_template to a .jinja file, to the text, or to a model whose template is to be cloned."
        )


def end_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids at which a generation ends: the tokenizer's EOS, the template's turn terminator, and those of the model."""
    record = record_of(model)
    settings = record.generation_config if record else getattr(unwrap(model), "generation_config", None)
    ids = [tokenizer.eos_token_id, turn_terminator(tokenizer), *as_list(getattr(settings, "eos_token_id", None))]
    return list(dict.fromkeys(int(token) for token in ids if token is not None))


def turn_terminator(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Id of the special token with which the chat template ends an assistant's turn; None where it has none."""
    if not tokenizer.chat_template:
        return None
    mark = "answer"
    turns = [{"role": "user", "content": "question"}, {"role": "assistant", "content": mark}]
    try:
        text = tokenizer.apply_chat_template(turns, tokenize=False)
    except (jinja2.TemplateError, TypeError, ValueError):
        return None  # it takes conversations of another kind only
    if mark not in text:
        return None
    rest = tokenizer(text.rpartition(mark)[2], add_special_tokens=False)["input_ids"]
    special = set(tokenizer.all_special_ids) | {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    return next((token for token in rest if token in special), None)


def _spec_of(model: nn.Module) -> ModelSpec:
    if record := record_of(model):
        return record.spec
    name = unwrap(model).config.name_or_path
    if not name:
        raise UserError("The model object was not loaded by name, so its tokenizer is not known; load that by its name.")
    return ModelSpec(name)


def _read(spec: ModelSpec) -> PreTrainedTokenizerBase:
    if spec.tokenizer is not None:
        spec = ModelSpec(spec.tokenizer, trust_remote_code=spec.trust_remote_code)
    location = _locate(spec)
    if location.kind == "tiny":
        from workbench.tiny.tokenizer import tiny_tokenizer

        return tiny_tokenizer()
    if location.kind == "adapter":  # one saved without its tokenizer
        return _read(base_spec(spec, location.path))
    try:
        with readable_errors(spec, location):
            return _from_location(spec, location)
    except UserError as error:
        raise _explain(spec, error) from error


def _locate(spec: ModelSpec) -> Location:
    path = Path(spec.name).expanduser()
    if spec.gguf_file is None and path.is_dir() and _has_files(path):
        return Location("directory", str(path))  # also a folder that holds a tokenizer and no model
    return locate(spec.name, gguf_file=spec.gguf_file, revision=spec.revision)


def _from_location(spec: ModelSpec, location: Location) -> PreTrainedTokenizerBase:
    if location.kind == "hub":
        return AutoTokenizer.from_pretrained(
            location.path, revision=spec.revision or "main", trust_remote_code=spec.trust_remote_code
        )
    if location.kind == "gguf":
        file = Path(location.path)
        gguf.check_readable(file)
        found = gguf.converted(file)
        return AutoTokenizer.from_pretrained(found) if found else gguf.read_tokenizer(file)
    if not _has_files(location.path):
        raise UserError(f"{location.path} holds no tokenizer; name the one it was trained with as model.tokenizer.")
    if _saved_class(location.path) in _PLAIN_CLASSES:
        return PreTrainedTokenizerFast.from_pretrained(location.path)
    return AutoTokenizer.from_pretrained(location.path, trust_remote_code=spec.trust_remote_code)


def _saved_class(directory: str) -> str | None:
    """The class that a saved tokenizer names. AutoTokenizer passes over it where the model's config (qwen2) knows another one,
    which builds the vocabulary's rules anew and gives other ids."""
    path = Path(directory, "tokenizer_config.json")
    return json.loads(path.read_text(encoding="utf-8")).get("tokenizer_class") if path.is_file() else None


def _has_files(directory: str | Path) -> bool:
    return any(Path(directory, name).is_file() for name in TOKENIZER_FILES)


def _explain(spec: ModelSpec, error: UserError) -> UserError:
    if error.__cause__ is None:
        return error
    text = str(error.__cause__)
    if "sentencepiece" in text or "tiktoken" in text:
        return UserError(
            f"The tokenizer of {spec.name!r} is not in the fast format, or is damaged; to convert it: "
            "pip install sentencepiece tiktoken"
        )
    return UserError(str(error).replace("Could not load model", "Could not load the tokenizer of"))


def _is_clone(chat_template: str | None) -> bool:
    """Whether the setting names another tokenizer rather than a file or the text itself."""
    if chat_template is None or "{{" in chat_template or "{%" in chat_template:
        return False
    return not chat_template.endswith((".jinja", ".jinja2", ".j2")) and not Path(chat_template).expanduser().is_file()


def _set_chat_template(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec) -> None:
    if spec.chat_template is None:
        return
    if _is_clone(spec.chat_template):
        try:
            source = _read(ModelSpec(spec.chat_template, trust_remote_code=spec.trust_remote_code))
            require_chat_template(source)
        except UserError as error:
            raise UserError(f"model.chat_template={spec.chat_template!r}: {error}") from error
        _clone(tokenizer, source)
    else:
        tokenizer.chat_template = _template_text(spec.chat_template)
    _check_syntax(tokenizer, spec.chat_template)


def _template_text(chat_template: str) -> str:
    if "{{" in chat_template or "{%" in chat_template:
        return chat_template
    path = Path(chat_template).expanduser()
    if not path.is_file():
        raise UserError(f"model.chat_template={chat_template!r}: {why_missing(path)}")
    return path.read_text(encoding="utf-8")


def _clone(tokenizer: PreTrainedTokenizerBase, source: PreTrainedTokenizerBase) -> None:
    """Copies the template, and of the special tokens of ``source`` those that it writes and that are missing here."""
    tokenizer.chat_template = source.chat_template
    templates = source.chat_template
    text = "\n".join(templates.values()) if isinstance(templates, dict) else templates
    known = tokenizer.get_vocab()
    written = [t for t in _tokens_of(source) if t.content in text or t.content == source.eos_token]
    new = [token for token in written if token.content not in known]
    added = tokenizer.add_tokens(new)
    if source.eos_token is not None:
        tokenizer.eos_token = source.eos_token
    log.info("Chat template cloned; %d tokens were added: %s.", added, ", ".join(t.content for t in new) or "none")


def _tokens_of(tokenizer: PreTrainedTokenizerBase) -> Iterable[AddedToken]:
    """Special and added tokens in the order of their ids, as tokens that stay whole wherever they are added."""
    named = {tokenizer.convert_tokens_to_ids(t): AddedToken(t, special=True) for t in tokenizer.all_special_tokens}
    return [token for _, token in sorted((named | tokenizer.added_tokens_decoder).items())]


def _check_syntax(tokenizer: PreTrainedTokenizerBase, given: str) -> None:
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "question"}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        shown = given if len(given) < 60 else f"{given[:57]}..."
        raise UserError(f"model.chat_template={shown!r}, line {error.lineno}: {error.message}") from error
    except (jinja2.TemplateError, *LOAD_ERRORS) as error:
        # It may refuse this very conversation, say for want of a system turn; the data tells whether that matters.
        log.debug("The chat template refuses a lone user turn: %s", first_line(error))


def _check_known(tokenizer: PreTrainedTokenizerBase, spec: ModelSpec, role: str, token: str) -> None:
    vocabulary = tokenizer.get_vocab()
    if token not in vocabulary:
        raise UserError(
            f"model.{role}={token!r} is not a token of {spec.tokenizer or spec.name!r}.{nearest(token, vocabulary)} "
            "New tokens come with a cloned chat template only (model.chat_template)."
        )


def _choose_pad(tokenizer: PreTrainedTokenizerBase) -> None:
    """Masks go by position, so any token can pad, the EOS too."""
    if tokenizer.pad_token is not None:
        return
    candidates = (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token, tokenizer.convert_ids_to_tokens(0))
    tokenizer.pad_token = next(token for token in candidates if token is not None)
    log.info("The tokenizer has no padding token: %r pads, and is trained wherever it is text.", tokenizer.pad_token)


def as_list(value: int | list[int] | None) -> list[int]:
    """The ids in a config's token setting: none, one or several."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
