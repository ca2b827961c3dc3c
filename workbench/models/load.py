"""`ModelSpec` and `load_model`: a language model by name, from whatever form it comes in.

Nothing is guessed: a weight that the checkpoint lacks, an option that cannot act or a damaged file is an error of one
line. Models arrive in eval mode, as transformers leaves them; the policy decides about modes later.
"""

import copy
import importlib.util
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from workbench.cache import cache_home
from workbench.errors import UserError, check_choice, nearest
from workbench.models import gguf
from workbench.models.checkpoint import check_complete, quiet, readable_errors
from workbench.models.gguf import first_line
from workbench.models.locate import TAUGHT, Location, is_tiny, locate, taught_task
from workbench.models.seeding import local_rng

Dtype = Literal["float32", "bfloat16", "float16", "auto"]
# Arguments of from_pretrained that are no config values, and that init_kwargs may therefore hold as well.
LOADING_KWARGS = (
    *("adapter_kwargs", "cache_dir", "device_map", "experts_implementation", "force_download", "key_mapping"),
    *("local_files_only", "max_memory", "offload_buffers", "offload_folder", "subfolder", "token", "tp_plan"),
    *("use_kernels", "use_safetensors", "variant", "weights_only"),
)
BASE_FILE = "base_model.json"  # beside a saved adapter: which of the fields below rebuild its base
BASE_FIELDS = ("name", "revision", "gguf_file", "init", "init_seed", "init_kwargs")
_SHOW_PROGRESS_ABOVE = 2**31  # bytes of weights; smaller files load in under two seconds


@dataclass
class ModelSpec:
    """Which model to train, as plain values: nothing is opened before `load_model`.

    Args:
        name: hub id, local directory, ``.gguf`` file, ``package:<module>/<file.gguf>`` for a file that an installed
            Python package ships, ``tiny`` or ``tiny:<architecture>`` for a nano model built by script, or the directory
            of a saved adapter (its base is loaded under it).
        revision: branch, tag or commit on the hub.
        dtype: of the weights; ``auto`` keeps the checkpoint's own.
        attn_implementation: name of an attention function; None leaves the choice to transformers.
        trust_remote_code: run model code that comes with the checkpoint.
        gguf_file: the file within ``name``, where that is a directory or hub repository of GGUF files.
        quantization: hold the frozen base in 4 or 8 bits (bitsandbytes; needs CUDA and an adapter to train).
        quant_type: 4-bit data type; None is ``nf4``.
        quant_nested: quantise the 4-bit constants as well; None is false.
        quant_compute_dtype: dtype of 4-bit products; None is ``dtype``.
        quant_storage_dtype: dtype that 4-bit weights are stored in (FSDP wants the compute dtype); None is ``uint8``.
        tokenizer: a tokenizer of another name or directory; None is the model's own.
        chat_template: path of a ``.jinja`` file, the text itself, or a name or directory whose template is cloned.
        eos_token: replaces the tokenizer's end-of-sequence token; must be one of its tokens.
        pad_token: replaces the tokenizer's padding token; must be one of its tokens.
        init: ``random`` ignores the checkpoint's weights and draws them from ``init_seed``.
        init_seed: of every weight that is drawn: nano and random models, new embedding rows, a new classification head.
        init_kwargs: further config values and loading arguments of ``from_pretrained``.
    """

    name: str
    revision: str | None = None
    dtype: Dtype = "float32"
    attn_implementation: str | None = None
    trust_remote_code: bool = False
    gguf_file: str | None = None
    quantization: Literal["4bit", "8bit"] | None = None
    quant_type: Literal["nf4", "fp4"] | None = None
    quant_nested: bool | None = None
    quant_compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    quant_storage_dtype: Literal["uint8", "float32", "bfloat16", "float16"] | None = None
    tokenizer: str | None = None
    chat_template: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    init: Literal["pretrained", "random"] = "pretrained"
    init_seed: int = 0
    init_kwargs: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_choice("model.dtype", self.dtype, ("float32", "bfloat16", "float16", "auto"))
        check_choice("model.init", self.init, ("pretrained", "random"))
        check_choice("model.quantization", self.quantization, (None, "4bit", "8bit"))
        self.init_kwargs = plain(self.init_kwargs)
        given = [f.name for f in fields(self) if f.name.startswith("quant_") and getattr(self, f.name) is not None]
        if given and self.quantization != "4bit":
            raise UserError(f"model.{given[0]} acts on quantization='4bit' alone (it is {self.quantization!r}).")
        if self.quantization and self.init == "random":
            raise UserError("model.quantization holds pretrained weights in few bits; it cannot go with init='random'.")


@dataclass
class LoadRecord:
    """What a model was as it came, kept on it (`record_of`) for the time it is saved.

    Args:
        spec: what it was loaded from.
        use_cache: the config's cache setting.
        generation_config: its generation settings; None where it cannot generate.
        vocab_size: rows of its embedding.
    """

    spec: ModelSpec
    use_cache: bool | None
    generation_config: GenerationConfig | None
    vocab_size: int


def as_spec(model: "str | ModelSpec | Mapping[str, Any]") -> ModelSpec:
    """A `ModelSpec` from a name, a mapping of its fields, or itself."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, Mapping):
        return ModelSpec(**plain(model))
    if isinstance(model, str | os.PathLike):
        return ModelSpec(os.fspath(model))
    raise UserError(f"model={type(model).__name__} is not known. Allowed: a name, a ModelSpec, a transformers model.")


def load_model(spec: str | ModelSpec | PreTrainedModel) -> PreTrainedModel:
    """The causal language model that ``spec`` names, in eval mode, on the CPU (quantised ones on this process's GPU).

    A model object is returned as it is. An adapter's directory gives a `peft.PeftModel` whose adapter is trainable.

    Raises:
        UserError: no such model, an unreadable, incomplete or differently shaped checkpoint, a package that is missing.
    """
    if isinstance(spec, nn.Module):
        return spec
    spec = as_spec(spec)
    location = locate_spec(spec)
    if location.kind == "adapter":
        return _load_adapter(spec, location.path)
    if location.kind == "tiny":
        model = _build_tiny(spec, location.path)
    elif spec.init == "random":
        model = _build_random(spec)
    else:
        if location.kind == "gguf":
            gguf.convert(Path(location.path))  # first, as the config is then read in no time
        config = load_config(spec)
        _refuse_classifier(spec, config)
        model, _ = read_checkpoint(spec, location, causal_class(config))
    return stamp(model, spec)


def load_config(spec: str | ModelSpec | PreTrainedModel) -> PreTrainedConfig:
    """The model's config, with ``init_kwargs`` in it; no weight is read (a GGUF file's header is)."""
    if isinstance(spec, nn.Module):
        return spec.config
    spec = as_spec(spec)
    location = locate_spec(spec)
    if location.kind == "tiny":
        from workbench.tiny.model import tiny_config

        return tiny_config(location.path, **_tiny_kwargs(spec))
    if location.kind == "adapter":
        return load_config(base_spec(spec, location.path))
    path, kwargs = _config_arguments(spec, location)
    own = {key: value for key, value in (spec.init_kwargs or {}).items() if key not in LOADING_KWARGS}
    with readable_errors(spec, location):
        config, unused = AutoConfig.from_pretrained(path, return_unused_kwargs=True, **kwargs, **own)
    for key in own.keys() & unused.keys():
        raise UserError(
            f"model.init_kwargs: {key!r} is no config value of {spec.name!r}.{nearest(key, [*config.to_dict(), *LOADING_KWARGS])}"
        )
    return config


def read_checkpoint(
    spec: ModelSpec,
    location: Location,
    model_class: Any,
    *,
    may_differ: Callable[[str], bool] = lambda key: False,
    **config_values: Any,
) -> tuple[PreTrainedModel, set[str]]:
    """``model_class.from_pretrained`` for a located checkpoint, where nothing may be missing, cut or of another shape.

    Args:
        spec: loading options.
        location: of kind ``directory``, ``gguf`` or ``hub``.
        model_class: a transformers model or auto class.
        may_differ: tells by key which weights the checkpoint may lack or hold for another kind of model.
        config_values: set in the config.

    Returns:
        The model, and the keys that the checkpoint lacked.
    """
    path = str(gguf.convert(Path(location.path))) if location.kind == "gguf" else location.path
    with readable_errors(spec, location), quiet(progress=_weight_bytes(path) > _SHOW_PROGRESS_ABOVE):
        model, info = model_class.from_pretrained(
            path,
            revision=spec.revision or "main",
            dtype=spec.dtype,
            attn_implementation=spec.attn_implementation,
            trust_remote_code=spec.trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they come back in info, and are an error of ours
            **_quantization_arguments(spec),
            **(spec.init_kwargs or {}),
            **config_values,
        )
    check_complete(spec, model, info, may_differ)
    return model, set(info["missing_keys"])


def causal_class(config: PreTrainedConfig) -> Any:
    """The auto class that builds a language model for ``config``.

    Raises:
        UserError: an architecture without a causal language-model head.
    """
    own_code = getattr(config, "auto_map", None) or {}
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code:
        return AutoModelForCausalLM
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        return AutoModelForImageTextToText
    raise UserError(f"{config.model_type!r} models have no causal language-model head; a decoder-only model is needed.")


def stamp(model: PreTrainedModel, spec: ModelSpec) -> PreTrainedModel:
    """Records on ``model`` where it came from and how it was set, and names it in its config as the user did."""
    generation = model.generation_config if model.can_generate() else None
    model.load_record = LoadRecord(
        spec=spec,
        use_cache=getattr(model.config.get_text_config(), "use_cache", None),
        generation_config=copy.deepcopy(generation),
        vocab_size=model.get_input_embeddings().weight.shape[0],
    )
    model.config._name_or_path = model.name_or_path = base_name(spec)
    return model.eval()


def record_of(model: nn.Module) -> LoadRecord | None:
    """The `LoadRecord` of a model that `load_model` built, also under an adapter; None for others."""
    return getattr(unwrap(model), "load_record", None)


def unwrap(model: nn.Module) -> PreTrainedModel:
    """The transformers model itself, under any adapter."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def base_name(spec: ModelSpec) -> str:
    """The name under which others find the model again: absolute where it is a path on this machine."""
    name = spec.name if spec.name != "tiny" else "tiny:llama"
    return os.path.abspath(os.path.expanduser(name)) if os.path.exists(os.path.expanduser(name)) else name


def base_spec(spec: ModelSpec, adapter: str | os.PathLike) -> ModelSpec:
    """The spec of the model that a saved adapter belongs to; dtype, quantisation and trust stay those of ``spec``.

    Raises:
        UserError: the adapter does not say.
    """
    read = {"name": read_json(Path(adapter, "adapter_config.json")).get("base_model_name_or_path")}
    if Path(adapter, BASE_FILE).is_file():
        read = {key: value for key, value in read_json(Path(adapter, BASE_FILE)).items() if key in BASE_FIELDS}
    if not read["name"]:
        raise UserError(
            f"The adapter in {adapter} does not name its base; give that as model.name and {adapter} as peft.adapter."
        )
    if locate_kind(read["name"]) != "tiny":  # elsewhere these can name code to run, which no checkpoint may
        read.pop("init_kwargs", None)
    return replace(spec, **{"revision": None, "gguf_file": None, "init_kwargs": spec.init_kwargs} | read)


def locate_kind(name: str) -> str:
    """``tiny`` for the names of nano models, ``other`` for all else; opens nothing."""
    return "tiny" if is_tiny(name) else "other"


def plain(value: Any) -> Any:
    """``value`` with every mapping a dict and every sequence a list, so that JSON can hold what comes from a config."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def locate_spec(spec: ModelSpec) -> Location:
    """Where ``spec`` points to; options that cannot act there are errors."""
    location = locate(spec.name, gguf_file=spec.gguf_file, revision=spec.revision)
    if spec.revision is not None and location.kind != "hub" and spec.gguf_file is None:
        raise UserError(f"model.revision={spec.revision!r} has no effect: {spec.name!r} is not read from the hub.")
    if spec.gguf_file is not None and location.kind != "gguf":
        raise UserError(f"model.gguf_file={spec.gguf_file!r} has no effect: {spec.name!r} is not GGUF; drop it.")
    return location


def _config_arguments(spec: ModelSpec, location: Location) -> tuple[str, dict[str, Any]]:
    if location.kind != "gguf":
        return location.path, {"revision": spec.revision or "main", "trust_remote_code": spec.trust_remote_code}
    file = Path(location.path)
    gguf.check_readable(file)
    if found := gguf.converted(file):
        return str(found), {}
    return str(file.parent), {"gguf_file": file.name}


def _quantization_arguments(spec: ModelSpec) -> dict[str, Any]:
    if spec.quantization is None:
        return {}
    _check_can_quantize(spec)
    if spec.quantization == "8bit":
        config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    else:
        own = spec.dtype if spec.dtype != "auto" else "bfloat16"
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=spec.quant_type or "nf4",
            bnb_4bit_use_double_quant=bool(spec.quant_nested),
            bnb_4bit_compute_dtype=getattr(torch, spec.quant_compute_dtype or own),
            bnb_4bit_quant_storage=getattr(torch, spec.quant_storage_dtype or "uint8"),
        )
    return {"quantization_config": config, "device_map": {"": int(os.environ.get("LOCAL_RANK", 0))}}


def _check_can_quantize(spec: ModelSpec) -> None:
    lacking = []
    if not torch.cuda.is_available():
        lacking.append("a CUDA device")
    if importlib.util.find_spec("bitsandbytes") is None:
        lacking.append("bitsandbytes (pip install 'workbench[quantization]')")
    if lacking:
        raise UserError(
            f"model.quantization={spec.quantization!r} (QLoRA) needs {' and '.join(lacking)}; "
            "drop it to train the adapter on the unquantised base."
        )


def _tiny_kwargs(spec: ModelSpec) -> dict[str, Any]:
    if spec.quantization is not None:
        raise UserError(f"model.quantization={spec.quantization!r} is not for nano models ({spec.name!r}); drop it.")
    return {key: value for key, value in (spec.init_kwargs or {}).items() if key != "seed"}


def _build_tiny(spec: ModelSpec, architecture: str) -> PreTrainedModel:
    from workbench.tiny.model import tiny_model

    model = tiny_model(architecture, seed=spec.init_seed, **_tiny_kwargs(spec))
    if task := taught_task(spec.name):
        _load_taught(model, task, spec)
    with readable_errors(spec, Location("tiny", architecture)):
        if spec.attn_implementation is not None:
            model.set_attn_implementation(spec.attn_implementation)
    if spec.dtype != "auto":
        # Parameters alone, as from_pretrained does: rotary frequencies rounded to 16 bits are other frequencies.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, spec.dtype))
        model.config.dtype = getattr(torch, spec.dtype)
    return model


def _load_taught(model: PreTrainedModel, task: str, spec: ModelSpec) -> None:
    from workbench.tiny.tasks import TASKS
    from workbench.tiny.taught import taught_weights

    check_choice("model.name=tiny-sft:<task>", task, TASKS)
    if _tiny_kwargs(spec):
        raise UserError(f"model.init_kwargs={spec.init_kwargs} has no effect with model.name={spec.name}, which is read.")
    missing, unexpected = model.load_state_dict(taught_weights(task, spec.init_seed), strict=False)
    tied = set(model._tied_weights_keys or ()) if model.config.tie_word_embeddings else set()
    if unexpected or set(missing) - tied:
        raise UserError(f"model.name={spec.name}: the kept weights are of another model; remove {cache_home() / TAUGHT}.")


def _build_random(spec: ModelSpec) -> PreTrainedModel:
    config = load_config(spec)
    dtype = None if spec.dtype == "auto" else getattr(torch, spec.dtype)
    with readable_errors(spec, Location("directory", spec.name)), local_rng(spec.init_seed):
        return causal_class(config).from_config(
            config, dtype=dtype, attn_implementation=spec.attn_implementation, trust_remote_code=spec.trust_remote_code
        )


def _load_adapter(spec: ModelSpec, path: str) -> nn.Module:
    from workbench.models.peft import PeftSpec, apply_peft  # which stands on this module

    if read_json(Path(path, "adapter_config.json")).get("task_type") in ("SEQ_CLS", "TOKEN_CLS"):
        raise UserError(
            f"The adapter in {path} is that of a classifier, not of a language model; use it as a reward or value model "
            "(workbench.models.heads.load_classifier)."
        )
    return apply_peft(load_model(base_spec(spec, path)), PeftSpec(adapter=path)).eval()


def _refuse_classifier(spec: ModelSpec, config: PreTrainedConfig) -> None:
    for architecture in config.architectures or []:
        if architecture.endswith(("ForSequenceClassification", "ForTokenClassification")):
            raise UserError(
                f"Model {spec.name!r} is a classifier ({architecture}), not a language model; "
                "use it as a reward or value model (workbench.models.heads.load_classifier)."
            )


def _weight_bytes(path: str) -> int:
    if not os.path.isdir(path):
        return 0
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; one line where it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"Cannot read {path}: {first_line(error)}") from error
