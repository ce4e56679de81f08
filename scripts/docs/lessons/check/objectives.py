"""Check a loss, or the shift of the target, alone (§3.1, §5.4)."""

import inspect
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_vanilla_transformer.utils.errors import UserError

from .mistakes import Mistake
from .report import TOLERANCE, UNKNOWN, Report
from .subject import BOS, PAD, TARGET_TOKENS, constructor_arguments, describe_failure

EPSILON = 0.1

_OTHERS = {"V": 0, "V - 1": 1, "V - 2": 2, "none": 0}  # smoothing: the tokens that get nothing of ε
_MISTAKES = {
    mistake.option: mistake
    for mistake in (
        Mistake(
            "normalisation", "§5.4", "padding", "padding has a loss too: leave its positions out"
        ),
        Mistake(
            "normalisation",
            "§5.4",
            "positions",
            "the sum is divided by all positions, padding included",
        ),
        Mistake(
            "normalisation",
            "§5.4",
            "sentences",
            "a mean of sentences' means is no mean over tokens",
        ),
        Mistake(
            "softmax", "§5.4", "twice", "the softmax is computed twice: cross-entropy takes scores"
        ),
        Mistake(
            "label smoothing",
            "§5.4",
            "unsmoothed",
            "the argument for label smoothing has no effect",
        ),
        Mistake(
            "target shift", "§3.1", "none", "the decoder reads the token that it has to predict"
        ),
        Mistake(
            "target shift",
            "§3.1",
            "left",
            "the target is shifted to the left, so that the decoder sees the next",
        ),
        Mistake(
            "target shift",
            "§3.1",
            "start",
            "the first token is lost, or the start token is missing",
        ),
    )
}


def check_loss(build: Any, given: Mapping[str, Any]) -> Report:
    """As `check_model`, for a function or module of (scores, labels). Its smoothing is set to 0.1."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 6, TARGET_TOKENS, generator=generator)
    labels = torch.randint(PAD + 1, TARGET_TOKENS, (3, 6), generator=generator)
    labels[1, 4:], labels[2, 3:] = PAD, PAD
    names = inspect.signature(build).parameters
    settings: dict[str, Any] = {
        name: EPSILON for name in names if re.search("smooth|eps", name.lower())
    }
    settings |= {name: PAD for name in names if "ignore" in name.lower()}
    settings |= {name: TARGET_TOKENS for name in names if name == "size" or "class" in name} | dict(
        given
    )
    if inspect.isclass(build):
        function: Any = build(**constructor_arguments(build, settings))
    else:
        inputs = dict.fromkeys(list(names)[:2])
        rest = constructor_arguments(build, settings | inputs)
        function = partial(
            build, **{name: value for name, value in rest.items() if name not in inputs}
        )
    errors: list[BaseException] = []
    for scores, flat in itertools.product((logits, logits.log_softmax(-1)), (True, False)):
        try:
            result = (
                function(scores.flatten(0, 1), labels.flatten())
                if flat
                else function(scores, labels)
            )
            loss, is_pair = _number(result)
        except Exception as error:
            errors.append(error)
            continue
        for smoothing, mean, twice, expected in _losses(scores, labels):
            if abs(loss - expected) < TOLERANCE * expected:
                options = [mean, "twice" * twice]
                options += (
                    ["unsmoothed"] if smoothing == "none" and EPSILON in settings.values() else []
                )
                notes = (
                    ["the loss is a sum, to be divided by the number of tokens"]
                    if mean == "sum"
                    else []
                )
                if is_pair:
                    notes = ["the loss is a pair of a sum and the number that divides it"]
                if _OTHERS[smoothing]:
                    notes.append(
                        f"ε is divided among {smoothing} tokens, where §5.4's reference has all V"
                    )
                return Report(
                    [_MISTAKES[each] for each in options if each in _MISTAKES],
                    abs(loss - expected),
                    notes,
                )
    if len(errors) == 4:
        raise UserError(
            f"{build.__name__} cannot be called with (scores, labels): {describe_failure(errors)}"
        )
    return Report([UNKNOWN._replace(place="loss", section="§5.4")], float("inf"), [])


def _number(result: Any) -> tuple[float, bool]:
    """A loss, and whether it was a pair of a sum and a count, which is divided here."""
    if not isinstance(result, tuple | list):
        return float(result), False
    total, count, *_ = (float(each) for each in result)
    return total / count, True


def _losses(scores: Tensor, labels: Tensor) -> Iterator[tuple[str, str, bool, float]]:
    """Smoothing, mean, whether the softmax is computed twice, and the loss. The paper's first."""
    real = labels != PAD
    size = scores.shape[-1]
    for twice in (False, True):
        logs = (scores.softmax(-1) if twice else scores).log_softmax(-1)
        label = -logs.gather(-1, labels[..., None])[..., 0]
        total = -logs.sum(-1)
        padding = -logs[..., PAD]
        sums = {"V": total, "V - 1": total - label, "V - 2": total - label - padding}
        for smoothing, constant in itertools.product(_OTHERS, (False, True)):
            count = size - _OTHERS[smoothing]
            each = (
                (1 - EPSILON) * label + EPSILON * sums[smoothing] / count
                if smoothing in sums
                else label
            )
            if constant:  # KLDivLoss subtracts the entropy of the smoothed target
                each = (
                    each
                    + (1 - EPSILON) * math.log(1 - EPSILON)
                    + EPSILON * math.log(EPSILON / count)
                )
            tokens = each * real
            means = {
                "tokens": tokens.sum() / real.sum(),
                "sum": tokens.sum(),
                "padding": each.mean(),
                "positions": tokens.mean(),
                "sentences": (tokens.sum(1) / real.sum(1)).mean(),
            }
            yield from ((smoothing, name, twice, float(loss)) for name, loss in means.items())


def check_shift(build: Callable[..., Any], given: Mapping[str, Any]) -> Report:
    """As `check_model`, for a function that makes the decoder's input from labels (B, T)."""
    labels = torch.arange(3, 15).view(2, 6)
    first, *others = inspect.signature(build).parameters
    settings = constructor_arguments(build, {first: None, **given})
    try:
        output = build(
            labels.clone(), **{name: settings[name] for name in others if name in settings}
        )
    except Exception as error:
        raise UserError(
            f"{build.__name__} cannot be called with labels: {describe_failure([error])}"
        ) from error
    start = torch.full_like(labels[:, :1], BOS)
    options = {"none": labels, "left": torch.cat([labels[:, 1:], start], dim=1)}
    if isinstance(output, Tensor) and output.equal(torch.cat([start, labels[:, :-1]], dim=1)):
        return Report([], 0.0, [])
    name = next(
        (name for name, ids in options.items() if isinstance(output, Tensor) and output.equal(ids)),
        "start",
    )
    return Report([_MISTAKES[name]], float("inf"), [])
