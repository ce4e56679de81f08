"""Programs for one sentence at a time, against the same search without them."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from hf_vanilla_transformer import compiled_vanilla_transformer as compiled
from hf_vanilla_transformer.decoding_vanilla_transformer import _MADE
from tests.model_helpers import EOS, PAD, START, padded, sentences, tiny_model

Translator = VanillaTransformerForConditionalGeneration

# Sources of one tile of places and of more, of one word alone too; translations that outgrow theirs.
LENGTHS, NEW_TOKENS = [7, 1, 3, 30, 18, 16, 40], 40


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture
def only_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler reads the modules, and what it has read is run as it is: the seconds of a real one are saved."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")
    monkeypatch.setattr(compiled, "OPTIONS", {})


def translator(**fields: Any) -> Translator:
    """A model whose sentences do not end by themselves: a tiny model's ends hang by a hair."""
    layers = {"encoder_layers": 1, "decoder_layers": 1} | fields
    model = tiny_model(2, tie_word_embeddings=False, lm_head_bias=True, **layers)
    with torch.no_grad():
        model.lm_head.bias[[PAD, START, EOS]] = -1e4
    return model


def translate(model: Translator, length: int, **settings: Any) -> tuple[list[int], float]:
    """Words, and the log-probability that a beam search says they have."""
    ids = padded(sentences([length]))
    found = model.generate(ids, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, **settings)
    score = float(found.sequences_scores) if "sequences_scores" in found else 0.0
    return found.sequences[0].tolist(), score


def assert_alike(model: Translator, lengths: list[int], **settings: Any) -> None:
    for length in lengths:
        words, score = translate(model, length, **settings)
        found, its_score = translate(model, length, compiled=True, **settings)
        assert found == words
        assert its_score == pytest.approx(score, rel=1e-4)


def graphs() -> int:
    """How often the compiler was called."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(("beams", "fields"), [(1, {}), (4, {"decoder_layers": 2, "final_layer_norm": True})])
def test_translations_are_the_same(beams: int, fields: dict[str, Any], only_read: None) -> None:
    assert_alike(translator(**fields), LENGTHS, num_beams=beams)
    assert graphs() == 2  # of the encoder and of the decoder, whatever the lengths


def test_what_a_search_can_have_programs_can_have(only_read: None) -> None:
    model, other = translator(), translator()
    with torch.no_grad():
        other.lm_head.weight.mul_(0.5)
    prefix = torch.tensor([[START, 9, 12]])
    assert_alike(model, [5, 20], num_beams=3, decoder_input_ids=prefix, no_repeat_ngram_size=2)
    assert_alike(model, [5], num_beams=2, ensemble=[other])


def test_sentences_that_take_the_room_of_others(only_read: None) -> None:
    model = translator()
    rows = [padded(sentences([length])) for length in (18, 3, 40)]

    def run(**settings: Any) -> Tensor:
        waiting = [(ids, torch.ones_like(ids)) for ids in rows[1:]]
        return model.generate(rows[0], more=lambda room: waiting.pop(0) if waiting else None, **settings)

    assert run(compiled=True).equal(run())
    assert graphs() == 2


def test_batches_go_without_programs(only_read: None) -> None:
    model, ids = translator(), padded(sentences([5, 9]))
    assert model.generate(ids, compiled=True).equal(model.generate(ids))
    assert not graphs()


def test_model_that_does_more_goes_without_programs(only_read: None) -> None:
    model = translator()
    heard = []
    model.model.encoder.layers[0].register_forward_hook(lambda *args: heard.append(1))
    translate(model, 5, compiled=True)
    assert len(heard) == 1
    assert not graphs()


def in_training(model: Translator) -> None:
    model.train()


def with_the_formula_at_work(model: Translator) -> None:
    model.set_attn_implementation("eager")


@pytest.mark.parametrize("change", [in_training, with_the_formula_at_work])
def test_modules_are_asked_where_they_do_more(change: Any, only_read: None) -> None:
    model = translator()
    change(model)
    translate(model, 5, compiled=True)
    assert not graphs()


def in_place(model: Translator) -> None:
    with torch.no_grad():
        model.model.decoder.layers[0].self_attn.k_proj.weight[1:].mul_(3)  # of which there is a copy


def other_encoder_weights(model: Translator) -> None:
    with torch.no_grad():
        model.model.encoder.layers[0].fc1.weight.mul_(3)


def loaded(model: Translator) -> None:
    model.load_state_dict({name: 2 * weight for name, weight in model.state_dict().items()})


def by_an_optimizer(model: Translator) -> None:
    model(torch.tensor([[5, 6, EOS]]), labels=torch.tensor([[7, EOS]])).loss.backward()
    torch.optim.AdamW(model.parameters(), lr=0.1, fused=True).step()


@pytest.mark.parametrize(
    "change",
    [
        in_place,
        other_encoder_weights,
        *(pytest.param(each, marks=pytest.mark.slow) for each in (loaded, by_an_optimizer)),
    ],
)
def test_programs_have_the_weights_of_now(change: Any, only_read: None) -> None:
    model = translator()
    before = translate(model, 5, compiled=True)
    change(model)
    assert_alike(model, [5])
    assert translate(model, 5, compiled=True)[1] != before[1]


def test_programs_go_with_their_model(only_read: None) -> None:
    model = translator()
    translate(model, 5, compiled=True)
    gone = [weakref.ref(made[2]) for made in _MADE[model].values()]
    assert len(gone) == 1
    del model
    gc.collect()
    assert not any(each() for each in gone)


def test_a_checkpoint_may_ask_for_programs(tmp_path: Any, only_read: None) -> None:
    model = translator()
    model.generation_config.compiled = True
    model.save_pretrained(tmp_path)
    translate(Translator.from_pretrained(tmp_path), 5)
    assert graphs() == 2


@pytest.mark.parametrize(
    ("device", "settings", "message"),
    [
        ("cpu", {"do_sample": True}, "compiled: with these settings transformers' own loop translates"),
        ("meta", {}, "compiled: programs are for a CPU; the model is on meta"),
    ],
)
def test_what_cannot_be_compiled_says_so(device: str, settings: dict[str, Any], message: str) -> None:
    model, ids = translator().to(device), torch.tensor([[5, 6, EOS]], device=device)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, attention_mask=torch.ones_like(ids), compiled=True, **settings)


def test_without_a_compiler_a_sentence_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from torch._inductor import config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ValueError, match=r"compiled: torch.compile finds no C\+\+ compiler; install g\+\+"):
        translate(translator(), 5, compiled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "weights"), [(torch.bfloat16, None), (torch.bfloat16, "int8"), (torch.float32, "int8")]
)
def test_real_programs_compute_the_same(dtype: torch.dtype, weights: str | None) -> None:
    """Log-probabilities of forced words, as a search of a tiny model in few bits may take another turn."""
    model = translator(d_model=64).to(dtype)
    torch.manual_seed(0)
    words = torch.randint(4, 40, (len(LENGTHS), NEW_TOKENS)).tolist()
    for length, forced in zip(LENGTHS, words, strict=True):

        def only(row: int, so_far: Tensor, forced: list[int] = forced) -> list[int]:
            return [forced[len(so_far) - 1]]

        settings = {"num_beams": 4, "prefix_allowed_tokens_fn": only}
        exact = translate(model, length, **settings)
        found = translate(model, length, **settings, compiled=True, decoder_weights=weights)
        assert found[0] == exact[0] == [START, *forced]
        assert found[1] == pytest.approx(exact[1], rel=5e-3)
    assert graphs() == 2
