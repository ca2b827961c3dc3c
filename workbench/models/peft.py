"""`PeftSpec` and `apply_peft`: adapters, fresh, continued or several by name.

A fresh LoRA, DoRA or rsLoRA adapter leaves the model's outputs as they were, bit for bit. Names that match no module are
errors (peft passes over them as long as one matches), and so is a model in which nothing would be trained.
"""

import contextlib
import copy
import logging
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import peft
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from workbench.errors import UserError, check_choice, nearest
from workbench.models.checkpoint import LOAD_ERRORS
from workbench.models.gguf import first_line
from workbench.models.heads import HEADS
from workbench.models.load import BASE_FILE, plain, read_json, unwrap
from workbench.models.locate import why_missing
from workbench.models.seeding import local_rng
from workbench.models.tokenizer import grow_embeddings

log = logging.getLogger(__name__)

INITS = ("gaussian", "eva", "olora", "pissa", "corda", "loftq", "lora_ga", "orthogonal")
# Fields that a continued adapter takes from its own files.
_OWN_FIELDS = ("adapter", "adapter_name", "adapter_dtype", "seed")


@dataclass
class PeftSpec:
    """A LoRA-family adapter as plain values (LoRA: arXiv:2106.09685, DoRA: 2402.09353, rsLoRA: 2312.03732).

    Args:
        r: rank.
        alpha: the update is scaled by ``alpha / r`` (``alpha / sqrt(r)`` with ``use_rslora``).
        dropout: on the adapter's input. Anything but 0 makes a run depend on how it was cut into micro-batches.
        target_modules: ``all-linear`` (every linear layer but the head), a list of names, a regular expression over full
            names, or None for peft's choice by architecture.
        exclude_modules: names or a regular expression of modules to leave out.
        target_parameters: names of bare parameters to adapt, such as the experts of a mixture.
        modules_to_save: modules trained in full beside the adapter, and saved with it.
        trainable_token_indices: rows of the embedding that are trained.
        train_new_tokens: train the rows that a cloned chat template added to the vocabulary.
        layers_to_transform: indices of the layers to adapt; None is all.
        layers_pattern: name of the layer list, where peft does not know it.
        rank_pattern: ranks by name, where they differ from ``r``.
        alpha_pattern: alphas by name, where they differ from ``alpha``.
        bias: which biases are trained.
        use_dora: decompose into magnitude and direction.
        use_rslora: rank-stabilised scaling.
        init_lora_weights: true (output unchanged), false (random) or the name of an initialisation, such as ``gaussian``,
            ``pissa``, ``pissa_niter_16``, ``olora``.
        task_type: peft's label; None follows from the model's head.
        adapter: directory or hub id of a saved adapter to go on with; its files give every field above.
        adapter_name: what this adapter is called within the model.
        adapter_dtype: ``float32`` trains the adapter in full precision on a base of less; ``base`` gives it the base's
            dtype (sharding wants one dtype throughout).
        seed: of the fresh adapter's weights; no other draw is moved by it.
        lora_kwargs: further arguments of ``peft.LoraConfig``.
    """

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | list[str] | None = "all-linear"
    exclude_modules: str | list[str] | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    trainable_token_indices: list[int] | None = None
    train_new_tokens: bool = True
    layers_to_transform: list[int] | int | None = None
    layers_pattern: str | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, int] | None = None
    bias: Literal["none", "all", "lora_only"] = "none"
    use_dora: bool = False
    use_rslora: bool = False
    init_lora_weights: bool | str = True
    task_type: Literal["CAUSAL_LM", "SEQ_CLS", "TOKEN_CLS"] | None = None
    adapter: str | None = None
    adapter_name: str = "default"
    adapter_dtype: Literal["float32", "base"] = "float32"
    seed: int = 0
    lora_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            setattr(self, field.name, plain(getattr(self, field.name)))
        check_choice("peft.bias", self.bias, ("none", "all", "lora_only"))
        check_choice("peft.adapter_dtype", self.adapter_dtype, ("float32", "base"))
        if isinstance(self.init_lora_weights, str):
            check_choice("peft.init_lora_weights", re.sub(r"^pissa_niter_\d+$", "pissa", self.init_lora_weights), INITS)
        if self.r < 1:
            raise UserError(f"peft.r={self.r}: the rank must be at least 1.")
        if self.alpha == 0:
            raise UserError("peft.alpha=0 scales the update to nothing: set it above 0, such as 2 * peft.r.")
        if self.adapter is not None:
            self._check_only_own_fields()

    def _check_only_own_fields(self) -> None:
        for field in fields(self):
            if field.name not in _OWN_FIELDS and getattr(self, field.name) != field.default:
                raise UserError(
                    f"peft.{field.name}={getattr(self, field.name)!r} has no effect: the adapter in {self.adapter!r} goes "
                    "on as it was saved; drop one of the two."
                )


def apply_peft(
    model: PreTrainedModel | PeftModel, spec: PeftSpec | PeftConfig | Mapping[str, Any] | str | None
) -> PreTrainedModel | PeftModel:
    """Puts an adapter on ``model`` and freezes the rest.

    Args:
        model: changed in place. One that carries adapters gets another, which becomes the active one.
        spec: the adapter; any ``peft.PeftConfig`` for kinds other than LoRA; a path for ``PeftSpec(adapter=path)``; None
            adds nothing and only checks that there is something to train.

    Raises:
        UserError: a name that matches nothing, an unreadable adapter, or nothing left to train.
    """
    if spec is None:
        if getattr(model, "is_quantized", False):
            raise UserError("model.quantization freezes the base, so there is nothing to train without an adapter (peft).")
        return _checked(model)
    if isinstance(spec, str):
        spec = PeftSpec(adapter=spec)
    elif isinstance(spec, Mapping):
        spec = PeftSpec(**plain(spec))
    name = spec.adapter_name if isinstance(spec, PeftSpec) else "default"
    if name in getattr(model, "peft_config", {}):
        raise UserError(
            f"The model carries an adapter {name!r} already; to go on with it leave peft out, "
            "to add another give it its own peft.adapter_name."
        )
    prepare_quantized(model)
    if isinstance(spec, PeftSpec) and spec.adapter is not None:
        return _checked(_continue(model, spec))
    seed = spec.seed if isinstance(spec, PeftSpec) else 0
    full_precision = not isinstance(spec, PeftSpec) or spec.adapter_dtype == "float32"
    with _peft_errors(model), local_rng(seed):
        config = _lora_config(model, spec) if isinstance(spec, PeftSpec) else _plain_config(model, spec)
        _check_task(model, config)
        model = _add(model, name, config, full_precision)
    _set_magnitudes(model, name)
    return _checked(model)


def trainable_parameters(model: nn.Module) -> tuple[int, int]:
    """Numbers of trained parameters and of all; a 4-bit weight counts with the parameters it stands for."""
    if isinstance(model, PeftModel):
        return model.get_nb_trainable_parameters()
    return sum(p.numel() for p in model.parameters() if p.requires_grad), sum(p.numel() for p in model.parameters())


def check_trainable(model: nn.Module) -> None:
    """Raises `UserError` where no parameter is trained: such a run would reach its end and learn nothing."""
    if any(p.requires_grad for p in model.parameters()):
        return
    way_out = (
        "load the adapter with peft.adapter=<path> or PeftModel.from_pretrained(..., is_trainable=True)"
        if isinstance(model, PeftModel)
        else "set requires_grad on what is to be trained"
    )
    raise UserError(f"The model has 0 trainable parameters; {way_out}.")


def single_adapter(model: PeftModel) -> str:
    """Name of the active adapter.

    Raises:
        UserError: several are active at once.
    """
    active = list(model.active_adapters)
    if len(active) != 1:
        raise UserError(f"Adapters {', '.join(active) or 'none'} are active; name one of: {', '.join(model.peft_config)}.")
    return active[0]


def prepare_quantized(model: nn.Module) -> None:
    """Freezes a 4- or 8-bit base but for adapters already on it (peft's own helper would freeze those as well).

    Norms keep the dtype of the checkpoint: transformers computes them in float32 whatever their weight's dtype, and a
    float32 weight would hand float32 activations to a head of less. Other models are left untouched.
    """
    if not getattr(unwrap(model), "is_quantized", False):
        return
    adapters = {id(p) for p in _adapter_parameters(model)}
    for parameter in model.parameters():
        if id(parameter) not in adapters:
            parameter.requires_grad_(False)


def copy_adapter(model: PeftModel, source: str, target: str) -> None:
    """Adds ``target``, a frozen copy of the adapter ``source``; the active adapter stays active and trained as it was."""
    active, state = list(model.active_adapters), _requires_grad(model)
    with local_rng(0):
        model.add_adapter(target, copy.deepcopy(model.peft_config[source]))
    weights = get_peft_model_state_dict(model, adapter_name=source, save_embedding_layers=False)
    set_peft_model_state_dict(model, {key: value.clone() for key, value in weights.items()}, adapter_name=target)
    model.base_model.set_adapter(active)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(state.get(name, False))


@contextlib.contextmanager
def use_adapter(model: PeftModel, name: str | None) -> Iterator[None]:
    """Computes with adapter ``name`` inside, with the base alone for None; what is trained does not change.

    (peft's own ``set_adapter`` and ``disable_adapter`` switch ``requires_grad``, which optimizers and sharding rest on.)
    """
    if name is not None and name not in model.peft_config:
        raise UserError(f"No adapter {name!r}.{nearest(name, model.peft_config)} There are: {', '.join(model.peft_config)}.")
    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer | AuxiliaryTrainingWrapper)]
    before = [(layer, layer._active_adapter, layer._disable_adapters) for layer in layers]
    try:
        for layer in layers:
            layer._active_adapter = [name] if name in _names_in(layer) else []
            layer._disable_adapters = name is None
        yield
    finally:
        for layer, active, disabled in before:
            layer._active_adapter, layer._disable_adapters = active, disabled


def _names_in(layer: BaseTunerLayer | AuxiliaryTrainingWrapper) -> Iterable[str]:
    return layer._adapters if isinstance(layer, AuxiliaryTrainingWrapper) else layer._all_available_adapter_names()


def _add(model: nn.Module, name: str, config: PeftConfig, full_precision: bool) -> PeftModel:
    if isinstance(model, PeftModel):
        model.add_adapter(name, config, autocast_adapter_dtype=full_precision)
        model.set_adapter(name)
        return model
    return peft.get_peft_model(model, config, adapter_name=name, autocast_adapter_dtype=full_precision)


def _set_magnitudes(model: nn.Module, name: str) -> None:
    """DoRA magnitudes in the adapter's dtype. peft takes them in the base's, which alters the outputs of a bfloat16 base."""
    for layer in model.modules():
        if name not in (getattr(layer, "lora_magnitude_vector", None) or ()) or name not in layer.lora_A:
            continue
        dora, weight = layer.lora_magnitude_vector[name], dequantize_module_weight(layer.get_base_layer())
        if weight.ndim == 2 and weight.dtype != dora.weight.dtype:
            update = dora.get_lora_weight(layer.lora_A[name], layer.lora_B[name]).detach()
            dora.weight.data = dora.get_weight_norm(weight.to(dora.weight.dtype), update, layer.scaling[name]).detach()


def _continue(model: nn.Module, spec: PeftSpec) -> PeftModel:
    kwargs = {"is_trainable": True, "autocast_adapter_dtype": spec.adapter_dtype == "float32"}
    with _adapter_errors("peft.adapter", model, spec.adapter), local_rng(spec.seed):
        if not isinstance(model, PeftModel):
            return PeftModel.from_pretrained(model, spec.adapter, adapter_name=spec.adapter_name, **kwargs)
        model.load_adapter(spec.adapter, adapter_name=spec.adapter_name, **kwargs)
        model.set_adapter(spec.adapter_name)
        return model


def add_frozen_adapter(model: PeftModel, path: str, name: str) -> None:
    """Loads the adapter saved in ``path`` as ``name``, frozen; the active adapter stays active and trained as it was.

    Raises:
        UserError: it cannot be loaded.
    """
    active, state = list(model.active_adapters), _requires_grad(model)
    with _adapter_errors("method.ref_adapter", model, path), local_rng(0):
        model.load_adapter(path, adapter_name=name, is_trainable=False)
    model.base_model.set_adapter(active)
    for key, parameter in model.named_parameters():
        parameter.requires_grad_(state.get(key, False))


@contextlib.contextmanager
def _adapter_errors(option: str, model: nn.Module, path: str) -> Iterator[None]:
    _check_base(model, Path(path).expanduser())
    try:
        with _peft_warnings():
            # Weights the file lacks would stay random, and peft only warns of them.
            warnings.filterwarnings("error", message="Found missing adapter keys")
            yield
    except (*LOAD_ERRORS, UserWarning) as error:
        raise UserError(f"{option}={path!r} cannot be loaded: {_adapter_fault(path, error)}") from error


def _check_base(model: nn.Module, adapter: Path) -> None:
    """Sizes the embedding as it was when the adapter was saved, and warns where the adapter names another base."""
    if not (adapter / "adapter_config.json").is_file():
        return
    if (adapter / BASE_FILE).is_file() and (rows := read_json(adapter / BASE_FILE).get("vocab_size")):
        grow_embeddings(model, rows, seed=read_json(adapter / BASE_FILE).get("init_seed", 0))
    said = read_json(adapter / "adapter_config.json").get("base_model_name_or_path")
    given = unwrap(model).config.name_or_path
    if said and given and os.path.basename(said) != os.path.basename(given):
        log.warning("The adapter in %s was trained on %r, and goes on %r now.", adapter, said, given)


def _adapter_fault(adapter: str, error: BaseException) -> str:
    path = Path(adapter).expanduser()
    if not path.exists() and (adapter.count("/") != 1 or path.parent.exists()):
        return why_missing(path)
    if path.is_dir() and not (path / "adapter_config.json").is_file():
        held = ", ".join(sorted(os.listdir(path))[:6]) or "nothing"
        return f"it holds no adapter_config.json (it holds {held})."
    if "size mismatch" in str(error):
        line = next(line for line in str(error).splitlines() if "size mismatch" in line)
        return f"it belongs to another base model ({line.strip()})."
    return first_line(error)


def _lora_config(model: nn.Module, spec: PeftSpec) -> LoraConfig:
    _check_names(model, spec)
    return LoraConfig(
        r=spec.r,
        lora_alpha=spec.alpha,
        lora_dropout=spec.dropout,
        target_modules=_target_modules(model, spec),
        exclude_modules=spec.exclude_modules,
        target_parameters=spec.target_parameters,
        modules_to_save=spec.modules_to_save,
        trainable_token_indices=_token_indices(model, spec),
        layers_to_transform=spec.layers_to_transform,
        layers_pattern=spec.layers_pattern,
        rank_pattern=spec.rank_pattern or {},
        alpha_pattern=spec.alpha_pattern or {},
        bias=spec.bias,
        use_dora=spec.use_dora,
        use_rslora=spec.use_rslora,
        init_lora_weights=spec.init_lora_weights,
        task_type=spec.task_type or task_type(model),
        **(spec.lora_kwargs or {}),
    )


def _target_modules(model: nn.Module, spec: PeftSpec) -> str | list[str] | None:
    """``all-linear`` by name where peft does not take it: beside a choice of layers, and for token classifiers, whose head it
    would adapt as well as train in full."""
    if spec.target_modules != "all-linear" or (spec.layers_to_transform is None and task_type(model) != "TOKEN_CLS"):
        return spec.target_modules
    base = unwrap(model)
    heads = (base.get_output_embeddings(), *(getattr(base, name, None) for name in HEADS))
    linear = {n.rpartition(".")[2] for n, m in base.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    return sorted(linear - {n.rpartition(".")[2] for n, m in base.named_modules() if any(m is head for head in heads)})


def task_type(model: nn.Module) -> str:
    """peft's label for the kind of head that ``model`` has."""
    kind = type(unwrap(model)).__name__
    if kind.endswith("ForSequenceClassification"):
        return "SEQ_CLS"
    return "TOKEN_CLS" if kind.endswith("ForTokenClassification") else "CAUSAL_LM"


def _check_task(model: nn.Module, config: PeftConfig) -> None:
    """A label of another kind would leave a classifier's new head as it was drawn."""
    kind = task_type(model)
    if kind != "CAUSAL_LM" and config.task_type != kind:
        raise UserError(f"peft.task_type={config.task_type} does not fit {type(unwrap(model)).__name__}: leave it out ({kind}).")


def _token_indices(model: nn.Module, spec: PeftSpec) -> list[int] | dict[str, list[int]] | None:
    """Rows to train: those asked for and those that are new, in the head as well where it has rows of its own."""
    base = unwrap(model)
    embedding, head = base.get_input_embeddings(), base.get_output_embeddings()
    names = {id(module): name.rpartition(".")[2] for name, module in base.named_modules()}
    in_full = {names[id(embedding)], names.get(id(head))} & set(spec.modules_to_save or ())
    rows = set(spec.trainable_token_indices or ())
    if outside := sorted(row for row in rows if not 0 <= row < embedding.weight.shape[0]):
        raise UserError(
            f"peft.trainable_token_indices={outside[0]}: the embedding's rows are 0 to {embedding.weight.shape[0] - 1}."
        )
    first_new = getattr(base, "rows_before_resize", None)
    if first_new is not None and spec.train_new_tokens and not in_full:
        rows |= set(range(first_new, embedding.weight.shape[0]))
        log.info("The rows of the %d new tokens are trained with the adapter.", embedding.weight.shape[0] - first_new)
    if not rows:
        return None
    if head is None or head.weight is embedding.weight:
        return {names[id(embedding)]: sorted(rows)}
    return {names[id(embedding)]: sorted(rows), names[id(head)]: sorted(rows)}


def _check_names(model: nn.Module, spec: PeftSpec) -> None:
    base = unwrap(model)
    modules = [name for name, _ in base.named_modules() if name]
    parameters = [name for name, _ in base.named_parameters()]
    if spec.target_modules != "all-linear":
        _check_matches("target_modules", spec.target_modules, modules)
    _check_matches("exclude_modules", spec.exclude_modules, modules)
    _check_matches("modules_to_save", spec.modules_to_save, modules)
    _check_matches("target_parameters", spec.target_parameters, parameters)
    for option in ("rank_pattern", "alpha_pattern"):
        for key in getattr(spec, option) or {}:
            if not any(re.match(rf"(.*\.)?({key})$", name) for name in (*modules, *parameters)):
                raise UserError(f"peft.{option}: {key!r} matches nothing in the model.")
    if spec.layers_to_transform is not None:
        wanted = [spec.layers_to_transform] if isinstance(spec.layers_to_transform, int) else spec.layers_to_transform
        layers = base.config.get_text_config().num_hidden_layers
        if outside := [index for index in wanted if not 0 <= index < layers]:
            raise UserError(f"peft.layers_to_transform={outside[0]}: the model's layers are 0 to {layers - 1}.")


def _check_matches(option: str, wanted: str | Sequence[str] | None, names: Sequence[str]) -> None:
    if isinstance(wanted, str):
        if not any(re.fullmatch(wanted, name) for name in names):
            example = next((name for name in names if ".0." in name), names[-1])
            raise UserError(f"peft.{option}={wanted!r} matches no full name; they look like {example!r}.")
        return
    for entry in wanted or ():
        if not any(name == entry or name.endswith(f".{entry}") for name in names):
            last = dict.fromkeys(name.rpartition(".")[2] for name in names if not name[-1].isdigit())
            raise UserError(f"peft.{option}: {entry!r} is not in the model.{nearest(entry, last)} It has: {', '.join(last)}.")


def _plain_config(model: nn.Module, config: PeftConfig) -> PeftConfig:
    """A copy whose containers are plain, which peft can then save."""
    config = copy.copy(config)
    config.task_type = config.task_type or task_type(model)
    for key, value in vars(config).items():
        if isinstance(value, Mapping | Sequence) and not isinstance(value, str):
            setattr(config, key, plain(value))
    return config


@contextlib.contextmanager
def _peft_warnings() -> Iterator[None]:
    """Leaves out the warnings that tell a user nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out is set to False")  # peft then sets it as it must be
        warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys")  # ours are checked
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        yield


@contextlib.contextmanager
def _peft_errors(model: nn.Module) -> Iterator[None]:
    try:
        with _peft_warnings():
            yield
    except UserError:
        raise
    except (ValueError, ImportError, KeyError, TypeError) as error:
        raise UserError(f"peft cannot put this adapter on {type(unwrap(model)).__name__}: {first_line(error)}") from error


def _adapter_parameters(model: PeftModel) -> Iterable[nn.Parameter]:
    for module in model.modules():
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper):
            for name in module.adapter_layer_names:
                part = module
                for attribute in name.split("."):
                    part = getattr(part, attribute, None)
                if isinstance(part, nn.Module):
                    yield from part.parameters()
                elif isinstance(part, nn.ParameterDict):
                    yield from part.values()


def _requires_grad(model: nn.Module) -> dict[str, bool]:
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def _checked(model: nn.Module) -> nn.Module:
    check_trainable(model)
    trained, total = trainable_parameters(model)
    log.info("Training %s of %s parameters (%.2f %%).", f"{trained:,}", f"{total:,}", 100 * trained / total)
    return model
