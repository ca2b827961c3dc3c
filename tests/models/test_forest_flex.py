"""A forest in one FlexAttention kernel: the mask and its blocks, numbers and gradients, and the check before it is trusted.

The kernel of a GPU has no CPU twin with a backward pass; what stands in for it here is the function that torch defines it by.
"""

import copy
import logging
import random

import pytest
import torch
from test_attention import FOREST, assert_equal, batch_of, group, outcome
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.models import attention, forest_flex
from workbench.models.attention import Forest
from workbench.models.load import ModelSpec, load_model
from workbench.models.policy import Policy, set_gradient_checkpointing
from workbench.models.probe import choose_layout
from workbench.tiny.model import tiny_model

CPU = torch.device("cpu")
FORESTS = {
    "one": ([5], [-1]),
    "documents": ([130, 1, 250], [-1, -1, -1]),
    "group": ([300, 64, 200, 7], [-1, 0, 0, 0]),
    "chain": ([100, 60, 140], [-1, 0, 1]),
    "two groups": ([128, 128, 256, 30, 20, 10], [-1, 0, 0, -1, 3, 3]),
    "children far from their parent": ([40, 30, 20, 50, 60, 10], [-1, -1, 0, 1, 2, 0]),
    "an empty segment": ([10, 0, 12], [-1, 0, 0]),
}


def whole(tokens):
    """Tokens with the padding to whole blocks."""
    return -(-tokens // forest_flex.BLOCK) * forest_flex.BLOCK


def dense(lengths, parent, window):
    """What each token sees, pair by pair."""
    owner = [s for s, n in enumerate(lengths) for _ in range(n)]
    forest = Forest(lengths, parent)
    before = [sum(lengths[a] for a in forest.context(s)) for s in range(len(lengths))]
    position = [before[s] + i for s, n in enumerate(lengths) for i in range(n)]
    chains = [{s, *forest.context(s)} for s in range(len(lengths))]

    def sees(q, k):
        distance = position[q] - position[k]
        return owner[k] in chains[owner[q]] and distance >= 0 and (window is None or distance < window)

    total = len(owner)
    return torch.tensor([[sees(q, k) for k in range(total)] for q in range(total)])


@pytest.fixture
def flex(monkeypatch):
    """FlexAttention on a CPU, written out, with its backward pass; counts the calls."""
    calls = []

    def kernel(query, key, value, score_mod, mask, scale, gqa, kernel_options):
        calls.append(query.shape[2])
        return torch_flex.flex_attention(query, key, value, score_mod, mask, scale, gqa)

    monkeypatch.setattr(attention, "_FLEX", ("cpu", "cuda"))
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(forest_flex, "_kernel", lambda: kernel)
    monkeypatch.setattr(forest_flex, "_trusted", {})
    return calls


@pytest.mark.parametrize("window", [None, 1, 37, 129])
@pytest.mark.parametrize("name", FORESTS)
def test_the_mask_is_what_a_token_sees(name, window):
    lengths, parent = FORESTS[name]
    tokens = torch.arange(sum(lengths))
    sees = forest_flex.visibility(lengths, parent, window, CPU)
    assert torch.equal(sees(None, None, tokens[:, None], tokens), dense(lengths, parent, window))


@pytest.mark.parametrize("pairs", [1, forest_flex._PAIRS])
@pytest.mark.parametrize("window", [None, 37, 200])
@pytest.mark.parametrize("name", FORESTS)
def test_blocks_are_full_partial_or_left_out(name, window, pairs, monkeypatch):
    monkeypatch.setattr(forest_flex, "_PAIRS", pairs)  # rows of blocks one by one, or together
    lengths, parent = FORESTS[name]
    mask = forest_flex.block_mask(lengths, parent, window, CPU)
    size = forest_flex.BLOCK
    padding = -sum(lengths) % size
    expected = dense([*lengths, padding], [*parent, -1], window)
    blocks = len(expected) // size
    listed = torch.zeros(blocks, blocks, dtype=torch.int64)
    for count, indices, kind in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
    ):
        for row in range(blocks):
            listed[row, indices[0, 0, row, : count[0, 0, row]].long()] += kind
    for row in range(blocks):
        for column in range(blocks):
            block = expected[row * size : (row + 1) * size, column * size : (column + 1) * size]
            full = block.numel() == size * size and block.all()
            assert listed[row, column] == (2 if full else int(block.any())), (row, column)


def test_blocks_are_those_that_torch_finds():
    lengths, parent = FORESTS["two groups"]
    ours = forest_flex.block_mask(lengths, parent, 200, CPU)
    padding = -sum(lengths) % forest_flex.BLOCK
    sees = forest_flex.visibility([*lengths, padding], [*parent, -1], 200, CPU)
    whole = sum(lengths) + padding
    theirs = torch_flex.create_block_mask(sees, None, None, whole, whole, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
        assert torch.equal(getattr(ours, name).flatten(), getattr(theirs, name).flatten()), name


def test_no_array_of_all_pairs_is_made():
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, torch.Tensor))
            return out

    with Sizes():
        forest_flex.block_mask([4000, 3000, 9000], [-1, 0, 0], 1000, CPU)
    assert max(largest) < 16000**2 / 10


@pytest.mark.parametrize("layout", ["packed", "shared"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "granite"])
def test_numbers_and_gradients_are_those_of_padded_rows(architecture, layout, flex):
    assert_equal(tiny_model(architecture, size="pico"), layout)
    assert flex


@pytest.mark.parametrize("kind", ["checkpointing", "offloading"])
def test_with_hooks_on_what_is_kept_for_the_backward_pass(kind, flex, monkeypatch):
    """They must see neither the check nor what the compiler traces."""
    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend="aot_eager")
    monkeypatch.setattr(forest_flex, "_kernel", lambda: compiled)
    model = tiny_model("gemma2", size="pico")
    set_gradient_checkpointing(model, kind == "checkpointing")
    assert_equal(model, "shared", activation_offloading=kind == "offloading")
    assert len(forest_flex._trusted) == 2 and all(forest_flex._trusted.values())
    torch.compiler.reset()


def test_selective_checkpointing_computes_bucket_by_bucket(flex):
    """It looks for the operations whose results it keeps, and a compiled kernel shows none."""
    model = tiny_model("llama", size="pico")
    set_gradient_checkpointing(model, "selective")
    assert_equal(model, "shared")
    assert not flex


def test_the_first_pass_may_be_one_without_gradients(flex):
    policy = Policy(tiny_model("llama", size="pico"), layout="shared")
    with torch.inference_mode():
        policy(FOREST)
    assert list(forest_flex._trusted.values()) == [True]


def test_a_filler_at_the_end_changes_nothing(flex):
    assert_equal(tiny_model("llama", size="pico"), "shared", pad_to_multiple_of=32)
    assert set(flex) == {forest_flex.BLOCK, whole(sum(forest_flex._CHECKED[0]))}


def test_under_autocast_it_computes_in_the_lower_precision(flex):
    model, dtypes = tiny_model("llama", size="pico"), set()
    policy = Policy(model, layout="shared")
    kernel = forest_flex._kernel()

    def spy(query, key, value, *args, **kwargs):
        dtypes.update(t.dtype for t in (query, key, value))
        return kernel(query, key, value, *args, **kwargs)

    forest_flex._kernel = lambda: spy  # put back by the fixture
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        half = policy(FOREST).logps
        forest_flex._trusted.clear()
        dtypes.clear()
        policy(FOREST)
    assert dtypes == {torch.bfloat16}
    with torch.no_grad():
        assert (half - policy(FOREST).logps).abs().max() < 0.1


def test_dropout_is_left_to_sdpa(flex):
    config = tiny_model("gpt2", size="pico").config
    config.attn_pdrop = 0.5
    policy = Policy(tiny_model("gpt2", size="pico", attn_pdrop=0.5), layout="shared").train()
    policy(FOREST)
    assert not flex
    policy.eval()(FOREST)
    assert flex


def test_eager_attention_stays_without_kernels(flex):
    assert_equal(load_model(ModelSpec("tiny", attn_implementation="eager")), "shared")
    assert not flex
    assert_equal(load_model(ModelSpec("tiny")), "shared")
    assert flex


def test_choosing_a_layout_builds_no_kernel_and_rounds_no_products(flex, monkeypatch):
    precisions = []
    forward = Policy.forward
    monkeypatch.setattr(
        Policy, "forward", lambda *a, **k: (precisions.append(torch.get_float32_matmul_precision()), forward(*a, **k))[1]
    )
    torch.set_float32_matmul_precision("high")
    try:
        assert choose_layout(tiny_model("llama", size="pico"), "auto") == "shared"
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert precisions == ["highest", "highest"]
    assert not flex


def test_one_check_for_each_kind(flex):
    model = tiny_model("gemma2", size="pico")  # layers with and without a window
    outcome(model, "shared")
    assert len(forest_flex._trusted) == 2 and all(forest_flex._trusted.values())
    checked = whole(sum(forest_flex._CHECKED[0]))
    assert flex.count(checked) == 2
    outcome(model, "packed")
    assert flex.count(checked) == 2


@pytest.mark.parametrize("fault", ["mask", "gradient", "nan", "refusal"])
def test_a_wrong_kernel_is_not_used(fault, flex, monkeypatch, caplog):
    kernel = forest_flex._kernel()

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out):
            return out.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def wrong(query, key, value, score_mod, mask, *args, **kwargs):
        if fault == "refusal":
            raise RuntimeError("no kernel for head dimension 7\nand a long trace")
        if fault == "mask":
            whole = query.shape[2]
            mask = forest_flex.block_mask([whole], [-1], None, CPU)
        out = kernel(query, key, value, score_mod, mask, *args, **kwargs)
        out = Doubled.apply(out) if fault == "gradient" else out
        return out * float("nan") if fault == "nan" else out

    monkeypatch.setattr(forest_flex, "_kernel", lambda: wrong)
    with caplog.at_level(logging.WARNING):
        assert_equal(tiny_model("llama", size="pico"), "shared")
    (line,) = [r.getMessage() for r in caplog.records if r.name == forest_flex.__name__]
    assert line.startswith("FlexAttention is not used for")
    assert ("no kernel for head dimension 7" in line) == (fault == "refusal")
    assert "\n" not in line


def test_one_graph_serves_every_length(monkeypatch):
    """Dynamo's part is the same on every device; what follows it is written out here."""
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(torch_flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(forest_flex, "_kernel", lambda: compiled)
    rng = random.Random(0)
    with torch.no_grad():
        for softcap, window in ((None, None), (5.0, 50)):
            for count in (4, 7, 30, 12):
                forest = Forest(
                    [rng.randint(40, 90) for _ in range(count)], [-1, *(rng.randint(-1, i - 1) for i in range(1, count))]
                )
                q, k, v = (torch.randn(1, heads, sum(forest.lengths), 16) for heads in (4, 2, 2))
                out = forest_flex.attend(q, k, v, forest.block_mask(window), None, softcap)
                options = {"dropout": 0.0, "scaling": None, "window": window, "softcap": softcap}
                expected = attention._by_buckets(q, k, v, forest, options).transpose(1, 2)
                assert (out - expected).abs().max() < 2e-6
    assert len(graphs) == 2
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (100, None), (None, 30.0)])
def test_the_kernel_of_a_gpu_is_trusted(dtype, window, softcap, monkeypatch):
    monkeypatch.setattr(forest_flex, "_trusted", {})
    lengths, parent = FORESTS["two groups"]
    forest = Forest(lengths, parent, torch.device("cuda"))
    q, k, v = (torch.randn(1, h, sum(lengths), 64, device="cuda", dtype=dtype) for h in (8, 2, 2))
    options = {"dropout": 0.0, "scaling": None, "window": window, "softcap": softcap}
    found = attention._over_forest(q, k, v, forest, options)
    expected = attention._by_buckets(q, k, v, forest, options)
    assert all(forest_flex._trusted.values()) and forest_flex._trusted
    assert ((found - expected).norm() / expected.norm()) < forest_flex._TOLERANCE[dtype]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_model_on_a_gpu_computes_what_it_does_in_padded_rows(architecture):
    model = tiny_model(architecture, size="pico").cuda()
    batch = batch_of(group(200, 90, 150, seed=1), group(30, 12, seed=9)).to("cuda")
    padded = outcome(copy.deepcopy(model), "padded", batch)[0]
    assert (outcome(model, "shared", batch)[0] - padded).abs().max() < 1e-2
