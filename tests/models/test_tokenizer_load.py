"""`load_tokenizer`: template by file, text or clone; special tokens; the vocabulary that grows with them."""

import logging

import pytest
import torch
from transformers import AddedToken, AutoTokenizer, GenerationConfig

from workbench.errors import UserError
from workbench.models.load import ModelSpec, load_model
from workbench.models.tokenizer import (
    end_token_ids,
    fit_vocabulary,
    load_tokenizer,
    require_chat_template,
    resize_embeddings,
    turn_terminator,
)
from workbench.tiny.tokenizer import tiny_tokenizer

PICO = {"size": "pico"}
BRACKETS = "{% for m in messages %}{{ '[S]' + m['content'] + '[/S]\n' }}{% endfor %}"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def spec(**fields):
    return ModelSpec("tiny", init_kwargs=PICO, **fields)


def message(**fields):
    with pytest.raises(UserError) as caught:
        load_tokenizer(spec(**fields))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.fixture
def bracketed(tmp_path):
    """A tokenizer whose template writes two special tokens that the nano one lacks, and one that it never writes."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken(t, special=True) for t in ("[never]", "[S]", "[/S]")])
    tokenizer.eos_token = "[/S]"
    tokenizer.chat_template = BRACKETS
    tokenizer.save_pretrained(tmp_path / "bracketed")
    return str(tmp_path / "bracketed")


class TestSource:
    def test_default_is_the_models_own(self, tmp_path):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "own {{ messages }}"
        tokenizer.save_pretrained(tmp_path)
        load_model(spec()).save_pretrained(tmp_path)
        assert load_tokenizer(str(tmp_path)).chat_template == "own {{ messages }}"

    def test_override(self, bracketed):
        assert load_tokenizer(spec(tokenizer=bracketed)).eos_token == "[/S]"

    def test_of_a_model_object(self, bracketed):
        model = load_model(spec(chat_template=bracketed))
        assert load_tokenizer(model).chat_template == BRACKETS
        model = load_model(spec())
        del model.load_record
        assert load_tokenizer(model).eos_token == "<|im_end|>"
        model.config._name_or_path = ""
        with pytest.raises(UserError, match="not loaded by name"):
            load_tokenizer(model)

    def test_folder_without_tokenizer(self, tmp_path):
        load_model(spec()).save_pretrained(tmp_path)
        with pytest.raises(UserError, match="holds no tokenizer"):
            load_tokenizer(str(tmp_path))

    def test_damaged_tokenizer(self, tmp_path):
        load_model(spec()).save_pretrained(tmp_path)
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{")
        with pytest.raises(UserError, match="tokenizer"):
            load_tokenizer(str(tmp_path))

    def test_offline(self):
        assert "not in the local cache" in message(tokenizer="owner/other")


class TestTemplate:
    def test_from_file(self, tmp_path):
        (tmp_path / "own.jinja").write_text(BRACKETS)
        tokenizer = load_tokenizer(spec(chat_template=str(tmp_path / "own.jinja")))
        assert tokenizer.chat_template == BRACKETS
        assert len(tokenizer) == 109

    def test_from_text(self):
        tokenizer = load_tokenizer(spec(chat_template=BRACKETS))
        assert tokenizer.apply_chat_template(CHAT, tokenize=False) == "[S]a[/S]\n[S]b[/S]\n"

    def test_clone_brings_the_tokens_it_writes(self, bracketed, caplog):
        with caplog.at_level(logging.INFO):
            tokenizer = load_tokenizer(spec(chat_template=bracketed))
        assert len(tokenizer) == 111
        assert "[S], [/S]" in caplog.text
        assert tokenizer.eos_token == "[/S]"
        ids = tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        start, end = tokenizer.convert_tokens_to_ids(["[S]", "[/S]"])
        assert [i for i in ids if i >= 109] == [start, end, start, end]
        assert tokenizer.decode(ids, skip_special_tokens=True) == "a\nb\n"

    def test_clone_survives_saving(self, bracketed, tmp_path):
        tokenizer = load_tokenizer(spec(chat_template=bracketed))
        tokenizer.save_pretrained(tmp_path / "saved")
        again = AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert again.chat_template == BRACKETS and again.eos_token == "[/S]"
        assert again("[S]a[/S]").input_ids == tokenizer("[S]a[/S]").input_ids

    def test_clone_of_known_tokens_adds_none(self, tmp_path):
        source = tiny_tokenizer()
        source.chat_template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
        source.save_pretrained(tmp_path)
        assert len(load_tokenizer(spec(chat_template=str(tmp_path)))) == 109

    def test_source_without_template(self, tmp_path):
        source = tiny_tokenizer()
        source.chat_template = None
        source.save_pretrained(tmp_path)
        assert "has no chat template" in message(chat_template=str(tmp_path))

    def test_mistakes(self, tmp_path):
        (tmp_path / "chat.jinja").touch()
        assert "Did you mean 'chat.jinja'?" in message(chat_template=str(tmp_path / "chta.jinja"))
        assert "line 2: " in message(chat_template="{{ messages }}\n{% for m in %}")
        assert message(chat_template="owner/other").startswith("model.chat_template='owner/other': ")

    def test_a_template_that_wants_a_system_turn_is_no_mistake(self):
        template = "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{{ messages }}"
        assert load_tokenizer(spec(chat_template=template)).chat_template == template

    def test_missing_is_an_error_only_when_needed(self, tmp_path):
        source = tiny_tokenizer()
        source.chat_template = None
        source.save_pretrained(tmp_path)
        tokenizer = load_tokenizer(spec(tokenizer=str(tmp_path)))
        with pytest.raises(UserError, match=r"set model\.chat_template"):
            require_chat_template(tokenizer)
        require_chat_template(tiny_tokenizer())


class TestSpecialTokens:
    def test_by_name(self):
        tokenizer = load_tokenizer(spec(eos_token="<|im_start|>", pad_token="<|im_end|>"))
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (2, 3, 109)

    def test_unknown(self):
        assert "Did you mean '<|im_start|>'?" in message(eos_token="<|im_strt|>")
        assert message(pad_token="[PAD]").startswith("model.pad_token='[PAD]' is not a token of 'tiny'.")

    def test_of_a_cloned_template_count(self, bracketed):
        assert load_tokenizer(spec(chat_template=bracketed, pad_token="[S]")).pad_token == "[S]"

    @pytest.mark.parametrize(("missing", "chosen"), [((), "<|im_end|>"), (("eos_token",), "<|unk|>")])
    def test_pad_is_chosen_and_told(self, missing, chosen, tmp_path, caplog):
        source = tiny_tokenizer()
        for name in ("pad_token", *missing):
            setattr(source, name, None)
        source.save_pretrained(tmp_path)
        with caplog.at_level(logging.INFO):
            tokenizer = load_tokenizer(spec(tokenizer=str(tmp_path)))
        assert tokenizer.pad_token == chosen
        assert chosen in caplog.text
        assert len(tokenizer) == len(source)


class TestVocabulary:
    @pytest.mark.parametrize("tied", [False, True])
    def test_rows_grow_with_a_clone(self, bracketed, tied):
        cloned = ModelSpec("tiny", init_kwargs=PICO | {"tie_word_embeddings": tied}, chat_template=bracketed)
        model, before = load_model(cloned), load_model(cloned)
        tokenizer = load_tokenizer(cloned, model)
        embedding, old = model.get_input_embeddings().weight, before.get_input_embeddings().weight
        assert embedding.shape[0] == model.get_output_embeddings().weight.shape[0] == model.config.vocab_size == 111
        assert (model.get_output_embeddings().weight is embedding) == tied
        assert torch.equal(embedding[:109], old)
        torch.testing.assert_close(embedding[109:], old.mean(0).expand(2, -1), rtol=0, atol=1e-4)
        ids = torch.tensor([tokenizer("[S]a[/S]").input_ids])
        assert torch.isfinite(model(ids).logits).all()

    def test_new_rows_depend_on_the_seed_alone(self, bracketed):
        def rows(seed, outside):
            cloned = ModelSpec("tiny", init_kwargs=PICO, chat_template=bracketed)
            model = load_model(cloned)
            torch.manual_seed(outside)
            resize_embeddings(model, load_tokenizer(cloned), seed=seed)
            return model.get_input_embeddings().weight[109:].clone(), torch.get_rng_state()

        first, state = rows(0, outside=1)
        again, _ = rows(0, outside=2)
        other, _ = rows(3, outside=1)
        torch.manual_seed(1)
        assert torch.equal(first, again) and not torch.equal(first, other)
        assert torch.equal(state, torch.get_rng_state())

    def test_a_larger_embedding_is_left_alone(self):
        padded = ModelSpec("tiny", init_kwargs=PICO | {"vocab_size": 128})
        model = load_model(padded)
        load_tokenizer(padded, model)
        assert model.get_input_embeddings().weight.shape[0] == 128
        assert not resize_embeddings(model, tiny_tokenizer())

    def test_a_tokenizer_of_another_model(self):
        small = ModelSpec("tiny", init_kwargs=PICO | {"vocab_size": 100})
        with pytest.raises(UserError, match="109 tokens and model 'tiny' has rows for 100"):
            load_tokenizer(small, load_model(small))

    def test_sizing_comes_before_the_adapter(self, bracketed):
        from workbench.models.peft import PeftSpec, apply_peft

        cloned = spec(chat_template=bracketed)
        model = apply_peft(load_model(cloned), PeftSpec(r=2))
        with pytest.raises(UserError, match="adapter"):
            fit_vocabulary(model, load_tokenizer(cloned), cloned)


class TestEnds:
    def test_terminator_of_the_template(self, bracketed):
        assert turn_terminator(tiny_tokenizer()) == 3
        tokenizer = load_tokenizer(spec(tokenizer=bracketed))
        assert turn_terminator(tokenizer) == tokenizer.convert_tokens_to_ids("[/S]")

    def test_none_where_the_next_role_closes_the_turn(self):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
        assert turn_terminator(tokenizer) is None
        tokenizer.chat_template = None
        assert turn_terminator(tokenizer) is None

    def test_model_settings_template_and_tokenizer_all_count(self):
        model, tokenizer = load_model(spec()), tiny_tokenizer()
        model.load_record.generation_config = GenerationConfig(eos_token_id=[7, 3])
        tokenizer.eos_token = "<|pad|>"
        assert end_token_ids(model, tokenizer) == [0, 3, 7]
