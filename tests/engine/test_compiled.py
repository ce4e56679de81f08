"""Compiled decoding of one sentence at a time: the compiled graphs, and the same results as from the modules."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer.engine import optimize
from hf_vanilla_transformer.engine.compiled import CompiledModule, CompiledWeights, compile_error
from hf_vanilla_transformer.engine.linear import int8_error
from hf_vanilla_transformer.engine.packed_decoder import PackedDecoder
from hf_vanilla_transformer.engine.packed_weights import PackedWeights
from hf_vanilla_transformer.inference import optimize_for_inference
from tests.engine.model_changes import resident_bytes
from tests.model_helpers import EOS, PAD, START, padded, sentences, slow, tiny_model

Model = VanillaTransformerForConditionalGeneration
CPU = torch.device("cpu")

# Sources of few tokens and of many, of one token alone too. Translations that outgrow theirs.
LENGTHS, NEW_TOKENS = [7, 1, 3, 30, 18, 16, 40], 40


def endless_model(**fields: Any) -> Model:
    """A model whose sentences do not end by themselves: a tiny model's ends hang by a hair."""
    layers = {"encoder_layers": 1, "decoder_layers": 1} | fields
    model = tiny_model(2, tie_word_embeddings=False, lm_head_bias=True, **layers)
    with torch.no_grad():
        model.lm_head.bias[[PAD, START, EOS]] = -1e4
    return model


def translate(model: Model, length: int, **settings: Any) -> tuple[list[int], float]:
    """Tokens, and the score that a beam search gives them."""
    settings = {"max_new_tokens": NEW_TOKENS, "return_dict_in_generate": True} | settings
    found = model.generate(padded(sentences([length])), **settings)
    return found.sequences[0].tolist(), float(found.sequences_scores) if "sequences_scores" in found else 0.0


def assert_same(compiled: Model, plain: Model, lengths: list[int], **settings: Any) -> None:
    for length in lengths:
        (tokens, score), (expected, its_score) = (translate(each, length, **settings) for each in (compiled, plain))
        assert tokens == expected
        assert score == pytest.approx(its_score, rel=1e-4)


@pytest.mark.parametrize(("beams", "fields"), [(1, {}), (4, {"decoder_layers": 2, "layer_norm_position": "pre"})])
def test_other_lengths_and_penalties_compile_nothing_new(beams, fields, compilations):
    plain, model = endless_model(**fields), optimize_for_inference(endless_model(**fields), compile=True)
    assert not compilations, "nothing is compiled before the first sentence"
    assert_same(model, plain, LENGTHS, num_beams=beams)
    assert sorted(compilations) == ["_encode", "step"]
    for settings in ({"paper_length_penalty": 0.9}, {"paper_length_penalty": 0.2}, {"max_new_tokens": 11}):
        assert_same(model, plain, [5, 20], num_beams=beams, **settings)
    assert len(compilations) == 2


@pytest.mark.parametrize("beams", [*slow(1), 4])
def test_prefixes_and_processors_share_one_step(beams: int, compilations: list[str]) -> None:
    plain, model = endless_model(), optimize_for_inference(endless_model(), compile=True)
    for prefix in ([START, 9], [START, 9, 12], [START, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19]):
        given = {"decoder_input_ids": torch.tensor([prefix]), "num_beams": beams}
        assert_same(model, plain, [5, 20], **given)
        assert_same(model, plain, [5, 20], **given, no_repeat_ngram_size=2)
        assert_same(model, plain, [5], **given, min_new_tokens=9, suppress_tokens=[5])
    # the step with the search's part, and that up to the logits
    assert sorted(compilations) == ["_encode", "step", "step"]


def test_other_searches_compile_another_step(compilations: list[str]) -> None:
    model, plain = optimize_for_inference(endless_model(), compile=True), endless_model()
    early = {"num_beams": 2, "early_stopping": True}
    searches: list[dict[str, Any]] = [{"num_beams": 1}, {"num_beams": 2}, early, {"num_beams": 4}, {"num_beams": 2}]
    for count, settings in enumerate(searches, 2):
        assert_same(model, plain, [5], **settings)
        assert len(compilations) == min(count, 5)


def test_other_numbers_of_threads_compile_again(compilations: list[str]) -> None:
    model, threads = optimize_for_inference(endless_model(), compile=True), torch.get_num_threads()
    translate(model, 5)
    try:
        torch.set_num_threads(threads + 1)
        translate(model, 5)
    finally:
        torch.set_num_threads(threads)
    translate(model, 5)
    assert len(compilations) == 4


@pytest.mark.parametrize("first", [torch.int32, torch.int64])
def test_source_ids_of_either_dtype_share_a_compilation(first: torch.dtype, compilations: list[str]) -> None:
    model, expected = optimize_for_inference(endless_model(), compile=True), translate(endless_model(), 9)
    ids = padded(sentences([9]))
    for dtype in (first, torch.int64, torch.int32):
        found = model.generate(ids.to(dtype), max_new_tokens=NEW_TOKENS, return_dict_in_generate=True)
        assert found.sequences[0].tolist() == expected[0]
        assert float(found.sequences_scores) == pytest.approx(expected[1], rel=1e-4)
    assert compilations.count("_encode") == 1


def test_tensors_of_another_dtype_are_another_compilation(compilations: list[str]) -> None:
    def doubled(module: torch.nn.Module, tensors: list[Tensor]) -> Tensor:
        return module(tensors[0]) * 2

    module, ids = CompiledModule(torch.nn.Identity, doubled, [(0, "N")]), torch.arange(5)
    for dtype in (torch.int32, torch.int64, torch.int32, torch.float32):
        assert module([ids.to(dtype)]).tolist() == [0, 2, 4, 6, 8]
    assert compilations == ["doubled"] * 3


def test_default_dtype_does_not_change_what_is_compiled(compilations: list[str]) -> None:
    model, before = optimize_for_inference(endless_model(), compile=True), torch.get_default_dtype()
    expected = translate(model, 9, num_beams=3)
    try:
        torch.set_default_dtype(torch.bfloat16)
        assert translate(model, 9, num_beams=3) == expected
    finally:
        torch.set_default_dtype(before)
    assert len(compilations) == 2


@pytest.mark.parametrize("beams", [1, 3])
def test_masked_tokens_inside_a_sentence_are_left_out(beams: int, compilations: list[str]) -> None:
    plain, model = endless_model(), optimize_for_inference(endless_model(), compile=True)
    ids, mask = padded(sentences([7])), torch.tensor([[0, 1, 1, 0, 1, 1, 0]])
    settings = {"attention_mask": mask, "max_new_tokens": 9, "num_beams": beams}
    assert model.generate(ids, **settings).equal(plain.generate(ids, **settings))


def test_batches_and_masked_sources_are_not_compiled(compilations: list[str], decoders: list[type]) -> None:
    plain, model = endless_model(), optimize_for_inference(endless_model(), compile=True)
    ids = padded(sentences([5, 9]))
    assert model.generate(ids, max_new_tokens=9).equal(plain.generate(ids, max_new_tokens=9))
    nothing = {"attention_mask": torch.zeros(1, 9, dtype=torch.long), "max_new_tokens": 9}
    assert model.generate(ids[1:], **nothing).shape == (1, 10)
    assert decoders[::2] == [PackedDecoder, PackedDecoder]
    assert not compilations


def test_one_sentence_joins_a_batch_that_is_not_compiled(compilations: list[str]) -> None:
    plain, model = endless_model(), optimize_for_inference(endless_model(), compile=True)
    ids, later = padded(sentences([5, 3])), padded(sentences([4, 4], seed=7))
    for first, others in ((ids, [later[:1], later[1:]]), (torch.full_like(ids[:1], PAD), [later[:1]])):
        waiting = iter([(each, each.ne(PAD).long()) for each in others])
        settings = {"num_beams": 2, "max_new_tokens": 5}
        found = model.generate(first, **settings, next_batch=lambda count, waiting=waiting: next(waiting, None))
        alone = [plain.generate(each[None], **settings)[0] for part in (first, *others) for each in part]
        assert found.tolist() == [row.tolist() for row in alone]


# With a compiler


@pytest.fixture(autouse=True)
def encoder_is_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where MKL is fast, and without the package's int8 kernels."""
    monkeypatch.setattr(optimize, "mkl_is_slow", lambda: False)
    monkeypatch.setattr(optimize, "library", lambda: None)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The modules that were compiled, by a real compiler."""
    error = compile_error(CPU)
    if error is not None:
        pytest.skip(error)
    found, original = list[str](), CompiledModule._compile
    monkeypatch.setattr(
        CompiledModule, "_compile", lambda self, args: found.append(self.function.__name__) or original(self, args)
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float32, "int8"), (torch.bfloat16, "int8")],
)
def test_compiled_modules_compute_what_modules_do(dtype, quantization, counted):
    """Scores of forced tokens, as a search of a tiny model in few bits may take another turn."""
    if quantization and int8_error(CPU, dtype):
        pytest.skip("dynamic int8 needs an x86 CPU")
    fields = {"d_model": 64, "decoder_layers": 2}
    plain = endless_model(**fields).to(dtype)
    model = optimize_for_inference(endless_model(**fields).to(dtype), quantization, compile=True)
    forced = torch.randint(4, 40, (len(LENGTHS), NEW_TOKENS)).tolist()
    exact = dtype == torch.float32 and not quantization
    for length, tokens in zip(LENGTHS, forced, strict=True):
        only = {"prefix_allowed_tokens_fn": lambda row, ids, tokens=tokens: [tokens[len(ids) - 1]], "num_beams": 4}
        (found, score), (expected, its_score) = (translate(each, length, **only) for each in (model, plain))
        assert found == expected == [START, *tokens]
        assert score == pytest.approx(its_score, rel=1e-4 if exact else 5e-3)
    assert sorted(counted) == ["_encode", "step"]
    for beams in (1, 4):  # the search compiled into the step
        for length in LENGTHS:
            (found, score), (expected, its_score) = (
                translate(each, length, num_beams=beams) for each in (model, plain)
            )
            assert len(found) == len(expected) and found[0] == START
            if exact:
                assert found == expected
                assert score == pytest.approx(its_score, rel=1e-4)
    assert len(counted) == 4
    if exact:
        for length in (7, 40):
            prefix = {"decoder_input_ids": torch.tensor([[START, 9, 12]]), "num_beams": 4}
            assert_same(model, plain, [length], **prefix)
            assert_same(model, plain, [length], **prefix, paper_length_penalty=0.1)
            assert_same(model, plain, [length], num_beams=4, paper_length_penalty=1.4, max_new_tokens=70)
        ids = padded(sentences([9]))
        for other in (torch.int32, torch.int64):
            settings = {"num_beams": 4, "max_new_tokens": 9}
            assert model.generate(ids.to(other), **settings).equal(plain.generate(ids, **settings))
        assert len(counted) == 4, "int32 ids share the code of int64 ids"


@pytest.mark.slow
@torch.no_grad()
def test_compiled_models_give_their_memory_back(counted: list[str]) -> None:
    size = {"vocab_size": 8000, "d_model": 256, "decoder_ffn_dim": 1024}

    def once() -> tuple[list[weakref.ref], int]:
        model = optimize_for_inference(endless_model(**size), compile=True)
        for _ in range(2):  # the second time with other weights
            translate(model, 5, num_beams=2, max_new_tokens=3)
            held = [weakref.ref(each) for each in model.inference_engine.packed.values()]
            # A write to one stack alone leaves the compiled code of the other in use.
            model.lm_head.bias.add_(0.1)
            model.model.encoder.layers[0].fc1.bias.add_(0.1)
        return [*held, weakref.ref(model)], sum(weight.nbytes for weight in model.parameters())

    gone, nbytes = once()
    before = resident_bytes()
    assert not any(each() for each in gone)
    gone, _ = once()
    gc.collect()
    assert not any(each() for each in gone)
    # of four models and packed weights in all
    assert resident_bytes() - before < nbytes
    assert len(counted) == 8


@pytest.mark.slow
@torch.no_grad()
def test_compiled_code_keeps_no_second_copy_of_packed_weights(counted, monkeypatch):
    made, original = list[weakref.ref](), CompiledWeights._decoder

    def recorded(self: CompiledWeights) -> PackedWeights:
        weights = original(self)
        made.extend(weakref.ref(layer.fc1.weight) for layer in weights.layers)
        return weights

    monkeypatch.setattr(CompiledWeights, "_decoder", recorded)
    model = optimize_for_inference(endless_model(d_model=64).bfloat16(), compile=True)
    translate(model, 5, num_beams=2, max_new_tokens=3)
    gc.collect()
    assert len(made) == len(model.get_decoder().layers)
    assert not any(each() is not None for each in made)
