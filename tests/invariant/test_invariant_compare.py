"""Comparison: sizes, the first step, the parameter most off, and what is drawn of it."""

import pytest
from matplotlib.image import imread

from workbench.invariants.compare import OTHER_HARDWARE, Mismatch, Tolerance, compare
from workbench.invariants.members import FORWARD
from workbench.invariants.report import save_picture, table
from workbench.invariants.trajectory import Trajectory

pytestmark = pytest.mark.quick


def run(**changes):
    values = {
        "steps": {"loss": [2.0, 1.0, 0.5, 0.25], "lr": [0.0, 1.0, 0.5, 0.25], "rewards/accuracies": [0.0, 0.5, 0.75, 1.0]},
        "grad_norms": {"a": [1.0, 1.0, 1.0, 1.0], "b": [2.0, 2.0, 2.0, 2.0]},
        "rows": [[0, 1], [2, 3], [1, 3], [0, 2]],
        "parameters": {"a": [10.0, 3.0], "b": [20.0, -5.0]},
        "hashes": {"decayed": "x"},
    }
    return Trajectory(**{**values, **changes})


def with_step(name, step, value):
    steps = {key: list(values) for key, values in run().steps.items()}
    steps[name][step - 1] = value
    return run(steps=steps)


def test_equal_runs_are_the_same():
    found = compare(run(), run())
    assert found.same
    assert found.largest == 0.0


def test_largest_and_mean_residual_and_the_first_step():
    found = compare(with_step("loss", 3, 0.6), run())
    (failed,) = found.failed
    usual = (sum(v * v for v in (2.0, 1.0, 0.5, 0.25)) / 4) ** 0.5
    assert failed.step == 3
    assert failed.largest == pytest.approx(0.1 / usual)
    assert failed.mean == pytest.approx(0.1 / usual / 4)
    assert (failed.largest_absolute, failed.mean_absolute) == pytest.approx((0.1, 0.025))
    assert (
        "loss differs first at step 3: 0.6 instead of 0.5 (largest residual 8.7e-02 relative and 1.0e-01 absolute"
        in found.message("x")
    )


def test_a_mean_beyond_its_bound_fails_where_no_step_does():
    shifted = run(steps={**run().steps, "loss": [v * (1 + 5e-6) for v in run().steps["loss"]]})
    (failed,) = compare(shifted, run()).failed
    assert failed.largest < 1e-5 < 10 * failed.mean
    assert failed.allowed == 1e-6
    assert compare(shifted, run(), Tolerance(mean=1e-5)).same


def test_values_near_zero_are_measured_by_the_fields_usual_size():
    assert compare(with_step("lr", 1, 1e-7), run()).same
    assert not compare(with_step("lr", 1, 1e-3), run()).same


def test_the_earliest_field_is_named_and_the_parameter_whose_gradient_is_most_off():
    ours = run(
        steps={**run().steps, "loss": [2.0, 1.0, 0.5, 0.3]},
        grad_norms={"a": [1.0, 1.1, 1.0, 1.0], "b": [2.0, 2.6, 2.0, 2.0]},
    )
    message = compare(ours, run()).message("sft/ddp")
    assert message.startswith("sft/ddp: gradient of b differs first at step 2: 2.6 instead of 2 ")
    assert "also: loss (4.3e-02 relative, step 4)" in message
    assert "largest offending parameter: b (gradient, from step 2 on, 3.0e-01 relative)" in message


def test_without_gradients_the_final_parameter_is_named():
    ours = run(grad_norms={}, parameters={"a": [10.0, 3.5], "b": [20.0, -5.1]})
    message = compare(ours, run()).message("x")
    assert "parameter a differs at the end: 3.5 instead of 3 (largest residual 5.0e-02 relative" in message
    assert "largest offending parameter: a (at the end, 5.0e-02 relative)" in message


@pytest.mark.parametrize(
    ("ours", "message"),
    [
        (run(rows=[[0, 1], [2, 3], [1, 2], [0, 2]]), r"rows differs first at step 3: \[1, 2\] instead of \[1, 3\]"),
        (run(steps={"loss": [2.0, 1.0, 0.5, 0.25], "lr": [0.0, 1.0, 0.5, 0.25]}), "rewards/accuracies is missing"),
        (run(steps={**run().steps, "kl": [0.0] * 4}), "kl is new"),
        (run(steps={name: values[:3] for name, values in run().steps.items()}), "3 steps instead of 4"),
        (run(parameters={"a": [10.0, 3.0]}), "parameter b is missing"),
        (with_step("loss", 2, None), "loss differs first at step 2: None instead of 1"),
    ],
)
def test_differences_in_kind(ours, message):
    found = compare(ours, run())
    assert not found.same
    with pytest.raises(Mismatch, match=message):
        raise Mismatch(found.message("x"), found)


def test_bits_are_compared_where_asked_for():
    other = run(hashes={"decayed": "y"})
    assert compare(other, run()).same
    assert compare(other, run(), fields=("loss", "hashes")).problems == ["the final decayed parameters are not the same bits"]


def test_fields_limit_the_comparison():
    ours = run(grad_norms={"a": [9.0] * 4, "b": [9.0] * 4}, parameters={"a": [1.0, 1.0], "b": [1.0, 1.0]})
    assert compare(ours, run(), fields=FORWARD).same


def test_the_sign_of_a_margin_of_nothing_is_not_compared():
    """Where policy and reference are one model, which of two equal rewards is larger is rounding."""
    reference = run(steps={**run().steps, "rewards/margins": [0.0, 1.0, 1.0, 1.0]})
    for step, same in ((1, True), (2, False)):
        ours = {**reference.steps, "rewards/accuracies": list(reference.steps["rewards/accuracies"])}
        ours["rewards/accuracies"][step - 1] = 0.25
        assert compare(run(steps=ours), reference).same is same


def test_on_other_hardware_a_token_may_tip():
    tipped = with_step("rewards/accuracies", 3, 0.76)
    assert compare(tipped, run(), OTHER_HARDWARE).same
    assert not compare(with_step("loss", 3, 0.51), run(), OTHER_HARDWARE).same


def test_a_resumed_run_is_its_first_part_and_the_rest():
    rest = Trajectory(
        first=3,
        steps={name: values[2:] for name, values in run().steps.items()},
        grad_norms={name: values[2:] for name, values in run().grad_norms.items()},
        rows=run().rows[2:],
        parameters=run().parameters,
    )
    first = run(parameters={"a": [0.0, 0.0], "b": [0.0, 0.0]}, steps={n: v[:3] for n, v in run().steps.items()})
    assert compare(first.continued(rest), run()).same


def test_the_picture_shows_both_curves(tmp_path):
    ours = with_step("loss", 3, 0.6)
    path = save_picture(compare(ours, run()), ours, run(), "sft/ddp", tmp_path)
    assert path.name == "sft-ddp.png"
    assert len(set(imread(path)[..., :3].reshape(-1, 3).round(1).sum(1).round(1).tolist())) > 5


def test_the_table_numbers_its_reasons():
    cells = {"sft": {"ddp": "pass", "reference": "it has none"}, "dpo": {"ddp": "FAIL", "reference": "pass"}}
    assert table(cells, ["ddp", "reference"]).splitlines() == [
        "           sft    dpo",
        "ddp        pass   FAIL",
        "reference  [1]    pass",
        "",
        "[1] it has none",
    ]
