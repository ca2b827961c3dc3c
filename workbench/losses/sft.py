"""Losses of supervised fine-tuning, per token."""

from torch import Tensor


def nll_loss(logps: Tensor) -> Tensor:
    """Negative log-likelihood of each target token.

    Args:
        logps: log-probabilities of the target tokens ``[T]`` in nats.

    Returns:
        Losses ``[T]``.
    """
    return -logps


def dft_loss(logps: Tensor) -> Tensor:
    """Dynamic fine-tuning: the likelihood-weighted NLL ``-sg(p) log p`` (Wu et al. 2025, arXiv:2508.05629, eq. 9).

    The weight ``p`` carries no gradient; it undoes the ``1/p`` hidden in the gradient of the NLL.

    Args:
        logps: log-probabilities of the target tokens ``[T]`` in nats.

    Returns:
        Losses ``[T]``.
    """
    return -logps.detach().exp() * logps


SFT_LOSSES = {"nll": nll_loss, "dft": dft_loss}
