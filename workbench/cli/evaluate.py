"""``workbench evaluate``: the method's own evaluation of a model, and the share of right answers where they can be
checked.
"""

import json
import pathlib

from omegaconf import DictConfig

from workbench.cli import resume
from workbench.cli.flags import Arguments, quote
from workbench.errors import UserError

# Groups that evaluation has its own choice of.
_REPLACED = ("peft", "callbacks", "logger", "debug")
# Fields of the model that the saved folder holds itself by now.
_SAVED = ("gguf_file", "revision", "tokenizer", "chat_template", "eos_token", "pad_token", "init_kwargs")


def expand(arguments: Arguments) -> Arguments:
    """``run=``: the overrides of that run, with its saved model in place of what it started from."""
    wanted = resume.value_of(arguments.overrides, "run")
    if wanted is None:
        return arguments
    folder = resume.run_folder(wanted, arguments.overrides)
    saved = [o for o in resume.saved_overrides(folder, arguments.overrides) if not _is_replaced(resume.key_of(o))]
    model = [f"model.name={quote(str(model_folder(folder)))}", "model.init=pretrained", *(f"model.{f}=null" for f in _SAVED)]
    arguments.overrides = resume.merge(resume.merge(saved, [*model, "peft=none"]), arguments.overrides)
    return arguments


def _is_replaced(key: str) -> bool:
    return key.partition(".")[0] in _REPLACED or key.startswith("model.init_kwargs.")


def model_folder(run: pathlib.Path) -> pathlib.Path:
    """The saved model of a run; raises `UserError` if there is none."""
    folder = run / "model"
    if not folder.is_dir():
        raise UserError(f"run={run} has no saved model; finish it (workbench train resume={run}) or name the model instead.")
    return folder


def main(cfg: DictConfig) -> int:
    """Evaluates and prints the measures."""
    from workbench import run as runs
    from workbench.cli import check as checker

    checker.check_targets(cfg)
    parts = runs.build(cfg)
    parts.trainer.validate(parts.method, datamodule=parts.data, verbose=False)
    metrics = {k: v for k, v in runs.final_metrics(parts.trainer).items() if not k.startswith("train/")}
    if not parts.trainer.is_global_zero:
        return 0
    width = max(map(len, metrics), default=0)
    for name, value in sorted(metrics.items()):
        print(f"{name:<{width}}  {value:.6g}")
    if cfg.output:
        file = pathlib.Path(cfg.output)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps({"model": cfg.model.name, "metrics": metrics}, indent=1))
    return 0
