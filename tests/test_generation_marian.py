"""With the same weights, `generate` writes the same tokens here as in transformers' `MarianMTModel`, in every mode.

The names of the parametrised tests are the table of modes. What a mode asks for must also be visible in
the tokens, so that a mode that is silently ignored by both models does not pass.
"""

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import GenerationConfig, MarianMTModel
from transformers.modeling_outputs import ModelOutput

from hf_vanilla_transformer import VanillaTransformerForConditionalGeneration
from tests.model_helpers import EOS, PAD, START, assert_near, padded, sentences, tiny_model
from tests.peers import MarianPeer

LIMIT = 12  # new tokens
LENGTHS = [7, 2, 5, 12, 1, 9]  # of the sources, ends included

# Everything in which the two models' own generation configs differ.
PLAIN: dict[str, Any] = {
    "bos_token_id": START,
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "decoder_start_token_id": START,
    "max_new_tokens": LIMIT,
    "num_beams": 1,
    "length_penalty": 1.0,
    "early_stopping": False,
    "do_sample": False,
    "return_dict_in_generate": True,
    "output_scores": True,
}

Model = VanillaTransformerForConditionalGeneration | MarianMTModel
Pair = tuple[VanillaTransformerForConditionalGeneration, MarianMTModel]


def our_model(**fields: Any) -> VanillaTransformerForConditionalGeneration:
    """A model whose sentences vary and end. A tied one repeats its last token. A random one repeats a few
    tokens for every source, unless the output bias takes this preference away."""
    separate = {"share_encoder_decoder_embeddings": False, "tie_word_embeddings": False, "lm_head_bias": True}
    model = tiny_model(seed=3, position_encoding_type="sinusoidal_split", **separate, **fields)
    target = torch.tensor(sentences([12] * len(LENGTHS), vocab_size=model.config.target_vocab_size, seed=9))
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.lm_head.bias.zero_()
        preference = model(**source(), decoder_input_ids=target).logits.mean(dim=(0, 1))
        model.lm_head.bias.copy_(-preference)
        model.lm_head.bias[EOS] += 1
        model.lm_head.bias[PAD] = -1e4
    return model


@pytest.fixture(scope="module", params=["sdpa-relu", pytest.param("eager-swish", marks=pytest.mark.slow)])
def pair(request: pytest.FixtureRequest) -> Pair:
    attention, activation = request.param.split("-")
    ours = our_model(attn_implementation=attention, activation_function=activation)
    return ours, MarianPeer(ours).network.eval()


@pytest.fixture(scope="module")
def greedy_tokens(pair: Pair) -> list[list[int]]:
    return tokens_of(written(pair[0], source()))


@pytest.fixture(scope="module")
def assistants(pair: Pair) -> Pair:
    """The pair without its last decoder layer."""
    ours, _ = pair
    attention, activation = ours.config._attn_implementation, ours.config.activation_function
    small = our_model(attn_implementation=attention, activation_function=activation, decoder_layers=1)
    small.load_state_dict({name: weight for name, weight in ours.state_dict().items() if name in small.state_dict()})
    return small, MarianPeer(small).network.eval()


def source(lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Padded on the right. Marian numbers its positions from the left, padding included."""
    ids = padded(sentences(lengths))
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


def written(model: Model, inputs: dict[str, Any], seed: int = 0, **settings: Any) -> ModelOutput:
    torch.manual_seed(seed)
    return model.generate(**inputs, generation_config=GenerationConfig(**{**PLAIN, **settings}))


def tokens_of(output: ModelOutput) -> list[list[int]]:
    """Each sentence up to its end, without the start."""
    rows = output.sequences[:, 1:].tolist()
    return [row[: row.index(EOS) + 1] if EOS in row else row for row in rows]


def assert_same_scores(ours: Tensor, theirs: Tensor, what: str) -> None:
    """Within 1e-5, and forbidden tokens (-inf, or a beam that does not run: -1e9) at the same positions."""
    possible = theirs > -1e8
    assert ours.gt(-1e8).equal(possible), what
    assert_near(ours[possible], theirs[possible], 1e-5, what)


def assert_same_translations(ours: ModelOutput, theirs: ModelOutput) -> None:
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert len(ours.scores) == len(theirs.scores)
    for step, (score, expected) in enumerate(zip(ours.scores, theirs.scores, strict=True)):
        assert_same_scores(score, expected, f"scores of step {step}")
    if "sequences_scores" in theirs:
        assert_near(ours.sequences_scores, theirs.sequences_scores, 1e-5, "scores of sentences")
        assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()


def both(pair: Pair, inputs: dict[str, Any], seed: int = 0, **settings: Any) -> ModelOutput:
    """The output of our model, compared with Marian's."""
    ours, theirs = (written(model, inputs, seed, **settings) for model in pair)
    assert_same_translations(ours, theirs)
    # Asked for scores of tokens, transformers' loops run. Not asked, greedy and beam search are this package's own.
    plain = written(pair[0], inputs, seed, output_scores=False, **settings)
    assert plain.sequences.tolist() == theirs.sequences.tolist()
    if "sequences_scores" in plain:
        assert_near(plain.sequences_scores, theirs.sequences_scores, 1e-5, "scores of sentences by our own search")
    return ours


# Settings

GREEDY = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "greedy with a static cache": {"cache_implementation": "static"},
}

# These must write something else than greedy search does.
OTHER_MODES = {
    "beam 2": {"num_beams": 2},
    "beam 4": {"num_beams": 4},
    "beam 5": {"num_beams": 5},
    "beam 4 as in the paper": {"num_beams": 4, "length_penalty": 0.6},
    "beam 4, early stopping": {"num_beams": 4, "early_stopping": True},
    "beam 4, stopping never early": {"num_beams": 4, "early_stopping": "never", "length_penalty": 2.0},
    "beam 4 without a cache": {"num_beams": 4, "use_cache": False},
    "beam 4 with a static cache": {"num_beams": 4, "cache_implementation": "static"},
    "several of a beam": {"num_beams": 5, "num_return_sequences": 3},
    "sampling": {"do_sample": True},
    "sampling with temperature, top-k and top-p": {"do_sample": True, "temperature": 1.5, "top_k": 8, "top_p": 0.8},
    "sampling several": {"do_sample": True, "num_return_sequences": 3},
    "sampling without a cache": {"do_sample": True, "use_cache": False},
    "sampling with a static cache": {"do_sample": True, "cache_implementation": "static"},
    "beam sampling": {"do_sample": True, "num_beams": 3},
    "beam sampling several": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2},
    "minimum length": {"min_length": 10},
    "minimum of new tokens, beam 4": {"min_new_tokens": 10, "num_beams": 4},
    "no repeated 2-grams": {"no_repeat_ngram_size": 2, "min_new_tokens": LIMIT},
    "no repeated token, beam 4": {"no_repeat_ngram_size": 1, "num_beams": 4, "min_new_tokens": LIMIT},
    "no token of the source": {"encoder_no_repeat_ngram_size": 1},
    "repetition penalty": {"repetition_penalty": 3.0},
    "forced first token": {"forced_bos_token_id": 7},
    "forced first token, beam 4": {"forced_bos_token_id": 7, "num_beams": 4},
    "forced end": {"forced_eos_token_id": EOS, "max_new_tokens": 3},
    "forbidden tokens": {"bad_words_ids": [[token] for token in range(10, 20)]},
    "several ends": {"eos_token_id": [EOS, 9, 10, 11, 12, 17, 18]},
}


@pytest.mark.parametrize("mode", GREEDY)
def test_greedy_search_equals_marian(mode: str, pair: Pair, greedy_tokens: list[list[int]]) -> None:
    output = both(pair, source(), **GREEDY[mode])
    lengths = {len(tokens) for tokens in tokens_of(output)}
    assert len(lengths) > 2, "sentences must end at different lengths"
    assert len({token for tokens in tokens_of(output) for token in tokens}) > 8, "tokens must vary"
    assert tokens_of(output) == greedy_tokens


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_other_modes_equal_marian(mode: str, pair: Pair, greedy_tokens: list[list[int]]) -> None:
    settings = OTHER_MODES[mode]
    output = both(pair, source(), **settings)
    assert len(output.sequences) == len(LENGTHS) * settings.get("num_return_sequences", 1)
    assert tokens_of(output) != greedy_tokens, "the mode has no effect"


def test_modes_have_the_effect_that_they_ask_for(pair: Pair) -> None:
    def tokens(**settings: Any) -> list[list[int]]:
        return tokens_of(written(pair[0], source(), **settings))

    assert min(map(len, tokens(min_new_tokens=10))) >= 10
    assert {row[0] for row in tokens(forced_bos_token_id=7)} == {7}
    for row in tokens(no_repeat_ngram_size=2, min_new_tokens=LIMIT):
        assert len(set(zip(row, row[1:], strict=False))) == len(row) - 1
    sampled = [tokens(do_sample=True, seed=seed) for seed in (0, 1)]
    assert sampled[0] != sampled[1]


# Inputs


@pytest.mark.parametrize("settings", [{}, {"num_beams": 4}, {"use_cache": False}, {"cache_implementation": "static"}])
def test_prefixes_equal_marian(settings: dict[str, Any], pair: Pair) -> None:
    prefix = torch.tensor([[START, 5 + i, 9, 30 - i] for i in range(len(LENGTHS))])
    output = both(pair, {**source(), "decoder_input_ids": prefix}, **settings)
    assert output.sequences[:, :4].equal(prefix)
    assert output.sequences.shape[1] > 8


@pytest.mark.parametrize("beams", [1, 4])
def test_inputs_embeds_equal_marian(beams: int, pair: Pair) -> None:
    # Ours scales its input, as its decoder and Marian's decoder do. Marian's encoder does not.
    ours, theirs = pair
    inputs = source()
    mask = inputs["attention_mask"]
    embeds = ours.get_input_embeddings()(inputs["input_ids"]).detach()
    expected = written(theirs, inputs, num_beams=beams)
    given = {"inputs_embeds": embeds, "attention_mask": mask}
    assert_same_translations(written(ours, given, num_beams=beams), expected)
    plain = written(ours, given, num_beams=beams, output_scores=False)
    assert plain.sequences.tolist() == expected.sequences.tolist()
    scaled = embeds * theirs.model.encoder.embed_scale
    output = written(theirs, {"inputs_embeds": scaled, "attention_mask": mask}, num_beams=beams)
    assert_same_translations(output, expected)


def decoder_passes(model: Model, inputs: dict[str, Any], **settings: Any) -> int:
    """How often its decoder has to run."""
    passes = []
    hook = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    try:
        written(model, inputs, **settings)
    finally:
        hook.remove()
    return len(passes)


@pytest.mark.parametrize("length", LENGTHS[:3])
def test_assisted_decoding_equals_marian(length: int, pair: Pair, assistants: Pair) -> None:
    # Assisted decoding takes one sentence at a time.
    outputs = []
    for model, assistant in zip(pair, assistants, strict=True):
        assistant.generation_config.update(
            num_assistant_tokens=4, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
        )
        output = written(model, {**source([length]), "assistant_model": assistant}, min_new_tokens=LIMIT)
        outputs.append(output)
    assert_same_translations(*outputs)
    assert_same_translations(outputs[0], written(pair[0], source([length]), min_new_tokens=LIMIT))


@pytest.mark.parametrize("length", LENGTHS[:3])
def test_prompt_lookup_equals_marian(length: int, pair: Pair) -> None:
    # In an encoder-decoder the prompt is the text written so far.
    inputs = {**source([length]), "decoder_input_ids": torch.tensor([[START, 7, 8, 7, 8]])}
    output = both(pair, inputs, prompt_lookup_num_tokens=3, min_new_tokens=LIMIT)
    assert_same_translations(output, written(pair[0], inputs, min_new_tokens=LIMIT))


def test_assisted_decoding_saves_decoder_passes(pair: Pair, assistants: Pair) -> None:
    # otherwise none was accepted, and the tests above have seen greedy search only
    ours, assistant = pair[0], assistants[0]
    guessing = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}
    for given, settings in (({"assistant_model": assistant}, {}), ({}, guessing)):
        passes = [
            decoder_passes(ours, {**source([length]), **given}, min_new_tokens=LIMIT, **settings)
            for length in LENGTHS[:4]
        ]
        assert min(passes) < LIMIT, passes


# Outputs


def assert_same_layers(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...], rows: Any, what: str) -> None:
    for layer, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert_near(actual[rows], expected[rows], 1e-5, f"{what}, layer {layer}")


@pytest.mark.parametrize("beams", [1, 4])
def test_attentions_and_states_equal_marian(beams: int) -> None:
    ours = our_model(attn_implementation="eager")
    pair = ours, MarianPeer(ours).network.eval()
    wanted = {"output_attentions": True, "output_hidden_states": True, "output_logits": True, "num_beams": beams}
    actual, expected = (written(model, source(), **wanted) for model in pair)
    assert_same_translations(actual, expected)
    # Padding differs: here it has the position of the token before it, in Marian its own.
    real = source()["attention_mask"].bool().repeat_interleave(len(actual.encoder_hidden_states[0]) // 6, dim=0)
    assert_same_layers(actual.encoder_hidden_states, expected.encoder_hidden_states, real, "encoder states")
    assert len(actual.encoder_attentions) == len(expected.encoder_attentions) == 2
    for layer in range(2):
        weights = (output.encoder_attentions[layer].transpose(1, 2)[real] for output in (actual, expected))
        assert_near(*weights, 1e-5, "encoder attentions")
    steps = range(len(expected.scores))
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        assert len(actual[name]) == len(expected[name]) == len(steps)
        for step in steps:
            assert_same_layers(actual[name][step], expected[name][step], ..., f"{name} of step {step}")
    for step in steps:
        assert_near(actual.logits[step], expected.logits[step], 1e-5, f"logits of step {step}")


@pytest.mark.parametrize(
    "settings",
    [{}, {"num_beams": 4}, {"num_beams": 4, "num_return_sequences": 2}, {"num_beams": 3, "do_sample": True}],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_transition_scores_equal_marian(normalize: bool, settings: dict[str, Any], pair: Pair) -> None:
    outputs = [written(model, source(), **settings) for model in pair]
    assert_same_translations(*outputs)
    scores = [
        model.compute_transition_scores(output.sequences, output.scores, output.get("beam_indices"), normalize)
        for model, output in zip(pair, outputs, strict=True)
    ]
    if normalize or "num_beams" in settings:
        assert_same_scores(*scores, "transition scores")
    output = outputs[0]
    if "num_beams" in settings and not normalize:
        # the sum of a sentence's tokens, divided by its length, is the score of the sentence
        lengths = torch.tensor([len(tokens) for tokens in tokens_of(output)])
        assert_near(scores[0].sum(dim=1) / lengths, output.sequences_scores)


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="the beam search of older transformers counts the tokens of the source",
)
def test_transition_scores_where_the_vocabularies_differ() -> None:
    # `GenerationMixin` counts the tokens of the source, in Marian too.
    for tokens in (31, 53):
        model = our_model(decoder_vocab_size=tokens)
        inputs = source()
        output = written(model, inputs, num_beams=4)
        scores = model.compute_transition_scores(output.sequences, output.scores, output.beam_indices)
        lengths = torch.tensor([len(tokens) for tokens in tokens_of(output)])
        assert_near(scores.sum(dim=1) / lengths, output.sequences_scores)


def test_static_cache_knows_padding_before_a_prefix() -> None:
    # Not with Marian, which counts positions through padding.
    model = our_model()
    prefixes = [[START, 7, 8], [START]]
    prefix = padded(prefixes, left=True)
    inputs = {**source([6, 3]), "decoder_input_ids": prefix, "decoder_attention_mask": prefix.ne(PAD).long()}
    for row, (length, tokens) in enumerate(zip([6, 3], prefixes, strict=True)):
        alone = {name: tensor[row : row + 1, :length] for name, tensor in source([6, 3]).items()}
        expected = tokens_of(written(model, {**alone, "decoder_input_ids": torch.tensor([tokens])}))[0]
        caches = ({}, {"use_cache": False}, {"cache_implementation": "static"}, {"output_scores": False})
        for settings in caches:
            together = written(model, inputs, **settings).sequences[row, prefix.shape[1] - len(tokens) + 1 :].tolist()
            together = together[: together.index(EOS) + 1] if EOS in together else together
            assert together[: len(expected)] == expected[: len(together)], settings
