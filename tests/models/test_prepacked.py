"""Laid-out weights give the same products, and leave no trace."""

import pytest
import torch
from torch import nn

from workbench.models import prepacked as module
from workbench.models.peft import PeftSpec, apply_peft
from workbench.models.policy import Policy
from workbench.models.prepacked import FEW, prepacked
from workbench.tiny.model import tiny_model

needs_products = pytest.mark.skipif(not module.is_available(), reason="this torch has no such products")
IDS = torch.arange(1, 25).view(4, 6)


@pytest.fixture
def products(monkeypatch):
    """Counts products with laid-out weights."""
    calls = []
    monkeypatch.setattr(module, "_product", lambda *args, product=module._product: calls.append(1) or product(*args))
    return calls


def logits(model, ids=IDS):
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits


@needs_products
@pytest.mark.parametrize("kind", ["llama", "qwen2", "tied", "adapter"])
@pytest.mark.parametrize("rows", [1, 3, 64])
def test_the_numbers_are_the_same(kind, rows, products):
    model = tiny_model("qwen2" if kind == "qwen2" else "llama", size="pico", tie_word_embeddings=kind == "tied").eval()
    if kind == "adapter":
        model = apply_peft(model, PeftSpec(r=2, init_lora_weights=False)).eval()
    ids = IDS[:1].expand(rows, -1)
    expected, keys = logits(model, ids), list(model.state_dict())
    with prepacked(model, FEW):
        found = logits(model, ids)
    assert products and torch.allclose(found, expected, atol=1e-5)
    del products[:]
    assert torch.equal(logits(model, ids), expected) and not products
    assert list(model.state_dict()) == keys
    assert not any("forward" in vars(m) for m in model.modules())


@needs_products
def test_they_are_laid_out_anew_each_time_and_given_back_after_an_error(products):
    model = tiny_model("llama", size="pico").eval()
    with pytest.raises(RuntimeError), prepacked(model, FEW):
        raise RuntimeError
    assert not any("forward" in vars(m) for m in model.modules())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    expected = logits(model)
    with prepacked(model, FEW):
        assert torch.allclose(logits(model), expected, atol=1e-5)


@pytest.mark.parametrize("change", ["few", "bf16", "subclass", "meta"])
def test_what_stays_as_it_is(change, products, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if change == "bf16":
        model.bfloat16()
    if change == "subclass":
        model = nn.Sequential(type("Own", (nn.Linear,), {})(4, 4))
    if change == "meta":
        model = model.to("meta")
    with prepacked(model, FEW - (change == "few")):
        assert not any("forward" in vars(m) for m in model.modules())


def test_without_such_products_nothing_changes(monkeypatch):
    monkeypatch.setattr(module, "is_available", lambda: False)
    model = nn.Sequential(nn.Linear(4, 4))
    with prepacked(model, FEW):
        assert "forward" not in vars(model[0])


@needs_products
def test_the_torch_engine_writes_with_them(products):
    from workbench.rollouts.torch_engine import TorchEngine
    from workbench.rollouts.types import Request, Sampling

    engine = TorchEngine()
    engine.start(Policy(tiny_model("llama", size="pico")), None)
    requests = [Request([1, 2, 3], (0, sample)) for sample in range(3)]
    rollouts = {}
    for bound in (FEW, FEW - 1):
        del products[:]
        rollouts[bound] = engine.generate(requests, Sampling(max_new_tokens=bound))
        assert bool(products) == (bound == FEW)
    for long, short in zip(*rollouts.values(), strict=True):
        assert long.token_ids[: FEW - 1] == short.token_ids
        assert torch.allclose(torch.tensor(long.logps[: FEW - 1]), torch.tensor(short.logps), atol=1e-5)
