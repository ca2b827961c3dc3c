"""`Policy` equals the model's own forward, for every family, layout and kind of row."""

import pytest
import torch

from workbench.data.batch import MicroBatch, Role
from workbench.errors import UserError
from workbench.losses.reduce import Normalisers
from workbench.models.policy import Policy, disable_dropout, evaluating, set_gradient_checkpointing
from workbench.models.probe import check_head, choose_layout
from workbench.tiny.model import ARCHITECTURES, tiny_model

NORM = Normalisers(1.0, 1.0, 1.0, 1.0)
# Families whose own code does not keep documents of a row apart: recurrent state, ALiBi, sinks, positions from the mask.
PADDED_ONLY = {"bloom", "falcon", "gpt_oss", "mamba", "qwen3_next"}


def text(ids, weights=None):
    weights = weights or [0.0] + [1.0] * (len(ids) - 1)
    return {"input_ids": ids, "weights": weights, "lengths": [len(ids)], "parents": [-1], "roles": [Role.TEXT]}


def random_ids(length, seed):
    return torch.randint(4, 90, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def own_logps(model, ids):
    """Log-probabilities of tokens 1.. by the model's own forward."""
    ids = torch.tensor([ids])
    logits = model(input_ids=ids, use_cache=False).logits.float()
    return logits.log_softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None]).squeeze(-1)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_family_agrees_with_its_own_logits(architecture):
    model = tiny_model(architecture, size="pico").eval()
    check_head(model)
    rows = [random_ids(n, seed=n) for n in (5, 23, 11)]
    batch = MicroBatch.from_rows([text(r) for r in rows], [0, 1, 2], NORM)
    expected = torch.cat([own_logps(model, r) for r in rows])
    assert torch.allclose(Policy(model)(batch).logps, expected, atol=2e-5)
    if architecture in PADDED_ONLY:
        for layout in ("packed", "shared"):
            with pytest.raises(UserError, match=rf"method.layout={layout}: .*(does not keep|cannot be computed so)"):
                choose_layout(model, layout)
        assert choose_layout(model, "auto") == "padded"
        return
    assert choose_layout(model, "packed") == "packed"
    assert choose_layout(model, "auto") == "shared"
    assert torch.allclose(Policy(model, layout="packed")(batch).logps, expected, atol=2e-5)


def test_a_pair_is_its_two_conversations():
    model = tiny_model("llama", size="pico").eval()
    prompt, chosen, rejected = random_ids(6, 1), random_ids(4, 2), random_ids(7, 3)
    row = {
        "input_ids": prompt + chosen + rejected,
        "weights": [0.0] * 6 + [1.0] * 11,
        "lengths": [6, 4, 7],
        "parents": [-1, 0, 0],
        "roles": [Role.PROMPT, Role.CHOSEN, Role.REJECTED],
    }
    expected = torch.cat([own_logps(model, prompt + chosen)[5:], own_logps(model, prompt + rejected)[5:]])
    for layout in ("padded", "packed"):
        got = Policy(model, layout=layout)(MicroBatch.from_rows([row], [0], NORM)).logps
        assert torch.allclose(got, expected, atol=2e-5)


def test_only_trained_positions_are_returned():
    model = tiny_model("llama", size="pico").eval()
    ids = random_ids(8, 5)
    batch = MicroBatch.from_rows([text(ids, [0, 0, 1, 0, 0, 1, 0, 0.5])], [0], NORM)
    out = Policy(model)(batch, ("logps", "entropy", "top1", "hidden"))
    assert torch.allclose(out.logps, own_logps(model, ids)[[1, 4, 6]], atol=2e-5)
    logits = model(torch.tensor([ids])).logits[0, [1, 4, 6]]
    assert out.top1.tolist() == logits.argmax(-1).tolist()
    assert torch.allclose(out.entropy, torch.distributions.Categorical(logits=logits).entropy(), atol=2e-5)
    assert not out.entropy.requires_grad


def test_temperature_divides_logits():
    model = tiny_model("llama", size="pico").eval()
    ids = random_ids(6, 7)
    logits = model(torch.tensor([ids])).logits[0, :-1] / 0.7
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None]).squeeze(-1)
    batch = MicroBatch.from_rows([text(ids)], [0], NORM)
    assert torch.allclose(Policy(model)(batch, temperature=0.7).logps, expected, atol=2e-5)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_padding_to_a_multiple_changes_nothing(layout):
    model = tiny_model("llama", size="pico").eval()
    batch = MicroBatch.from_rows([text(random_ids(n, n)) for n in (5, 9)], [0, 1], NORM)
    plain, padded = (Policy(model, layout=layout, pad_to_multiple_of=m)(batch).logps for m in (None, 16))
    assert torch.allclose(plain, padded, atol=1e-5)


@pytest.mark.parametrize("mode", [True, "selective"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_gradient_checkpointing_leaves_gradients_alone(mode, layout):
    gradients = []
    for checkpointing in (False, mode):
        model = tiny_model("llama", size="pico").train()
        set_gradient_checkpointing(model, checkpointing)
        batch = MicroBatch.from_rows([text(random_ids(n, n)) for n in (5, 9)], [0, 1], NORM)
        Policy(model, layout=layout)(batch).logps.sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(gradients[0], gradients[1])


def test_selective_checkpointing_does_not_recompute_attention():
    calls = []
    for mode in (True, "selective"):
        model = tiny_model("llama", size="pico").train()
        set_gradient_checkpointing(model, mode)
        calls.append(_count_attention_kernels(model))
    layers = 2
    assert calls == [2 * layers, layers]


def _count_attention_kernels(model):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        n = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = str(func)
            self.n += "scaled_dot_product" in name and "backward" not in name
            return func(*args, **(kwargs or {}))

    batch = MicroBatch.from_rows([text(random_ids(9, 9))], [0], NORM)
    with Count() as mode:
        Policy(model)(batch).logps.sum().backward()
    return mode.n


def test_empty_micro_batch_reaches_every_parameter_with_zero_gradient():
    model = tiny_model("llama", size="pico").train()
    policy = Policy(model)
    batch = MicroBatch.empty(NORM)
    (policy(batch).logps * policy.weights_of(batch)).sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_aux_loss_is_the_familys_own():
    model = tiny_model("qwen3_moe", size="pico").train()
    ids = random_ids(12, 3)
    batch = MicroBatch.from_rows([text(ids)], [0], NORM)
    own = model(torch.tensor([ids]), attention_mask=torch.ones(1, 12, dtype=torch.long), output_router_logits=True).aux_loss
    assert Policy(model)(batch, ("logps", "aux_loss")).aux_loss.item() == pytest.approx(own.item(), rel=1e-5)
    with pytest.raises(UserError, match="no router to balance"):
        Policy(tiny_model("llama", size="pico"))(batch, ("logps", "aux_loss"))


def test_dropout_is_off_everywhere():
    model = tiny_model("gpt2", size="pico", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5).train()
    disable_dropout(model)
    batch = MicroBatch.from_rows([text(random_ids(9, 9))], [0], NORM)
    assert torch.equal(Policy(model)(batch).logps, Policy(model)(batch).logps)
    model = tiny_model("llama", size="pico", attention_dropout=0.5).train()
    disable_dropout(model)
    assert torch.equal(Policy(model)(batch).logps, Policy(model)(batch).logps)


def test_half_precision_leaves_rotary_frequencies_exact():
    policy = Policy(tiny_model("llama", size="pico"))
    before = policy.hf.model.rotary_emb.inv_freq.clone()
    torch.nn.ModuleList([policy]).to(torch.bfloat16)
    assert policy.hf.dtype == torch.bfloat16
    assert torch.equal(policy.hf.model.rotary_emb.inv_freq, before)


def test_evaluating_restores_each_modules_own_mode():
    model = tiny_model("llama", size="pico").train()
    model.lm_head.eval()
    with evaluating(model):
        assert not any(m.training for m in model.modules())
    assert model.training
    assert not model.lm_head.training


def test_a_model_that_changes_its_logits_is_refused(monkeypatch):
    model = tiny_model("llama", size="pico")
    original = type(model).forward

    def forward(self, *args, **kwargs):
        out = original(self, *args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    monkeypatch.setattr(type(model), "forward", forward)
    with pytest.raises(UserError, match="changes its logits in a way that is not known"):
        check_head(model)


def test_a_model_that_sees_across_documents_is_refused(monkeypatch):
    model = tiny_model("llama", size="pico")
    original = type(model.model).forward

    def forward(self, *args, forest=None, **kwargs):
        return original(self, *args, **kwargs)  # loses what keeps documents apart

    monkeypatch.setattr(type(model.model), "forward", forward)
    with pytest.raises(UserError, match=r"layout=packed: LlamaForCausalLM does not keep packed segments apart"):
        choose_layout(model, "packed")


def test_the_layout_probe_is_sharp_in_half_precision():
    choose_layout(tiny_model("llama", size="pico").bfloat16(), "packed")
    with pytest.raises(UserError, match=r"does not keep packed segments apart|cannot be computed so"):
        choose_layout(tiny_model("mamba", size="pico").bfloat16(), "packed")
