"""Training on several devices from a notebook: in processes of their own, since a kernel cannot be one of them.

Lightning's launchers either start the script again (a notebook has none) or fork (which breaks once CUDA is in use),
so the command line is run instead, with the notebook's configuration.
"""

import pathlib
import signal
import subprocess
import sys
import tempfile
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from workbench.cli import rundir
from workbench.errors import UserError

if TYPE_CHECKING:
    from workbench.run import Run


def in_notebook() -> bool:
    """Whether this process is a Jupyter or Colab kernel."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and hasattr(shell, "kernel")


def num_devices(cfg: DictConfig) -> int:
    """How many devices of this machine the trainer would use."""
    devices = cfg.trainer.get("devices", "auto")
    if OmegaConf.is_list(devices):
        return len(devices)
    if str(devices) in ("auto", "-1"):
        if cfg.trainer.get("accelerator", "auto") not in ("auto", "gpu", "cuda"):
            return 1
        import torch

        return max(1, torch.cuda.device_count())
    return len(str(devices).split(",")) if "," in str(devices) else int(devices)


def needs_processes(cfg: DictConfig) -> bool:
    """Whether training must leave this process."""
    return in_notebook() and num_devices(cfg) * cfg.trainer.get("num_nodes", 1) > 1


def train_in_processes(cfg: DictConfig, objects: dict[str, Any]) -> "Run":
    """Runs ``workbench train`` with ``cfg`` and returns its result; Ctrl-C (the stop button) lets it save first."""
    from workbench import run as runs

    count = num_devices(cfg)
    if objects:
        raise UserError(
            f"trainer.devices={count} trains in other processes, which cannot share {', '.join(objects)} with this notebook: "
            "set trainer.devices=1, or name such things by import path in the configuration."
        )
    folder = rundir.run_dir(cfg)
    cfg.paths.run_dir = str(folder)
    print(f"{count} devices: training in processes of their own (trainer.devices=1 trains in this kernel)")
    with tempfile.TemporaryDirectory() as directory:
        OmegaConf.save(cfg, pathlib.Path(directory) / "config.yaml")
        code = _run_command([sys.executable, "-m", "workbench", "train", "-cd", directory, "-cn", "config"])
    if code not in (0, 130):
        raise UserError(f"training failed with exit code {code}; its last lines above say why.")
    return runs.read(folder, cfg)


def _run_command(command: list[str]) -> int:
    """Runs a command and prints its output here, in a notebook's cell."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    while True:
        try:
            for line in process.stdout:
                print(line, end="", flush=True)
            return process.wait()
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)
