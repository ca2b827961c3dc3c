"""The head in pieces: the numbers and gradients of the whole logits, without ever holding them."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models import logps
from workbench.models.logps import STATS, Head, Seen, token_logps
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import seen_before
from workbench.tiny.model import tiny_model

T, H, V = 23, 16, 61


def rig(*, bias=False, frozen=False, dtype=torch.float64, seed=0, **head):
    torch.manual_seed(seed)
    module = nn.Linear(H, V, bias=bias).to(dtype)
    module.requires_grad_(not frozen)
    hidden = torch.randn(T, H, dtype=dtype, requires_grad=True)
    return hidden, Head(module, **head), torch.randint(0, V, (T,))


def both(hidden, head, targets, **options):
    """Values and gradients, in pieces and whole."""
    found = []
    for chunked in (True, False):
        hidden.grad = None
        head.module.zero_grad()
        stats = token_logps(hidden, head, targets, want=STATS, chunked=chunked, **options)
        weights = torch.linspace(-1, 2, T, dtype=stats.logps.dtype)
        (stats.logps * weights).sum().backward()
        grads = [hidden.grad.clone(), *(None if p.grad is None else p.grad.clone() for p in head.module.parameters())]
        found.append((stats, grads))
    return found


@pytest.fixture
def small_pieces(monkeypatch):
    monkeypatch.setattr(logps, "_PIECE", 5 * V)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.7}, {"softcap": 1.5}, {"scale": 0.3}, {"scale": 2.0, "softcap": 2.0, "temperature": 1.3}],
    ids=str,
)
def test_pieces_are_the_whole(small_pieces, options, bias, frozen):
    options = dict(options)
    temperature = {"temperature": options.pop("temperature", 1.0)}
    (ours, our_grads), (theirs, their_grads) = both(*rig(bias=bias, frozen=frozen, **options), **temperature)
    for name in STATS:
        assert torch.allclose(getattr(ours, name).double(), getattr(theirs, name).double(), atol=1e-5), name
    for a, b in zip(our_grads, their_grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=2e-6)


def test_the_gradient_is_that_of_finite_differences(small_pieces):
    """Logits are formed in fp32, so the steps are wide."""
    hidden, head, targets = rig(softcap=3.0)

    def loss(h):
        return token_logps(h, head, targets, chunked=True).logps.double().sum()

    (gradient,) = torch.autograd.grad(loss(hidden), hidden)
    direction = torch.randn_like(hidden)
    with torch.no_grad():
        slope = (loss(hidden + 1e-2 * direction) - loss(hidden - 1e-2 * direction)) / 2e-2
    assert slope.item() == pytest.approx((gradient * direction).sum().item(), rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_exact_as_the_plain_head(small_pieces, dtype):
    (ours, our_grads), (theirs, their_grads) = both(*rig(dtype=dtype))
    exact = both(*rig(dtype=torch.float32))[1]
    assert torch.equal(ours.logps, theirs.logps)
    for a, b, c in zip(our_grads, their_grads, exact[1], strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 1e-3 * c.norm()


def test_autocast_computes_products_in_half_precision_and_keeps_gradients_exact(small_pieces):
    hidden, head, targets = rig(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        (ours, our_grads), (theirs, their_grads) = both(hidden, head, targets)
    assert torch.equal(ours.logps, theirs.logps)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.02 * b.norm()


class Largest(TorchDispatchMode):
    """The most elements that any operation's result has."""

    most = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                self.most = max(self.most, value.numel())
        return out


@pytest.mark.parametrize("kind", ["plain", "frozen", "adapter"])
@pytest.mark.parametrize(("tokens", "vocabulary"), [(4096, 512), (512, 4096), (64, 65536)])
def test_no_tensor_grows_with_tokens_times_vocabulary(monkeypatch, kind, tokens, vocabulary):
    monkeypatch.setattr(logps, "_PIECE", 2**16)
    module = nn.Linear(4, vocabulary, bias=False)
    module.requires_grad_(kind == "plain")
    if kind == "adapter":
        model = tiny_model("llama", size="pico", tie_word_embeddings=False)
        model.lm_head = nn.Linear(4, vocabulary, bias=False)
        module = apply_peft(model, PeftSpec(r=2, target_modules=["lm_head"])).get_base_model().lm_head
    hidden = torch.randn(tokens, 4, requires_grad=True)
    with Largest() as largest:
        targets = torch.zeros(tokens, dtype=torch.int64)
        stats = token_logps(hidden, Head(module), targets, want=("entropy",), chunked=True)
        stats.logps.sum().backward()
    assert hidden.grad.abs().sum() > 0
    assert largest.most <= max(2**16, 4 * vocabulary, 4 * tokens)
    assert largest.most < tokens * vocabulary


def test_an_adapter_on_the_head_is_computed_through_the_adapter(small_pieces):
    model = apply_peft(
        tiny_model("llama", size="pico", tie_word_embeddings=False),
        PeftSpec(r=4, target_modules=["lm_head"], init_lora_weights=False),
    )
    head = Head.of(model.get_base_model())
    assert not head.is_plain
    width = model.config.hidden_size
    hidden, targets = torch.randn(T, width, requires_grad=True), torch.randint(0, 50, (T,))
    (ours, our_grads), (theirs, their_grads) = both(hidden, head, targets)
    assert torch.allclose(ours.logps, theirs.logps, atol=1e-5)
    for a, b in zip(our_grads, their_grads, strict=True):
        assert (a is None) == (b is None)
        assert a is None or torch.allclose(a, b, atol=1e-4)


def test_hooks_on_the_head_are_called():
    hidden, head, targets = rig(dtype=torch.float32)
    head.module.register_forward_hook(lambda module, args, out: out * 2)
    (ours, _), (theirs, _) = both(hidden, head, targets)
    assert torch.allclose(ours.logps, theirs.logps)
    assert not head.is_plain


def test_few_logits_are_formed_at_once_and_many_in_pieces(monkeypatch):
    hidden, head, targets = rig(dtype=torch.float32)
    taken = []
    monkeypatch.setattr(logps._HeadStats, "apply", lambda *args: taken.append(1) or (args[0].sum(-1),))
    token_logps(hidden, head, targets)
    assert not taken
    monkeypatch.setattr(logps, "_FEW", T * V - 1)
    token_logps(hidden, head, targets)
    assert taken


@pytest.mark.parametrize("kept", [0, 7 * V, 12 * V, 10**9])
def test_slopes_that_wait_are_those_that_would_be_formed_again(monkeypatch, small_pieces, kept):
    monkeypatch.setattr(logps, "_FEW", 0)
    monkeypatch.setattr(logps, "_KEPT", kept)
    formed = []
    monkeypatch.setattr(logps, "_slope", lambda *args, slope=logps._slope: formed.append(1) or slope(*args))
    grads = []
    for chunked in (True, "auto"):
        hidden, head, targets = rig(dtype=torch.float32)
        stats = token_logps(hidden, head, targets, chunked=chunked, temperature=0.7)
        stats.logps.square().sum().backward()
        grads.append((stats.logps, hidden.grad, head.module.weight.grad))
    assert torch.equal(grads[0][0], grads[1][0])
    assert all(torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6) for ours, theirs in zip(*grads, strict=True))
    assert len(formed) == 2 * -(-T // 5)  # each once, before or in the backward pass


@pytest.mark.parametrize("vocabulary", [1, 127, 128, 300, 4096])
def test_the_most_likely_token(vocabulary):
    values = torch.randint(0, 9, (64, vocabulary)).float()  # with ties, of which the first counts
    values[0] = float("-inf")
    assert torch.equal(logps._top1(values), values.argmax(-1))


def processed(logits, *, temperature=1.0, penalty=1.0, seen=None, keep=None):
    """Distribution of one position, spelt out in fp64."""
    z = logits.double().clone()
    for v in set(seen or ()):
        z[v] = z[v] / penalty if z[v] > 0 else z[v] * penalty
    z = z / temperature
    if keep is not None:
        left_out = [v for v in range(len(z)) if v not in keep]
        z[left_out] = float("-inf")
    return z.log_softmax(-1)


@pytest.mark.parametrize("limit", [5 * V, 10**9])
def test_penalty_temperature_and_support(monkeypatch, limit):
    monkeypatch.setattr(logps, "_PIECE", limit)
    hidden, head, targets = rig()
    generator = torch.Generator().manual_seed(3)
    contexts = torch.randint(0, V, (2, 30), generator=generator)
    seen = Seen(contexts, torch.arange(T) % 2, torch.arange(T))
    sets = [sorted({int(targets[t]), *torch.randint(0, V, (6,), generator=generator).tolist()}) for t in range(T)]
    sets[4] = []  # no restriction
    support = (torch.tensor([v for s in sets for v in s], dtype=torch.int32), torch.tensor([len(s) for s in sets]))
    stats = token_logps(
        hidden,
        head,
        targets,
        temperature=0.7,
        repetition_penalty=1.4,
        seen=seen,
        support=support,
        want=("logps", "entropy", "top1"),
    )
    logits = head(hidden.detach())
    for t in range(T):
        expected = processed(logits[t], temperature=0.7, penalty=1.4, seen=contexts[t % 2, :t].tolist(), keep=sets[t] or None)
        finite = expected[expected > float("-inf")]
        assert stats.logps[t].item() == pytest.approx(expected[targets[t]].item(), abs=1e-5)
        assert stats.entropy[t].item() == pytest.approx(-(finite.exp() * finite).sum().item(), abs=1e-5)
        assert stats.top1[t] == expected.argmax()
    assert not stats.entropy.requires_grad
    stats.logps.sum().backward()
    assert torch.isfinite(hidden.grad).all()


def test_a_target_outside_its_support_counts_as_one_of_it():
    hidden, head, targets = rig()
    other = (targets + 1) % V
    stats = token_logps(hidden, head, targets, support=(other, torch.ones_like(other)))
    both_of = head(hidden)[torch.arange(T)[:, None], torch.stack([targets, other], 1)].log_softmax(-1)[:, 0]
    assert torch.allclose(stats.logps, both_of, atol=1e-6)


@pytest.mark.parametrize("limit", [5 * V, 10**9])
@pytest.mark.parametrize("restricted", [False, True])
def test_entropy_with_gradient(monkeypatch, limit, restricted):
    monkeypatch.setattr(logps, "_PIECE", limit)
    hidden, head, targets = rig()
    support = (torch.stack([targets, (targets + 3) % V, (targets + 9) % V], 1).flatten(), torch.full((T,), 3))
    support = support if restricted else None
    stats = token_logps(hidden, head, targets, want=("entropy",), entropy_grad=True, support=support)
    logits = head(hidden.detach()).double()
    if restricted:
        mask = torch.ones(T, V, dtype=torch.bool).scatter_(1, support[0].view(T, 3), False)
        logits = logits.masked_fill(mask, float("-inf"))
    p, log_p = logits.softmax(-1), logits.log_softmax(-1).masked_fill(logits == float("-inf"), 0.0)
    entropy = -(p * log_p).sum(-1)
    assert torch.allclose(stats.entropy.double(), entropy, atol=1e-5)
    weights = torch.linspace(-1, 2, T, dtype=torch.float64)
    slope = -p * (log_p + entropy[:, None]) * weights[:, None]
    (stats.entropy * weights).sum().backward()
    assert torch.allclose(hidden.grad, slope @ head.module.weight.double(), atol=2e-6)
    assert torch.allclose(head.module.weight.grad, slope.T @ hidden.detach(), atol=2e-6)


@pytest.mark.parametrize("chunked", [True, False])
def test_a_head_in_fp32(small_pieces, chunked):
    hidden, head, targets = rig(dtype=torch.bfloat16)
    head.dtype = torch.float32
    exact = nn.functional.linear(hidden.float(), head.module.weight.float()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    stats = token_logps(hidden, head, targets, chunked=chunked)
    assert torch.allclose(stats.logps, exact, atol=1e-5)
    head.dtype = None
    assert not torch.allclose(token_logps(hidden, head, targets, chunked=chunked).logps, exact, atol=1e-4)


def test_a_head_that_is_no_matrix_is_not_computed_in_fp32():
    module = nn.Sequential(nn.Linear(H, V))
    with pytest.raises(UserError, match=r"cannot compute in float32.*cast_lm_head_to_fp32=false"):
        Head(module, dtype=torch.float32)(torch.randn(2, H))


def test_the_tokens_before_an_output():
    row = {
        "input_ids": [1, 2, 3, 4, 5],
        "weights": [0.0, 0.0, 1.0, 1.0, 1.0],
        "lengths": [2, 2, 1],
        "parents": [-1, 0, 0],
        "roles": [Role.PROMPT, Role.CHOSEN, Role.REJECTED],
    }
    seen = seen_before(MicroBatch.from_rows([row, row], [0, 1], Normalisers(1.0, 1.0, 1.0, 1.0)))
    found = [m.nonzero()[:, 0].tolist() for m in seen.mask(slice(0, 6), 9)]
    assert found == [[1, 2], [1, 2, 3], [1, 2]] * 2
