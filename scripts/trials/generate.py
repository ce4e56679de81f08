"""`python -m scripts.trials.generate` compares `generate` with transformers' loop, for random models and arguments.

A case is a tiny model, the engine that decodes, and a few requests: random batches and arguments, and before each but
the first perhaps a change of the model, such as an optimizer's step. After every request transformers' loop translates
with the modules of the same model. It knows neither our search nor our decoders, so that stale packed weights show as
well as mistakes of the search.

    python -m scripts.trials.generate --cases 2000 --seed 0

prints what was tried, and every case with a difference. A tie is none: there changes of the weights as small as
rounding make transformers' loop give both answers.
"""

import argparse
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, set_seed
from transformers.utils import logging

from hf_vanilla_transformer.configuration_vanilla_transformer import (
    LAYER_NORM_POSITIONS,
    POSITION_ENCODING_TYPES,
)
from hf_vanilla_transformer.engine import linear
from hf_vanilla_transformer.inference import deoptimize, optimize_for_inference
from tests.engine.model_changes import CHANGES, TEMPORARY_CHANGES
from tests.engine.recorded_steps import Recorder, recording
from tests.model_helpers import EOS, FIRST_WORD, PAD, START, TYING_MODES
from tests.search_helpers import AS_DICT, Model, by_transformers, source, varied_model

VOCABULARY = 24  # tokens that `source` draws from
LONGEST = 9  # tokens of a source
ENGINES = ["modules", "packed", "prepacked", "captured"]
NO_HYPOTHESIS = (
    -1e6
)  # transformers' score of a row without one is below, whatever its length penalty
# The difference allowed of scores, relative to the largest, and the change of weights to find ties.
# In bfloat16 kernels differ by so much that tokens do: tests/engine/test_packed_decoder.py compares its logits.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}


@dataclass
class Request:
    """A batch, how it is handed over, and the arguments of `generate`."""

    lengths: list[int]
    left: bool
    seed: int
    given_as: str
    mask: str
    prefix: int
    arguments: dict[str, Any]


@dataclass
class Case:
    """A model, and requests, each with the name of the change of the model that comes before it."""

    fields: dict[str, Any]
    seed: int
    end: float
    dtype: torch.dtype
    engine: str
    requests: list[tuple[str, Request]]


@dataclass
class Tally:
    """The case that was tried."""

    cases: int = 0
    requests: int = 0
    ties: int = 0
    differences: list[str] = field(default_factory=list)
    names: Counter[str] = field(default_factory=Counter)

    def count(self, case: Case) -> None:
        self.cases += 1
        self.names[f"engine {case.engine}"] += 1
        self.names[f"dtype {case.dtype}".replace("torch.", "")] += 1
        for change, request in case.requests:
            self.requests += 1
            self.names[f"change {change}"] += 1
            self.names[f"source as {request.given_as}"] += 1
            self.names[f"mask {request.mask}"] += 1
            self.names.update(request.arguments.keys())


# The random cases


@dataclass(frozen=True)
class AllowedTokens:
    """A `prefix_allowed_tokens_fn` that depends on the sentence and on the length."""

    start: int

    def __call__(self, sentence: int, tokens: Tensor) -> list[int]:
        first = FIRST_WORD + (self.start + 3 * sentence + 5 * len(tokens)) % (
            VOCABULARY - FIRST_WORD - 6
        )
        return [EOS, *range(first, first + 6)]


@dataclass(frozen=True)
class Favour:
    """A logits processor that depends on the last token."""

    token: int

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        favoured = (input_ids[:, -1:] + self.token) % scores.shape[1]
        return scores.scatter_add(1, favoured, torch.full_like(favoured, 2, dtype=scores.dtype))


ordinary_tokens = st.integers(FIRST_WORD, VOCABULARY - 1)
ends = st.one_of(
    st.just(EOS), st.none(), st.lists(ordinary_tokens, max_size=2).map(lambda more: [EOS, *more])
)
lists_of_tokens = st.lists(ordinary_tokens, min_size=1, max_size=4, unique=True)

# Every documented argument that decides which tokens a search finds. `num_beams`, `length_penalty` and a limit are
# always given, since their defaults here are the paper's.
ARGUMENTS: dict[str, st.SearchStrategy[Any]] = {
    "early_stopping": st.sampled_from([True, False, "never"]),
    "num_return_sequences": st.integers(1, 5),
    "min_length": st.integers(0, 8),
    "min_new_tokens": st.integers(0, 8),
    "no_repeat_ngram_size": st.integers(1, 3),
    "encoder_no_repeat_ngram_size": st.integers(1, 3),
    "repetition_penalty": st.floats(0.5, 2.0),
    "encoder_repetition_penalty": st.floats(0.5, 2.0),
    "bad_words_ids": st.lists(
        st.lists(ordinary_tokens, min_size=1, max_size=2), min_size=1, max_size=3
    ),
    "sequence_bias": st.lists(
        st.tuples(st.lists(ordinary_tokens, min_size=1, max_size=2), st.floats(-4.0, 4.0)).map(
            list
        ),
        **{"min_size": 1, "max_size": 3, "unique_by": lambda pair: tuple(pair[0])},
    ),
    "forced_bos_token_id": ordinary_tokens,
    "forced_eos_token_id": st.one_of(st.just(EOS), ordinary_tokens),
    "suppress_tokens": lists_of_tokens,
    "begin_suppress_tokens": lists_of_tokens,
    "exponential_decay_length_penalty": st.tuples(st.integers(1, 6), st.floats(0.8, 1.5)),
    "renormalize_logits": st.booleans(),
    "remove_invalid_values": st.booleans(),
    "prefix_allowed_tokens_fn": st.integers(0, 20).map(AllowedTokens),
    "logits_processor": ordinary_tokens.map(lambda token: LogitsProcessorList([Favour(token)])),
    "eos_token_id": ends,
    "temperature": st.floats(0.5, 2.0),
    "top_k": st.integers(1, 50),
    "top_p": st.floats(0.5, 1.0),
    "use_cache": st.booleans(),
    # in transformers' own loops here too
    "do_sample": st.booleans(),
    "output_scores": st.booleans(),
    "output_attentions": st.booleans(),
}
LIMITS: dict[str, st.SearchStrategy[int]] = {
    "max_new_tokens": st.integers(1, 9),
    "max_length": st.integers(1, 9),  # beside the prefix
    "max_length_over_source": st.integers(-3, 4),
}
UNCOVERED = ("do_sample", "output_scores", "output_attentions")  # by our search
CALLABLES = ("prefix_allowed_tokens_fn", "logits_processor")
READ_IDS = (
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
)  # of the source, given as ids


@st.composite
def models(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of the configuration, as differences from `varied_model`."""
    share, tie = draw(st.sampled_from(TYING_MODES))
    fields: dict[str, Any] = {"share_encoder_decoder_embeddings": share, "tie_word_embeddings": tie}
    if not share:
        fields["decoder_vocab_size"] = draw(st.integers(VOCABULARY, 30))
    choices: dict[str, st.SearchStrategy[Any]] = {
        "position_encoding_type": st.sampled_from(POSITION_ENCODING_TYPES),
        "layer_norm_position": st.sampled_from(LAYER_NORM_POSITIONS),
        "activation_function": st.sampled_from(["relu", "gelu", "swish", "tanh"]),
        "decoder_layers": st.integers(1, 3),
        "decoder_attention_heads": st.sampled_from([1, 2, 8]),
        "head_dim": st.integers(2, 9),
        "value_head_dim": st.integers(2, 9),
        "attention_bias": st.booleans(),
        "scale_embedding": st.booleans(),
        "attn_implementation": st.sampled_from(["sdpa", "sdpa", "sdpa", "eager"]),
    }
    chosen = draw(st.lists(st.sampled_from(sorted(choices)), max_size=3, unique=True))
    return fields | {name: draw(choices[name]) for name in chosen}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    names = draw(st.lists(st.sampled_from(sorted(ARGUMENTS)), max_size=4, unique=True))
    arguments = {name: draw(ARGUMENTS[name]) for name in names}
    arguments["num_beams"] = draw(st.sampled_from([1, 2, 3, 4, 5]))
    arguments["length_penalty"] = draw(st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]))
    if "num_return_sequences" in names:
        arguments["num_return_sequences"] = min(
            arguments["num_return_sequences"], arguments["num_beams"]
        )
    by_their_loop = set(UNCOVERED) & {*names} or not arguments.get("use_cache", True)
    limit = draw(
        st.sampled_from(["max_length", "max_new_tokens"] if by_their_loop else sorted(LIMITS))
    )
    if arguments.get("forced_bos_token_id") in arguments.get(
        "suppress_tokens", ()
    ):  # which transformers refuses
        del arguments["suppress_tokens"]
    suppressed = [
        *arguments.get("suppress_tokens", ()),
        *arguments.get("begin_suppress_tokens", ()),
    ]
    if (
        arguments.get("forced_eos_token_id") in suppressed
    ):  # every token has probability 0: transformers returns none
        del arguments["forced_eos_token_id"]
    if (
        arguments.get("eos_token_id", EOS) is None
    ):  # without an end transformers' processor raises a RuntimeError
        arguments.pop("exponential_decay_length_penalty", None)
    prefix = draw(st.sampled_from([1, 1, 2, 4]))
    arguments[limit] = draw(LIMITS[limit]) + (prefix if limit == "max_length" else 0)
    ways = ["input_ids", "inputs", "config"]
    if not set(READ_IDS) & {*names}:
        ways += ["encoder_outputs", "inputs_embeds"]
    if not by_their_loop and not {*READ_IDS, "prefix_allowed_tokens_fn"} & {
        *names
    }:  # which refuse it
        ways += ["next_batch"]
    given_as = draw(st.sampled_from(ways))
    if (
        given_as == "config" and arguments.get("eos_token_id", EOS) is None
    ):  # which means the model's own there
        del arguments["eos_token_id"]
    return Request(
        lengths=draw(st.lists(st.integers(1, LONGEST), min_size=1, max_size=5)),
        left=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        given_as=given_as,
        mask=draw(
            st.sampled_from(["of padding", "of padding", "none", "with holes", "with an empty row"])
        ),
        prefix=prefix,
        arguments=arguments,
    )


# Dropout draws other numbers in each engine, and an adapter is never undone.
ALL_CHANGES = {**CHANGES, **TEMPORARY_CHANGES, "double": Model.double, "float": Model.float}
del ALL_CHANGES["train_decoder"], ALL_CHANGES["inject_adapter"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    changes = st.sampled_from(["none", "none", *ALL_CHANGES])
    later = draw(st.lists(st.tuples(changes, requests()), max_size=2))
    return Case(
        fields=draw(models()),
        seed=draw(st.integers(0, 99)),
        end=draw(st.sampled_from([-1.0, 0.0, 1.0, 2.0])),
        dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.float64])),
        engine=draw(st.sampled_from(ENGINES)),
        requests=[("none", draw(requests())), *later],
    )


# How it is compared


@contextmanager
def engine(name: str) -> Iterator[None]:
    """Small weights are packed as large ones are."""
    with (
        mock.patch.object(
            linear, "_LEAST_PREPACKED", 0 if name == "prepacked" else linear._LEAST_PREPACKED
        ),
        recording(Recorder(), steps_at_once=3) if name == "captured" else nullcontext(),
    ):
        yield


def make(case: Case) -> Model:
    """Its logits are far from uniform, so that ties are rare."""
    model = varied_model(case.seed % 3, case.end, **case.fields)
    with torch.no_grad():
        model.lm_head.weight *= 1.5
    return model.to(case.dtype)


def optimized(model: Model, name: str) -> Model:
    if name == "modules" or model.config._attn_implementation != "sdpa":
        return deoptimize(model)
    return optimize_for_inference(model)


@torch.no_grad()
def check(case: Case, tally: Tally) -> None:
    """Raise an AssertionError for a difference that is no tie."""
    tally.count(case)
    with engine(case.engine), ExitStack() as undone:
        model = optimized(make(case), case.engine)
        for change, request in case.requests:
            undone.close()  # undo the change before
            if change in TEMPORARY_CHANGES:
                undone.callback(TEMPORARY_CHANGES[change](model))
            elif change != "none":
                ALL_CHANGES[change](model)
            tally.ties += compare(model, request)


def compare(model: Model, request: Request) -> int:
    """How many translations differ by a tie alone."""
    ours, scores = by_us(model, request)
    expected, its_scores = by_their_loop(model, request)
    assert len(ours) == len(expected), f"{len(ours)} translations instead of {len(expected)}"
    returned = request.arguments.get("num_return_sequences", 1)
    wrong = []
    for row, (mine, theirs) in enumerate(zip(ours, expected, strict=True)):
        if its_scores and its_scores[row] < NO_HYPOTHESIS:
            # transformers decides among equal scores of copies and of rows without tokens. Ours repeats the best.
            theirs = ours[row - row % returned]
        if mine != theirs:
            wrong.append(row)
    if wrong:
        for row in wrong:
            found = f"translation {row}: {ours[row]}, transformers {expected[row]}"
            assert is_tie(model, request, row, [ours[row], expected[row]]), found
    elif scores:
        pairs = [pair for pair in zip(scores, its_scores, strict=True) if max(pair) > NO_HYPOTHESIS]
        far = max((abs(a - b) / max(1, abs(b)) for a, b in pairs), default=0.0)
        assert far <= TOLERANCE[model.dtype], f"scores {scores} instead of {its_scores}"
    return len(wrong)


Found = tuple[list[list[int]], list[float]]  # translations, and their scores if there are any


def inputs_of(request: Request) -> dict[str, Tensor]:
    inputs = source(request.lengths, request.left, request.seed)
    mask = inputs["attention_mask"]
    if request.mask == "none":
        del inputs["attention_mask"]
    elif request.mask == "with holes":
        mask[:, request.seed % mask.shape[1]] = 0
        mask[mask.sum(dim=1) == 0] = 1
    elif request.mask == "with an empty row":
        mask[request.seed % len(mask)] = 0
    if request.prefix > 1:
        draw = torch.Generator().manual_seed(request.seed)
        more = torch.randint(FIRST_WORD, VOCABULARY, (1, request.prefix - 1), generator=draw)
        inputs["decoder_input_ids"] = torch.cat([torch.tensor([[START]]), more], dim=1).repeat(
            len(mask), 1
        )
    return inputs


def by_us(model: Model, request: Request) -> Found:
    inputs, arguments = inputs_of(request), {**request.arguments, **AS_DICT}
    if request.given_as in ("encoder_outputs", "inputs_embeds"):
        ids, mask = inputs.pop("input_ids"), inputs.get("attention_mask")
        inputs["attention_mask"] = mask = ids.ne(PAD).long() if mask is None else mask
        if request.given_as == "encoder_outputs":
            arguments["encoder_outputs"] = model.get_encoder()(ids, mask)
        else:
            inputs["inputs_embeds"] = model.get_input_embeddings()(ids)
    elif request.given_as == "inputs":
        inputs["inputs"] = inputs.pop("input_ids")
    elif request.given_as == "config":
        given = {name: arguments.pop(name) for name in list(arguments) if name not in CALLABLES}
        arguments["generation_config"] = GenerationConfig(**given)
    elif request.given_as == "next_batch":
        return rows_of(model.generate(**arguments, **with_the_rest_later(inputs)))
    set_seed(request.seed)
    return rows_of(model.generate(**inputs, **arguments))


def with_the_rest_later(inputs: dict[str, Tensor]) -> dict[str, Any]:
    """The first half of a batch, and a `next_batch` that brings the others."""
    ids = inputs["input_ids"]
    mask, waiting = (
        inputs.get("attention_mask", ids.ne(PAD).long()),
        list(range((len(ids) + 1) // 2, len(ids))),
    )

    def next_batch(count: int) -> tuple[Tensor, Tensor] | None:
        some, waiting[:] = waiting[:count], waiting[count:]
        return (ids[some], mask[some]) if some else None

    first = {name: tensor[: waiting[0] if waiting else None] for name, tensor in inputs.items()}
    return {**first, "next_batch": next_batch}


def by_their_loop(model: Model, request: Request) -> Found:
    """By transformers, whose limits are those of a batch: for limits of their own, one sentence at a time."""
    inputs, arguments = inputs_of(request), {**request.arguments, **AS_DICT, "output_scores": True}
    inputs.setdefault(
        "attention_mask", inputs["input_ids"].ne(PAD).long()
    )  # it makes none for the decoder
    set_seed(request.seed)
    if "max_length_over_source" not in arguments:
        return rows_of(by_transformers(model, **inputs, **arguments))
    over, allowed = (
        arguments.pop("max_length_over_source"),
        arguments.get("prefix_allowed_tokens_fn"),
    )
    translations, scores = list[list[int]](), list[float]()
    for row in range(len(request.lengths)):
        sentence = {name: tensor[row : row + 1] for name, tensor in inputs.items()}
        arguments["max_new_tokens"] = max(1, int(sentence["attention_mask"].sum()) + over)
        if allowed:
            arguments["prefix_allowed_tokens_fn"] = lambda _, ids, row=row: allowed(row, ids)
        found = rows_of(by_transformers(model, **sentence, **arguments))
        translations, scores = translations + found[0], scores + found[1]
    return translations, scores


def rows_of(output: Any) -> Found:
    """Without padding, of which batches have different numbers."""
    rows = output.sequences.tolist()
    for row in rows:
        while row[-1] == PAD:
            row.pop()
    scores = output.get("sequences_scores")
    return rows, [] if scores is None else scores.tolist()


def is_tie(model: Model, request: Request, row: int, both: list[list[int]]) -> bool:
    """Check if transformers' loop finds both of these translations when numbers are rounded otherwise."""
    found, weights = list[list[int]](), [weight.clone() for weight in model.parameters()]
    for attempt in range(24):
        noise = torch.Generator().manual_seed(attempt)
        for weight, before in zip(model.parameters(), weights, strict=True):
            factor = 1 + ROUNDING[model.dtype] * torch.randn(weight.shape, generator=noise)
            weight.copy_(before * factor)
        found.append(by_their_loop(model, request)[0][row])
        if all(each in found for each in both):
            break
    for weight, before in zip(model.parameters(), weights, strict=True):
        weight.copy_(before)
    return all(each in found for each in both)


def run(count: int, number: int | None, chosen: str | None = None) -> Tally:
    """Check so many cases, always the same without a number. `chosen` is the engine of all of them."""
    tally = Tally()

    @settings(
        max_examples=count,
        derandomize=number is None,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def trial(case: Case) -> None:
        try:
            check(case if chosen is None else replace(case, engine=chosen), tally)
        except Exception as error:
            where = "".join(traceback.format_exception(error)[-3:])
            tally.differences.append(f"{case}\n{where}")
            print(tally.differences[-1], flush=True)

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # settings without effect, thousands of times
    try:
        (trial if number is None else seed(number)(trial))()
    finally:
        logging.set_verbosity(verbosity)
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=ENGINES, help="by default random")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # threads wait for each other longer than such small products take
    start = time.monotonic()
    tally = run(arguments.cases, arguments.seed, arguments.engine)
    seconds = time.monotonic() - start
    found = f"{len(tally.differences)} differences, {tally.ties} ties"
    print(f"{tally.cases} cases, {tally.requests} requests in {seconds:.0f} s: {found}")
    for name, times in sorted(tally.names.items()):
        print(f"{times:6d}  {name}")
    raise SystemExit(bool(tally.differences))


if __name__ == "__main__":
    main()
