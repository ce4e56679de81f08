"""Check a loss, or the shift of the target, alone (§3.1, §5.4)."""

import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from .mistakes import Mistake
from .report import TOLERANCE, UNKNOWN, Report
from .subject import BOS, PAD, TARGET_TOKENS, constructor_arguments, describe_failure

EPSILON = 0.1

_SMOOTHING = {
    "V": None,
    "none": None,
    "V - 1": "ε is divided among the V - 1 other tokens, where §5.4's reference has all V",
    "V - 2": "ε is divided among the V - 2 other tokens without padding, where §5.4's reference has all V",
}
_MEANS = {
    "sum": "the loss is a sum, to be divided by the number of tokens",
    "padding": Mistake("normalisation", "padding", "§5.4", "padding has a loss too: leave its positions out"),
    "positions": Mistake(
        "normalisation", "positions", "§5.4", "the sum is divided by all positions, padding included"
    ),
    "sentences": Mistake("normalisation", "sentences", "§5.4", "a mean of sentences' means is no mean over tokens"),
}
_TWICE = Mistake("softmax", "twice", "§5.4", "the softmax is computed twice: cross-entropy takes scores")
_UNSMOOTHED = Mistake("label smoothing", "none", "§5.4", "the argument for label smoothing has no effect")
_SHIFTS = {
    "none": Mistake("target shift", "none", "§3.1", "the decoder reads the token that it has to predict"),
    "left": Mistake(
        "target shift", "left", "§3.1", "the target is shifted to the left, so that the decoder sees the next"
    ),
    "start": Mistake("target shift", "start", "§3.1", "the first token is lost, or the start token is missing"),
}


def check_loss(build: Any, given: Mapping[str, Any]) -> Report:
    """As `check_model`, for a function or module of (scores, labels). Its smoothing is set to 0.1."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(3, 6, TARGET_TOKENS, generator=generator)
    labels = torch.randint(PAD + 1, TARGET_TOKENS, (3, 6), generator=generator)
    labels[1, 4:], labels[2, 3:] = PAD, PAD
    module = inspect.isclass(build) and issubclass(build, nn.Module)
    names = inspect.signature(build).parameters
    settings = {name: EPSILON for name in names if any(word in name.lower() for word in ("smooth", "eps"))}
    settings |= {name: PAD for name in names if "ignore" in name.lower()}
    settings |= {name: TARGET_TOKENS for name in names if name == "size" or "class" in name} | dict(given)
    inputs = list(names)[: 0 if module else 2]
    rest = constructor_arguments(build, settings | dict.fromkeys(inputs))
    function = (
        build(**rest) if module else lambda x, y: build(x, y, **{n: v for n, v in rest.items() if n not in inputs})
    )
    errors: list[BaseException] = []
    for scores, flat in itertools.product((logits, logits.log_softmax(-1)), (True, False)):
        try:
            loss = function(scores.flatten(0, 1), labels.flatten()) if flat else function(scores, labels)
        except Exception as error:
            errors.append(error)
            continue
        for smoothing, mean, twice, expected in _losses(scores, labels):
            if isinstance(loss, Tensor) and loss.numel() == 1 and abs(float(loss) - expected) < TOLERANCE * expected:
                reasons = [_MEANS.get(mean), _SMOOTHING[smoothing], _TWICE if twice else None]
                reasons += [_UNSMOOTHED] if smoothing == "none" and EPSILON in settings.values() else []
                mistakes = [each for each in reasons if isinstance(each, Mistake)]
                return Report(
                    mistakes, abs(float(loss) - expected), [each for each in reasons if isinstance(each, str)]
                )
    if len(errors) == 4:
        raise UserError(f"{build.__name__} cannot be called with (scores, labels): {describe_failure(errors)}")
    return Report([UNKNOWN._replace(place="loss", section="§5.4")], float("inf"), [])


def _losses(scores: Tensor, labels: Tensor) -> Iterator[tuple[str, str, bool, float]]:
    """Smoothing, mean, whether the softmax is computed twice, and the loss. The paper's first."""
    real, size = labels != PAD, scores.shape[-1]
    for twice in (False, True):
        logs = (scores.softmax(-1) if twice else scores).log_softmax(-1)
        label = -logs.gather(-1, labels[..., None])[..., 0]
        total, padding = -logs.sum(-1), -logs[..., PAD]
        uniform = {
            "V": total / size,
            "V - 1": (total - label) / (size - 1),
            "V - 2": (total - label - padding) / (size - 2),
        }
        for smoothing, constant in itertools.product(_SMOOTHING, (False, True)):
            each = label if smoothing == "none" else (1 - EPSILON) * label + EPSILON * uniform[smoothing]
            count = size - {"V": 0, "none": 0, "V - 1": 1, "V - 2": 2}[smoothing]
            if constant:  # KLDivLoss subtracts the entropy of the smoothed target
                each = each + (1 - EPSILON) * math.log(1 - EPSILON) + EPSILON * math.log(EPSILON / count)
            tokens = each * real
            means = {"tokens": tokens.sum() / real.sum(), "sum": tokens.sum(), "padding": each.mean(),
                     "positions": tokens.mean(), "sentences": (tokens.sum(1) / real.sum(1)).mean()}  # fmt: skip
            yield from ((smoothing, name, twice, float(loss)) for name, loss in means.items())


def check_shift(build: Callable[..., Any], given: Mapping[str, Any]) -> Report:
    """As `check_model`, for a function that makes the decoder's input from labels (B, T)."""
    labels = torch.arange(3, 15).view(2, 6)
    first, *others = inspect.signature(build).parameters
    settings = constructor_arguments(build, {first: None, **given})
    output = build(labels.clone(), **{name: settings[name] for name in others if name in settings})
    start = torch.full_like(labels[:, :1], BOS)
    expected = torch.cat([start, labels[:, :-1]], dim=1)
    wrong = {"none": labels, "left": torch.cat([labels[:, 1:], start], dim=1)}
    if torch.equal(output, expected):
        return Report([], 0.0, [])
    name = next((name for name, ids in wrong.items() if torch.equal(output, ids)), "start")
    return Report([_SHIFTS[name]], float("inf"), [])
