"""Writing a trained model where others can load it: transformers, peft, vLLM and the hub.

A directory is written beside its place and renamed into it at the end, so that a full disk or a crash leaves the previous
one as it was. What a run changed for its own sake (the cache switched off, padding) is not what gets written.
"""

import contextlib
import copy
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import HfApi, constants, errors
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from workbench.errors import UserError
from workbench.models.checkpoint import quiet
from workbench.models.gguf import first_line
from workbench.models.load import BASE_FIELDS, BASE_FILE, base_name, record_of, unwrap
from workbench.models.peft import single_adapter
from workbench.models.tokenizer import as_list, end_token_ids

log = logging.getLogger(__name__)

MERGED = "merged"  # folder of the merged copy, within an adapter's
# Names that a save may write, and with them those that the next one may replace; all others in a directory are kept.
_MODEL_SUFFIXES = (".safetensors", ".safetensors.index.json", ".jinja", ".model")
_MODEL_FILES = frozenset(
    (
        *("config.json", "generation_config.json", "adapter_config.json", BASE_FILE, "README.md", MERGED),
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
        *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json", "additional_chat_templates"),
    )
)


def save_pretrained(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase | None,
    directory: str | os.PathLike,
    *,
    merge: bool = False,
    state_dict: Mapping[str, Tensor] | None = None,
    dtype: Literal["float32", "bfloat16", "float16"] | None = None,
    card: str | None = None,
    adapter: str | None = None,
    max_shard_size: str = "5GB",
) -> Path:
    """Writes a directory that ``AutoModelForCausalLM`` and vLLM load, or for an adapter the one that peft loads.

    Call it on one process. The model is left as it was.

    Args:
        model: the trained model.
        tokenizer: saved beside it with its chat template; None leaves it out.
        directory: replaced as a whole; files in it that no save writes are kept.
        merge: for an adapter, also write the merged model to ``directory/merged``.
        state_dict: full tensors by the names of ``model.state_dict()``, where those of ``model`` itself are sharded.
        dtype: of the weights in the file; None keeps theirs.
        card: text of README.md.
        adapter: which adapter; None is the active one.
        max_shard_size: of one weight file.

    Raises:
        UserError: nothing could be written (full disk, no permission), or an adapter that cannot be merged.
    """
    if merge and not isinstance(model, PeftModel):
        raise UserError("merge=true has no effect: the model carries no adapter; drop it.")
    tokenizer = _padding_apart(model, tokenizer)
    with atomic_directory(directory) as folder:
        if isinstance(model, PeftModel):
            name = adapter or single_adapter(model)
            _write_adapter(model, folder, name, state_dict, dtype)
            if merge:
                tensors = merged_state_dict(model, state_dict, adapter=name)
                _write_full(model.get_base_model(), tokenizer, folder / MERGED, tensors, dtype, max_shard_size)
        else:
            _write_full(model, tokenizer, folder, state_dict, dtype, max_shard_size)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        if card is not None:
            (folder / "README.md").write_text(card, encoding="utf-8")
    return Path(directory)


@contextlib.contextmanager
def atomic_directory(directory: str | os.PathLike) -> Iterator[Path]:
    """Gives a new folder to write to, which takes the place of ``directory`` when the block ends without an error.

    Files of ``directory`` that are not a model's are carried over. What an earlier, killed save left behind is cleared.

    Raises:
        UserError: writing failed; ``directory`` is what it was before.
    """
    target = Path(os.path.abspath(directory))
    temporary, old = target.with_name(f".{target.name}.tmp"), target.with_name(f".{target.name}.old")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _finish_swap(target, old)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        yield temporary
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        _finish_swap(target, old)
    except (OSError, SafetensorError) as error:
        if isinstance(error, SafetensorError) and "os error" not in str(error):
            raise
        raise UserError(f"Could not save to {directory}: {_disk_fault(error)}; {_what_is_left(target)}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def export_generation_config(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> GenerationConfig:
    """The model's generation settings as they belong in a saved directory.

    They are the model's own, and end at every id of `end_token_ids`. A padding token that is one of those ids is kept only
    where the model came with it: a server that strips padding would strip the end with it.
    """
    base, record = unwrap(model), record_of(model)
    settings = copy.deepcopy(base.generation_config)
    if tokenizer is None:
        return settings
    before = as_list(settings.eos_token_id)
    ids = [*before, *(token for token in end_token_ids(model, tokenizer) if token not in before)]
    settings.eos_token_id = ids[0] if len(ids) == 1 else ids or None
    came_with = record.generation_config.pad_token_id if record and record.generation_config else None
    if settings.pad_token_id in ids and settings.pad_token_id != came_with:
        settings.pad_token_id = came_with
    if settings.pad_token_id is None and tokenizer.pad_token_id not in ids:
        settings.pad_token_id = tokenizer.pad_token_id
    return settings


def merged_state_dict(
    model: PeftModel, state_dict: Mapping[str, Tensor] | None = None, *, adapter: str | None = None
) -> dict[str, Tensor]:
    """The base model's tensors with the adapter added to them, under the base model's names; ``model`` is not touched.

    Args:
        model: the model with its adapter.
        state_dict: full tensors by the names of ``model.state_dict()``; its own if None.
        adapter: which adapter; None is the active one.

    Raises:
        UserError: an adapter that has no merged form (prompt tuning), or a base held in few bits.
    """
    name = adapter or single_adapter(model)
    if model.peft_config[name].is_prompt_learning:
        raise UserError(f"A {model.peft_config[name].peft_type.value} adapter cannot be merged; save it without merge=true.")
    if getattr(model.get_base_model(), "is_quantized", False):
        raise UserError(
            "merge=true would round the adapter to the base's few bits; save the adapter, "
            "load it with model.quantization=null, and merge that."
        )
    source = dict(model.state_dict() if state_dict is None else state_dict)
    base = model.get_base_model()
    prefix = next(name for name, module in model.named_modules() if module is base) + "."
    tensors = {key.removeprefix(prefix): value for key, value in source.items() if key.startswith(prefix)}
    for path, module in _outermost_wrappers(base):
        inside = {key: tensors.pop(key) for key in list(tensors) if key.startswith(f"{path}.")}
        tensors |= {f"{path}.{key}": value for key, value in _merged_module(module, path, inside, name).items()}
    return tensors


def push_to_hub(
    directory: str | os.PathLike,
    repo_id: str,
    *,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
    commit_message: str = "Upload model",
) -> str:
    """Uploads a saved directory to the hub, creating the repository where there is none, and returns its address.

    Args:
        directory: as `save_pretrained` wrote it.
        repo_id: ``owner/name``.
        private: of a new repository; None is the account's default.
        token: None is the one of ``hf auth login`` or ``HF_TOKEN``.
        revision: branch to commit to.
        commit_message: title of the commit.

    Raises:
        UserError: no model in the directory, no account, no right to write, or the hub cannot be reached.
    """
    folder = Path(directory)
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        raise UserError(f"{directory} holds no saved model to push (neither config.json nor adapter_config.json).")
    api = HfApi(token=token)
    try:
        url = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            revision=revision,
            commit_message=commit_message,
            ignore_patterns=["*.ckpt", ".*"],
        )
    except (OSError, ValueError) as error:
        raise _explain_push(repo_id, directory, error) from error
    return str(url)


def _write_full(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    folder: Path,
    state_dict: Mapping[str, Tensor] | None,
    dtype: str | None,
    max_shard_size: str,
) -> None:
    tensors = _cast(dict(model.state_dict() if state_dict is None else state_dict), dtype)
    tied = _tie(model, tensors)
    written = next(value.dtype for value in tensors.values() if value.is_floating_point())
    generation = model.generation_config if model.can_generate() else None
    with quiet(), _own_attributes(model, generation_config=GenerationConfig() if generation else None):
        # The settings are written below: transformers refuses to save some that it loads, as a temperature without sampling.
        model.save_pretrained(folder, state_dict=tensors, max_shard_size=max_shard_size)
    config = _export_config(model, tokenizer)
    config.dtype = written
    if not tied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    config.save_pretrained(folder)
    if generation is not None:
        export_generation_config(model, tokenizer).to_json_file(folder / "generation_config.json")


def is_sequence_classifier(model: nn.Module) -> bool:
    """Whether the model, under any adapter, gives one output per sequence."""
    return type(unwrap(model)).__name__.endswith("ForSequenceClassification")


def _padding_apart(model: nn.Module, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """For a sequence classifier a tokenizer that pads with a token that ends nothing: transformers reads the output at the last
    token that is no padding, which would otherwise be the one before a text's end."""
    if tokenizer is None or not is_sequence_classifier(model):
        return tokenizer
    ends = end_token_ids(model, tokenizer)
    if tokenizer.pad_token_id not in ends:
        return tokenizer
    special = [t.content for t in tokenizer.added_tokens_decoder.values() if t.special]
    others = [t for t in (tokenizer.unk_token, tokenizer.bos_token, *special) if t is not None]
    chosen = next((t for t in others if tokenizer.convert_tokens_to_ids(t) not in ends), None)
    if chosen is None:
        log.warning("The tokenizer's only special tokens end a text: transformers will read the score before the end.")
        return tokenizer
    log.info("The saved tokenizer pads with %r: %r also ends a text, where the score is read.", chosen, tokenizer.pad_token)
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.pad_token = chosen
    return tokenizer


def _tie(model: PreTrainedModel, tensors: dict[str, Tensor]) -> bool:
    """Lets tied weights share one storage, so that they are written once; False where an adapter has told them apart."""
    equal = True
    for name, main in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        if name not in tensors or main not in tensors:
            continue
        if torch.equal(tensors[name], tensors[main]):
            tensors[name] = tensors[main]
        else:
            equal = False
    return equal


def _write_adapter(model: PeftModel, folder: Path, name: str, state_dict: Mapping[str, Tensor] | None, dtype: str | None) -> None:
    tensors = _cast(dict(model.state_dict() if state_dict is None else state_dict), dtype)
    # peft's own guess, "auto", asks the hub for the base's config.
    model.save_pretrained(
        folder, selected_adapters=[name], state_dict=tensors, save_embedding_layers=_embedding_belongs(model, name)
    )
    if name != "default":  # peft puts those in a folder of their own
        for file in (folder / name).iterdir():
            file.rename(folder / file.name)
        (folder / name).rmdir()
    (folder / "README.md").unlink(missing_ok=True)
    if record := record_of(model):
        base = {field: getattr(record.spec, field) for field in BASE_FIELDS} | {"name": base_name(record.spec)}
        if (rows := unwrap(model).get_input_embeddings().weight.shape[0]) != record.vocab_size:
            base["vocab_size"] = rows
        (folder / BASE_FILE).write_text(json.dumps(base, indent=2) + "\n", encoding="utf-8")


def _embedding_belongs(model: PeftModel, name: str) -> bool:
    """Whether the frozen embedding has rows that the base lacks, and so is needed beside the adapter."""
    grown = getattr(unwrap(model), "rows_before_resize", None) is not None
    return grown and not getattr(model.peft_config[name], "trainable_token_indices", None)


def _export_config(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedConfig:
    config, record = copy.deepcopy(model.config), record_of(model)
    text = config.get_text_config()
    if record is not None and record.use_cache is not None:
        text.use_cache = record.use_cache
    if tokenizer is None:
        return config
    if is_sequence_classifier(model) or (not model.can_generate() and text.pad_token_id is None):
        text.pad_token_id = tokenizer.pad_token_id  # by which transformers' classifiers find a row's last token
    ends = as_list(text.eos_token_id)
    if tokenizer.eos_token_id is not None and tokenizer.eos_token_id not in ends:
        text.eos_token_id = [tokenizer.eos_token_id, *ends] if ends else tokenizer.eos_token_id
    return config


def _outermost_wrappers(base: nn.Module) -> list[tuple[str, nn.Module]]:
    """Names and modules of the adapter's layers, those within another one left out."""
    found: list[tuple[str, nn.Module]] = []
    for path, module in base.named_modules():
        wrapper = isinstance(module, BaseTunerLayer | ModulesToSaveWrapper | TrainableTokensWrapper)
        if wrapper and not any(path.startswith(f"{outer}.") for outer, _ in found):
            found.append((path, module))
    return found


def _merged_module(module: nn.Module, path: str, tensors: Mapping[str, Tensor], adapter: str) -> dict[str, Tensor]:
    """Tensors that ``module`` would have without its wrapper, merged in a copy made of ``tensors``."""
    here = {key.removeprefix(f"{path}."): value for key, value in tensors.items()}
    if isinstance(module, ModulesToSaveWrapper):
        trained = f"modules_to_save.{adapter}."
        part = trained if any(key.startswith(trained) for key in here) else "original_module."
        return {key.removeprefix(part): value for key, value in here.items() if key.startswith(part)}
    # Parameters are swapped for the given tensors while copying, so that sharded ones are never touched.
    memo = {
        id(parameter): nn.Parameter(here[key].detach().clone(), requires_grad=False)
        for key, parameter in module.named_parameters(remove_duplicate=False)
        if key in here
    }
    layer = copy.deepcopy(module, memo)
    layer = layer.token_adapter if isinstance(layer, TrainableTokensWrapper) else layer
    with torch.no_grad():
        # One wrapper around another, innermost first: peft merges each by itself.
        for part in reversed([m for m in layer.modules() if isinstance(m, BaseTunerLayer)]):
            _merge(part, path, adapter)
    return dict(layer.get_base_layer().state_dict())


def _merge(layer: BaseTunerLayer, path: str, adapter: str) -> None:
    try:
        layer.merge(safe_merge=True, adapter_names=[adapter])
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"The adapter on {path} cannot be merged: {first_line(error)}") from error


def _cast(tensors: dict[str, Tensor], dtype: str | None) -> dict[str, Tensor]:
    if dtype is None:
        return tensors
    return {k: v.to(getattr(torch, dtype)) if v.is_floating_point() else v for k, v in tensors.items()}


@contextlib.contextmanager
def _own_attributes(owner: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(owner, name) for name in values if hasattr(owner, name)}
    for name in before:
        setattr(owner, name, values[name])
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def _finish_swap(target: Path, old: Path) -> None:
    """Completes a replacement: what of ``old`` is not a model's goes to ``target``, or all of it where that is missing."""
    if not old.exists():
        return
    if not target.exists():
        old.rename(target)
        return
    for entry in old.iterdir():
        replaceable = entry.name in _MODEL_FILES - {"README.md"} or entry.name.endswith(_MODEL_SUFFIXES)
        if not replaceable and not (target / entry.name).exists():
            entry.rename(target / entry.name)
    shutil.rmtree(old)


def _disk_fault(error: Exception) -> str:
    if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error):
        return "the disk is full"
    return first_line(error)


def _what_is_left(target: Path) -> str:
    return "the previous one there is intact." if target.exists() else "nothing was left there."


def _explain_push(repo_id: str, directory: str | os.PathLike, error: Exception) -> UserError:
    kept = f"The model is safe in {directory}."
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.OfflineModeIsEnabled) or constants.HF_HUB_OFFLINE:
        return UserError(f"Cannot push to {repo_id!r}: HF_HUB_OFFLINE is set; unset it. {kept}")
    if isinstance(error, errors.LocalTokenNotFoundError) or status == 401:
        return UserError(f"Cannot push to {repo_id!r}: no valid token; run `hf auth login` or set HF_TOKEN. {kept}")
    if status == 403:
        return UserError(f"Cannot push to {repo_id!r}: the token may not write there. {kept}")
    if isinstance(error, errors.HFValidationError):
        return UserError(f"Cannot push to {repo_id!r}: not a repository id (owner/name): {first_line(error)} {kept}")
    return UserError(f"Cannot push to {repo_id!r}: {first_line(error)} {kept}")
