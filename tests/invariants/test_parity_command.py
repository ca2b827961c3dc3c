"""``workbench invariants parity``: what it prints, exit codes, mistakes in one line, options, reasons."""

import json
import subprocess
import sys

import pytest
from support import DATA, REFERENCES, ROOT

from workbench.cli import invariants, main
from workbench.errors import UserError
from workbench.invariants import parity
from workbench.invariants.parity_cases import Case, load_case, load_rows
from workbench.invariants.parity_compare import compare, spread
from workbench.invariants.parity_expected import EXPECTED, expected
from workbench.invariants.parity_options import FIXED, INERT, TRAINING
from workbench.invariants.parity_rows import Fixture, unpaired, with_gold
from workbench.invariants.parity_run import run
from workbench.invariants.parity_trainers import TRAINERS, replay, warmup_steps

SIGMOID = REFERENCES / "dpo_sigmoid.json"
HEAVY = {"torch", "lightning", "transformers", "datasets", "numpy", "omegaconf", "yaml"}


@pytest.fixture
def edited(tmp_path):
    """``edited(args=..., **keys)``: the path of dpo_sigmoid with other options and keys."""

    def edit(args=(), name="case", **keys):
        case = json.loads(SIGMOID.read_text())
        case["args"] |= dict(args)
        case |= keys
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(case))
        return str(file)

    return edit


def case_of(kind="dpo", steps=None, **options):
    return Case("x", kind, "preference", options, steps or [{"step": 1, "loss": 1.0}])


# -- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [[], ["--help"], ["parity", "--help"], ["nonsense"], ["parity", "missing.json"]], ids=str)
def test_pages_and_mistakes_import_nothing_heavy(words):
    script = f"import sys\nfrom workbench.cli import main\nmain({['invariants', *words]!r})\nprint('\\nMODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not set(done.stdout.split("MODULES ")[1].split()) & HEAVY


def test_pages(capsys):
    assert main(["invariants"]) == main(["invariants", "--help"]) == 0
    page = capsys.readouterr().out
    assert all(f"  {name}" in page and subcommand.about in page for name, subcommand in invariants.SUBCOMMANDS.items())
    assert main(["invariants", "parity", "--help"]) == 0
    assert "--fixture" in capsys.readouterr().out


def test_a_case_that_matches(capsys):
    assert main(["invariants", "parity", str(SIGMOID), "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["case", "field", "deviation", "of", "tolerance", "over", "from", "step", "verdict"]
    assert lines[1].startswith("dpo_sigmoid") and lines[1].endswith("matches")
    fields = [line.split()[-4] for line in lines[2:13]]
    assert fields[0] == "grad_norm" and "rewards/margins" in fields and len(fields) == 11
    assert lines[-1].startswith("1 of 1 cases match. Tolerances")


def test_a_case_that_deviates(capsys, edited):
    """Another beta than the record's: the first step, where policy and reference agree, still has the right loss."""
    assert main(["invariants", "parity", edited({"beta": 0.31}, case="mine"), "--steps", "3", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (case,) = found["cases"]
    assert not found["matches"] and case["case"] == "mine" and case["steps"] == 3
    loss = case["fields"]["loss"]
    assert loss["verdict"] == "deviates" and loss["first_over"] == 2 and 1e-3 < loss["deviation"] < 0.1
    assert case["fields"]["grad_norm"]["first_over"] == 1


def test_a_field_that_we_do_not_log_deviates(capsys, edited):
    steps = [{"step": 1, "loss": 0.69314718, "frobnication": 1.0}]
    assert main(["invariants", "parity", edited(steps=steps), "--json"]) == 1
    fields = json.loads(capsys.readouterr().out)["cases"][0]["fields"]
    assert fields["loss"]["verdict"] == "matches"
    assert fields["frobnication"] == {
        "deviation": None,
        "used": None,
        "first_over": 1,
        "verdict": "deviates",
        "reason": "not logged here",
    }


def test_of_several_the_good_ones_are_replayed(capsys, edited):
    files = [edited({"betta": 1}, name="bad"), str(SIGMOID), str(REFERENCES / "distill_beta0.5.json")]
    assert main(["invariants", "parity", *files, "--steps", "1"]) == 2
    out, err = capsys.readouterr()
    assert "1 of 3 cases match; not replayed: 2" in out
    first, second = err.splitlines()
    assert "bad.json: betta=1 is no option of TRL's dpo trainer that is known here. Did you mean 'beta'?" in first
    assert "kind='distillation' is not replayed. Allowed: sft, dpo, kto, reward, cpo, orpo, tpo, grpo, rloo, bco, prm." in second


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"kind": "dpoo"}, "kind='dpoo' is not replayed. Did you mean 'dpo'? Allowed: sft"),
        ({"kind": None}, "kind=null must be a text"),
        ({"steps": []}, "steps is empty"),
        ({"steps": [{"step": 1}]}, "must be an object with step, loss and metrics"),
        ({"steps": [{"step": 1, "loss": "x"}]}, 'steps[0].loss="x" must be a number'),
        ({"steps": [{"step": 2, "loss": 1}, {"step": 2, "loss": 1}]}, "above 2, the step before it"),
        ({"args": {"beta": "x"}}, "beta='x' of TRL's dpo trainer must be a number"),
        ({"args": {"beta": None}}, "beta=None of TRL's dpo trainer must be a number"),
        ({"args": {"loss_type": ["sigmoyd"]}}, "Did you mean 'sigmoid'?"),
        ({"args": {"loss_weights": [1, 2]}}, "must hold one value for each of loss_type=['sigmoid']"),
        ({"args": {"loss_type": ["exo_pair"]}}, "loss=exo_pair needs label_smoothing above 0"),
        ({"args": {"f_divergence_type": "x"}}, "divergence='x' is not known. Allowed: reverse_kl"),
        ({"args": {"bf16": True}}, "bf16=True of TRL's dpo trainer is not replayed; allowed: False"),
        ({"args": {"use_liger_kernel": True}}, "use_liger_kernel=True of TRL's dpo trainer is not replayed"),
        ({"args": {"train_sampling_strategy": "random"}}, "allowed: 'sequential'"),
        ({"args": {"lr_scheduler_type": "lineer"}}, "Did you mean 'linear'?"),
        ({"args": {"optim": "lion"}}, "optim='lion' is not known"),
        ({"args": {"truncation_mode": "x"}}, "truncation_mode='x' is not known"),
        ({"args": {"gradient_accumulation_steps": 0}}, "gradient_accumulation_steps=0 must be at least 1"),
        ({"args": {"max_grad_norm": -1.0}}, "max_grad_norm=-1.0 must be at least 0"),
        ({"args": {"max_steps": -1, "num_train_epochs": 1.5}}, "num_train_epochs=1.5 is not replayed"),
        ({"args": {"max_length": 4}}, "cut_away 96"),
        ({"args": {"model_init_kwargs": {"dtype": "bfloat16"}}}, "model_init_kwargs={'dtype': 'bfloat16'} is not replayed"),
        ({"data": "prefrence"}, "names no rows of the fixture. Did you mean 'preference'?"),
        ({"data": []}, "data holds no rows"),
        ({"data": "text"}, "needs preference"),
        ({"lora": {"rank": 3}}, "lora='rank' is not known"),
        ({"margin": True}, "margin=true must be a number for each row"),
        ({"columns": {"margin": [1.0]}}, "column 'margin' has 1 values for 96 rows"),
        ({"bema": {"lagg": 3}}, "bema='lagg' is not known. Did you mean 'lag'?"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_mistakes_are_one_line(capsys, edited, edit, message):
    file = edited(**edit)
    assert main(["invariants", "parity", file]) == 2
    out, err = capsys.readouterr()
    assert err.startswith(f"workbench: {file}: ") and message in err and err.count("\n") == 1
    assert not out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["party"], "invariants party: there is no such subcommand. Did you mean 'parity'?"),
        (["parity"], "arguments are required: CASE.json"),
        (["parity", "nowhere.json"], "nowhere.json: there is no such case file"),
        (["parity", "README.md"], "README.md is not JSON"),
        (["parity", str(SIGMOID), "--steps", "0"], "--steps 0 must be at least 1"),
        (["parity", str(SIGMOID), "--stepz", "1"], "unrecognized arguments"),
        (["parity", str(SIGMOID), "--fixture", "nowhere"], "--fixture nowhere: there is no folder model/ in it"),
    ],
    ids=str,
)
def test_wrong_words_are_one_line(capsys, words, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(["invariants", *words]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1


def test_without_a_checkout_the_fixture_is_asked_for(monkeypatch):
    monkeypatch.setattr(parity, "default_fixture", lambda: None)
    with pytest.raises(UserError, match="give --fixture DIR"):
        parity.find_fixture(None)


def test_a_key_that_nothing_reads_is_told(capsys, edited):
    assert main(["invariants", "parity", edited(margins=1), "--steps", "1"]) == 0
    assert "nothing reads the key 'margins'. Did you mean 'margin'?" in capsys.readouterr().err


# -- options --------------------------------------------------------------------------------------------------------


def test_every_option_is_of_one_kind():
    """Read, without effect, or refused; and every default is a value of its own type."""
    assert not INERT & FIXED.keys()
    for trainer in TRAINERS.values():
        read = {**TRAINING, **trainer.defaults}
        assert not read.keys() & FIXED.keys()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3}, {"divergence_alpha": 0.7}),
        ({"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 1.0}, {"divergence_alpha": 0.0}),
        ({"loss_type": "exo_pair", "label_smoothing": 0.1}, {"label_smoothing": {"exo_pair": 0.1}}),
        ({"loss_type": ["hinge", "hinge"], "loss_weights": [1, 2]}, {"loss": ["hinge"], "loss_weights": [3.0]}),
        ({"precompute_ref_log_probs": True, "precompute_ref_batch_size": 3}, {"precompute_ref_micro_batch_size": 3}),
        ({"padding_free": True}, {"layout": "packed"}),
        ({"pad_to_multiple_of": 8}, {"layout": "padded", "pad_to_multiple_of": 8}),
    ],
    ids=str,
)
def test_dpo_options(theirs, ours):
    method = replay(case_of(**theirs)).method
    assert {name: method[name] for name in ours} == ours


@pytest.mark.parametrize(
    ("theirs", "absent"),
    [
        ({"label_smoothing": 0.2}, "label_smoothing"),  # TRL's sigmoid does not read it
        ({"loss_type": ["sft"], "f_divergence_type": "js_divergence"}, "divergence"),
        ({"discopop_tau": 0.5}, "discopop_tau"),
        ({"ref_model_sync_steps": 3}, "ref_model_sync_steps"),
        ({"pad_to_multiple_of": "auto"}, "pad_to_multiple_of"),
    ],
    ids=str,
)
def test_options_that_trl_does_not_read_are_not_passed_on(theirs, absent):
    assert absent not in replay(case_of(**theirs)).method


def test_what_a_run_is_made_of():
    options = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 5, "max_grad_norm": 0.0, "max_steps": 7}
    plan = replay(case_of(**options, adam_beta2=0.9, weight_decay=0.1, lr_scheduler_type="linear", warmup_steps=0.25))
    assert (plan.data["batch_size"], plan.data["micro_batch_size"], plan.data["shuffle"]) == (15, 3, False)
    assert plan.trainer == {"max_steps": 7, "gradient_clip_val": None}
    assert plan.optim == ("adamw", {"lr": 1e-6, "weight_decay": 0.1, "betas": (0.9, 0.9), "eps": 1e-8})
    assert plan.schedule == {"name": "linear", "warmup_steps": 0.25, "options": None}
    assert [warmup_steps(asked, 10) for asked in (0, 0.25, 1, 4)] == [0, 3, 1, 4]
    assert replay(case_of(lr_scheduler_type="constant", warmup_steps=4)).schedule["warmup_steps"] == 0
    assert replay(case_of(num_train_epochs=2)).trainer["max_epochs"] == 2


def test_defaults_are_those_of_each_trainer():
    rates = {kind: replay(case_of(kind)).optim[1]["lr"] for kind in TRAINERS}
    assert rates["sft"] == 2e-5 and rates["dpo"] == 1e-6 and rates["reward"] == 1e-4 and rates["tpo"] == 5e-7
    assert replay(case_of("tpo")).method["beta"] == 0.01 and replay(case_of("kto")).method["kl_scope"] == "micro_batch"
    assert (
        replay(case_of("reward")).data["truncation"] == "drop"
        and replay(case_of("cpo", max_length=None)).data["max_length"] == 512
    )


@pytest.mark.parametrize("kind", ["cpo", "tpo"])
def test_hinge_does_not_read_label_smoothing(kind):
    assert "label_smoothing" not in replay(case_of(kind, loss_type="hinge", label_smoothing=0.2)).method
    assert replay(case_of(kind, label_smoothing=0.2)).method["label_smoothing"] == 0.2


# -- rows -----------------------------------------------------------------------------------------------------------


def test_rows_of_a_case(tmp_path):
    fixture = DATA.parent
    inline = Case("x", "reward", [{"chosen": "a", "rejected": "b"}] * 2, {}, [], extras={"margin": [0.5, 1.0]})
    assert [row["margin"] for row in load_rows(inline, fixture)] == [0.5, 1.0]
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "b"}\n')
    beside = Case("x", "sft", "rows.jsonl", {}, [], path=tmp_path / "case.json", extras={"columns": {"n": 3}})
    assert load_rows(beside, fixture) == [{"text": "a", "n": 3}, {"text": "b", "n": 3}]


def test_pairs_become_labelled_rows_a_thousand_at_a_time():
    rows = [{"prompt": "p", "chosen": f"c{i}", "rejected": f"r{i}"} for i in range(1001)]
    made = unpaired(rows, None)
    order = [row["completion"] for row in made]
    assert order[999:1001] == ["c999", "r0"] and order[1999:] == ["r999", "c1000", "r1000"]
    assert [row["label"] for row in made[999:1001]] == [True, False]


def test_gold_answers_are_those_of_the_same_rows():
    fixture = Fixture(None, lambda name: [{"completion": f"{name} {i}"} for i in range(2)])
    made = with_gold([{"chosen": "a"}, {"chosen": "b"}], fixture)
    assert [row["reference"] for row in made] == ["prompt_completion 0", "prompt_completion 1"]
    with pytest.raises(UserError, match="3 pairs and 2 rows of prompt_completion make no triples"):
        with_gold([{"chosen": "a"}] * 3, fixture)


# -- comparing ------------------------------------------------------------------------------------------------------


def test_tolerances():
    """Loss 1e-5 relative + 1e-6, gradient norm 1e-4, others 1e-4 + 1e-6: each just inside, and just outside."""
    theirs = {"loss": 2.0, "grad_norm": 2.0, "kl": 0.0}
    case = case_of(steps=[{"step": 1, **theirs}])
    inside = compare(case, [{"loss": 2.0 + 2.0e-5, "grad_norm": 2.0 + 1.9e-4, "kl": 0.9e-6}])
    assert [f.verdict for f in inside.fields] == ["matches"] * 3 and inside.matches
    assert inside.field("loss").deviation == pytest.approx(1e-5) and inside.field("grad_norm").used == pytest.approx(0.95)
    outside = compare(case, [{"loss": 2.0 + 2.2e-5, "grad_norm": 2.0 + 2.1e-4, "kl": 1.1e-6}])
    assert [f.verdict for f in outside.fields] == ["deviates"] * 3 and not outside.matches
    assert {f.first_over for f in outside.fields} == {1}


def test_a_run_that_ends_early_or_breaks_deviates():
    case = case_of(steps=[{"step": i, "loss": 1.0} for i in (1, 2, 3)])
    assert compare(case, [{"loss": 1.0}] * 2).field("loss").first_over == 3
    assert compare(case, [{"loss": 1.0}, {"loss": float("nan")}, {"loss": 1.0}]).field("loss").first_over == 2


def test_records_of_every_nth_step_are_means():
    case = case_of(steps=[{"step": 2, "loss": 1.5, "grad_norm": 4.0}, {"step": 5, "loss": 4.0, "grad_norm": 7.0}])
    ours = [{"loss": float(i), "grad_norm": i + 2.0} for i in (1, 2, 3, 4, 5)]
    assert compare(case, ours).matches


def test_a_record_without_numbers_is_told():
    found = compare(case_of(steps=[{"step": 1, "loss": None}, {"step": 2, "loss": float("nan")}]), [{"loss": 1.0}] * 2)
    assert found.matches and found.field("loss").reason == "the record has no number at 2 steps"


def test_spread_is_measured_in_tolerances():
    case = case_of(steps=[{"step": 1, "loss": 1.0, "kl": 0.0}])
    runs = [[{"loss": 1.0, "kl": 0.0}], [{"loss": 1.0 + 3.3e-5, "kl": -2e-6}]]
    assert spread(case, runs, "loss") == pytest.approx(3.0) and spread(case, runs, "kl") == pytest.approx(2.0)


# -- reasons --------------------------------------------------------------------------------------------------------


def test_reasons_apply_to_their_cases_alone():
    def reasons(kind, facts=(), **options):
        return [e for e in expected(case_of(kind), lambda name: options.get(name), dict(facts)) if e.fields == "*"]

    assert reasons("dpo", truncation_mode="keep_end", loss_type=["sigmoid", "ipo"])
    assert not reasons("dpo", truncation_mode="keep_start", loss_type=["ipo"])
    assert not reasons("dpo", truncation_mode="keep_end", loss_type=["sigmoid"])
    assert reasons("sft", packing=True, packing_strategy="wrapped") and not reasons("sft", packing=True, packing_strategy="bfd")
    assert reasons("tpo", {"cut_away": 2}) and not reasons("tpo", {"cut_away": 0}) and not reasons("dpo", {"cut_away": 2})
    assert not any("logits" in e.fields for e in EXPECTED if set(e.kinds) & {"dpo", "tpo", "kto", "sft", "reward"})


def test_a_checked_reason_does_not_hide_another_fault(tmp_path):
    """With another rate, wrapped packing no longer explains what deviates."""
    record = json.loads((REFERENCES / "more/sft_wrapped.json").read_text())
    record["args"]["learning_rate"] = 1.1e-3
    file = tmp_path / "case.json"
    file.write_text(json.dumps(record))
    found = parity.judge(load_case(file), DATA.parent, tmp_path, steps=3)
    assert not found.matches and found.field("loss").verdict == "deviates"


def test_rounding_does_not_hide_a_fault(tmp_path):
    """A slope that is 2 per mille too high is far above rounding."""
    record = json.loads(SIGMOID.read_text())
    record["args"]["beta"] = 0.3006
    file = tmp_path / "case.json"
    file.write_text(json.dumps(record))
    found = parity.judge(load_case(file), DATA.parent, tmp_path, steps=2)
    assert found.field("loss").verdict == "deviates" and found.field("rewards/margins").verdict == "deviates"


def test_a_run_stops_where_the_record_ends(tmp_path):
    case = load_case(SIGMOID)
    assert len(run(case, DATA.parent, tmp_path, steps=2).steps) == 2
    assert len(run(case, DATA.parent, tmp_path).steps) == 10
