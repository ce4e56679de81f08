"""Order, empty lines, lookahead and settings of `Translator`, with a model too small to know anything."""

import pytest
import torch
from transformers import GenerationConfig

from hf_vanilla_transformer import VanillaTransformerConfig, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.data.tokenizer_training import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.errors import UserError
from hf_vanilla_transformer.evaluation.translating import BATCHES_AHEAD, EXTRA_TOKENS, Translator

SENTENCES = ["two hundred and one", "", "seven", "   ", "one million three hundred thousand", "seven", "é 中 🙂", ""]


def tiny_model(tokenizer, **options):
    """A random model that says ASCII words only: half a character would look the same in every translation."""
    torch.manual_seed(1)
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    options = {"vocab_size": len(tokenizer), "tie_word_embeddings": False, "lm_head_bias": True} | options
    model = VanillaTransformerForConditionalGeneration(VanillaTransformerConfig(**sizes, **heads, **options))
    with torch.no_grad():
        # large weights where the source comes in and words go out, so that sentences get different translations
        model.model.decoder.layers[0].cross_attn.out_proj.weight.normal_(std=4)
        model.lm_head.weight.normal_()
        for index in range(model.config.target_vocab_size):
            text = tokenizer.decode([index])
            model.lm_head.bias[index] = 0 if text.isascii() and text.isalpha() else -1e4
        model.lm_head.bias[tokenizer.eos_token_id] = 0
    return model.eval()


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES * 3, 290)


@pytest.fixture(scope="module")
def model(tokenizer):
    return tiny_model(tokenizer)


@pytest.fixture
def translator(model, tokenizer):
    return Translator(model, tokenizer)


def alone(model, tokenizer, sentence, **settings):
    """What `generate` makes of one sentence, without any of our batching."""
    ids = torch.tensor([tokenizer(sentence)["input_ids"]])
    return tokenizer.decode(model.generate(input_ids=ids, **settings)[0], skip_special_tokens=True)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_each_line_gets_its_own_translation_in_its_place(translator, batch_size):
    expected = [
        alone(translator.model, translator.source_tokenizer, line, num_beams=1, max_new_tokens=8)
        if line.strip()
        else ""
        for line in SENTENCES
    ]
    found = list(translator.translate(SENTENCES, batch_size=batch_size, num_beams=1, max_new_tokens=8))
    assert found == expected
    assert len(set(found)) >= 4  # else order could not be seen


def test_order_holds_over_many_windows(translator):
    lines = [" ".join(["seven"] * (number * 7 % 5)) for number in range(3 * 2 * BATCHES_AHEAD + 1)]
    found = list(translator.translate(lines, batch_size=2, num_beams=1, max_new_tokens=4))
    known = dict(zip(lines, found, strict=True))
    assert len(set(found)) > 2 and known[""] == ""
    assert found == [known[line] for line in lines]


@pytest.mark.parametrize(("batch_size", "ahead"), [(1, 1), (4, 4 * BATCHES_AHEAD)])
def test_endless_streams_are_read_a_little_ahead(translator, batch_size, ahead):
    read = []

    def stream():
        while True:
            read.append("seven")
            yield "seven"

    next(translator.translate(stream(), batch_size=batch_size, num_beams=1, max_new_tokens=2))
    assert len(read) == ahead


def test_blank_lines_never_reach_the_model(translator, monkeypatch):
    def refuse(**_):
        raise AssertionError("the model was asked")

    monkeypatch.setattr(translator.model, "generate", refuse)
    assert list(translator.translate(["", " ", "\t\u3000"])) == ["", "", ""]
    assert list(translator.translate([])) == []


def recorded(translator, monkeypatch, **settings):
    """The arguments with which the library's own `generate` starts."""
    calls = []

    def prepare(self, generation_config, *arguments, **kwargs):
        calls.append(generation_config)
        return original(self, generation_config, *arguments, **kwargs)

    original = type(translator.model)._prepare_generated_length
    monkeypatch.setattr(type(translator.model), "_prepare_generated_length", prepare)
    list(translator.translate(["seven"], **settings))
    return calls[0]


def test_settings_come_from_the_checkpoint_and_callers_win(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generation_config", GenerationConfig.from_dict(model.generation_config.to_dict()))
    model.generation_config.update(num_beams=3, length_penalty=0.3)
    translator = Translator(model, tokenizer)
    found = recorded(translator, monkeypatch)
    source_length = len(tokenizer("seven")["input_ids"])
    assert (found.num_beams, found.length_penalty) == (3, 0.3)
    assert found.max_new_tokens == source_length + EXTRA_TOKENS  # §6.1
    found = recorded(translator, monkeypatch, num_beams=2, length_penalty=1.5, max_new_tokens=5, min_new_tokens=3)
    assert (found.num_beams, found.length_penalty, found.max_new_tokens, found.min_new_tokens) == (2, 1.5, 5, 3)
    described = translator.describe(batch_size=7, num_beams=2)
    assert described["num_beams"] == 2 and described["length_penalty"] == 0.3 and described["batch_size"] == 7
    assert described["max_new_tokens"] == "source + 50" and described["dtype"] == "float32"


def test_learned_positions_end_the_translation_and_refuse_long_lines(tokenizer, monkeypatch):
    model = tiny_model(tokenizer, position_encoding_type="learned", max_position_embeddings=20)
    translator = Translator(model, tokenizer)
    assert recorded(translator, monkeypatch, num_beams=1).max_new_tokens == 20
    list(translator.translate(["seven"], num_beams=1, min_new_tokens=20))  # to the last position and not beyond
    with pytest.raises(UserError, match="line 2: .* tokens, but the model has positions for 20"):
        list(translator.translate(["seven", "seven " * 30]))


def test_model_in_training_is_evaluated_and_trains_on(translator):
    expected = list(translator.translate(SENTENCES, num_beams=1, max_new_tokens=8))
    translator.model.train()
    try:
        assert list(translator.translate(SENTENCES, num_beams=1, max_new_tokens=8)) == expected
        assert translator.model.training and torch.is_grad_enabled()
    finally:
        translator.model.eval()


@pytest.mark.parametrize(
    ("sentences", "settings", "message"),
    [
        ("seven", {}, "not one string"),
        (["seven"], {"batch_size": 0}, "batch_size: must be at least 1, not 0"),
        (["seven"], {"num_beams": -1}, "num_beams"),
        (["seven"], {"max_new_tokens": 0}, "max_new_tokens"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_read(translator, sentences, settings, message):
    with pytest.raises(UserError, match=message):
        translator.translate(sentences, **settings)


def test_items_that_are_no_text_and_several_translations_are_refused(translator):
    with pytest.raises(UserError, match="not None"):
        list(translator.translate(["seven", None]))
    with pytest.raises(UserError, match="num_return_sequences"):
        list(translator.translate(["seven"], num_beams=2, num_return_sequences=2, max_new_tokens=2))


def test_folder_with_two_tokenizers(tmp_path, tokenizer):
    target = train_tokenizer(["zweihundert eins", "sieben", "eine Million"] * 3, 290)
    model = tiny_model(
        target, vocab_size=len(tokenizer), decoder_vocab_size=len(target), share_encoder_decoder_embeddings=False
    )
    with torch.no_grad():
        model.lm_head.bias[4:260] = -1e4  # single bytes, which the two tokenizers have in common
    model.save_pretrained(tmp_path)
    save_tokenizers(tmp_path, tokenizer, target)
    translator = Translator.from_pretrained(tmp_path, device="cpu")
    ids = model.generate(input_ids=torch.tensor([tokenizer("seven")["input_ids"]]), max_new_tokens=6)[0]
    (found,) = translator.translate(["seven"], max_new_tokens=6)
    assert found == target.decode(ids, skip_special_tokens=True) != tokenizer.decode(ids, skip_special_tokens=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder


def test_loaded_folder_translates_like_the_model(folder, translator):
    loaded = Translator.from_pretrained(folder, device="cpu")
    assert loaded.model.generation_config.num_beams == 4  # the paper's, §6.1
    expected = list(translator.translate(SENTENCES, max_new_tokens=6))
    assert list(loaded.translate(SENTENCES, max_new_tokens=6)) == expected
    assert Translator.from_pretrained(folder, dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:99"}, "device: 'cuda:99' cannot be used here; there is cpu"),
        ({"device": "gpu"}, "device: 'gpu' cannot be used here"),
        ({"device": "meta"}, "device: 'meta' cannot be used here"),
        ({"dtype": "float8"}, "dtype: 'float8' is none of float32, bfloat16, float16"),
    ],
)
def test_devices_and_dtypes_that_are_not_there(folder, options, message):
    with pytest.raises(UserError, match=message):
        Translator.from_pretrained(folder, **options)


def break_config(folder):
    (folder / "config.json").unlink()


def break_json(folder):
    (folder / "config.json").write_text("{")


def break_kind(folder):
    (folder / "config.json").write_text('{"model_type": "bert"}')


def break_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])


def break_shape(folder):
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"decoder_ffn_dim": 16', '"decoder_ffn_dim": 17'))


def break_depth(folder):
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"decoder_layers": 1', '"decoder_layers": 2'))


def break_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_config, "no config.json"),
        (break_json, "cannot load the model"),
        (break_kind, "cannot load the model"),
        (break_weights, "cannot load the model"),
        (break_shape, "cannot load the model"),
        (break_depth, "weights lack .* tensors"),
        (break_tokenizer, "tokenizer"),
    ],
)
def test_folder_without_a_whole_model_is_one_line(folder, tmp_path, damage, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        Translator.from_pretrained(tmp_path, device="cpu")
    assert "\n" not in str(error.value)


def test_missing_folder_says_what_to_do(tmp_path):
    with pytest.raises(UserError, match="no such folder; .*hf download"):
        Translator.from_pretrained(tmp_path / "missing")
