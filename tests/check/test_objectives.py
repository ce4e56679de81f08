"""`python -m scripts.docs.lessons.check` of a loss and of the shift of the target."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_vanilla_transformer.loss_vanilla_transformer import shift_right, translation_loss
from scripts.docs.lessons.check.checker import check

PAD = 0


def ours(logits, labels, label_smoothing, pad_token_id):
    return translation_loss(logits, labels.masked_fill(labels == pad_token_id, -100), label_smoothing)


def torchs(logits, target, ignore_index, smoothing=0.0):
    return functional.cross_entropy(
        logits.flatten(0, -2), target.flatten(), None, None, ignore_index, None, "mean", smoothing
    )


class LabelSmoothing(nn.Module):
    """Divides the smoothing among the tokens that are neither the label nor padding, with a sum of KL divergences."""

    def __init__(self, size, padding_idx, smoothing=0.0):
        super().__init__()
        self.size, self.padding_idx, self.smoothing = size, padding_idx, smoothing

    def forward(self, x, target):
        wanted = torch.full_like(x, self.smoothing / (self.size - 2)).scatter_(1, target[:, None], 1 - self.smoothing)
        wanted[:, self.padding_idx] = 0
        wanted[target == self.padding_idx] = 0
        return nn.KLDivLoss(reduction="sum")(x, wanted)


def no_mask(logits, target, smoothing):
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), label_smoothing=smoothing)


def all_positions(logits, target):
    losses = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return (losses * (target.flatten() != PAD)).mean()


def softmax_twice(logits, target):
    return functional.cross_entropy(logits.softmax(-1), target, ignore_index=PAD)


def not_smoothed(logits, target, label_smoothing):
    return functional.cross_entropy(logits, target, ignore_index=PAD)


def sentences(logits, target):
    means = [functional.cross_entropy(*pair, ignore_index=PAD) for pair in zip(logits, target, strict=True)]
    return torch.stack(means).mean() if logits.ndim == 3 else "needs (B, T, V)"


def named(function):
    function.__name__ = f"{function.__name__}_loss"
    return function


@pytest.mark.parametrize(
    ("loss", "place", "note"),
    [
        (ours, None, None),
        (torchs, None, None),
        (LabelSmoothing, None, "V - 2"),
        (no_mask, "normalisation", None),
        (all_positions, "normalisation", None),
        (softmax_twice, "softmax", None),
        (not_smoothed, "label smoothing", None),
        (sentences, "normalisation", None),
    ],
)
def test_losses_are_told_apart(loss, place, note):
    report = check(loss if loss is LabelSmoothing else named(loss), {})
    assert [mistake.place for mistake in report.mistakes] == ([place] if place else [])
    assert note is None or any(note in text for text in report.notes)


@pytest.mark.parametrize(
    ("shift", "option"),
    [
        (lambda labels, bos: torch.cat([torch.full_like(labels[:, :1], bos), labels[:, :-1]], dim=1), None),
        (lambda labels, start_id, pad_id: shift_right(labels, start_id, pad_id), None),
        (lambda labels, bos: labels, "none"),
        (lambda labels, bos: torch.cat([labels[:, 1:], torch.full_like(labels[:, :1], bos)], dim=1), "left"),
        (lambda labels, bos: labels.roll(1, dims=1), "start"),
    ],
)
def test_shifts_are_told_apart(shift, option):
    shift.__name__ = "shift_right"
    assert [mistake.option for mistake in check(shift, {}).mistakes] == ([option] if option else [])


def test_shifted_loss_is_a_loss():
    def shifted_loss(logits, labels):
        return torchs(logits[:, :-1], labels[:, 1:], ignore_index=0)

    assert [mistake.place for mistake in check(shifted_loss, {}).mistakes] == ["loss"]


@pytest.mark.parametrize("has_right_count", [True, False])
def test_loss_may_be_a_pair_of_a_sum_and_a_count(has_right_count):
    def pair_loss(logits, target):
        total = functional.cross_entropy(logits.flatten(0, -2), target.flatten(), ignore_index=PAD, reduction="sum")
        return total, int(target.ne(PAD).sum()) if has_right_count else target.numel()

    report = check(pair_loss, {})
    assert [each.option for each in report.mistakes] == ([] if has_right_count else ["positions"])
    assert "pair" in report.notes[0]
