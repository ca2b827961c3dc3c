"""`workbench inspect`: flags, exit codes, what is printed, the page, and the notebook's object."""

import json
from html.parser import HTMLParser

import pandas as pd
import pytest
from datasets import Dataset
from rich.console import Console
from support import ROOT

import workbench
from workbench.cli import inspect_cost, main
from workbench.cli.inspect import rewrite
from workbench.cli.inspect_content import si, size
from workbench.cli.inspect_text import tokens_text, visible
from workbench.data.inspection_rows import ShownSegment, ShownToken, Skipped
from workbench.data.module import DataModule
from workbench.errors import UserError
from workbench.tiny.tokenizer import tiny_tokenizer

NO_EVAL = ("data.eval=null", "exact_match=0")


def chat(question: str, answer: str) -> dict:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, rows) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


# -- flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--html"], ['inspect.html="inspect.html"']),
        (["--html", "data=file"], ['inspect.html="inspect.html"', "data=file"]),
        (["--html", "a b.html", "rows=2"], ['inspect.html="a b.html"', "inspect.rows=2"]),
        (["--html=x.html"], ['inspect.html="x.html"']),
        (["html=x=1.html"], ['inspect.html="x=1.html"']),
        (["html=null", "rows=[0,7]"], ["inspect.html=null", "inspect.rows=[0,7]"]),
        (["method=null", "data.max_length=8"], ["~method", "data.max_length=8"]),
    ],
)
def test_short_forms(typed, meant):
    assert rewrite(typed) == meant


# -- the known-bad set ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_set(tmp_path_factory):
    """Twenty rows with six planted faults, two rows each, and a tokenizer whose template can double the start token."""
    folder = tmp_path_factory.mktemp("bad")
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}\n{% else %}{{ m.role }}:{{ m.content }}"
        "{% if m.role == 'assistant' and not m.content.endswith('...') %}{{ eos_token }}{% endif %}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder / "tokenizer")
    good = [chat(f"{i}+{i}", str(2 * i)) for i in range(8)]
    system = {"role": "system", "content": "<|im_start|>be kind"}
    planted = [
        *({"messages": [{"role": "user", "content": f"alone {i}"}]} for i in range(2)),  # 1: nothing to train
        *(chat("long", letter * 60) for letter in "xy"),  # 2: cut before the end
        *(chat("open", f"{i}...") for i in range(2)),  # 3: the template leaves the terminator out
        *({"messages": [system, *chat("a", str(i))["messages"]]} for i in range(2)),  # 4: two start tokens
        *({"messages": [{"role": "critic", "content": str(i)}]} for i in range(2)),  # 5: cannot be read
        *(chat(f"empty {i}", "") for i in range(2)),  # 6: nothing but an end token
    ]
    rows = write(folder / "rows.jsonl", good + planted)
    held_out = write(folder / "eval.jsonl", [chat("9+9", "18"), chat("9+8", "17")])
    options = [f"data.train={rows}", f"data.eval={held_out}", f"model.tokenizer={folder / 'tokenizer'}"]
    return ["data=file", *options, "data.train_on=assistant", "data.max_length=30", "data.batch_size=4"]


SIX = {
    "untrained": "2 of 20 rows (10.0%) have no trained token",
    "cut": "2 of 20 rows (10.0%) lose trained tokens at their end",
    "no_terminator": "2 of 16 rows (12.5%) train no end token (<|im_end|>)",
    "double_bos": "2 of 16 rows start with two start tokens (<|im_start|>)",
    "bad_row": "training stops at a row that cannot be read (2 of 20 are such): Row 16",
    "empty_answer": "2 of 16 rows (12.5%) train nothing but an end token",
}


def test_all_six_planted_faults_are_listed(bad_set, capsys, tmp_path):
    assert main(["inspect", *bad_set, "--html", str(tmp_path / "bad.html")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    page = (tmp_path / "bad.html").read_text()
    assert "6 faults, 0 warnings" in out
    for sentence in SIX.values():
        assert f"fault train: {sentence}" in out
        assert sentence.replace("<", "&lt;").replace(">", "&gt;") in page


def test_each_fault_is_counted_and_alone(bad_set):
    found = workbench.inspect(*bad_set, "rows=8")
    assert {(f.where, f.kind, f.level) for f in found.findings} == {("train", kind, "fault") for kind in SIX}
    report = found.report["sets"]["train"]
    assert (report["rows_in"], report["rows_out"], report["dropped"]) == (20, 16, {"bad_row": 2, "untrained": 2})
    counted = ("cut_before_terminator", "rows_without_terminator", "trained_double_bos", "empty_answers", "duplicates")
    assert [report[name] for name in counted] == [2, 2, 2, 2, 0]
    assert found.report["sets"]["eval"]["dropped"] == {}
    json.dumps(found.report)
    titles = " ".join(row.title for row in found.sets["train"].shown)
    assert all(word in titles for word in ("first", "longest", "untrained", "two start tokens", "left out", "no terminator"))


def test_mended_rows_have_no_fault(bad_set):
    found = workbench.inspect(*bad_set, data=Dataset.from_list([chat(f"{i}+{i}", str(2 * i)) for i in range(8)]))
    assert found.ok and not found.findings


# -- exit codes and the terminal ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_default_is_without_fault(capsys):
    assert main(["inspect", "rows=1"]) == 0
    out = capsys.readouterr().out
    assert "«92<|im_end|>↵»" in out and "57,432 (24.5%)" in out
    assert "0 faults, 1 warning" in out and "3,312 of 12,800" in out  # 300 steps pass some sums again


LABELS = ("rows in -> out", "messages", "rows per step", "steps per epoch")


def test_the_report_in_a_terminal(capsys):
    assert main(["inspect", "rows=1", "data.train={path: 'tiny:sums', kwargs: {size: 130}}", *NO_EVAL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "«92<|im_end|>↵»" in lines
    facts = {label: next(line[len(label) :].strip() for line in lines if line.startswith(label)) for label in LABELS}
    assert facts["rows in -> out"] == "130 -> 130" and facts["steps per epoch"] == "2" and facts["rows per step"] == "128"
    assert facts["messages"] == "user 130, assistant 130"
    bars = [line for line in lines if "█" in line or "▏" in line]
    assert sum(int(line.split()[-1]) for line in bars) == 130


def test_a_mistake_in_the_configuration_is_exit_2_in_one_line(capsys, tmp_path):
    assert main(["inspect", "data=file", f"data.train={tmp_path / 'none.jsonl'}"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("workbench: ") and "none.jsonl" in error and "\n" not in error
    assert main(["inspect", "inspect.row=3"]) == 2
    assert "'rows'" in capsys.readouterr().err


def test_a_set_of_which_nothing_is_left_is_a_fault(capsys, tmp_path):
    rows = write(tmp_path / "rows.jsonl", [chat("1+1", "2")] * 3)
    assert main(["inspect", "data=file", f"data.train={rows}", "data.max_length=4", "data.train_on=assistant"]) == 1
    assert "No row of 'train' is left of 3" in capsys.readouterr().out


def test_pairs_without_a_method(capsys):
    pairs = "data.train={path: 'tiny:sums', kwargs: {type: preference, size: 50}}"
    assert main(["inspect", "method=null", "rows=1", pairs, *NO_EVAL]) == 0
    out = capsys.readouterr().out
    assert all(f"{name}, " in out for name in ("prompt", "chosen", "rejected"))
    assert main(["inspect", pairs, *NO_EVAL]) == 2, "which the configured method does not take"


def test_colours_where_there_are_any_else_marks():
    tokens = [
        ShownToken("<s>", 1, 0.0, special=True),
        ShownToken("[bold]q", 2, 0.0),
        ShownToken("a", 3, 1.0),
        ShownToken("b\n", 4, 1.0),
        ShownToken("c", 5, 0.5),
        Skipped(7),
        ShownToken("d", 6, 1.0, cut=True),
    ]
    segment = ShownSegment("text", tokens, 13)
    assert tokens_text(segment, colours=False).plain == "<s>[bold]q«ab↵»\n‹0.5|c› ... 7 tokens ... [cut: d]"
    coloured = tokens_text(segment, colours=True)
    assert coloured.plain == "<s>[bold]qab↵\nc ... 7 tokens ... d"
    spans = {coloured.plain[s.start : s.end]: str(s.style) for s in coloured.spans}
    assert spans["ab↵\n"] != spans["c"] and "green" in spans["ab↵\n"] and "strike" in spans["d"] and "magenta" in spans["<s>"]


def test_control_characters_do_not_reach_the_terminal():
    assert visible("a\x1b[31m\tb\n") == "a\\x1b[31m⇥b↵\n"


# -- page and notebook ------------------------------------------------------------------------------------------------


class Tree(HTMLParser):
    """Tags that stay open or close nothing, and the text of each kind of token."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], {}

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta",):
            self.open.append((tag, dict(attrs).get("class", "")))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop()[0] == tag, f"</{tag}> closes nothing"

    def handle_data(self, data):
        kind = self.open[-1][1] if self.open else ""
        self.text[kind] = self.text.get(kind, "") + data


def test_the_page_is_whole_escaped_and_needs_no_other_file(tmp_path):
    rows = [chat("<script>alert(1)</script> & [red]", f"</pre><b>{i}") for i in range(3)]
    found = workbench.inspect(*NO_EVAL, "data.train_on=assistant", "data.batch_size=2", data=Dataset.from_list(rows))
    text = found.write_html(tmp_path / "deep" / "page.html").read_text()
    tree = Tree()
    tree.feed(text)
    assert not tree.open and not {"script", "b", "link", "img"} & set(tree.tags)
    assert "http" not in text and "prefers-color-scheme: dark" in text
    assert "</pre><b>0<|im_end|>" in tree.text["trained"]
    assert "<script>alert(1)</script> & [red]" in tree.text["plain"]
    assert found._repr_html_() in text
    out = str(found)
    assert "[red]" in out, "is text, not a style"


def test_a_page_that_cannot_be_written_is_one_line(tmp_path):
    found = workbench.inspect(*NO_EVAL, data=Dataset.from_list([chat("1", "2")]))
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        found.write_html(tmp_path / "file" / "page.html")


def test_the_notebook_object(capsys):
    data = DataModule(Dataset.from_list([chat("1+1", "2"), chat("2+1", "3")]), batch_size=2, train_on="assistant")
    found = workbench.inspect(workbench.compose("data.eval=null", "exact_match=0"), data=data, rows=[1])
    assert isinstance(found.table, pd.DataFrame) and found.table.loc["trained_tokens", "train"] == 4
    assert found.report["steps"]["steps_per_epoch"] == 1 and found.report["steps"]["padding"] == 0.0
    assert [row.title for row in found.sets["train"].shown] == ["row 1"]
    assert found.ok and "0 faults" in repr(found)
    found.show(Console(width=100))
    assert "row 1" in capsys.readouterr().out
    with pytest.raises(UserError, match="not both"):
        workbench.inspect(workbench.compose(), "rows=1")


# -- cost -------------------------------------------------------------------------------------------------------------


def cost(*overrides: str) -> dict:
    rows = Dataset.from_list([{"text": "a" * 9}] * 4)
    return workbench.inspect(*NO_EVAL, "rows=0", "data.batch_size=4", *overrides, data=rows).report


def test_operations_and_memory_by_hand():
    report = cost("trainer.max_epochs=3")
    found, steps = report["cost"], report["steps"]
    total = found["parameters"]
    assert found["trainable_parameters"] == total
    # 6 N, and 6 per layer, query width and token of the row in attention; the tied embedding is the head
    from workbench.tiny.model import tiny_config

    config = tiny_config("llama")
    width = config.num_attention_heads * (config.head_dim or 0)
    attention = 6 * config.num_hidden_layers * width * 10
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert found["flops_per_token"] == pytest.approx(6 * (total - embedding) + attention)
    assert found["flops"] == pytest.approx(3 * found["flops_per_epoch"]) == pytest.approx(3 * 40 * found["flops_per_token"])
    assert (steps["largest"], found["micro_batch_tokens"]) == (40, 40)
    memory = found["memory_bytes"]
    assert (memory["weights"], memory["gradients"], memory["optimizer"]) == (4 * total, 4 * total, 8 * total)
    assert memory["total"] == sum(v for k, v in memory.items() if k != "total")


def test_an_adapter_trains_less_and_costs_less():
    full, lora = cost()["cost"], cost("peft=lora")["cost"]
    assert lora["trainable_parameters"] == lora["parameters"] - full["parameters"] > 0
    assert lora["memory_bytes"]["optimizer"] == 8 * lora["trainable_parameters"]
    assert lora["flops_per_token"] < full["flops_per_token"]


def test_recomputing_costs_a_forward_and_saves_activations():
    plain, recomputed = cost()["cost"], cost("method.gradient_checkpointing=true")["cost"]
    assert recomputed["flops_per_token"] == pytest.approx(4 / 3 * plain["flops_per_token"])
    assert recomputed["memory_bytes"]["activations"] < plain["memory_bytes"]["activations"]


PAIRS = ("method=dpo", "data.train={path: 'tiny:sums', kwargs: {size: 40}}", *NO_EVAL)


def test_a_reference_costs_its_weights_and_a_forward():
    plain = workbench.inspect("method=orpo", *PAIRS[1:], "rows=0").report["cost"]
    dpo = workbench.inspect(*PAIRS, "rows=0").report["cost"]
    assert dpo["memory_bytes"]["weights"] == 2 * plain["memory_bytes"]["weights"]
    assert dpo["flops_per_token"] == pytest.approx(4 / 3 * plain["flops_per_token"])
    for without in ("method.reference_free=true", "method.precompute_ref_logps=true"):
        assert workbench.inspect(*PAIRS, without, "rows=0").report["cost"]["memory_bytes"] == plain["memory_bytes"]
    over_base = inspect_cost.reference_of({"method": {"_target_": "workbench.methods.dpo.DPO"}, "peft": {"r": 8}})
    assert over_base == (0, 1), "the base under an adapter is its reference"


PARITY = "tests/parity"


@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        (
            ["method=dpo", f"data.train={PARITY}/data/preference.jsonl"],
            ["chosen, 20 tokens", "rejected, 21 tokens", "«The orchard", "«the river", "longer side"],
        ),
        (["method=kto", f"data.train={PARITY}/data/unpaired.jsonl"], ["label false", "true 64, false 32", "«the river"]),
        (["method=dpo", *PAIRS[1:2]], ["«92<|im_end|>↵»", ", rejected 4."]),
        (["method=kto", *PAIRS[1:2]], ["label true", "«92<|im_end|>↵»"]),
        (["method=tpo", *PAIRS[1:2]], ["gold, 4 tokens", ", gold 4."]),
    ],
    ids=lambda v: " ".join(v[:2]) if v[0].startswith("method") else "",
)
def test_rows_of_preference_methods(typed, shown, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    model = ["data=file", "model=hf", f"model.name={PARITY}/model"] if PARITY in typed[1] else NO_EVAL
    assert main(["inspect", *typed, *model, "rows=1"]) == 0
    out = capsys.readouterr().out
    assert all(text in out for text in shown), out


def test_devices_share_the_rows_and_under_fsdp2_the_weights():
    one = cost("trainer=cpu")
    ddp = cost("trainer=cpu", "trainer.devices=2", "strategy=ddp")
    fsdp = cost("trainer=cpu", "trainer.devices=2", "strategy=fsdp2")
    assert (one["steps"]["largest"], ddp["steps"]["largest"]) == (40, 20)
    memory = [report["cost"]["memory_bytes"] for report in (one, ddp, fsdp)]
    assert memory[1]["weights"] == memory[0]["weights"] == 2 * memory[2]["weights"]
    assert ddp["cost"]["flops_per_epoch"] == one["cost"]["flops_per_epoch"]


def test_what_optimizers_keep_and_strategies_spread():
    states = {"torch.optim.SGD": 0, "workbench.methods.optim.adamw": 2, "torch.optim.Adafactor": 0, "x.Unknown": 2}
    assert {name: inspect_cost.optimizer_states({"_target_": name}) for name in states} == states
    assert inspect_cost.optimizer_states({"_target_": "torch.optim.SGD", "momentum": 0.9}) == 1
    deepspeed = {"_target_": "workbench.strategies.deepspeed.DeepSpeed"}
    spread = [inspect_cost.sharding({**deepspeed, "stage": stage}, 4) for stage in (1, 2, 3)]
    assert [(s.weights, s.gradients, s.optimizer) for s in spread] == [(1, 1, 4), (1, 4, 4), (4, 4, 4)]
    assert inspect_cost.sharding("deepspeed_stage_2", 4) == spread[1]
    assert inspect_cost.sharding("ddp", 4) == inspect_cost.Sharding()
    mesh = {"_target_": "workbench.strategies.fsdp2.FSDP2Strategy", "tensor_parallel_size": 2}
    assert inspect_cost.sharding(mesh, 4).weights == 8


def test_units():
    assert [si(v) for v in (7, 999, 1000, 618_624, 3.2e15)] == ["7", "999", "1 K", "619 K", "3.2 P"]
    assert [size(v) for v in (512, 2048, 5 * 2**30, 3 * 2**41)] == ["512 B", "2.0 KiB", "5.0 GiB", "6.0 TiB"]


def test_an_online_method_is_planned_with_completions_at_their_bound(capsys):
    """Steps by the published formula; what is written later counts as long as it may be."""
    assert main(["inspect", "method=grpo", "data.train.kwargs.size=48", "data.batch_size=16", "rows=0", "trainer=cpu"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "completions of up to 256 tokens per step 16" in out
    assert "steps per epoch 24" in out and "score read at" not in out
