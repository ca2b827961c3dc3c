"""Binary Classifier Optimization on single completions (Jung et al. 2024, arXiv:2404.04656).

A classifier with the implicit reward as its logit: its cross-entropy bounds DPO's loss from above, most tightly when the rewards
are shifted to lie around 0. `preference.bco_pair_loss` is the same on pairs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def bco_loss(
    logratios: Tensor,
    desirable: Tensor,
    reward_shift: Tensor | float,
    *,
    beta: float,
    undesirable_weights: Tensor | float = 1.0,
) -> Tensor:
    """``-log sigmoid(r - d)`` for a desirable completion, ``-w(x) log sigmoid(d - r)`` for another, per completion.

    Args:
        logratios: ``log p(y) - log ref(y)`` ``[B]``, nats; the reward is ``r = beta`` times it.
        desirable: labels ``[B]``, boolean.
        reward_shift: ``d``, a constant; see `reward_shift`.
        beta: scale of the reward.
        undesirable_weights: ``w(x)`` per completion ``[B]``, read where not desirable; see `distribution_weights`.

    Returns:
        Losses ``[B]``.
    """
    rewards = beta * logratios - reward_shift
    weights = torch.as_tensor(undesirable_weights, dtype=rewards.dtype, device=rewards.device)
    return -torch.where(desirable, F.logsigmoid(rewards), weights * F.logsigmoid(-rewards))


def reward_shift(
    desirable_total: Tensor, desirable_count: Tensor | float, undesirable_total: Tensor, undesirable_count: Tensor | float
) -> Tensor:
    """``d = (E[r | desirable] + E[r | undesirable]) / 2`` from sums and counts, without gradient.

    With rows of one label only it is their mean; without any it is 0. The paper takes a moving average: give sums that run over
    the steps so far.
    """
    totals = torch.stack([desirable_total, undesirable_total]).detach()
    counts = torch.stack([totals.new_ones(()) * desirable_count, totals.new_ones(()) * undesirable_count])
    means = totals / counts.clamp(min=1)
    return means.sum() / counts.gt(0).sum().clamp(min=1)


def fit_density_ratio(features: Tensor, desirable: Tensor) -> tuple[Tensor, Tensor]:
    """A linear classifier of prompts: ``p(desirable | x) = sigmoid(w . x + b)`` if both labels were equally frequent.

    Its odds estimate ``p(x | desirable) / p(x | undesirable)``. Minimises
    ``|w|^2 / 2 + sum_i c_i log(1 + exp(-s_i (w . x_i + b)))``, where s_i = +-1 is the label and ``c_i = N / (2 N_label)``, by
    Newton's method: one minimum, to rounding.

    Args:
        features: embeddings of prompts ``[N, D]``.
        desirable: labels ``[N]``, boolean, with at least one of each.

    Returns:
        ``w`` ``[D]`` and ``b`` (a scalar), fp64.
    """
    features = features.detach().double()
    centre = features.mean(0)
    basis, triangle = torch.linalg.qr((features - centre).T)  # w lies among the features: at most N numbers to find
    x = torch.cat([triangle.T, triangle.new_ones(len(features), 1)], 1)
    signs = torch.where(desirable, 1.0, -1.0).double()
    weights = torch.where(desirable, 0.5 / desirable.double().mean(), 0.5 / (~desirable).double().mean())
    ridge = torch.ones_like(x[0])
    ridge[-1] = 0.0

    def loss(at: Tensor) -> Tensor:
        return 0.5 * (ridge * at * at).sum() - (weights * F.logsigmoid(signs * (x @ at))).sum()

    found = torch.zeros_like(x[0])
    for _ in range(100):
        wrong = torch.sigmoid(-signs * (x @ found))
        gradient = ridge * found - x.T @ (weights * signs * wrong)
        curvature = x.T @ ((weights * wrong * (1 - wrong)).unsqueeze(1) * x) + torch.diag(ridge)
        step = torch.linalg.solve(curvature, gradient)
        size, before = 1.0, loss(found)
        while loss(found - size * step) > before and size > 1e-6:
            size /= 2
        found = found - size * step
        if size * step.abs().max() <= 1e-10 * (1 + found.abs().max()):
            break
    weight = basis @ found[:-1]
    return weight, found[-1] - weight @ centre


def distribution_weights(desirable_probability: Tensor, *, minimum: float = 0.5, maximum: float = 10.0) -> Tensor:
    """Underlying distribution matching: ``p(desirable | x) / p(undesirable | x)``, clipped.

    Weights undesirable rows as if their prompts came from the distribution of the desirable ones (density ratio).

    Args:
        desirable_probability: a classifier's probability that the prompt belongs to a desirable row ``[B]``.
        minimum: smallest weight.
        maximum: largest weight.
    """
    odds = desirable_probability / (1 - desirable_probability)
    return odds.clamp(minimum, maximum).detach()
