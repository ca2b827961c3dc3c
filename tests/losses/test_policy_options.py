import pytest

from workbench.errors import UserError
from workbench.losses.policy import PolicyOptions, check_gmpo_options, check_policy_options
from workbench.losses.policy_options import CLIPPED, LOSSES


def usable(loss):
    options = PolicyOptions(epsilon_high=5.0) if loss == "cispo" else PolicyOptions()
    return options, {"importance_sampling_level": "sequence" if loss == "luspo" else "token"}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_usual_options_pass_in_silence(loss):
    options, others = usable(loss)
    assert check_policy_options(loss, options, **others) == []


@pytest.mark.parametrize(
    ("loss", "changes"),
    [
        *[(loss, {"delta": 4.0}) for loss in LOSSES if loss not in CLIPPED],
        *[(loss, {"epsilon": 0.3}) for loss in LOSSES if loss not in CLIPPED],
        *[(loss, {"epsilon_high": 2.0}) for loss in ("sapo", "vespo")],
        *[(loss, {"sapo_temperature_pos": 2.0}) for loss in LOSSES if loss != "sapo"],
        *[(loss, {"sapo_temperature_neg": 2.0}) for loss in LOSSES if loss != "sapo"],
        *[(loss, {name: 2.5}) for loss in ("dapo", "cispo") for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg")],
        ("grpo", {"vespo_lambda_neg": 1.0}),
    ],
)
def test_an_option_that_a_loss_does_not_read_is_refused(loss, changes):
    options, others = usable(loss)
    options = PolicyOptions(**{"epsilon_high": options.epsilon_high} | changes)
    (name,) = changes
    with pytest.raises(UserError, match=rf"method\.{name}=.* has no effect with method\.loss={loss}"):
        check_policy_options(loss, options, **others)


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        ("dapq", {}, "Did you mean 'dapo'"),
        ("cispo", {}, "needs method.epsilon_high"),
        ("cispo", {"epsilon_high": 0.28}, "at least 1"),
        ("dapo", {"epsilon": -0.1}, "method.epsilon=-0.1"),
        ("dapo", {"epsilon_high": -0.1}, "method.epsilon_high=-0.1"),
        ("grpo", {"delta": 1.2}, r"above 1 \+ epsilon_high = 1.2"),
        ("sapo", {"sapo_temperature_pos": 0.0}, "method.sapo_temperature_pos=0.0 must be above 0"),
        ("sapo", {"sapo_temperature_neg": -1.0}, "method.sapo_temperature_neg=-1.0"),
        ("vespo", {"vespo_k_pos": -1.0}, "method.vespo_k_pos=-1.0"),
        ("vespo", {"vespo_lambda_neg": 0.0}, "method.vespo_lambda_neg=0.0"),
    ],
)
def test_values_that_cannot_be_are_refused(loss, changes, message):
    with pytest.raises(UserError, match=message):
        check_policy_options(loss, PolicyOptions(**changes))


@pytest.mark.parametrize(
    ("loss", "others", "message"),
    [
        ("luspo", {}, "importance_sampling_level=sequence"),
        ("vespo", {"importance_sampling_level": "sequence"}, "no effect"),
        ("dapo", {"importance_sampling_level": "row"}, "importance_sampling_level='row'"),
        ("vespo", {"importance_sampling_mode": "sequence_mask", "importance_sampling_clip_max": 3.0}, "token_truncate"),
        ("dapo", {"importance_sampling_mode": "mask", "importance_sampling_clip_max": 3.0}, "importance_sampling_mode='mask'"),
        ("dapo", {"importance_sampling_mode": "token_truncate"}, "no bound"),
        ("dapo", {"importance_sampling_mode": "sequence_mask"}, "no bound"),
        ("dapo", {"off_policy_mask_threshold": 0.0}, "off_policy_mask_threshold"),
        ("dapo", {"top_entropy_quantile": 0.0}, "top_entropy_quantile"),
        ("dapo", {"top_entropy_quantile": 1.5}, "top_entropy_quantile"),
        ("dapo", {"use_adaptive_entropy": True, "entropy_coef": 2.0}, "entropy_coef=2.0"),
        ("dapo", {"use_adaptive_entropy": True, "entropy_coef_min": 1.0}, "must be below"),
        ("dapo", {"use_adaptive_entropy": True, "entropy_coef_delta": 0.0}, "entropy_coef_delta"),
        ("dapo", {"use_adaptive_entropy": True, "entropy_target": 0.0}, "entropy_target"),
    ],
)
def test_combinations_that_cannot_be_are_refused(loss, others, message):
    with pytest.raises(UserError, match=message):
        check_policy_options(loss, PolicyOptions(), **others)


@pytest.mark.parametrize(("low", "high"), [(2.0, 2.0), (3.0, 2.0), (-0.5, 2.0), (None, 0.0)])
def test_bounds_of_the_correction_are_checked(low, high):
    with pytest.raises(UserError, match="importance_sampling_clip"):
        check_policy_options(
            "dapo",
            PolicyOptions(),
            importance_sampling_mode="token_mask",
            importance_sampling_clip_min=low,
            importance_sampling_clip_max=high,
        )


def test_sequence_ratios_without_effect_are_mentioned():
    (warning,) = check_policy_options("grpo", PolicyOptions(), importance_sampling_level="sequence", off_policy=False)
    assert "no effect" in warning
    assert not check_policy_options("grpo", PolicyOptions(), importance_sampling_level="sequence")


def test_gmpo_needs_a_range():
    check_gmpo_options(0.4)
    with pytest.raises(UserError, match=r"method\.epsilon=0"):
        check_gmpo_options(0)
