"""What a user can get wrong ends in one line that names it, exit code 2 and no traceback, through the command itself."""

import errno
import json
import resource
import shutil
import signal

import pytest
import torch

from workbench.cli import main

SMALL = [
    *("train", "model.init_kwargs={size: pico}", "trainer=cpu", "exact_match=0", "callbacks.samples=null", "logger=csv"),
    *("scheduler=constant", "trainer.max_steps=2", "data.batch_size=4", "paths.run_dir=run"),
    "data.train={path: tiny:sums, kwargs: {size: 16}}",
    "data.eval={path: tiny:sums, kwargs: {size: 4}}",
]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def refused(capfd):
    """Runs a command that must fail, and returns its one line."""

    def run(*words: str) -> str:
        assert main(list(words)) == 2
        error = capfd.readouterr().err
        assert "Traceback" not in error
        lines = [line for line in error.splitlines() if line.startswith("workbench: ")]
        assert len(lines) == 1 and error.rstrip().endswith(lines[0]), error
        return lines[0].removeprefix("workbench: ")

    return run


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("+optim.lrr=1", "optim.lrr is not an option of adamw. Did you mean 'lr'?"),
        ("method.los=dft", "method.los is not an option of SFT. Did you mean 'loss'?"),
        ("methd.loss=dft", "methd is not an option of train. Did you mean 'method'?"),
        ("optim.lr=nan", "optim.lr=nan: expects a number"),
        ("trainer.gradient_clip_val=nan", "trainer.gradient_clip_val=nan: expects"),
        ("trainer.gradient_clip_val=-1", "trainer.gradient_clip_val=-1 must be at least 0"),
        ("seed=-1", "seed=-1 must lie in 0 to 4294967295"),
        ("seed=null", "seed=null: expects an integer"),
        ("trainer.max_steps=-2", "trainer.max_steps=-2 must be at least -1"),
        ("trainer.min_steps=10", "trainer.min_steps=10 is above trainer.max_steps=2"),
        ("trainer.check_val_every_n_epoch=0", "trainer.check_val_every_n_epoch=0 must be at least 1"),
        ("trainer.val_check_interval=0", "trainer.val_check_interval=0 would never evaluate"),
        ("trainer.devices=5000", "trainer.devices=5000 starts as many processes"),
        ("trainer.precision=16-mixed", "trainer.precision=16-mixed needs a GPU"),
        ("trainer.barebones=true", "callbacks.progress=null callbacks.checkpoint=null callbacks.graceful_stop=null"),
        ("+trainer.accumulate_grad_batches=2", "write data.micro_batch_size="),
        ("name=../../x", "name='../../x' is a folder below paths.root"),
        ("name=${nope}", "name: Interpolation key 'nope' not found"),
        ("trainer=null", "trainer=null chooses no option of the group 'trainer'. Options: auto, cpu, gpu"),
        ("=5", "cannot read '=5': an override is written key=value"),
        ("model.quantization=4bit", "choose peft=lora"),
    ],
)
def test_refused_before_anything_is_built(override, message, refused, here):
    assert message in refused(*SMALL, override)
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optim.lr=-1"], "optim refuses its options: Invalid learning rate: -1"),
        (["optim.betas=[0.9,1.5]"], "optim refuses its options: Invalid beta parameter at index 1: 1.5"),
        (["scheduler.warmup_steps=-1"], "scheduler.warmup_steps=-1 must be at least 0"),
        (["data.micro_batch_tokens=0"], "data.micro_batch_tokens=0 must be at least 1"),
        (["data.eval_micro_batch_size=0"], "data.eval_micro_batch_size=0 must be at least 1"),
        (["data.num_workers=-1"], "data.num_workers=-1 must be at least 0"),
        (["data.num_proc=0"], "data.num_proc=0 must be at least 1"),
        (["data.seed=-1"], "data.seed=-1 must be at least 0"),
        (["data.batch_size=4", "data.micro_batch_size=3"], "is not divisible by data.micro_batch_size=3"),
        (["data.eval=null", "data.eval_size=-1"], "data.eval_size=-1; use a number of rows"),
        (["data.max_length=1"], "data.max_length=1: a row needs two tokens"),
        (["method.pad_to_multiple_of=0"], "method.pad_to_multiple_of=0 must be at least 1"),
        (["trainer.accelerator=gpu"], "Trainer refuses its options: "),
        (["trainer.devices=0"], "Trainer refuses its options: "),
        (["trainer.max_time=abc"], "Trainer refuses its options: `Timer(duration='abc')` is not a valid duration"),
        (["trainer.profiler=foo"], "Trainer refuses its options: "),
        (["peft=lora", "peft.alpha=0"], "peft.alpha=0 scales the update to nothing"),
        (["peft=lora", "peft.trainable_token_indices=[999]"], "peft.trainable_token_indices=999: the embedding's rows are 0 to"),
        (["model.init_kwargs={hidden_size: 33}"], "The hidden size (33) is not a multiple"),
        (["callbacks.checkpoint.dirpath=/proc/nope"], "cannot make the folder of checkpoints /proc/nope"),
        (["data.cache_dir=/proc/nope"], "cannot write prepared data to /proc/nope (data.cache_dir)"),
        (["paths.run_dir=/proc/nope"], "cannot make the run's folder /proc/nope (paths.run_dir)"),
    ],
)
def test_refused_before_the_first_step(overrides, message, refused):
    if "trainer.accelerator=gpu" in overrides and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert message in refused(*SMALL, *overrides)


def test_a_barebones_run_once_its_extras_are_off(here):
    off = ["callbacks=none", "callbacks.samples=null", "logger=none", "trainer.log_every_n_steps=null"]
    assert main([*SMALL, "trainer.barebones=true", *off]) == 0


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "There is no file"),
        ("empty.jsonl", b"", "holds no row"),
        ("cut.jsonl", b'{"prompt": "a", "completion": "b"}\n{"prompt": \n', "cut.jsonl:2: not valid JSON"),
        ("latin.csv", "prompt,completion\ncaf\xe9,b\n".encode("latin-1"), "not UTF-8 text"),
        ("uneven.csv", b"prompt,completion\na,b\na,b,c\n", "uneven.csv:3: 3 cells, the header has 2"),
        ("columns.jsonl", b'{"foo": "a"}\n' * 8, "The columns foo fit no data type"),
        ("types.jsonl", b'{"prompt": "a", "completion": 5}\n' * 8, "column 'completion': 5 is int"),
        ("blank.jsonl", b'{"prompt": "", "completion": ""}\n' * 8, "No row of 'train' has a trained token"),
    ],
)
def test_files(name, content, message, refused, here):
    if content is not None:
        (here / name).write_bytes(content)
    words = [w for w in SMALL if not w.startswith("data.train")]
    assert message in refused(*words, "data=file", f"data.train={name}")


def test_assistant_mask_on_plain_text(refused, here):
    (here / "rows.jsonl").write_text('{"text": "hello"}\n' * 8)
    words = [w for w in SMALL if not w.startswith(("data.train", "data.eval"))]
    line = refused(*words, "data=file", "data.train=rows.jsonl", "data.train_on=assistant")
    assert "data.train_on=assistant is impossible with plain text" in line and "Allowed here: auto, all" in line


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run with checkpoints of its two steps."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    options = [f"paths.run_dir={folder}", "callbacks.checkpoint.every_n_steps=1", "callbacks.checkpoint.keep=2"]
    assert main([*SMALL, *options]) == 0
    return folder


@pytest.fixture
def run(finished, here):
    return shutil.copytree(finished, here / "run")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[: len(data) // 2], "is damaged or cut short"),
        (lambda data: b"", "is damaged or cut short"),
        (lambda data: b"not a checkpoint", "is damaged or cut short"),
        (lambda data: data[:700_000] + bytes([data[700_000] ^ 1]) + data[700_001:], "is damaged or cut short"),
    ],
)
def test_a_damaged_checkpoint_names_the_intact_ones(damage, message, run, refused):
    last = run / "checkpoints/last.ckpt"
    data = last.read_bytes()
    last.unlink()
    last.write_bytes(damage(data))
    line = refused("train", "resume=run", "trainer.max_steps=3")
    assert message in line and "step-000001.ckpt, step-000002.ckpt" in line


@pytest.mark.parametrize("content", [{}, [1], {"w": torch.zeros(2)}])
def test_a_file_of_something_else(content, run, refused):
    (run / "checkpoints/last.ckpt").unlink()
    torch.save(content, run / "checkpoints/last.ckpt")
    assert "is whole, but not of a training run" in refused("train", "resume=run", "trainer.max_steps=3")


def test_a_resume_that_fails_leaves_the_run_as_it_was(run, refused):
    before = {name: (run / name).read_text() for name in ("overrides.yaml", "config.yaml")}
    line = refused("train", "resume=run", "trainer.max_steps=3", "model.init_kwargs={size: nano}")
    assert "the checkpoint lacks" in line
    assert {name: (run / name).read_text() for name in before} == before
    assert main(["train", "resume=run", "trainer.max_steps=3"]) == 0
    assert json.loads((run / "result.json").read_text())["metrics"]["steps"] == 3
    assert "trainer.max_steps=3" in (run / "overrides.yaml").read_text()


@pytest.mark.parametrize("text", ["[", "a: 1", "- 1", "!!python/object/apply:os.getcwd []", "\x00"])
def test_damaged_overrides(text, run, refused):
    (run / "overrides.yaml").write_text(text)
    assert "mend or remove it" in refused("train", "resume=run")


def test_evaluate_a_run_whose_model_was_built_with_options(run):
    assert main(["evaluate", "run=run"]) == 0


# -- full disks --------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_files():
    """Lets no file of this process grow beyond a size: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_no_room_for_a_checkpoint(run, small_files, capsys):
    before = {p.name: p.read_bytes() for p in (run / "checkpoints").iterdir()}
    small_files(100_000)
    code = main(["train", "resume=run", "trainer.max_steps=3"])
    small_files(resource.RLIM_INFINITY)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and "cannot write checkpoint" in line and "the previous ones are intact" in line
    assert {p.name: p.read_bytes() for p in (run / "checkpoints").iterdir()} == before
    assert main(["train", "resume=run", "trainer.max_steps=3"]) == 0


def test_no_room_for_the_model(here, small_files, capsys):
    small_files(400_000)  # less than the weights
    code = main([*SMALL, "callbacks.checkpoint=null"])
    small_files(resource.RLIM_INFINITY)
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert code == 2 and line.startswith("workbench: ") and str(here / "run/model") in line
    assert not (here / "run/model").exists() and not list((here / "run").glob(".*"))


@pytest.mark.parametrize("size", [0, 100, 2000])
def test_no_room_for_the_configuration(size, here, small_files, capsys):
    small_files(size)
    code = main(SMALL)
    small_files(resource.RLIM_INFINITY)
    assert code == 2 and "cannot write run/config.yaml" in capsys.readouterr().err.replace(f"{here}/", "")
    assert not list((here / "run").iterdir())


def test_no_room_for_the_metrics(monkeypatch, refused):
    monkeypatch.setattr("workbench.loggers.csv._write_bytes", _full)
    assert "metrics.csv: No space left on device. Free some space." in refused(*SMALL)


def test_no_room_for_prepared_data(here, monkeypatch, refused):
    monkeypatch.setattr("datasets.Dataset.save_to_disk", _full)
    line = refused(*SMALL, "data.cache_dir=cache")
    assert line == "cannot write prepared data to cache (data.cache_dir): No space left on device. Free some space."
    assert not [p for p in (here / "cache").iterdir() if p.is_dir()]


def _full(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")
