"""Order, blank lines, lookahead, settings and loading of `Translator`, with a tiny random model."""

import copy
import shutil
import threading
from types import SimpleNamespace

import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import GenerationConfig

from hf_vanilla_transformer import Translator, VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine import c_kernels, kernels, linear
from hf_vanilla_transformer.engine.ensemble import with_ensemble
from hf_vanilla_transformer.inference import deoptimize, dtypes, workers
from hf_vanilla_transformer.inference.batching import BATCHES_AHEAD
from hf_vanilla_transformer.inference.file_translation import translated_lines
from hf_vanilla_transformer.inference.loading import load_model
from hf_vanilla_transformer.inference.translator import Hypothesis
from hf_vanilla_transformer.text import save_tokenizers, train_tokenizer
from hf_vanilla_transformer.text.side_tokens import readable_tokens
from hf_vanilla_transformer.utils.errors import UserError
from tests.model_helpers import echo_model, error_of

SENTENCES = [
    "two hundred and one",
    "",
    "seven",
    "   ",
    "one million three hundred thousand",
    "seven",
    "é 中 𐍈",
    "",
]
GREEDY = {"num_beams": 1, "max_new_tokens": 8}
BEAMS = {"num_beams": 2, "max_new_tokens": 8}
LEARNED_POSITIONS = {"position_encoding_type": "learned", "max_position_embeddings": 20}

Model = VanillaTransformerForConditionalGeneration


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES * 3, 290)


@pytest.fixture(scope="module")
def model(tokenizer):
    return echo_model(tokenizer)


@pytest.fixture
def translator(model, tokenizer):
    return Translator(model, tokenizer)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    save_tokenizers(folder, tokenizer)
    return folder


def translations(translator, sentences=SENTENCES, **settings):
    return list(translator.translate(sentences, **settings))


def alone(model, tokenizer, sentence, **settings):
    """The result of `generate` for one sentence, without batching. Blank lines stay."""
    if not sentence.strip():
        return ""
    ids = torch.tensor([tokenizer(sentence)["input_ids"]])
    (tokens,) = model.generate(input_ids=ids, **settings)
    return tokenizer.decode(tokens, skip_special_tokens=True)


def assert_same_hypotheses(found, expected):
    for mine, theirs in zip(found, expected, strict=True):
        assert [one.text for one in mine] == [one.text for one in theirs]
        assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], abs=1e-5)


@pytest.mark.parametrize(
    "settings", [{}, {"output_scores": True}], ids=["refilled", "transformers' loop"]
)
def test_batch_without_memory_is_halved(translator, settings, monkeypatch, caplog):
    lines = [line for line in SENTENCES if line.strip()] * 4
    settings = {**GREEDY, **settings, "batch_size": 16}
    expected = translations(translator, lines, **settings)
    generate = Model.generate
    sizes: list[int] = []
    room = 5

    def with_little_memory(self, **arguments):
        sizes.append(len(arguments["input_ids"]))
        if sizes[-1] > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, **arguments)

    monkeypatch.setattr(Model, "generate", with_little_memory)
    assert translations(translator, lines, **settings) == expected
    assert [size for size in sizes if size > room][:2] == [16, 8]
    assert any("translating 4" in message for message in caplog.messages)
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        translations(translator, lines, **settings)


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_translations_keep_the_order_of_their_sentences(translator, tokenizer, batch_size):
    found = translations(translator, batch_size=batch_size, **GREEDY)
    assert found == [alone(translator.model, tokenizer, line, **GREEDY) for line in SENTENCES]
    assert len(set(found)) >= 4  # otherwise the order is not tested


@pytest.mark.parametrize(("batch_size", "ahead"), [(1, 1), (4, 4 * BATCHES_AHEAD)])
def test_endless_stream_is_read_a_fixed_number_ahead(translator, batch_size, ahead):
    read = []

    def stream():
        while True:
            read.append("seven")
            yield "seven"

    next(
        translator.translate(
            stream(),
            batch_size=batch_size,
            num_beams=1,
            max_new_tokens=2,
        )
    )
    assert len(read) == ahead


@pytest.mark.parametrize("budget", [1, 12, 60])
def test_translations_do_not_depend_on_max_tokens_per_batch(translator, monkeypatch, budget):
    lines = SENTENCES * 2
    expected = translations(translator, lines, **BEAMS)
    shapes = []
    original = translator.model.generate

    def generate(**arguments):
        shapes.append(arguments["input_ids"].shape)
        return original(**arguments)

    monkeypatch.setattr(translator.model, "generate", generate)
    assert (
        translations(
            translator,
            lines,
            max_tokens_per_batch=budget,
            **BEAMS,
        )
        == expected
    )
    assert all(rows == 1 or rows * longest <= budget for rows, longest in shapes)
    assert sum(rows for rows, _ in shapes) == sum(bool(line.strip()) for line in lines)


@pytest.mark.parametrize("n_best", [1, 2])
def test_parallel_searches_return_the_same_translations(model, tokenizer, monkeypatch, n_best):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 3)
    threads = torch.get_num_threads()
    searching = set()
    counts = set()
    two_search = threading.Event()
    settings = {**BEAMS, "batch_size": 4}
    lines = SENTENCES * 6
    expected = list(
        Translator(model, tokenizer, workers=1).translate_nbest(lines, n_best, **settings)
    )
    original = model.generate

    def generate(**arguments):
        searching.add(threading.current_thread())
        counts.add(torch.get_num_threads())
        if len(searching) > 1:
            two_search.set()
        assert two_search.wait(timeout=60)
        return original(**arguments)

    monkeypatch.setattr(model, "generate", generate)
    found = Translator(model, tokenizer, workers=3).translate_nbest(lines, n_best, **settings)
    assert_same_hypotheses(found, expected)
    assert counts == {max(1, threads // 3)}
    assert torch.get_num_threads() == threads


def test_error_in_one_search_stops_the_others(model, tokenizer, monkeypatch):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 1)
    threads = torch.get_num_threads()
    begun = threading.Barrier(2)
    original = Translator._search

    def search(self, models, sentences, batch_size, request, stop):
        begun.wait(timeout=60)
        if len(sentences) == 16:
            raise OSError("one of two")
        assert stop.wait(timeout=60)
        return original(self, models, sentences, batch_size, request, stop)

    monkeypatch.setattr(Translator, "_search", search)
    translator = Translator(model, tokenizer, workers=2)
    with pytest.raises(OSError, match="one of two"):
        translations(
            translator,
            ["seven"] * 31,
            batch_size=4,
            num_beams=1,
            max_new_tokens=2,
        )
    assert torch.get_num_threads() == threads


def test_workers_are_at_least_one(model, tokenizer):
    assert "workers" in error_of(Translator, model, tokenizer, workers=0)


def test_sentence_of_two_thousand_tokens_is_translated(translator, tokenizer):
    line = " ".join(["seven", "two hundred and one"] * 400)
    assert len(tokenizer(line)["input_ids"]) >= 2000
    first, long, last = translations(translator, ["seven", line, "seven"], **BEAMS)
    assert long == alone(translator.model, tokenizer, line, **BEAMS)
    assert first == last != long


@pytest.mark.parametrize("batch_size", [1, 64])
def test_n_best_equals_that_of_transformers(translator, tokenizer, batch_size):
    settings = {
        "num_beams": 4,
        "length_penalty": 1.3,
        "max_new_tokens": 7,
        "early_stopping": True,
    }
    found = list(
        translator.translate_nbest(
            SENTENCES,
            3,
            batch_size=batch_size,
            **settings,
        )
    )
    for line, hypotheses in zip(SENTENCES, found, strict=True):
        if not line.strip():
            assert hypotheses == [Hypothesis("", 0.0)]
            continue
        output = translator.model.generate(  # transformers' own loop, because of output_scores
            input_ids=torch.tensor([tokenizer(line)["input_ids"]]),
            num_return_sequences=3,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        texts = tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        expected = map(Hypothesis, texts, output.sequences_scores.tolist())
        assert_same_hypotheses([hypotheses], [list(expected)])
        assert hypotheses[0].alignment is None
    assert translations(translator, **settings) == [hypotheses[0].text for hypotheses in found]


def test_settings_of_transformers_search_are_supported(translator, tokenizer):
    settings = {
        "num_beams": 3,
        "max_new_tokens": 5,
        "length_penalty": 1.0,
        "early_stopping": True,
    }
    left = settings | {"use_cache": False}  # runs transformers' own search
    found = list(translator.translate_nbest(SENTENCES, 2, **left))
    assert_same_hypotheses(translator.translate_nbest(SENTENCES, 2, **settings), found)
    assert translations(translator, **left) == [hypotheses[0].text for hypotheses in found]
    ensemble = Translator(translator.model, tokenizer, ensemble=[translator.model])
    with pytest.raises(UserError, match="ensemble"):
        ensemble.translate(["seven"], **left)


PREFIXES = ["zw", "", "x", "leer", "  a b c ", "", "abc", ""]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_prefix_tokens_come_first_and_search_continues_them(translator, tokenizer, batch_size):
    found = translations(
        translator,
        prefixes=PREFIXES,
        batch_size=batch_size,
        num_beams=1,
        max_new_tokens=5,
    )
    for line, prefix, text in zip(SENTENCES, PREFIXES, found, strict=True):
        forced = tokenizer(prefix.strip(), add_special_tokens=False)["input_ids"] if prefix else []

        def allowed(_, tokens, forced=forced):
            position = len(tokens) - 1
            return [forced[position]] if position < len(forced) else list(range(len(tokenizer)))

        expected = alone(
            translator.model,
            tokenizer,
            line,
            num_beams=1,
            max_new_tokens=5 + len(forced),
            prefix_allowed_tokens_fn=allowed,
        )
        assert text == (expected if line.strip() else prefix)
        assert text.startswith(prefix.strip())


def test_prefix_longer_than_learned_positions_is_refused(tokenizer):
    translator = Translator(echo_model(tokenizer, **LEARNED_POSITIONS), tokenizer)
    translations(
        translator,
        ["seven"],
        prefixes=["a b c"],
        num_beams=1,
        min_new_tokens=14,
    )
    with pytest.raises(UserError, match="line 1: .*prefix.* 20 "):
        translations(translator, ["seven"], prefixes=["xq" * 9 + "x"])


def test_ensemble_equals_generate_with_several_models(model, tokenizer):
    other = echo_model(tokenizer, layer_norm_eps=0.1)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, dims=1))
    settings = {"num_beams": 2, "max_new_tokens": 6}
    found = translations(Translator(model, tokenizer, ensemble=[other]), **settings)
    together = with_ensemble([model, other])
    assert found == [alone(together, tokenizer, line, **settings) for line in SENTENCES]
    assert found != translations(Translator(model, tokenizer), **settings)


def test_blank_lines_do_not_reach_the_model(tokenizer):
    asked = []
    translator = Translator(echo_model(tokenizer), tokenizer)
    translator.model.get_encoder().register_forward_pre_hook(lambda *_: asked.append(True))
    assert translations(translator, ["", " ", "\t\u3000"]) == ["", "", ""]
    assert translations(translator, []) == []
    assert not asked
    assert translations(translator, ["seven"], max_new_tokens=1)
    assert asked


def recorded(translator, monkeypatch, **settings):
    """The generation config with which transformers' `generate` starts."""
    calls = []
    original = Model._prepare_generated_length

    def prepare(self, generation_config, *arguments, **kwargs):
        calls.append(generation_config)
        return original(self, generation_config, *arguments, **kwargs)

    monkeypatch.setattr(Model, "_prepare_generated_length", prepare)
    translations(translator, ["seven"], **settings)
    return calls[0]


def assert_has(found, **expected):
    assert {name: found.get(name) for name in expected} == expected


def test_settings_default_to_the_checkpoints(model, tokenizer, monkeypatch):
    config = GenerationConfig.from_dict(model.generation_config.to_dict())
    config.update(
        num_beams=3,
        length_penalty=0.3,
        max_length_over_source=40,
    )
    monkeypatch.setattr(model, "generation_config", config)
    translator = Translator(model, tokenizer)
    source_length = len(tokenizer("seven")["input_ids"])
    assert_has(
        vars(recorded(translator, monkeypatch)),
        num_beams=3,
        length_penalty=0.3,
        max_length=1 + source_length + 40,  # the start token, and §6.1,
    )
    settings = {
        "num_beams": 2,
        "length_penalty": 1.5,
        "max_new_tokens": 5,
        "min_new_tokens": 3,
    }
    assert_has(vars(recorded(translator, monkeypatch, **settings)), **settings)
    assert_has(
        translator.describe(batch_size=7, num_beams=2),
        num_beams=2,
        length_penalty=0.3,
        batch_size=7,
        max_new_tokens="source + 40",
        dtype="float32",
    )


@pytest.mark.usefixtures("limit_of_the_package")
def test_learned_positions_limit_translation_and_source(tokenizer, monkeypatch):
    model = echo_model(tokenizer, **LEARNED_POSITIONS)
    translator = Translator(model, tokenizer)
    assert recorded(translator, monkeypatch, num_beams=1).max_new_tokens == 20
    with monkeypatch.context() as patch:
        patch.setattr(model.generation_config, "max_length_over_source", 3)
        longest = len(tokenizer("seven")["input_ids"]) + 3
        assert recorded(translator, patch, num_beams=1).max_new_tokens == longest
    translations(
        translator,
        ["seven"],
        num_beams=1,
        min_new_tokens=20,
    )  # to the last position and not beyond
    with pytest.raises(UserError, match="line 2: .* 20"):
        translations(translator, ["seven", "seven " * 30])


@pytest.mark.parametrize(
    ("sentences", "settings", "message"),
    [
        ("seven", {}, "sentences|string"),
        (["seven"], {"batch_size": 0}, "batch_size"),
        (["seven"], {"num_beams": -1}, "num_beams"),
        (["seven"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["seven"], {"max_tokens_per_batch": 0}, "max_tokens_per_batch"),
        (["seven"], {"num_return_sequences": 2}, "n_best"),
        (["seven"], {"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        (["seven"], {"repetition_penalty": 0.0}, "repetition_penalty"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(translator, sentences, settings, message):
    with pytest.raises(UserError, match=message):
        translator.translate(sentences, **settings)


def test_items_other_than_strings_are_refused(translator):
    assert "line 2 is 3 (int)" in error_of(translations, translator, ["seven", 3])


def test_folder_with_two_tokenizers_uses_the_targets(tmp_path, tokenizer):
    target = train_tokenizer(["zweihundert eins", "sieben", "eine Million"] * 3, 290)
    model = echo_model(
        target,
        vocab_size=len(tokenizer),
        decoder_vocab_size=len(target),
        share_encoder_decoder_embeddings=False,
    )
    with torch.no_grad():
        model.lm_head.bias[4:260] = -1e4  # single bytes, which the two tokenizers have in common
    model.save_pretrained(tmp_path)
    save_tokenizers(tmp_path, tokenizer, target)
    translator = Translator.from_pretrained(tmp_path, device="cpu")
    ids = torch.tensor([tokenizer("seven")["input_ids"]])
    (tokens,) = model.generate(input_ids=ids, max_new_tokens=6)
    right, wrong = (each.decode(tokens, skip_special_tokens=True) for each in (target, tokenizer))
    assert translations(translator, ["seven"], max_new_tokens=6) == [right]
    assert right != wrong


# Loading


def test_loaded_model_translates_like_the_saved_one(folder, translator):
    loaded = Translator.from_pretrained(folder, device="cpu")
    assert loaded.model.generation_config.num_beams == 4  # the paper's, §6.1
    assert translations(loaded, max_new_tokens=6) == translations(translator, max_new_tokens=6)
    assert Translator.from_pretrained(folder, dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("machine", "has_compiler", "has_bfloat16", "expected"),
    [
        ("x86_64", True, True, "int8"),
        ("x86_64", True, False, "int8"),
        ("x86_64", False, True, "bfloat16"),
        ("x86_64", False, False, "float32"),
        ("aarch64", True, True, "bfloat16"),
        ("aarch64", True, False, "float32"),
    ],
)
def test_fastest_dtype_follows_the_processor(
    machine, has_compiler, has_bfloat16, expected, folder, monkeypatch
):
    monkeypatch.setattr(c_kernels, "library", lambda: object() if has_compiler else None)
    monkeypatch.setattr(kernels, "has_fast_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(linear.platform, "machine", lambda: machine)
    assert dtypes.fastest_dtype(load_model(folder, "cpu", "float32")) == expected


def test_fastest_dtype_is_that_of_the_model(folder):
    model = load_model(folder, "cpu", "fastest")
    chosen = dtypes.fastest_dtype(load_model(folder, "cpu", "float32"))
    engine = getattr(model, "inference_engine", None)
    found = getattr(engine, "quantization", None) or str(model.dtype).removeprefix("torch.")
    assert found == chosen
    assert model.dtype == dtypes.torch_dtype(chosen)


def test_int8_is_a_dtype_of_the_decoder(folder):
    int8 = Translator.from_pretrained(
        folder,
        device="cpu",
        dtype="int8",
        ensemble=[folder],
    )
    dtype = int8.model.dtype
    assert int8.model.inference_engine.quantization == "int8"
    assert int8.describe()["dtype"] == f"{str(dtype).removeprefix('torch.')}, products in int8"
    plain = Translator.from_pretrained(folder, device="cpu", dtype=dtype)
    found, full = (
        [best.score for (best,) in each.translate_nbest(SENTENCES, 1, max_new_tokens=6)]
        for each in (int8, plain)
    )
    assert found != full
    assert found == pytest.approx(full, abs=0.2)


def test_ensemble_members_must_share_a_tokenizer(folder, tmp_path):
    found = Translator.from_pretrained(folder, device="cpu", ensemble=[folder])
    assert len(found.models) == 2
    save_tokenizers(tmp_path, train_tokenizer(["another text"] * 3, 290))
    assert "tokenizer" in error_of(
        Translator.from_pretrained,
        folder,
        device="cpu",
        ensemble=[tmp_path],
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cuda:99"}, "device: 'cuda:99'.* cpu"),
        ({"device": "gpu"}, "device: 'gpu'"),
        ({"device": "meta"}, "device: 'meta'"),
        ({"dtype": "float8"}, "dtype: 'float8' .*float32, bfloat16, float16, int8, fastest"),
    ],
)
def test_unknown_devices_and_dtypes_are_refused(folder, options, message):
    with pytest.raises(UserError, match=message):
        Translator.from_pretrained(folder, **options)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json"),
        ("config.json", "{", "config.json"),
        ("config.json", '{"model_type": "bert"}', "model"),
        ("model.safetensors", "cut", "model"),
        ("tokenizer.json", None, "tokenizer"),
    ],
)
def test_damaged_folder_is_refused_in_one_line(folder, tmp_path, name, content, message):
    """A file is deleted, or has another content."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    assert message in error_of(Translator.from_pretrained, tmp_path, device="cpu")


@pytest.mark.parametrize("members", [0, 1], ids=["alone", "ensemble"])
def test_hash_of_a_translator_survives_its_use(model, tokenizer, members):
    """`datasets` names the cached results of `map` by it."""
    ensemble = [echo_model(tokenizer) for _ in range(members)]
    translator = Translator(deoptimize(model), tokenizer, ensemble=ensemble)
    before = Hasher.hash(translator)
    for _ in range(2):
        translations(translator)
        assert Hasher.hash(translator) == before
    assert model.inference_engine is not None
    assert Hasher.hash(Translator(echo_model(tokenizer, dropout=0.3), tokenizer)) != before


def test_repetition_is_limited(translator):
    found = translator.translate_nbest(
        ["seven", "two hundred"],
        no_repeat_ngram_size=1,
        probabilities=True,
        num_beams=2,
    )
    for translation in found:
        tokens = translation[0].tokens
        assert len(set(tokens)) == len(tokens)


def test_repetition_is_named(model, tokenizer, caplog):
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.bias.zero_()
        model.lm_head.bias[model.config.eos_token_id] = -1e4
    endless = Translator(model, tokenizer)
    translations(
        endless,
        ["seven", ""],
        first_line=5,
        num_beams=1,
    )
    (message,) = caplog.messages
    assert "line 5" in message
    translations(endless, ["seven", "two hundred"], max_new_tokens=2)
    assert caplog.messages == [message]


def test_tokens_show_letters_of_every_script():
    tokenizer = train_tokenizer(["für Größe мир 世界"] * 9, 400)
    ids = tokenizer("für Größe мир 世界\n世")["input_ids"]
    tokens = readable_tokens(tokenizer, ids)
    assert tokens[:4] == ["Ġfür", "ĠGröße", "Ġмир", "Ġ世界"]
    assert tokens[-1] == "</s>"
    assert len(tokens) == len(ids)
    assert all(token.isprintable() and "\ufffd" not in token for token in tokens)


def test_n_best_lists_have_no_text_twice():
    same = [Hypothesis("a", 0.1), Hypothesis("b", 0.0), Hypothesis("a", -1.0)]
    translator = SimpleNamespace(translate_nbest=lambda *_, **__: iter([same]))
    lines = list(translated_lines(translator, ["x"], n_best=3, num_beams=3))
    assert lines == ["0 ||| a ||| 0.1000", "0 ||| b ||| 0.0000"]
