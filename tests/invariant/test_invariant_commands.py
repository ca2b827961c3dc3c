"""``workbench invariants record | check | compare | mutants``."""

import json
import shutil
import subprocess

import pytest
import torch

from workbench.cli import main
from workbench.errors import UserError
from workbench.invariants import commands, environment, record
from workbench.invariants.classes import load_class
from workbench.invariants.compare import Mismatch
from workbench.invariants.members import MEMBERS
from workbench.invariants.mutants import planted
from workbench.invariants.session import Session
from workbench.invariants.suite import Suite


def test_check_prints_the_table(capsys, tmp_path):
    options = ["--member", "recorded", "--member", "micro_batch_2", "--member", "precomputed_reference"]
    assert main(["invariants", "check", "sft", "dpo", *options, "--pictures", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "                       sft    dpo",
        "recorded               pass   pass",
        "micro_batch_2          pass   pass",
        "precomputed_reference  [1]    pass",
        "",
        "[1] it compares with no reference",
    ]


def test_check_fails_with_step_field_size_and_curve(capsys, tmp_path):
    with planted("accumulation_counted_twice"):
        code = main(["invariants", "check", "sft", "--member", "micro_batch_1", "--pictures", str(tmp_path)])
    out, err = capsys.readouterr()
    assert code == 1
    assert "micro_batch_1  FAIL" in out
    assert "sft/micro_batch_1: grad_norm differs first at step 1" in err
    assert "allowed 1e-05" in err
    assert "largest offending parameter: " in err
    assert (tmp_path / "sft-micro_batch_1.png").is_file()


def test_a_deliberate_change_of_the_plan_is_told(tmp_path):
    fresh = Suite(Session(tmp_path), pictures=tmp_path)
    message = "dpo/recorded: loss differs first at step 4"
    with planted("rows_of_a_full_step_counted"), pytest.raises(Mismatch, match=message) as caught:
        fresh.check_recorded(load_class("dpo"))
    assert "curves: " in str(caught.value)


def test_recording_again_gives_the_same_file_apart_from_the_date(suite, tmp_path):
    cls = load_class("sft")
    texts = []
    for name in ("a", "b"):
        path = tmp_path / name / "sft.json"
        record.write(cls, suite.session.trajectory(cls, "repeat"), path)
        texts.append([line for line in path.read_text().splitlines() if '"recorded"' not in line])
    assert texts[0] == texts[1]
    assert len(texts[0]) + 1 == len(path.read_text().splitlines())


@pytest.mark.quick
def test_references_hold_what_they_depend_on_and_no_path():
    for path in record.path_of("sft").parent.glob("*.json"):
        values = json.loads(path.read_text())
        assert {"cpu", "vectors", "threads", "python", "torch", "transformers"} <= values["environment"].keys()
        assert values["seed"] == values["config"]["seed"] == values["config"]["data"]["seed"] == 11
        assert "paths" not in values["config"]
        assert "/tmp" not in path.read_text()
        assert '"/' not in path.read_text()


def git(folder, *words):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", "-C", str(folder), *words]
    subprocess.run(command, check=True, capture_output=True)


def test_recording_refuses_a_dirty_tree(tmp_path, monkeypatch):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "a.yaml").write_text("a: 1\n")
    monkeypatch.setattr(record, "config_dir", lambda: tmp_path / "conf")
    with pytest.raises(UserError, match="recording needs a git checkout"):
        record.refuse_dirty_tree()
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "a")
    record.refuse_dirty_tree()
    (tmp_path / "invariant_refs").mkdir()
    (tmp_path / "invariant_refs" / "sft.json").write_text("{}")
    record.refuse_dirty_tree()  # an earlier recording is no change
    (tmp_path / "conf" / "a.yaml").write_text("a: 2\n")
    with pytest.raises(UserError, match=r"the tree is dirty \(conf/a.yaml\): commit or put aside"):
        record.refuse_dirty_tree()


def test_compare_reads_runs_and_references(tmp_path, capsys):
    words = ["trainer.max_steps=3", "data.train.kwargs.size=64", "data.eval=null", "exact_match=0", "logger=csv"]
    words += ["callbacks=none", "save_model=false", "data.batch_size=8"]
    for name, lr in (("a", "1e-3"), ("b", "1.01e-3")):
        assert main(["train", *words, f"optim.lr={lr}", f"paths.run_dir={tmp_path / name}"]) == 0
    capsys.readouterr()
    pictures = ["--pictures", str(tmp_path / "pictures")]
    assert main(["invariants", "compare", str(tmp_path / "a"), str(tmp_path / "a"), *pictures]) == 0
    assert main(["invariants", "compare", str(tmp_path / "a"), str(tmp_path / "b"), *pictures]) == 1
    out = capsys.readouterr().out
    assert "lr differs first at step 2" in out
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 1
    file = str(record.path_of("sft"))
    assert main(["invariants", "compare", file, file]) == 0
    assert main(["invariants", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--tolerance", "0.1", *pictures]) == 0


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")
def test_compare_runs_a_commit_in_a_copy_of_its_tree(tmp_path, capsys, monkeypatch):
    """A repository of two commits, the second of which changes one line of a loss."""
    root = record.references().parent
    copy = tmp_path / "copy"
    shutil.copytree(root / "workbench", copy / "workbench", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(root / "conf", copy / "conf")

    git(copy, "init", "-q")
    git(copy, "add", ".")
    git(copy, "commit", "-q", "-m", "a")
    loss = copy / "workbench/losses/sft.py"
    loss.write_text(loss.read_text().replace("return -logps\n", "return -1.001 * logps\n"))
    git(copy, "commit", "-q", "-a", "-m", "b")
    monkeypatch.setattr(commands, "config_dir", lambda: copy / "conf")
    pictures = ["--pictures", str(tmp_path)]
    assert main(["invariants", "compare", "HEAD", "HEAD~1", "--class", "sft", *pictures]) == 1
    assert "loss differs first at step 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["check", "dppo"], "'dppo' is no invariant class"),
        (["check", "sft", "--all"], "--all and sft exclude each other"),
        (["check", "--member", "tpu"], "there is no such member"),
        (["compare", "nothing-here", "nor-here"], "is no run folder, no reference file"),
        (["mutants", "no_bug"], "there is no mutant 'no_bug'"),
        (["record", "--device", "tpu"], "invalid choice: 'tpu'"),
    ],
)
def test_mistakes_are_one_line(words, message, capsys):
    assert main(["invariants", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_references_are_skipped_by_name_without_a_gpu(capsys):
    assert main(["invariants", "check", "--device", "cuda"]) == 0
    assert capsys.readouterr().out == "cuda references skipped: there is no GPU here\n"
    assert main(["invariants", "record", "--device", "cuda"]) == 2


def test_mutants_lists_and_judges(capsys):
    assert main(["invariants", "mutants", "--list"]) == 0
    listed = capsys.readouterr().out
    assert "weight_decay_lost" in listed
    assert main(["invariants", "mutants", "rate_1_percent_up", "kl_sign", "--class", "sft", "--class", "kto"]) == 0
    out = capsys.readouterr().out
    assert "rate_1_percent_up" in out
    assert "killed by sft, kto" in out
    assert "2 of 2 mutants killed." in out
    assert main(["invariants", "mutants", "kl_sign", "--class", "sft"]) == 1
    assert "SURVIVED" in capsys.readouterr().out


@pytest.mark.quick
def test_hardware_is_told_by_processor_and_kernels():
    here = environment.describe()
    assert environment.is_same_hardware(here, here)
    assert not environment.is_same_hardware({**here, "cpu": "another"}, here)
    assert not environment.is_same_hardware({**here, "vectors": "AVX2"}, {**here, "vectors": "AVX512"})
    assert environment.is_same_hardware({**here, "torch": "1.0"}, here)  # an upgrade has to change no number


@pytest.mark.quick
def test_members_say_what_they_show():
    assert all(member.about for member in MEMBERS.values())
