"""`python -m scripts.docs.lessons.check` of a loss and of the shift of the target."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from hf_vanilla_transformer.loss_vanilla_transformer import shift_right, translation_loss
from scripts.docs.lessons.check.checker import check

PAD = 0


def ours(logits, labels, label_smoothing, pad_token_id):
    return translation_loss(
        logits, labels.masked_fill(labels == pad_token_id, -100), label_smoothing
    )


def cross_entropy(logits, target, **settings):
    """Of logits (N, V) or (B, T, V)."""
    return functional.cross_entropy(logits.flatten(0, -2), target.flatten(), **settings)


def torchs(logits, target, ignore_index, smoothing=0.0):
    return cross_entropy(logits, target, ignore_index=ignore_index, label_smoothing=smoothing)


class LabelSmoothing(nn.Module):
    """Divides the smoothing among the tokens that are neither the label nor padding, with a sum of KL divergences."""

    def __init__(self, size, padding_idx, smoothing=0.0):
        super().__init__()
        self.size = size
        self.padding_idx = padding_idx
        self.smoothing = smoothing

    def forward(self, x, target):
        wanted = torch.full_like(x, self.smoothing / (self.size - 2))
        wanted.scatter_(1, target[:, None], 1 - self.smoothing)
        wanted[:, self.padding_idx] = 0
        wanted[target == self.padding_idx] = 0
        return nn.KLDivLoss(reduction="sum")(x, wanted)


def no_mask(logits, target, smoothing):
    return cross_entropy(logits, target, label_smoothing=smoothing)


def all_positions(logits, target):
    losses = cross_entropy(logits, target, reduction="none")
    return (losses * (target.flatten() != PAD)).mean()


def softmax_twice(logits, target):
    return functional.cross_entropy(logits.softmax(-1), target, ignore_index=PAD)


def not_smoothed(logits, target, label_smoothing):
    return functional.cross_entropy(logits, target, ignore_index=PAD)


def sentences(logits, target):
    means = [
        functional.cross_entropy(*pair, ignore_index=PAD)
        for pair in zip(logits, target, strict=True)
    ]
    return torch.stack(means).mean() if logits.ndim == 3 else "needs (B, T, V)"


def places(report):
    return [mistake.place for mistake in report.mistakes]


def options(report):
    return [mistake.option for mistake in report.mistakes]


@pytest.mark.parametrize(
    ("loss", "wrong"),
    [
        (ours, []),
        (torchs, []),
        (no_mask, ["normalisation"]),
        (all_positions, ["normalisation"]),
        (softmax_twice, ["softmax"]),
        (not_smoothed, ["label smoothing"]),
        (sentences, ["normalisation"]),
    ],
)
def test_losses_are_told_apart(loss, wrong, monkeypatch):
    monkeypatch.setattr(loss, "__name__", f"{loss.__name__}_loss")
    assert places(check(loss, {})) == wrong


def test_smoothing_among_the_other_tokens_is_noted():
    report = check(LabelSmoothing, {})
    assert places(report) == []
    assert any("V - 2" in text for text in report.notes)


@pytest.mark.parametrize(
    ("shift", "option"),
    [
        (lambda labels, bos: functional.pad(labels[:, :-1], (1, 0), value=bos), None),
        (lambda labels, start_id, pad_id: shift_right(labels, start_id, pad_id), None),
        (lambda labels, bos: labels, "none"),
        (lambda labels, bos: functional.pad(labels[:, 1:], (0, 1), value=bos), "left"),
        (lambda labels, bos: labels.roll(1, dims=1), "start"),
    ],
)
def test_shifts_are_told_apart(shift, option):
    shift.__name__ = "shift_right"
    assert options(check(shift, {})) == ([option] if option else [])


def test_shifted_loss_is_a_loss():
    def shifted_loss(logits, labels):
        return torchs(logits[:, :-1], labels[:, 1:], ignore_index=0)

    assert places(check(shifted_loss, {})) == ["loss"]


@pytest.mark.parametrize("has_right_count", [True, False])
def test_loss_may_be_a_pair_of_a_sum_and_a_count(has_right_count):
    def pair_loss(logits, target):
        total = cross_entropy(logits, target, ignore_index=PAD, reduction="sum")
        count = int(target.ne(PAD).sum()) if has_right_count else target.numel()
        return total, count

    report = check(pair_loss, {})
    assert options(report) == ([] if has_right_count else ["positions"])
    assert "pair" in report.notes[0]
