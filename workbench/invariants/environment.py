"""What a number may depend on besides the configuration: the processor, the versions and the threads."""

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("torch", "transformers", "lightning", "peft", "datasets", "tokenizers", "numpy")


def pin() -> None:
    """One thread: sums over several are added in another order."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)


def describe(device: str = "cpu") -> dict[str, Any]:
    """Processor, versions and threads, as they are kept in a reference file."""
    hardware = {"cpu": processor(), "vectors": torch.backends.cpu.get_cpu_capability(), "threads": torch.get_num_threads()}
    if device == "cuda":
        hardware |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    versions = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {**hardware, "python": platform.python_version(), **versions}


def processor() -> str:
    """The processor's name, with family, model and stepping, since virtual machines give many the same name."""
    info = Path("/proc/cpuinfo")
    if not info.is_file():
        return platform.processor() or platform.machine()
    first = info.read_text().partition("\n\n")[0].splitlines()
    found = {key.strip(): " ".join(value.split()) for key, _, value in (line.partition(":") for line in first)}
    numbers = "/".join(found[key] for key in ("cpu family", "model", "stepping") if key in found)
    return (
        f"{found.get('model name', platform.machine())} ({numbers})" if numbers else found.get("model name", platform.machine())
    )


def folder_of(device: str) -> str:
    """Where a device's references lie below ``invariant_refs``: ``cpu``, or ``cuda/<gpu>``."""
    if device == "cpu":
        return "cpu"
    return "cuda/" + torch.cuda.get_device_name().lower().replace(" ", "-")


def is_same_hardware(recorded: dict[str, Any], here: dict[str, Any]) -> bool:
    """Whether numbers recorded there must be met here to rounding: the same processor, running the same kernels."""
    return all(recorded.get(key) == here.get(key) for key in ("cpu", "vectors", "gpu"))
