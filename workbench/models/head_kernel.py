"""The LM head by the kernel of another package, on CUDA.

``cut_cross_entropy`` (Wijmans et al. 2024, arXiv:2411.09009) computes the log-probability of a target, and its gradients, without
writing logits to memory: a hidden state and a matrix go in, one number comes out. Scale, temperature and softcap of a head fold
into that exactly: ``z / T`` with ``z = c tanh(s W h / c)`` is ``c' tanh(W h' / c')`` for ``h' = h s / T`` and ``c' = c / T``.
Entropy, the most likely token and other statistics do not, and torch computes them; a repetition penalty, a support and the
entropy's gradient do not either, and are refused. Gradients are added up in half precision and in no fixed order.
"""

import inspect
import types
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from workbench.errors import UserError, check_choice

if TYPE_CHECKING:
    from workbench.models.logps import Head

# liger-kernel is none of them: its head's gradient is formed in the forward pass for a reduced loss, and with reduction="none",
# which every sum over completions needs, it is not that of the tokens' own factors.
HeadKernel = Literal["torch", "cut_cross_entropy"]
PRECISIONS = ("bf16-mixed", "bf16-true", "16-mixed")  # without a scaler, fp16 would lose the factors of the loss
_TOKENS = 64  # of a self-check
_ROWS = 8191  # of the head in a self-check, an odd number for blocks that are not full
_INDICES = 2**31  # the kernel's are 32 bits long
_checked: set[tuple] = set()


def refusal(reason: str) -> UserError:
    """``reason`` names what does not go with the kernel, and the way out that keeps it."""
    return UserError(f"method.head_kernel=cut_cross_entropy {reason}, or set method.head_kernel=torch.")


def check_head_kernel(kernel: str, trains_lm_head: bool = True) -> None:
    """Refuses a kernel that is not known, or that would do nothing.

    Raises:
        UserError: it is not one of `HeadKernel`, or the method has no LM head.
    """
    check_choice("method.head_kernel", kernel, HeadKernel.__args__)
    if kernel != "torch" and not trains_lm_head:
        raise UserError(
            f"method.head_kernel={kernel} has no effect on a method that trains no LM head; set method.head_kernel=torch."
        )


def check_device(device: torch.device) -> None:
    """Refuses a device that the kernel does not run on.

    Raises:
        UserError: it is no CUDA device, an old one, or asked for deterministic kernels.
    """
    if device.type != "cuda":
        raise refusal(f"needs a CUDA device, and this run computes on {device.type}: set trainer.accelerator=gpu")
    if torch.version.cuda and torch.cuda.get_device_capability(device) < (8, 0):
        raise refusal(f"needs an Ampere GPU or a newer one, which {torch.cuda.get_device_name(device)} is not: use another")
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        raise refusal("adds gradients up in no fixed order: set trainer.deterministic=false")


def check_precision(precision: str, dtype: torch.dtype) -> None:
    """Refuses a precision of the trainer's that the kernel does not take.

    Args:
        precision: the trainer's.
        dtype: of the head's weights, which ``32-true`` leaves as they are.

    Raises:
        UserError: it is neither bf16, nor fp16 with a scaler.
    """
    if precision not in PRECISIONS and not (precision == "32-true" and dtype == torch.bfloat16):
        raise refusal(f"does not take trainer.precision={precision}: set it to {', '.join(PRECISIONS[:-1])} or {PRECISIONS[-1]}")


def check_head(head: "Head") -> None:
    """Refuses a head that the kernel cannot compute.

    Raises:
        UserError: the package is missing; the head is not one whole matrix, too large, or has a bias that the package has no
            argument for.
    """
    function = _package().linear_cross_entropy
    name = type(head.module).__name__
    if not head.is_plain:
        raise refusal(
            f"needs the head as one whole matrix, and {name} is an adapter's, a quantised or a partitioned layer: leave the head "
            "out of peft and quantization, use a strategy other than deepspeed_stage_3"
        )
    if head.module.bias is not None and "bias" not in inspect.signature(function).parameters:
        raise refusal("knows no bias in the installed version of its package, and this model's head has one: use a newer version")
    _check_size("head", head.module.weight)


def kernel_logps(hidden: Tensor, head: "Head", targets: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probabilities of ``targets`` ``[T]``, fp32, nats, as `token_logps` gives them.

    The first call of its kind in a process is compared with torch.

    Args:
        hidden: ``[T, H]``, at least one.
        head: the model's head.
        targets: token ids ``[T]``.
        temperature: divides the logits.

    Raises:
        UserError: device, precision or head are not those of the kernel, or it computes something else than torch does.
    """
    check_head(head)
    _check_size("hidden state of a micro-batch", hidden)
    device, weight, bias = hidden.device, head.module.weight, head.module.bias
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else weight.dtype
    dtype = head.dtype or dtype
    kind = (device, dtype, weight.shape[1], head.scale, head.softcap, temperature, bias is not None, weight.requires_grad)
    if kind not in _checked:
        check_device(device)
        _check_dtype(dtype)
        _compare(hidden, head, targets, temperature, dtype)
        _checked.add(kind)
    return _logps(hidden, weight, bias, targets, head, temperature, dtype)


def _logps(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    head: "Head",
    temperature: float,
    dtype: torch.dtype,
) -> Tensor:
    factor = head.scale / temperature
    hidden = hidden if factor == 1.0 else hidden * factor
    options = {} if bias is None else {"bias": (bias * factor).to(dtype)}
    softcap = None if head.softcap is None else head.softcap / temperature
    # Without a filter: by default the kernel drops the gradients of blocks of tokens whose probabilities are small, all of them
    # where the model is unsure.
    options |= {"softcap": softcap, "reduction": "none", "filter_eps": None}
    return -_package().linear_cross_entropy(hidden.to(dtype), weight.to(dtype), targets, **options).float()


def _package() -> types.ModuleType:
    try:
        import cut_cross_entropy
    except ImportError as error:
        raise refusal(f"needs its package ({error}): pip install 'workbench[cut-cross-entropy]'") from None
    return cut_cross_entropy


def _check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        raise refusal(f"computes in bfloat16 or float16, and the head is to compute in {name}: set trainer.precision=bf16-mixed")


def _check_size(name: str, tensor: Tensor) -> None:
    if tensor.numel() >= _INDICES:
        shape = " x ".join(map(str, tensor.shape))
        raise refusal(f"counts to 2^31, and the {name} is {shape}: take a smaller one")


def _compare(hidden: Tensor, head: "Head", targets: Tensor, temperature: float, dtype: torch.dtype) -> None:
    """Compares log-probabilities and gradients on a few tokens and a part of the vocabulary with those of torch in fp32, the
    numbers rounded alike before.

    Raises:
        UserError: they are further apart than rounding explains.
    """
    weight, bias = head.module.weight, head.module.bias
    rows = min(_ROWS, len(weight))
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
        h = hidden[:_TOKENS].detach().to(dtype).clone().requires_grad_()
        w = weight[:rows].detach().to(dtype).clone().requires_grad_(weight.requires_grad)
        b = None if bias is None else bias[:rows].detach().to(dtype).clone().requires_grad_(bias.requires_grad)
        # The targets' neighbours: where a model is sure of its targets, nothing but rounding is left of the gradients.
        t = (targets[:_TOKENS] + 1) % rows
        leaves = [leaf for leaf in (h, w, b) if leaf is not None and leaf.requires_grad]
        factors = torch.linspace(-1.0, 2.0, len(t), device=h.device)
        products = nn.functional.linear(h.float(), w.float(), None if b is None else b.float())
        expected = (head.shape(products) / temperature).log_softmax(-1).gather(-1, t[:, None])[:, 0]
        found = _logps(h, w, b, t, head, temperature, dtype)
        gradients = [torch.autograd.grad((logps * factors).sum(), leaves) for logps in (found, expected)]
        # A target's logit is a sum of H products, each rounded: an error that grows like their norm.
        norm = abs(head.scale) / temperature * (h.float() * w[t].float()).norm(dim=-1).max().item()
    eps = max(torch.finfo(dtype).eps, 1e-5)
    _check_close("log-probabilities", (found - expected).abs().max().item(), 4 * eps * (1 + norm))
    names = [name for name, leaf in (("hidden states", h), ("head", w), ("bias", b)) if leaf is not None and leaf.requires_grad]
    for name, ours, theirs in zip(names, *gradients, strict=True):
        distance = (ours.float() - theirs.float()).norm() / theirs.float().norm().clamp(min=1e-30)
        _check_close(f"gradients of the {name}", distance.item(), 8 * eps)


def _check_close(what: str, difference: float, allowed: float) -> None:
    if not difference <= allowed:
        unit = "nats" if what == "log-probabilities" else "of their norm"
        raise UserError(
            f"method.head_kernel=cut_cross_entropy computes {what} that are up to {difference:.2g} {unit} away from torch's, "
            f"where rounding explains {allowed:.2g}; set method.head_kernel=torch."
        )
