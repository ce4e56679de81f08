"""Compare a class with the paper: find the choices that let `Reference` compute the same numbers."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hf_vanilla_transformer.utils.errors import UserError

from . import subject
from .mistakes import MISTAKES, Mistake
from .objectives import check_loss, check_shift
from .parts import check_part, part_of
from .place import first_difference
from .reference import Reference
from .report import TOLERANCE, UNKNOWN, Report, choices, notes_of, relative_difference

_OUTPUTS = {
    "logits": lambda logits: logits,
    "log-probabilities": lambda logits: logits.log_softmax(-1),
    "probabilities": lambda logits: logits.softmax(-1),
    "log-probabilities over positions": lambda logits: logits.log_softmax(1),
}
_OUTPUT_MISTAKES = {
    "probabilities": Mistake(
        "output", "§3.4", "probabilities", "the model ends in a softmax, and cross-entropy computes another one"
    ),
    "log-probabilities over positions": Mistake(
        "output", "§3.4", "dim=1", "the softmax of the output runs over positions, not over the vocabulary"
    ),
}
_TIED = Mistake("tying", "§3.4", "source", "the output layer has the table of the source, not of the target")
_PRE = Mistake("norm position", "§3.1", "post", "an argument asks for pre-norm, and the layers are post-norm")
_CACHED = Mistake(
    "cached step", "§3.1", None, "token by token with a cache the logits are not those of the whole target"
)
_PADDED = Mistake("positions", "§3.5", "padding", "padding on the left of a source moves the positions of its tokens")


def check(build: Any, given: Mapping[str, Any]) -> Report:
    """Build a model, or a part of one, and compare its output with the paper's for the same random weights.

    Args:
        build: a class or a function that returns an `nn.Module`. Its name tells a part, such as `PositionalEncoding`,
            `MultiHeadAttention`, `LayerNorm`, `EncoderLayer`, `loss` or `shift_right`, from a whole model.
        given: arguments for it that the names of its parameters do not explain.

    Raises:
        UserError: it cannot be built, called or understood. The message names the argument that is needed.
    """
    torch.manual_seed(0)
    for words, check_objective in ((r"shift", check_shift), (r"loss|smooth|criterion", check_loss)):
        if re.search(words, build.__name__, re.IGNORECASE):
            return check_objective(build, given)
    part = part_of(build.__name__)
    return check_part(build, given, *part) if part else check_model(build, given)


@torch.no_grad()
def check_model(build: Any, given: Mapping[str, Any]) -> Report:
    """As `check`, for an encoder and decoder."""
    arguments = subject.constructor_arguments(build, given)
    model = subject.built(build, arguments)
    if subject.shared_layers(model):
        explanation = "the layers of a stack are one object, as in [layer] * N: use copy.deepcopy"
        return Report([Mistake("layers", "§3.1", "shared", explanation)], float("inf"), [])
    weights = subject.weights_of(model)
    source, target = _batch(weights.tensors)
    outputs = _outputs(model, source, target)
    reference = Reference(weights.tensors, subject.heads_of(arguments), subject.PAD, weights.tables)
    if weights.tied_to_source:
        return Report([_TIED], float("inf"), [])
    report = _compare(reference, [output for _, output in outputs], source, target, subject.norm_options(model))
    if report.mistakes == [UNKNOWN]:
        places = [first_difference(model, weights.modules, reference, call, (source, target)) for call, _ in outputs]
        # of two ways to call it that both work, one may swap words and sentences
        place, section = min(places, key=lambda each: "embeddings" in each[0])
        report.mistakes[0] = UNKNOWN._replace(place=place, section=section)
    asks_pre_norm = any("norm" in name and (value is True or value == "pre") for name, value in arguments.items())
    if not report.mistakes and asks_pre_norm and not any(note.startswith("pre-norm") for note in report.notes):
        return Report([_PRE], report.difference, report.notes)
    for mistake, difference in () if report.mistakes else _with_cache_and_padding(model, source, target):
        if difference > TOLERANCE:
            return Report([mistake], difference, report.notes)
    return report


def _with_cache_and_padding(model: nn.Module, source: Tensor, target: Tensor) -> Iterator[tuple[Mistake, float]]:
    """Mistakes that only calls with Hugging Face's arguments show, with the difference of the logits."""
    if not {"input_ids", "attention_mask", "past_key_values"} <= inspect.signature(model.forward).parameters.keys():
        return

    def run(ids: Tensor, target: Tensor, **more: Any) -> Any:
        return model(input_ids=ids, attention_mask=ids.ne(subject.PAD).long(), decoder_input_ids=target, **more)

    logits, steps, cache = run(source, target).logits, [], None
    left = torch.stack([row.roll(int(row.eq(subject.PAD).sum())) for row in source])
    yield _PADDED, relative_difference(run(left, target).logits, logits)
    try:
        for token in target.split(1, dim=1):
            output = run(source, token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits)
        yield _CACHED, relative_difference(torch.cat(steps, dim=1), logits)
    except RuntimeError:  # keys and values of shapes that do not fit
        yield _CACHED, float("inf")


def _batch(weights: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A source (3, 7) with padding, and a decoder input (3, 5) without."""
    generator = torch.Generator().manual_seed(1)
    sizes = (len(weights[f"model.{stack}.embed_tokens.weight"]) for stack in ("encoder", "decoder"))
    source, target = (
        torch.randint(subject.EOS + 1, min(size, subject.SOURCE_TOKENS), (3, length), generator=generator)
        for size, length in zip(sizes, (7, 5), strict=True)
    )
    for row, length in enumerate((6, 5, 4)):  # with padding in each, so that an inverted mask shows something
        source[row, length:] = subject.PAD
    return source, target


def _outputs(model: nn.Module, source: Tensor, target: Tensor) -> list[tuple[Callable[[], Any], Tensor]]:
    """Every way to call the model that works, with its output."""
    errors: list[BaseException] = []
    outputs: list[tuple[Callable[[], Any], Tensor]] = []
    for call in subject.calls(model, source, target):
        try:
            output, again = (subject.logits_of(call(), *target.shape) for _ in range(2))
        except Exception as error:
            errors.append(error)
            continue
        if output is not None and again is not None:
            subject.require_equal(output, again)
            outputs.append((call, output))
    if not outputs:
        reason = subject.describe_failure(errors)
        raise UserError(f"forward cannot be called with (source, target) and masks: {reason}")
    return outputs


def _compare(
    reference: Reference, outputs: list[Tensor], source: Tensor, target: Tensor, norms: Mapping[str, tuple[Any, ...]]
) -> Report:
    smallest = float("inf")
    for choice, mistake in choices({each.place for each in MISTAKES}, norms):
        try:
            logits = reference(source, target, choice)
        except (RuntimeError, KeyError):  # shapes that this mistake does not allow, or a part that the model lacks
            continue
        for name, transform in _OUTPUTS.items():
            expected = transform(logits)
            for output in (each for each in outputs if each.shape[-1] == expected.shape[-1]):
                difference = relative_difference(output, expected[:, : output.shape[1]])
                if not mistake and name not in _OUTPUT_MISTAKES:
                    smallest = min(smallest, difference)
                if difference < TOLERANCE:
                    mistakes = [each for each in (mistake, _OUTPUT_MISTAKES.get(name)) if each]
                    table = {"positions": "table"} if reference.tables else {}
                    notes = notes_of(choice | table, mistake, output=name)
                    return Report(mistakes, smallest if mistakes else difference, notes)
    return Report([UNKNOWN], smallest, [])
