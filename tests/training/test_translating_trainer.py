"""The steps of an evaluation of the trainer, each with small objects in place of a run."""

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace as Fake
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.utils import convert_outputs_to_fp32
from torch import nn
from transformers import Seq2SeqTrainer

from hf_vanilla_transformer.training.trainer.resumable_trainer import ResumableTrainer
from hf_vanilla_transformer.training.trainer.translating_trainer import (
    TranslatingTrainer,
    _WithoutPrefix,
)
from tests.trainer_helpers import uninitialised

bare = partial(uninitialised, TranslatingTrainer)


def of_config(**fields: Any) -> Any:
    return bare(_base_model=lambda: Fake(config=Fake(**fields)))


@pytest.mark.parametrize(
    ("ends", "share"),
    [(2, 0.5), ([2, 7], 0.75), (8, 0.25), (None, 1.0)],
)
def test_translation_ends_at_an_end_token_after_the_first(ends: Any, share: float) -> None:
    """The configuration of an `EncoderDecoderModel` has no end token, its generation config does."""
    model = Fake(config=Fake(), generation_config=Fake(eos_token_id=ends))
    trainer = bare(_base_model=lambda: model)
    rows = np.array([[2, 5, 2], [2, 2, 5], [2, 5, 8], [2, 7, 5]])
    assert trainer._share_that_ends(rows) == share
    assert trainer._share_that_ends(rows[:0]) == 1.0


@pytest.mark.parametrize(
    ("budget", "in_training", "given", "expected"),
    [
        (None, True, {"max_length": 9}, {}),
        (Fake(cuts=False), True, {"max_length": 9}, {}),
        (Fake(cuts=True), False, {"max_length": 9}, {}),
        (Fake(cuts=True), True, {"num_beams": 2}, {"num_beams": 2, "max_length": 12}),  # 1 + 6 + 5
        (Fake(cuts=True), True, {"max_length": 9}, {"max_length": 9}),
        (Fake(cuts=True), True, {"max_length": 13}, {"max_length": 12}),
    ],
)
def test_budget_cuts_translations_in_training(
    budget: Any, in_training: bool, given: dict[str, Any], expected: dict[str, Any]
) -> None:
    trainer = bare(budget=budget, is_in_train=in_training, _gen_kwargs=given)
    assert trainer._cut({"labels": torch.zeros(2, 4)}) == expected


def test_translations_are_padded_with_the_token_of_the_target(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Seq2SeqTrainer, "_pad_tensors_to_max_len", lambda *given: "the source's")
    rows = torch.tensor([[3, 4]])
    assert of_config(decoder_pad_token_id=5)._pad_tensors_to_max_len(rows, 4).tolist() == [
        [3, 4, 5, 5]
    ]
    assert of_config()._pad_tensors_to_max_len(rows, 4) == "the source's"


@pytest.mark.parametrize(
    ("languages", "starts"),
    [(None, False), (Fake(target_mark=None), False), (Fake(target_mark="target"), True)],
)
def test_translation_starts_with_the_token_of_its_language(languages: Any, starts: bool) -> None:
    trainer = of_config(decoder_start_token_id=1)
    trainer.languages = languages
    assert trainer.starts_with_language is starts
    batch = {"labels": torch.tensor([[7, 8], [9, 2]])}
    prefix = trainer._with_first_token(batch)["decoder_input_ids"]
    assert prefix.tolist() == [[1, 7], [1, 9]]


@pytest.mark.parametrize(
    ("in_training", "data", "rows", "whole", "evaluated", "is_kept"),
    [
        (False, None, None, True, None, False),
        (True, "others", None, True, "others", False),
        (True, None, None, True, None, True),
        (True, None, None, False, None, False),
        (True, None, [1], False, [1], False),
    ],
)
def test_evaluation_in_training_keeps_to_its_budget(
    in_training: bool,
    data: Any,
    rows: Any,
    whole: bool,
    evaluated: Any,
    is_kept: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    metrics = {"eval_loss": 1.0}

    def evaluate(trainer: Any, chosen: Any) -> dict[str, float]:
        asked.append(chosen)
        return metrics

    monkeypatch.setattr(ResumableTrainer, "evaluate", evaluate)
    budget = Fake(evaluation=lambda trainer: nullcontext(), rows=rows, is_whole=whole)
    for given, kept in ((budget, is_kept), (None, in_training and data is None)):
        trainer = bare(
            is_in_train=in_training,
            budget=given,
            eval_dataset=Fake(select=lambda rows: rows),
            state=Fake(global_step=4),
            scores={},
        )
        assert trainer.evaluate(data) is metrics
        assert trainer.scores == ({4: metrics} if kept else {})
    assert asked == [evaluated, data]


@pytest.mark.parametrize("rows", [None, [1, 2]])
@pytest.mark.parametrize("translates", [False, True])
def test_loop_counts_the_sentences_of_its_budget(
    rows: Any, translates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Fake(predictions=np.array([[2, 5]]), metrics={})
    averages = []

    def loop(trainer: Any) -> Any:
        averages.append(trainer.args.average_tokens_across_devices)
        return output

    monkeypatch.setattr(ResumableTrainer, "evaluation_loop", loop)
    trainer = bare(
        args=Fake(predict_with_generate=translates, average_tokens_across_devices=True),
        budget=Fake(rows=rows),
        ended=1.0,
        _share_that_ends=lambda rows: 0.25,
    )
    assert trainer.evaluation_loop() is output
    assert [*averages, trainer.args.average_tokens_across_devices] == [False, True]
    assert trainer.gather_function == trainer._gather
    assert trainer.ended == (0.25 if translates else 1.0)
    assert output.metrics == ({} if rows is None else {"eval_sentences": 2})


# The last batches of ten pairs, three to a batch of each process: what is computed for pairs 6 to 9, then 0 and 1
@pytest.mark.parametrize(
    ("ranks", "kept"),
    [
        ([[9]], [9]),
        ([[9, 9, 9]], [9, 9, 9]),
        ([[6, 7, 8], [9, 0, 1]], [6, 7, 8, 9]),
        ([[6, 6, 7, 7, 8, 8], [9, 9, 0, 0, 1, 1]], [6, 6, 7, 7, 8, 8, 9, 9]),
        ([[21, 30], [10, 30]], [21, 30, 10, 30]),  # sums over a batch
    ],
)
@pytest.mark.parametrize("is_last", [True, False])
def test_pairs_that_fill_the_last_batch_are_left_out(
    ranks: list[list[int]], kept: list[int], is_last: bool
) -> None:
    count = len(ranks)
    gradient_state = Fake(end_of_dataloader=is_last, remainder=10 % (3 * count))
    everyone = torch.tensor(ranks).flatten()
    accelerator = Fake(
        num_processes=count, gradient_state=gradient_state, gather=lambda rows: everyone
    )
    trainer = bare(
        accelerator=accelerator,
        args=Fake(eval_batch_size=3),
        _pairs_of_step=3,
        _gathers_loss=False,
    )
    gathered = trainer._gather(torch.tensor(ranks[0]))
    assert gathered.tolist() == (kept if is_last else everyone.tolist())


@pytest.mark.parametrize("native", [True, False])
def test_forward_of_accelerate_is_left_out_within_a_step(native: bool) -> None:
    forward = convert_outputs_to_fp32(nn.Linear.forward)
    trainer = bare(
        accelerator=Fake(native_amp=native, autocast=nullcontext), model=Fake(forward=forward)
    )
    with pytest.raises(KeyError), trainer._autocast_around_the_step():
        assert hasattr(trainer.model, "forward") is not native
        raise KeyError
    assert trainer.model.forward == forward


@pytest.mark.parametrize("error", [None, KeyError])
def test_measured_sentences_have_no_scores(error: Any) -> None:
    asked: list[Any] = []

    def predict(rows: Any) -> None:
        asked.append((rows, trainer.compute_metrics))
        if error is not None:
            raise error

    data = Fake(select=lambda rows: f"rows {rows}")
    trainer = bare(eval_dataset=data, compute_metrics="bleu", predict=predict)
    with pytest.raises(error) if error else nullcontext():
        trainer.translate_rows([1, 2])
    assert asked == [("rows [1, 2]", None)]
    assert trainer.compute_metrics == "bleu"


def test_loss_is_that_without_the_prefix_of_a_search() -> None:
    loss = _WithoutPrefix(lambda **batch: batch)
    assert loss(decoder_input_ids=1, labels=2) == {"labels": 2}
