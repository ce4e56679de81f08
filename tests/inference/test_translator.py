"""Order, blank lines, lookahead, settings and loading of `Translator`, with a tiny random model."""

import copy
import threading
from types import SimpleNamespace

import pytest
import torch
from datasets.fingerprint import Hasher
from transformers import GenerationConfig

from hf_vanilla_transformer import Translator
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

SENTENCES = ["two hundred and one", "", "seven", "   ", "one million three hundred thousand", "seven", "é 中 𐍈", ""]


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(SENTENCES * 3, 290)


@pytest.fixture(scope="module")
def model(tokenizer):
    return echo_model(tokenizer)


@pytest.fixture
def translator(model, tokenizer):
    return Translator(model, tokenizer)


def alone(model, tokenizer, sentence, **settings):
    """The result of `generate` for one sentence, without batching."""
    ids = torch.tensor([tokenizer(sentence)["input_ids"]])
    return tokenizer.decode(model.generate(input_ids=ids, **settings)[0], skip_special_tokens=True)


@pytest.mark.parametrize("settings", [{}, {"output_scores": True}], ids=["refilled", "transformers' loop"])
def test_batch_without_memory_is_halved(translator, settings, monkeypatch, caplog):
    lines = [line for line in SENTENCES if line.strip()] * 4
    settings = {"num_beams": 1, "max_new_tokens": 8, "batch_size": 16, **settings}
    expected = list(translator.translate(lines, **settings))
    generate, sizes = type(translator.model).generate, []

    def with_memory_for_five(self, **arguments):
        sizes.append(len(arguments["input_ids"]))
        if sizes[-1] > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return generate(self, **arguments)

    monkeypatch.setattr(type(translator.model), "generate", with_memory_for_five)
    assert list(translator.translate(lines, **settings)) == expected
    assert [size for size in sizes if size > 5][:2] == [16, 8]
    assert any("translating 4" in record.getMessage() for record in caplog.records)
    monkeypatch.setattr(type(translator.model), "generate", lambda *_, **__: with_memory_for_none())
    with pytest.raises(torch.OutOfMemoryError):
        list(translator.translate(lines, **settings))


def with_memory_for_none():
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_translations_keep_the_order_of_their_sentences(translator, batch_size):
    expected = [
        alone(translator.model, translator.source_tokenizer, line, num_beams=1, max_new_tokens=8)
        if line.strip()
        else ""
        for line in SENTENCES
    ]
    found = list(translator.translate(SENTENCES, batch_size=batch_size, num_beams=1, max_new_tokens=8))
    assert found == expected
    assert len(set(found)) >= 4  # otherwise the order is not tested


@pytest.mark.parametrize(("batch_size", "ahead"), [(1, 1), (4, 4 * BATCHES_AHEAD)])
def test_endless_stream_is_read_a_fixed_number_ahead(translator, batch_size, ahead):
    read = []

    def stream():
        while True:
            read.append("seven")
            yield "seven"

    next(translator.translate(stream(), batch_size=batch_size, num_beams=1, max_new_tokens=2))
    assert len(read) == ahead


@pytest.mark.parametrize("budget", [1, 12, 60])
def test_translations_do_not_depend_on_max_tokens_per_batch(translator, monkeypatch, budget):
    settings = {"num_beams": 2, "max_new_tokens": 8}
    expected = list(translator.translate(SENTENCES * 2, **settings))
    shapes = []
    original = translator.model.generate
    monkeypatch.setattr(
        translator.model, "generate", lambda **all: shapes.append(all["input_ids"].shape) or original(**all)
    )
    assert list(translator.translate(SENTENCES * 2, max_tokens_per_batch=budget, **settings)) == expected
    assert all(rows == 1 or rows * longest <= budget for rows, longest in shapes)
    assert sum(rows for rows, _ in shapes) == 2 * sum(bool(line.strip()) for line in SENTENCES)


@pytest.mark.parametrize("n_best", [1, 2])
def test_parallel_searches_return_the_same_translations(translator, model, tokenizer, monkeypatch, n_best):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 3)
    threads, searching, counts = torch.get_num_threads(), set(), set()
    two_search = threading.Event()
    settings = {"num_beams": 2, "max_new_tokens": 8, "batch_size": 4}
    lines = SENTENCES * 6
    expected = list(Translator(model, tokenizer, workers=1).translate_nbest(lines, n_best, **settings))
    parallel = Translator(model, tokenizer, workers=3)
    original = model.generate

    def generate(**arguments):
        searching.add(threading.current_thread())
        counts.add(torch.get_num_threads())
        if len(searching) > 1:
            two_search.set()
        assert two_search.wait(timeout=60)
        return original(**arguments)

    monkeypatch.setattr(model, "generate", generate)
    found = list(parallel.translate_nbest(lines, n_best, **settings))
    assert [[one.text for one in each] for each in found] == [[one.text for one in each] for each in expected]
    assert counts == {max(1, threads // 3)}
    assert torch.get_num_threads() == threads


def test_error_in_one_search_stops_the_others(model, tokenizer, monkeypatch):
    monkeypatch.setattr(workers, "MIN_SENTENCES", 1)
    threads, begun = torch.get_num_threads(), threading.Barrier(2)
    original = Translator._search

    def search(self, models, sentences, batch_size, request, stop):
        begun.wait(timeout=60)
        if len(sentences) == 16:
            raise OSError("one of two")
        assert stop.wait(timeout=60)
        return original(self, models, sentences, batch_size, request, stop)

    monkeypatch.setattr(Translator, "_search", search)
    lines = ["seven"] * 31
    with pytest.raises(OSError, match="one of two"):
        list(Translator(model, tokenizer, workers=2).translate(lines, batch_size=4, num_beams=1, max_new_tokens=2))
    assert torch.get_num_threads() == threads


def test_workers_default_to_torch_threads(model, tokenizer):
    assert "workers" in error_of(Translator, model, tokenizer, workers=0)
    assert workers.worker_count(model) == min(8, torch.get_num_threads())
    with torch.autocast("cpu"):
        assert workers.worker_count(model) == 1


def test_sentence_of_two_thousand_tokens_is_translated(translator):
    line = " ".join(["seven", "two hundred and one"] * 400)
    assert len(translator.source_tokenizer(line)["input_ids"]) >= 2000
    first, long, last = translator.translate(["seven", line, "seven"], num_beams=2, max_new_tokens=8)
    assert long == alone(translator.model, translator.source_tokenizer, line, num_beams=2, max_new_tokens=8)
    assert first == last != long


@pytest.mark.parametrize("batch_size", [1, 64])
def test_n_best_equals_that_of_transformers(translator, batch_size):
    settings = {"num_beams": 4, "length_penalty": 1.3, "max_new_tokens": 7, "early_stopping": True}
    found = list(translator.translate_nbest(SENTENCES, 3, batch_size=batch_size, **settings))
    for line, hypotheses in zip(SENTENCES, found, strict=True):
        if not line.strip():
            assert hypotheses == [Hypothesis("", 0.0)]
            continue
        output = translator.model.generate(  # transformers' own loop, because of output_scores
            input_ids=torch.tensor([translator.source_tokenizer(line)["input_ids"]]),
            num_return_sequences=3,
            return_dict_in_generate=True,
            output_scores=True,
            **settings,
        )
        texts = translator.source_tokenizer.batch_decode(output.sequences, skip_special_tokens=True)
        assert [one.text for one in hypotheses] == texts
        assert [one.score for one in hypotheses] == pytest.approx(output.sequences_scores.tolist(), abs=1e-5)
        assert hypotheses[0].alignment is None
    best = [hypotheses[0].text for hypotheses in found]
    assert best == list(translator.translate(SENTENCES, **settings))


def test_settings_of_transformers_search_are_supported(translator, tokenizer):
    settings = {"num_beams": 3, "max_new_tokens": 5, "length_penalty": 1.0, "early_stopping": True}
    left = settings | {"use_cache": False}  # runs transformers' own search
    found = list(translator.translate_nbest(SENTENCES, 2, **left))
    for mine, theirs in zip(translator.translate_nbest(SENTENCES, 2, **settings), found, strict=True):
        assert [one.text for one in mine] == [one.text for one in theirs]
        assert [one.score for one in mine] == pytest.approx([one.score for one in theirs], abs=1e-5)
    assert list(translator.translate(SENTENCES, **left)) == [hypotheses[0].text for hypotheses in found]
    with pytest.raises(UserError, match="ensemble"):
        Translator(translator.model, tokenizer, ensemble=[translator.model]).translate(["seven"], **left)


PREFIXES = ["zw", "", "x", "leer", "  a b c ", "", "abc", ""]


@pytest.mark.parametrize("batch_size", [1, 64])
def test_prefix_tokens_come_first_and_search_continues_them(translator, batch_size):
    tokenizer = translator.target_tokenizer
    found = list(
        translator.translate(SENTENCES, prefixes=PREFIXES, batch_size=batch_size, num_beams=1, max_new_tokens=5)
    )
    for line, prefix, text in zip(SENTENCES, PREFIXES, found, strict=True):
        if not line.strip():
            assert text == prefix
            continue
        forced = tokenizer(prefix.strip(), add_special_tokens=False)["input_ids"] if prefix else []
        free = list(range(len(tokenizer)))

        def allowed(_, tokens, forced=forced, free=free):
            return [forced[len(tokens) - 1]] if len(tokens) <= len(forced) else free

        ids = torch.tensor([tokenizer(line)["input_ids"]])
        output = translator.model.generate(
            input_ids=ids, num_beams=1, max_new_tokens=5 + len(forced), prefix_allowed_tokens_fn=allowed
        )
        assert text == tokenizer.decode(output[0], skip_special_tokens=True)
        assert text.startswith(prefix.strip())


def test_prefix_longer_than_learned_positions_is_refused(tokenizer):
    model = echo_model(tokenizer, position_encoding_type="learned", max_position_embeddings=20)
    translator = Translator(model, tokenizer)
    list(translator.translate(["seven"], prefixes=["a b c"], num_beams=1, min_new_tokens=14))
    with pytest.raises(UserError, match="line 1: .*prefix.* 20 "):
        list(translator.translate(["seven"], prefixes=["xq" * 9 + "x"]))


def test_ensemble_equals_generate_with_several_models(model, tokenizer):
    other = echo_model(tokenizer, layer_norm_eps=0.1)
    with torch.no_grad():
        other.lm_head.weight.copy_(other.lm_head.weight.roll(1, dims=1))
    translator = Translator(model, tokenizer, ensemble=[other])
    settings = {"num_beams": 2, "max_new_tokens": 6}
    found = list(translator.translate(SENTENCES, **settings))
    together = with_ensemble([model, other])
    assert found == [alone(together, tokenizer, line, **settings) if line.strip() else "" for line in SENTENCES]
    assert found != list(Translator(model, tokenizer).translate(SENTENCES, **settings))


def test_blank_lines_do_not_reach_the_model(tokenizer):
    asked = []
    translator = Translator(echo_model(tokenizer), tokenizer)
    translator.model.get_encoder().register_forward_pre_hook(lambda *_: asked.append(True))
    assert list(translator.translate(["", " ", "\t\u3000"])) == ["", "", ""]
    assert list(translator.translate([])) == []
    assert not asked
    assert list(translator.translate(["seven"], max_new_tokens=1)) and asked


def recorded(translator, monkeypatch, **settings):
    """The generation config with which transformers' `generate` starts."""
    calls = []

    def prepare(self, generation_config, *arguments, **kwargs):
        calls.append(generation_config)
        return original(self, generation_config, *arguments, **kwargs)

    original = type(translator.model)._prepare_generated_length
    monkeypatch.setattr(type(translator.model), "_prepare_generated_length", prepare)
    list(translator.translate(["seven"], **settings))
    return calls[0]


def test_settings_default_to_the_checkpoints(model, tokenizer, monkeypatch):
    monkeypatch.setattr(model, "generation_config", GenerationConfig.from_dict(model.generation_config.to_dict()))
    model.generation_config.update(num_beams=3, length_penalty=0.3, max_length_over_source=40)
    translator = Translator(model, tokenizer)
    found = recorded(translator, monkeypatch)
    source_length = len(tokenizer("seven")["input_ids"])
    assert (found.num_beams, found.length_penalty) == (3, 0.3)
    assert found.max_length == 1 + source_length + 40  # the start token, and §6.1
    found = recorded(translator, monkeypatch, num_beams=2, length_penalty=1.5, max_new_tokens=5, min_new_tokens=3)
    assert (found.num_beams, found.length_penalty, found.max_new_tokens, found.min_new_tokens) == (2, 1.5, 5, 3)
    described = translator.describe(batch_size=7, num_beams=2)
    assert described["num_beams"] == 2 and described["length_penalty"] == 0.3 and described["batch_size"] == 7
    assert described["max_new_tokens"] == "source + 40" and described["dtype"] == "float32"


@pytest.mark.usefixtures("limit_of_the_package")
def test_learned_positions_limit_translation_and_source(tokenizer, monkeypatch):
    model = echo_model(tokenizer, position_encoding_type="learned", max_position_embeddings=20)
    translator = Translator(model, tokenizer)
    assert recorded(translator, monkeypatch, num_beams=1).max_new_tokens == 20
    with monkeypatch.context() as patch:
        patch.setattr(model.generation_config, "max_length_over_source", 3)
        longest = len(tokenizer("seven")["input_ids"]) + 3
        assert recorded(translator, patch, num_beams=1).max_new_tokens == longest
    list(translator.translate(["seven"], num_beams=1, min_new_tokens=20))  # to the last position and not beyond
    with pytest.raises(UserError, match="line 2: .* 20"):
        list(translator.translate(["seven", "seven " * 30]))


@pytest.mark.parametrize(
    ("sentences", "settings", "message"),
    [
        ("seven", {}, "sentences|string"),
        (["seven"], {"batch_size": 0}, "batch_size"),
        (["seven"], {"num_beams": -1}, "num_beams"),
        (["seven"], {"max_new_tokens": 0}, "max_new_tokens"),
        (["seven"], {"max_tokens_per_batch": 0}, "max_tokens_per_batch"),
        (["seven"], {"num_return_sequences": 2}, "n_best"),
    ],
)
def test_arguments_are_checked_before_anything_is_read(translator, sentences, settings, message):
    with pytest.raises(UserError, match=message):
        translator.translate(sentences, **settings)


def test_items_other_than_strings_are_refused(translator):
    assert "line 2 is 3 (int)" in error_of(lambda: list(translator.translate(["seven", 3])))


def test_folder_with_two_tokenizers_uses_the_targets(tmp_path, tokenizer):
    target = train_tokenizer(["zweihundert eins", "sieben", "eine Million"] * 3, 290)
    model = echo_model(
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


def test_loaded_model_translates_like_the_saved_one(folder, translator):
    loaded = Translator.from_pretrained(folder, device="cpu")
    assert loaded.model.generation_config.num_beams == 4  # the paper's, §6.1
    expected = list(translator.translate(SENTENCES, max_new_tokens=6))
    assert list(loaded.translate(SENTENCES, max_new_tokens=6)) == expected
    assert Translator.from_pretrained(folder, dtype="bfloat16").model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("has_compiler", "has_bfloat16", "expected"),
    [(True, True, "int8"), (True, False, "int8"), (False, True, "bfloat16"), (False, False, "float32")],
)
def test_fastest_dtype_follows_the_processor(has_compiler, has_bfloat16, expected, folder, monkeypatch):
    monkeypatch.setattr(c_kernels, "library", lambda: object() if has_compiler else None)
    monkeypatch.setattr(kernels, "has_fast_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(linear.platform, "machine", lambda: "x86_64")
    assert dtypes.fastest_dtype(load_model(folder, "cpu", "float32")) == expected
    monkeypatch.setattr(linear.platform, "machine", lambda: "aarch64")
    assert dtypes.fastest_dtype(load_model(folder, "cpu", "float32")) == ("bfloat16" if has_bfloat16 else "float32")


def test_fastest_dtype_is_that_of_the_model(folder):
    model = load_model(folder, "cpu", "fastest")
    chosen = dtypes.fastest_dtype(load_model(folder, "cpu", "float32"))
    engine = getattr(model, "inference_engine", None)
    assert (getattr(engine, "quantization", None) or str(model.dtype).removeprefix("torch.")) == chosen
    assert model.dtype == dtypes.torch_dtype(chosen)


def test_int8_is_a_dtype_of_the_decoder(folder):
    found = Translator.from_pretrained(folder, device="cpu", dtype="int8", ensemble=[folder])
    assert found.model.inference_engine.quantization == "int8"
    assert found.describe()["dtype"] == f"{str(found.model.dtype).removeprefix('torch.')}, products in int8"
    plain = Translator.from_pretrained(folder, device="cpu", dtype=found.model.dtype)
    int8, full = (
        [one.score for found_ in each.translate_nbest(SENTENCES, 1, max_new_tokens=6) for one in found_]
        for each in (found, plain)
    )
    assert int8 != full and int8 == pytest.approx(full, abs=0.2)


def test_ensemble_members_must_share_a_tokenizer(folder, tmp_path, tokenizer):
    found = Translator.from_pretrained(folder, device="cpu", ensemble=[folder])
    assert len(found.models) == 2
    save_tokenizers(tmp_path, train_tokenizer(["another text"] * 3, 290))
    assert "tokenizer" in error_of(Translator.from_pretrained, folder, device="cpu", ensemble=[tmp_path])


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


def broken(name, content):
    """Replace the content of a file, or delete it."""
    return lambda folder: (folder / name).unlink() if content is None else (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (broken("config.json", None), "config.json"),
        (broken("config.json", "{"), "config.json"),
        (broken("config.json", '{"model_type": "bert"}'), "model"),
        (broken("model.safetensors", "cut"), "model"),
        (broken("tokenizer.json", None), "tokenizer"),
    ],
)
def test_damaged_folder_is_refused_in_one_line(folder, tmp_path, damage, message):
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    damage(tmp_path)
    with pytest.raises(UserError, match=message) as error:
        Translator.from_pretrained(tmp_path, device="cpu")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ensemble", [False, True])
def test_hash_of_a_translator_survives_its_use(model, tokenizer, ensemble):
    """`datasets` names the cached results of `map` by it."""
    translator = Translator(deoptimize(model), tokenizer, ensemble=[echo_model(tokenizer)] if ensemble else [])
    hashes = [Hasher.hash(translator)]
    for _ in range(2):
        list(translator.translate(SENTENCES))
        hashes.append(Hasher.hash(translator))
    assert len(set(hashes)) == 1 and model.inference_engine is not None
    assert Hasher.hash(Translator(echo_model(tokenizer, dropout=0.3), tokenizer)) != hashes[0]


def test_repetition_is_limited_or_named(translator, caplog):
    lines = ["seven", "two hundred"]
    for translation in translator.translate_nbest(lines, no_repeat_ngram_size=1, probabilities=True, num_beams=2):
        assert len(set(translation[0].tokens)) == len(translation[0].tokens)
    for name, value in (("no_repeat_ngram_size", -1), ("repetition_penalty", 0.0)):
        with pytest.raises(UserError, match=name):
            translator.translate(lines, **{name: value})
    caplog.clear()
    model = copy.deepcopy(translator.model)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.config.vocab_size))
        model.lm_head.bias[model.config.eos_token_id] = -1e4
    endless = Translator(model, translator.source_tokenizer)
    list(endless.translate(["seven", ""], first_line=5, num_beams=1))
    assert ["line 5" in message for message in caplog.messages] == [True]
    list(endless.translate(lines, max_new_tokens=2))
    assert len(caplog.messages) == 1


def test_tokens_show_letters_of_every_script(tokenizer):
    trained = train_tokenizer(["für Größe мир 世界"] * 9, 400)
    ids = trained("für Größe мир 世界\n世")["input_ids"]
    tokens = readable_tokens(trained, ids)
    assert tokens[:4] == ["Ġfür", "ĠGröße", "Ġмир", "Ġ世界"] and tokens[-1] == "</s>"
    assert len(tokens) == len(ids) and all(token.isprintable() and "\ufffd" not in token for token in tokens)


def test_n_best_lists_have_no_text_twice():
    same = [[Hypothesis("a", 0.1), Hypothesis("b", 0.0), Hypothesis("a", -1.0)]]
    translator = SimpleNamespace(translate_nbest=lambda *_, **__: iter(same))
    lines = list(translated_lines(translator, ["x"], n_best=3, num_beams=3))
    assert lines == ["0 ||| a ||| 0.1000", "0 ||| b ||| 0.0000"]
