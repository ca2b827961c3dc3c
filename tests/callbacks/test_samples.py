"""Generated answers: which rows, when, in which table, and metrics that rank checkpoints."""

import json

import lightning as L
import pytest
import torch
from small_run import SmallModule, trainer

from workbench.callbacks.averaging import EMA
from workbench.callbacks.checkpoint import Checkpoint
from workbench.callbacks.samples import GenerationSamples
from workbench.errors import UserError
from workbench.loggers.csv import CSVLogger, read_history
from workbench.loggers.tables import read_table

ROWS = [{"prompt": f"{i} + 1 =", "reference": str(i + 1), "answer": str(i + 1), "source": "x"} for i in range(5)]
CHAT = [{"prompt": [{"role": "user", "content": row["prompt"]}], "answer": row["answer"]} for row in ROWS]


class Answering(SmallModule):
    """Answers row i right from step i on."""

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = []

    def generate(self, prompts, **options):
        self.calls.append((self.trainer.global_step, len(prompts), options))
        texts = [p if isinstance(p, str) else p[-1]["content"] for p in prompts]
        numbers = [int(text.split()[0]) for text in texts]
        return [str(i + 1) if i < self.trainer.global_step else "?" for i in numbers]


def right(prompts, completions, answer, **columns):
    assert all(isinstance(p, str) for p in prompts) and "prompt" not in columns
    return [float(c == a) for c, a in zip(completions, answer, strict=True)]


def _fit(folder, samples, *callbacks, module=None, **options):
    module = module or Answering()
    trainer(folder, samples, *callbacks, **options).fit(module)
    return module


def test_at_every_validation(tmp_path, capsys):
    samples = GenerationSamples(4, 16, metrics={"right": right}, prompts=ROWS, generation={"temperature": 0.5})
    module = _fit(tmp_path, samples, val_check_interval=4, num_sanity_val_steps=1)
    assert module.calls == [(s, 4, {"max_new_tokens": 16, "temperature": 0.5}) for s in (2, 4, 6, 8)]
    table = read_table(tmp_path, "val/samples")
    assert list(table) == ["step", "prompt", "completion", "reference", "right"]
    assert table["step"].tolist() == [s for s in (2, 4, 6, 8) for _ in range(4)]
    assert table["completion"].tolist()[:8] == ["1", "2", "?", "?", "1", "2", "3", "4"]
    assert table["right"].tolist()[:8] == [1, 1, 0, 0, 1, 1, 1, 1] and table["reference"].tolist()[:2] == ["1", "2"]
    printed = capsys.readouterr().out
    assert printed.count("0 + 1 =") == 4 and "2 + 1 =" in printed and "3 + 1 =" not in printed


def test_a_metric_ranks_checkpoints_and_is_logged(tmp_path, capsys):
    def backwards(prompts, completions, answer, **columns):
        return [-value for value in right(prompts, completions, answer)]

    samples = GenerationSamples(4, metrics={"right": right, "backwards": backwards}, prompts=ROWS)
    checkpoint = Checkpoint(monitor="val/backwards", mode="max")
    _fit(tmp_path, samples, checkpoint, logger=CSVLogger(str(tmp_path)), val_check_interval=4)
    history = read_history(tmp_path).set_index("step")["val/right"].dropna()
    assert history.to_dict() == {2: 0.5, 4: 1.0, 6: 1.0, 8: 1.0}
    assert checkpoint.best_model_path.endswith("step-000002.ckpt") and checkpoint.best_model_score.item() == -0.5


def test_every_n_steps(tmp_path, capsys):
    logger = CSVLogger(str(tmp_path))
    samples = GenerationSamples(2, every_n_steps=3, metrics=right, prompts=ROWS, print_rows=0)
    module = _fit(tmp_path, samples, logger=logger, log_every_n_steps=50)
    assert [step for step, *_ in module.calls] == [3, 6]
    history = read_history(tmp_path).set_index("step")
    assert history["val/right"].dropna().to_dict() == {3: 1.0, 6: 1.0}
    assert read_table(tmp_path, "val/samples")["step"].tolist() == [3, 3, 6, 6]
    assert "+ 1 =" not in capsys.readouterr().out


def test_rows_of_the_data_module(tmp_path):
    asked = []

    class DataModule(L.LightningDataModule):
        def eval_rows(self, name, limit):
            asked.append((name, limit))
            return CHAT[:limit]

        def train_dataloader(self):
            return self.trainer.lightning_module.train_dataloader()

        def val_dataloader(self):
            return self.trainer.lightning_module.val_dataloader()

    seen = []

    def check(prompts, completions, answer):
        seen.append((prompts, completions))
        return [None if c[-1]["content"] == "?" else 1.0 for c in completions]

    module = Answering()
    samples = GenerationSamples(3, eval_set="math", metrics=check, print_rows=1)
    run = trainer(tmp_path, samples, max_steps=2, val_check_interval=4)
    run.fit(module, datamodule=DataModule())
    assert asked == [("math", 3)]
    assert seen[0][0] == [row["prompt"] for row in CHAT[:3]]
    assert seen[0][1] == [[{"role": "assistant", "content": text}] for text in ("1", "2", "?")]
    assert run.callback_metrics["val/check"].item() == 1.0  # The one that abstained does not count.
    table = read_table(tmp_path, "val/samples")
    assert json.loads(table["prompt"][0]) == CHAT[0]["prompt"] and table["check"].isna().tolist() == [False, False, True]


def test_texts_and_import_paths(tmp_path):
    samples = GenerationSamples(2, prompts=["0 + 1 =", "1 + 1 ="], metrics="operator:lt", print_rows=0)
    samples.metrics = {"length": lambda prompts, completions: [len(c) for c in completions]}
    module = _fit(tmp_path, samples, max_epochs=1)
    assert module.trainer.callback_metrics["val/length"].item() == 1.0
    assert GenerationSamples(metrics="operator:lt").metrics.keys() == {"lt"}


def test_generating_does_not_change_training(tmp_path):
    class Sampling(Answering):
        def generate(self, prompts, **options):
            self.drawn = [*getattr(self, "drawn", []), torch.rand(1).item()]
            return ["x"] * len(prompts)

        def training_step(self, batch, batch_idx):
            self.noise = [*getattr(self, "noise", []), torch.rand(1).item()]
            return super().training_step(batch, batch_idx)

    noise, drawn = [], []
    for callbacks in ([], [GenerationSamples(2, every_n_steps=2, prompts=ROWS, print_rows=0)]):
        torch.manual_seed(0)
        module = Sampling()
        trainer(tmp_path, *callbacks).fit(module)
        noise.append(module.noise)
        drawn.append(getattr(module, "drawn", []))
    assert noise[0] == noise[1] and len(set(drawn[1])) == 4


def test_it_answers_with_the_average_where_that_is_evaluated(tmp_path):
    weights = []

    class Watching(Answering):
        def generate(self, prompts, **options):
            weights.append(self.weights())
            return super().generate(prompts, **options)

    ema = EMA(0.5, evaluate=True, apply_at_end=False)
    module = Watching()
    trainer(tmp_path, GenerationSamples(1, prompts=ROWS, print_rows=0), ema).fit(module)
    average = [*ema.average["layer.weight"].flatten().tolist(), *ema.average["layer.bias"].tolist()]
    assert weights[-1] == average != module.weights()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metrics": lambda prompts, completions, **c: [1.0]}, "returned 1 values for 2 completions"),
        ({"metrics": lambda prompts, completions: [1.0, 1.0]}, "cannot be called as f.prompts, completions, reference"),
        ({"prompts": None}, "need an evaluation set"),
    ],
)
def test_mistakes(tmp_path, options, message):
    samples = GenerationSamples(2, print_rows=0, **{"prompts": ROWS, **options})
    with pytest.raises(UserError, match=message):
        _fit(tmp_path, samples)


def test_mistakes_at_once():
    for metric in ("operator", "operator:absent", "absent.module:f"):
        with pytest.raises(UserError, match="module:function"):
            GenerationSamples(metrics=metric)
    with pytest.raises(UserError, match="num_prompts=0"):
        GenerationSamples(0)
