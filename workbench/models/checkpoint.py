"""Reading a checkpoint strictly: what is missing, misshapen or damaged becomes one line that names the model."""

import contextlib
import json
import logging
import pickle
import re
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import PreTrainedModel

from workbench.errors import UserError
from workbench.models.gguf import READ_ERRORS, first_line, unreadable
from workbench.models.locate import Location, explain_hub

if TYPE_CHECKING:
    from workbench.models.load import ModelSpec

log = logging.getLogger(__name__)

# What transformers, torch and safetensors raise on bad input; anything else is a fault of ours and keeps its traceback.
LOAD_ERRORS = (
    *(OSError, ValueError, LookupError, RuntimeError, ImportError, TypeError, AttributeError),
    *(SafetensorError, StrictDataclassError, struct.error, pickle.UnpicklingError),
)


@contextlib.contextmanager
def quiet(*, progress: bool = False) -> Iterator[None]:
    """Silences transformers' own load report, which ours replaces, and its bars unless ``progress``."""
    logging_of_hf = transformers.utils.logging
    verbosity, bars = logging_of_hf.get_verbosity(), logging_of_hf.is_progress_bar_enabled()
    logging_of_hf.set_verbosity_error()
    if not progress:
        logging_of_hf.disable_progress_bar()
    try:
        yield
    finally:
        logging_of_hf.set_verbosity(verbosity)
        if bars:
            logging_of_hf.enable_progress_bar()


@contextlib.contextmanager
def readable_errors(spec: "ModelSpec", location: Location) -> Iterator[None]:
    """Turns what the libraries raise on bad input into one line that names the model."""
    try:
        yield
    except UserError:
        raise
    except LOAD_ERRORS as error:
        raise _explain(spec, location, error) from error


def check_complete(spec: "ModelSpec", model: PreTrainedModel, info: dict[str, Any], may_differ: Callable[[str], bool]) -> None:
    """Raises `UserError` where the loading report ``info`` tells of weights that are missing or of another shape."""
    kind = type(model).__name__
    if info["mismatched_keys"]:
        key, found, wanted = sorted(info["mismatched_keys"], key=str)[0]
        count = len(info["mismatched_keys"])
        raise UserError(
            f"Checkpoint {spec.name!r} does not fit {kind}: {key} is {list(found)} in the file and {list(wanted)} by "
            f"the config ({count} such weight{'s' * (count > 1)}); check init_kwargs and config.json."
        )
    if info.get("error_msgs"):
        raise UserError(f"Checkpoint {spec.name!r} could not be read into {kind}: {info['error_msgs'][0]}")
    if missing := sorted(key for key in info["missing_keys"] if not may_differ(key)):
        listed = ", ".join(missing[:3]) + ", ..." * (len(missing) > 3)
        raise UserError(
            f"Checkpoint {spec.name!r} lacks {len(missing)} weight{'s' * (len(missing) > 1)} of {kind} ({listed}), "
            "which would be random; complete it, or start afresh with init='random'."
        )
    if unexpected := sorted(key for key in info["unexpected_keys"] if not may_differ(key)):
        count, some = len(unexpected), ", ".join(unexpected[:3])
        log.warning("Checkpoint %r holds %d weights that %s has no place for: %s.", spec.name, count, kind, some)


def _explain(spec: "ModelSpec", location: Location, error: BaseException) -> UserError:
    text = first_line(error)
    if "trust_remote_code" in str(error):
        return UserError(f"Model {spec.name!r} brings its own code; read it, then set model.trust_remote_code=true to run it.")
    if spec.attn_implementation is not None and ("attn_implementation" in text or "lashAttention" in text):
        return UserError(f"model.attn_implementation={spec.attn_implementation!r} cannot be used here: {text}")
    if location.kind == "gguf" and isinstance(error, READ_ERRORS):
        return unreadable(location.path, error)
    if location.kind == "hub" and isinstance(error, OSError | ValueError):
        return explain_hub(spec.name, error)
    if isinstance(error, StrictDataclassError):
        return UserError(f"The config of {spec.name!r} does not fit together: {' '.join(str(error).split())}")
    if isinstance(error, pickle.UnpicklingError):
        return UserError(
            f"The weights of {spec.name!r} hold objects other than tensors, or are damaged, and are not loaded, since that "
            "could run code; get them as safetensors."
        )
    if isinstance(error, SafetensorError) or "deserializ" in text or "PytorchStreamReader" in text:
        return UserError(f"The weights of {spec.name!r} are damaged or incomplete ({text}); copy or download them again.")
    if isinstance(error, ImportError) and (pip := re.search(r"pip install [^`'\"\n]+", str(error))):
        return UserError(f"Model {spec.name!r} needs a package that is not installed: {pip[0].strip()}")
    if isinstance(error, json.JSONDecodeError) or "valid JSON" in str(error):
        return UserError(f"Model {spec.name!r}: a JSON file of it is damaged: {text}")
    return UserError(f"Could not load model {spec.name!r}: {type(error).__name__}: {text}")
