"""With the same weights, `generate` writes the same tokens here as in transformers' `MarianMTModel`.

What a mode asks for must also be visible in the tokens, so that a mode that both models silently ignore does not pass.
tests/test_generation_modes.py has every mode of transformers, and tests/test_beam_search.py the logits processors.
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
    model = tiny_model(
        seed=3,
        position_encoding_type="sinusoidal_split",
        share_encoder_decoder_embeddings=False,
        tie_word_embeddings=False,
        lm_head_bias=True,
        **fields,
    )
    target = sentences(
        [12] * len(LENGTHS),
        vocab_size=model.config.target_vocab_size,
        seed=9,
    )
    with torch.no_grad():
        model.lm_head.weight *= 2
        model.lm_head.bias.zero_()
        logits = model(**source(), decoder_input_ids=torch.tensor(target)).logits
        model.lm_head.bias.copy_(-logits.mean(dim=(0, 1)))
        model.lm_head.bias[EOS] += 1
        model.lm_head.bias[PAD] = -1e4
    return model


@pytest.fixture(
    scope="module",
    params=["sdpa-relu", pytest.param("eager-swish", marks=pytest.mark.slow)],
)
def pair(request: pytest.FixtureRequest) -> Pair:
    attention, activation = request.param.split("-")
    ours = our_model(attn_implementation=attention, activation_function=activation)
    return ours, MarianPeer(ours).network.eval()


@pytest.fixture(scope="module")
def greedy_tokens(pair: Pair) -> list[list[int]]:
    return tokens_of(written(pair[0], source()))


def source(lengths: list[int] = LENGTHS) -> dict[str, Tensor]:
    """Padded on the right. Marian numbers its positions from the left, padding included."""
    ids = padded(sentences(lengths))
    return {"input_ids": ids, "attention_mask": ids.ne(PAD).long()}


def written(
    model: Model,
    inputs: dict[str, Any],
    seed: int = 0,
    **settings: Any,
) -> ModelOutput:
    torch.manual_seed(seed)
    config = GenerationConfig(**PLAIN | settings)
    return model.generate(**inputs, generation_config=config)


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
        assert_near(
            ours.sequences_scores,
            theirs.sequences_scores,
            1e-5,
            "scores of sentences",
        )
        assert ours.beam_indices.tolist() == theirs.beam_indices.tolist()


def both(pair: Pair, inputs: dict[str, Any], **settings: Any) -> ModelOutput:
    """The output of our model, compared with Marian's."""
    ours, theirs = (written(model, inputs, **settings) for model in pair)
    assert_same_translations(ours, theirs)
    # Asked for scores of tokens, transformers' loops run. Not asked, greedy and beam search are this package's own.
    plain = written(pair[0], inputs, output_scores=False, **settings)
    assert plain.sequences.tolist() == theirs.sequences.tolist()
    if "sequences_scores" in plain:
        assert_near(
            plain.sequences_scores,
            theirs.sequences_scores,
            1e-5,
            "scores of sentences by our own search",
        )
    return ours


# Settings

GREEDY = {
    "greedy": {},
    "greedy without a cache": {"use_cache": False},
    "greedy with a static cache": {"cache_implementation": "static"},
}

# These must write something else than greedy search does.
OTHER_MODES = {
    "beam 4": {"num_beams": 4},
    "beam 4 as in the paper": {"num_beams": 4, "length_penalty": 0.6},
    "beam 4, early stopping": {"num_beams": 4, "early_stopping": True},
    "beam 4, stopping never early": {
        "num_beams": 4,
        "early_stopping": "never",
        "length_penalty": 2.0,
    },
    "beam 4 without a cache": {"num_beams": 4, "use_cache": False},
    "beam 4 with a static cache": {"num_beams": 4, "cache_implementation": "static"},
    "several of a beam": {"num_beams": 5, "num_return_sequences": 3},
    "sampling several": {"do_sample": True, "num_return_sequences": 3},
    "sampling without a cache": {"do_sample": True, "use_cache": False},
    "sampling with a static cache": {"do_sample": True, "cache_implementation": "static"},
    "beam sampling several": {"do_sample": True, "num_beams": 4, "num_return_sequences": 2},
    "forced end": {"forced_eos_token_id": EOS, "max_new_tokens": 3},
    "several ends": {"eos_token_id": [EOS, 9, 10, 11, 12, 17, 18]},
}


@pytest.mark.parametrize("mode", GREEDY)
def test_greedy_search_equals_marian(
    mode: str,
    pair: Pair,
    greedy_tokens: list[list[int]],
) -> None:
    rows = tokens_of(both(pair, source(), **GREEDY[mode]))
    assert len(set(map(len, rows))) > 2, "sentences must end at different lengths"
    assert len(set().union(*rows)) > 8, "tokens must vary"
    assert rows == greedy_tokens


@pytest.mark.parametrize("mode", OTHER_MODES)
def test_other_modes_equal_marian(
    mode: str,
    pair: Pair,
    greedy_tokens: list[list[int]],
) -> None:
    settings = OTHER_MODES[mode]
    output = both(pair, source(), **settings)
    assert len(output.sequences) == len(LENGTHS) * settings.get("num_return_sequences", 1)
    assert tokens_of(output) != greedy_tokens, "the mode has no effect"


# Inputs


@pytest.mark.parametrize(
    "settings", [{}, {"num_beams": 4}, {"use_cache": False}, {"cache_implementation": "static"}]
)
def test_prefixes_equal_marian(settings: dict[str, Any], pair: Pair) -> None:
    prefix = torch.tensor([[START, 5 + i, 9, 30 - i] for i in range(len(LENGTHS))])
    output = both(pair, {**source(), "decoder_input_ids": prefix}, **settings)
    assert output.sequences[:, :4].equal(prefix)
    assert output.sequences.shape[1] > 8


@pytest.mark.parametrize("beams", [1, 4])
def test_inputs_embeds_equal_marian(beams: int, pair: Pair) -> None:
    # Ours scales its input, as its decoder and Marian's decoder do. Marian's encoder does not.
    ours, theirs = pair
    ids, mask = source().values()
    embeds = ours.get_input_embeddings()(ids).detach()
    given = {"inputs_embeds": embeds, "attention_mask": mask}
    scaled = given | {"inputs_embeds": embeds * theirs.model.encoder.embed_scale}
    expected = written(theirs, source(), num_beams=beams)
    assert_same_translations(written(ours, given, num_beams=beams), expected)
    assert_same_translations(written(theirs, scaled, num_beams=beams), expected)
    plain = written(ours, given, num_beams=beams, output_scores=False)
    assert plain.sequences.tolist() == expected.sequences.tolist()


def decoder_passes(model: Model, inputs: dict[str, Any], **settings: Any) -> int:
    """How often its decoder has to run."""
    passes = []
    hook = model.get_decoder().register_forward_hook(lambda *_: passes.append(1))
    try:
        written(model, inputs, **settings)
    finally:
        hook.remove()
    return len(passes)


@pytest.mark.parametrize(
    "settings", [{}, {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1}]
)
def test_assisted_decoding_saves_decoder_passes(settings: dict[str, Any], pair: Pair) -> None:
    """Otherwise no guess was accepted, and the tests of its modes have seen greedy search only."""
    ours, _ = pair
    assistant = our_model(decoder_layers=1)
    weights = ours.state_dict()
    assistant.load_state_dict({name: weights[name] for name in assistant.state_dict()})
    given = {} if settings else {"assistant_model": assistant}
    passes = []
    for length in LENGTHS[:4]:  # it takes one sentence at a time
        inputs = source([length]) | given
        passes.append(decoder_passes(ours, inputs, min_new_tokens=LIMIT, **settings))
    assert min(passes) < LIMIT, passes


# Outputs


def assert_same_layers(
    ours: tuple[Tensor, ...],
    theirs: tuple[Tensor, ...],
    what: str,
    real: Tensor | None = None,
) -> None:
    """Of each layer. Where sentences are padded, `real` (B, S) chooses."""
    for layer, (actual, expected) in enumerate(zip(ours, theirs, strict=True)):
        if real is not None:
            actual = actual[real]
            expected = expected[real]
        assert_near(actual, expected, 1e-5, f"{what}, layer {layer}")


@pytest.mark.parametrize("beams", [1, 4])
def test_attentions_and_states_equal_marian(beams: int) -> None:
    ours = our_model(attn_implementation="eager")
    actual, expected = (
        written(
            model,
            source(),
            num_beams=beams,
            output_attentions=True,
            output_hidden_states=True,
            output_logits=True,
        )
        for model in (ours, MarianPeer(ours).network.eval())
    )
    assert_same_translations(actual, expected)
    # Padding differs: here it has the position of the token before it, in Marian its own.
    real = source()["attention_mask"].bool()
    real = real.repeat_interleave(len(actual.encoder_hidden_states[0]) // len(real), dim=0)
    assert_same_layers(
        actual.encoder_hidden_states,
        expected.encoder_hidden_states,
        "encoder states",
        real,
    )
    queries_first = (
        [layer.transpose(1, 2) for layer in each.encoder_attentions] for each in (actual, expected)
    )
    assert_same_layers(*queries_first, "encoder attentions", real)
    assert_same_layers(actual.logits, expected.logits, "logits")  # of each step
    for name in ("decoder_attentions", "cross_attentions", "decoder_hidden_states"):
        for step, (ours, theirs) in enumerate(zip(actual[name], expected[name], strict=True)):
            assert_same_layers(ours, theirs, f"{name} of step {step}")


def assert_sum_to_scores(transitions: Tensor, output: ModelOutput) -> None:
    """The sum of a sentence's tokens, divided by its length, is the score of the sentence."""
    lengths = torch.tensor(list(map(len, tokens_of(output))))
    assert_near(transitions.sum(dim=1) / lengths, output.sequences_scores)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 4, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
    ],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_transition_scores_equal_marian(
    normalize: bool,
    settings: dict[str, Any],
    pair: Pair,
) -> None:
    outputs = [written(model, source(), **settings) for model in pair]
    assert_same_translations(*outputs)
    scores = [
        model.compute_transition_scores(
            output.sequences,
            output.scores,
            output.get("beam_indices"),
            normalize,
        )
        for model, output in zip(pair, outputs, strict=True)
    ]
    if normalize or "num_beams" in settings:
        assert_same_scores(*scores, "transition scores")
    if "num_beams" in settings and not normalize:
        assert_sum_to_scores(scores[0], outputs[0])


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.20"),
    reason="the beam search of older transformers counts the tokens of the source",
)
def test_transition_scores_where_the_vocabularies_differ() -> None:
    # `GenerationMixin` counts the tokens of the source, in Marian too.
    for tokens in (31, 53):
        model = our_model(decoder_vocab_size=tokens)
        output = written(model, source(), num_beams=4)
        scores = model.compute_transition_scores(
            output.sequences,
            output.scores,
            output.beam_indices,
        )
        assert_sum_to_scores(scores, output)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"output_scores": False},
    ],
)
def test_caches_know_padding_before_a_prefix(settings: dict[str, Any]) -> None:
    # Not with Marian, which counts positions through padding.
    model = our_model()
    prefixes = [[START, 7, 8], [START]]
    prefix = padded(prefixes, left=True)
    together = source([6, 3]) | {
        "decoder_input_ids": prefix,
        "decoder_attention_mask": prefix.ne(PAD).long(),
    }
    rows = tokens_of(written(model, together, **settings))
    for row, ids, tokens in zip(rows, sentences([6, 3]), prefixes, strict=True):
        alone = {
            "input_ids": torch.tensor([ids]),
            "decoder_input_ids": torch.tensor([tokens]),
        }
        (expected,) = tokens_of(written(model, alone))
        given = prefix.shape[1] - len(tokens)
        assert row[given : given + len(expected)] == expected[: len(row) - given]
