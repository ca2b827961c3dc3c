"""A reward model reads text with its own tokenizer and template, whatever the policy's tokens were."""

import json

import pytest
import torch
from support import DATA, MODEL, run_method
from transformers import AutoTokenizer

from workbench.errors import UserError
from workbench.methods.reward import Reward
from workbench.models.heads import classification_head, load_classifier
from workbench.models.load import ModelSpec, load_model
from workbench.models.peft import PeftSpec
from workbench.models.save import save_pretrained
from workbench.models.tokenizer import load_tokenizer
from workbench.rewards import RewardFunctions, RewardModel

PAIRS = [json.loads(line) for line in (DATA / "preference.jsonl").read_text().splitlines()]
PROMPTS = [row["prompt"] for row in PAIRS[:5]]
ANSWERS = [row["chosen"] for row in PAIRS[:5]]


def trained(folder, **method):
    _, module, _ = run_method(Reward, {"train": PAIRS}, method, {"max_steps": 2}, lr=1e-3)
    save_pretrained(module.policy.hf, module.tokenizer, folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("rewards") / "my-reward-model")


def by_transformers(folder, prompts, answers, head=None):
    """Scores by the model's own forward, one sequence at a time, read at the last token."""
    model, tokenizer = head or load_classifier(folder), AutoTokenizer.from_pretrained(folder)
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        text = tokenizer.apply_chat_template([*prompt, *answer], tokenize=False)
        ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            hidden = model.model(input_ids=ids).last_hidden_state[0, -1]
        found.append(classification_head(model)(hidden).item())
    return found


def test_scores_of_a_saved_model(folder):
    expected = by_transformers(folder, PROMPTS, ANSWERS)
    assert max(expected) - min(expected) > 1e-3
    runner = RewardFunctions([folder])
    runner.place("cpu")
    wrong_ids = [[10**6]] * 5  # of another vocabulary
    found = runner(PROMPTS, ANSWERS, wrong_ids, {"answer": ["x"] * 5})
    assert found.names == ["my-reward-model"]
    assert found.values[:, 0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    small = RewardModel(folder, batch_size=2, name="judge")
    assert small(prompts=PROMPTS, completions=ANSWERS) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert small.__name__ == "judge"


def test_the_policy_s_tokens_do_not_matter_report_65(folder, tmp_path):
    """Tokenizers with exchanged ids, each with the embedding that belongs to it: the scores are the same."""
    other = tmp_path / "other"
    model, tokenizer = load_classifier(folder), load_tokenizer(folder)
    a, b = (tokenizer.convert_tokens_to_ids(t) for t in tokenizer.tokenize("the violin")[:2])
    assert a != b
    save_pretrained(model, tokenizer, other)
    described = json.loads((other / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    back = {i: t for t, i in vocab.items()}
    vocab[back[a]], vocab[back[b]] = b, a
    (other / "tokenizer.json").write_text(json.dumps(described))
    rows = model.get_input_embeddings().weight.data
    rows[[a, b]] = rows[[b, a]].clone()
    exchanged = AutoTokenizer.from_pretrained(other)
    assert exchanged.convert_tokens_to_ids(back[a]) == b
    same = RewardModel(model, exchanged)(prompts=PROMPTS, completions=ANSWERS)
    assert same == pytest.approx(RewardModel(folder)(prompts=PROMPTS, completions=ANSWERS), rel=1e-4, abs=1e-6)
    wrong = RewardModel(model, tokenizer)(prompts=PROMPTS, completions=ANSWERS)
    assert wrong != pytest.approx(same, rel=1e-3)


def test_no_double_special_tokens_report_65(folder, monkeypatch):
    """A template that renders the first token and a tokenizer that adds it: it is there once."""
    from workbench.models.policy import Policy

    seen = []
    forward = Policy.forward

    def spy(self, batch, *args, **kwargs):
        seen.extend(batch.tokens.tolist())
        return forward(self, batch, *args, **kwargs)

    monkeypatch.setattr(Policy, "forward", spy)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = "{{ '<|endoftext|>' }}" + tokenizer.chat_template
    tokenizer.bos_token = "<|endoftext|>"
    RewardModel(folder, tokenizer)(prompts=PROMPTS[:1], completions=ANSWERS[:1])
    text = tokenizer.decode(seen)
    assert text.count("<|endoftext|>") == 1 and text.startswith("<|endoftext|><|im_start|>")
    assert text.count("<|im_end|>") == len(PROMPTS[0]) + 1 and text.rstrip().endswith("<|im_end|>")


def test_a_saved_adapter(tmp_path):
    folder = trained(tmp_path / "adapter", peft=PeftSpec(r=4, alpha=8))
    assert (tmp_path / "adapter/adapter_config.json").exists()
    reward = RewardModel(folder)
    found = reward(prompts=PROMPTS, completions=ANSWERS)
    plain = by_transformers(MODEL, PROMPTS, ANSWERS)
    assert found != pytest.approx(plain, rel=1e-2)
    again = RewardModel(load_classifier(folder), folder)(prompts=PROMPTS, completions=ANSWERS)
    assert found == pytest.approx(again, rel=1e-6)


def test_texts_and_mixed_forms(folder):
    reward = RewardModel(folder)
    texts = reward(prompts=["The sky is", "The sky is"], completions=[" blue.", ""])
    assert len(set(texts)) == 2
    messages = reward(prompts=PROMPTS[:1], completions=ANSWERS[:1])
    assert reward(prompts=PROMPTS[:1], completions=[ANSWERS[0][0]["content"]]) == messages
    assert reward(prompts=[PROMPTS[0][-1]["content"]], completions=ANSWERS[:1]) == messages
    begun, rest = ANSWERS[0][0]["content"][:8], ANSWERS[0][0]["content"][8:]
    prefilled = [[*PROMPTS[0], {"role": "assistant", "content": begun}]]
    assert reward(prompts=prefilled, completions=[[{"role": "assistant", "content": rest}]]) == messages
    assert len(prefilled[0]) == len(PROMPTS[0]) + 1


def test_in_eval_mode_without_gradient_and_in_its_dtype(folder):
    reward = RewardModel(folder, dtype="bfloat16")
    exact = RewardModel(folder)(prompts=PROMPTS, completions=ANSWERS)
    rounded = reward(prompts=PROMPTS, completions=ANSWERS)
    assert rounded == pytest.approx(exact, abs=0.1) and rounded != exact
    policy = reward._loaded()
    assert policy.hf.dtype == torch.bfloat16 and not policy.training
    assert not any(p.requires_grad for p in policy.parameters())


def test_max_length_keeps_the_end(folder):
    def scores(end, **options):
        prompts = [
            [{"role": "user", "content": f"{start} the glacier under the bridge."}] for start in ("What", "The violin and")
        ]
        return RewardModel(folder, **options)(prompts=prompts, completions=[[{"role": "assistant", "content": end}]] * 2)

    long = scores("The lantern.")
    cut = scores("The lantern.", max_length=8)
    assert long[0] != pytest.approx(long[1], rel=1e-4) and cut[0] == pytest.approx(cut[1], rel=1e-4)


def test_a_model_object_is_used_as_it_is(folder):
    model = load_classifier(folder)
    found = RewardFunctions([model])(PROMPTS, ANSWERS, [[1]] * 5)
    assert found.values[:, 0].tolist() == pytest.approx(by_transformers(folder, PROMPTS, ANSWERS, model), rel=1e-4, abs=1e-6)


def test_mistakes(folder):
    with pytest.raises(UserError, match="is no sequence classifier"):
        RewardModel(load_model(MODEL))
    with pytest.raises(UserError, match="dtype=bfloat16 has no effect on a model that is loaded"):
        RewardModel(load_classifier(folder), dtype="bfloat16")
    with pytest.raises(UserError, match="contradicts the model's own dtype=float32"):
        RewardModel(ModelSpec(folder), dtype="bfloat16")
    with pytest.raises(UserError, match="truncation=keep_start has no effect without max_length"):
        RewardModel(folder, truncation="keep_start")
    with pytest.raises(UserError, match="batch_size=0 must be at least 1"):
        RewardModel(folder, batch_size=0)
    with pytest.raises(UserError, match=r"drop leaves completions without a score"):
        RewardModel(folder, truncation="drop", max_length=8)
    with pytest.raises(UserError, match="2 outputs where a reward model has one"):
        RewardModel(load_classifier(MODEL, num_labels=2))(prompts=PROMPTS, completions=ANSWERS)
