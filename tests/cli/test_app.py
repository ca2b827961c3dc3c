"""The commands as typed: flags, help, exit codes, and what is imported before a mistake is found."""

import subprocess
import sys

import pytest
import yaml

from workbench.cli import COMMANDS, main

HEAVY = {"torch", "lightning", "transformers", "datasets", "pandas", "numpy"}


def loaded_modules(*words: str) -> set[str]:
    """What running a command has imported."""
    script = f"import sys\nfrom workbench.cli import main\nmain({list(words)!r})\nprint('\\nMODULES', *sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(result.stdout.split("MODULES ")[1].split())


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["generate", "--help"], ["--version"], ["nonsense"]], ids=str)
def test_help_imports_neither_torch_nor_hydra(words):
    assert not loaded_modules(*words) & (HEAVY | {"hydra", "omegaconf", "yaml"})


@pytest.mark.parametrize(
    "words",
    [["train", "--cfg", "job"], ["train", "method.betaa=1"], ["train", "-m", "method.betaa=1,2"], ["train", "data=file"]],
    ids=str,
)
def test_the_check_imports_no_torch(words):
    assert not loaded_modules(*words) & HEAVY


def test_composing_and_checking_is_quick():
    script = "import time; from workbench.cli import main; main(['train', '--cfg', 'job']); print(time.process_time())"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(result.stdout.split()[-1]) < 1.5  # processor time, since other work may keep the machine busy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian"], "'trian' is not a command. Did you mean 'train'?"),
        (["model=hf"], "Overrides follow a command: workbench train model=hf."),
        (["train", "method.betaa=1"], "method.betaa is not an option of SFT."),
        (["train", "--multirunn"], "Did you mean '--multirun'?"),
        (["train", "hydra.run.dir=x"], "hydra.run.dir has no effect on a single run: set paths.run_dir."),
        (["train", "hydra/launcher=subprocess"], "it matters to sweeps only (-m)"),
        (["train", "-m", "hydra.sweep.dir=x", "seed=0,1"], "set paths.sweep_dir"),
        (["train", "-m", "hydra.launcher.n_job=2", "seed=0,1"], "Did you mean 'n_jobs'?"),
        (["train", "-m", "seed=0,x"], "seed='x': expects an integer."),
        (["train", "-m", "model=tiny,tinny"], "Did you mean 'tiny'?"),
        (["generate"], "model.name is required"),
        (["generate", "model.name=x", "top_p=0.9"], "top_p=0.9 has no effect at temperature=0"),
        (["evaluate", "-m", "seed=0,1"], "-m sweeps over training runs"),
        (["evaluate", "run=nowhere"], "no such file or folder"),
        (["env", "x"], "env takes no arguments"),
        (["train", "--cfg", "job", "--package", "modle"], "no such node"),
    ],
    ids=str,
)
def test_mistakes_exit_with_2_and_one_line(words, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1 and error.startswith("workbench: ")
    assert not list(tmp_path.iterdir())  # nothing was made for a run that cannot be


def test_cfg_prints_what_would_run(capsys):
    assert main(["train", "optim.lr=0.5", "--cfg", "job"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["optim"]["lr"] == 0.5 and printed["data"]["seed"] == "${seed}"
    assert main(["train", "seed=3", "--cfg", "job", "--resolve", "--package", "data"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["seed"] == 3
    assert main(["train", "--cfg", "hydra"]) == 0
    assert list(yaml.safe_load(capsys.readouterr().out)) == ["hydra"]


def test_info_shows_what_hydra_knows_and_leaves_logging_as_it_was(capsys):
    import logging

    root = logging.getLogger()
    before = list(root.handlers), root.level
    assert main(["train", "--info", "defaults"]) == 0
    assert "optim/adamw" in capsys.readouterr().out
    assert (list(root.handlers), root.level) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_page(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"usage: workbench {command}" in capsys.readouterr().out


def test_a_page_lists_groups_experiments_and_keys_with_their_comments(capsys):
    main(["train", "--help"])
    page = capsys.readouterr().out
    assert "  model        hf smollm2 [tiny]" in page
    assert "LoRA (Hu et al. 2021" in page
    assert "trainer.max_epochs=3" in page and "passes over the data" in page
    main(["train", "trainer=gpu", "--help"])
    assert "trainer.precision=bf16-mixed" in capsys.readouterr().out


def test_env_shows_versions_devices_and_folders(capsys):
    import torch

    assert main(["env"]) == 0
    page = capsys.readouterr().out
    assert torch.__version__ in page or torch.__version__.split("+")[0] in page
    assert all(word in page for word in ("cores", "configuration", "hub cache", "[deepspeed]"))
    assert len(page.splitlines()) < 40


def test_notices_go_to_the_stderr_of_the_moment(monkeypatch):
    import io
    import logging

    from workbench.cli import app

    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    first, second = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    app._set_up_logging()
    logging.getLogger("workbench.x").info("one")
    first.close()
    monkeypatch.setattr(sys, "stderr", second)
    app._set_up_logging()
    logging.getLogger("workbench.x").info("two")
    assert second.getvalue() == "INFO: two\n"
