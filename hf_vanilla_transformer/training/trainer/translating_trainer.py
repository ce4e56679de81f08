"""`Seq2SeqTrainer` that evaluates fast and exactly: it translates with packed weights and counts every sentence once.

In a run with `max_minutes` the evaluations keep to their share of the time (`EvaluationBudget`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from accelerate.utils import recursively_apply
from datasets import Dataset
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.trainer_pt_utils import find_batch_size
from transformers.trainer_utils import EvalLoopOutput
from transformers.utils import ModelOutput

from ...attention_vanilla_transformer import attention_kernels
from ...batches.batching import Batch
from ...engine.ownership import foreign_part, is_own
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from ...text.language_tokens import LanguageTokens, language_tokens
from .evaluation_budget import EvaluationBudget, longest_cut
from .ownership import foreign_loss
from .resumable_trainer import ResumableTrainer


class TranslatingTrainer(ResumableTrainer):
    """`ResumableTrainer` with fast evaluations in the order of the dataset.

    Args:
        args, kwargs: the arguments of `ResumableTrainer`.

    Attributes:
        languages: the tokens of a model of many languages, or None.
        scores: of the whole evaluations while training, by update.
        budget: of a run with `max_minutes`.
        ended: share of the translations of the last evaluation that end before their limit.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        tokenizer = self.target_tokenizer or self.processing_class
        self.languages: LanguageTokens | None = None
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            self.languages = language_tokens(tokenizer)
        self.scores: dict[int, dict[str, float]] = {}
        self.budget: EvaluationBudget | None = None
        self.ended = 1.0
        # Of a step of an evaluation: the pairs on this rank, and whether its loss is gathered next.
        self._pairs_of_step: int | None = None
        self._gathers_loss = False

    def _get_eval_sampler(self, eval_dataset: Dataset) -> None:
        """Keep the order of the dataset. The base class would group it by length and return permuted predictions."""
        return None

    def evaluate(
        self, eval_dataset: Dataset | None = None, *args: Any, **kwargs: Any
    ) -> dict[str, float]:
        """Evaluate. In a run with `max_minutes`, evaluations in training keep to their budget."""
        if not self.is_in_train or eval_dataset is not None:
            return super().evaluate(eval_dataset, *args, **kwargs)
        if self.budget is None:
            metrics = super().evaluate(None, *args, **kwargs)
            self.scores[self.state.global_step] = metrics
            return metrics
        with self.budget.evaluation(self):
            rows = self.budget.rows
            chosen = None if rows is None else self.eval_dataset.select(rows)
            metrics = super().evaluate(chosen, *args, **kwargs)
            if self.budget.is_whole:
                self.scores[self.state.global_step] = metrics
        return metrics

    def translate_rows(self, rows: np.ndarray) -> None:
        """Translate some evaluation sentences, to measure the time."""
        compute_metrics = self.compute_metrics  # type: ignore[has-type]
        self.compute_metrics = None
        try:
            self.predict(self.eval_dataset.select(rows))
        finally:
            self.compute_metrics = compute_metrics

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """Count each pair once, see `_gather`."""
        self.gather_function = self._gather
        averages = self.args.average_tokens_across_devices
        # `Trainer` would scale the loss of a batch by its share of the tokens of all ranks, also of those that repeat
        # pairs and whose losses are left out.
        self.args.average_tokens_across_devices = False
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.args.average_tokens_across_devices = averages
        if self.args.predict_with_generate and isinstance(output.predictions, np.ndarray):
            self.ended = self._share_that_ends(output.predictions)
        if self.budget is not None and self.budget.rows is not None:
            output.metrics["eval_sentences"] = len(self.budget.rows)
        return output

    def _gather(self, rows: Any) -> Any:
        """Gather what all ranks have computed for a batch, a tensor or several.

        accelerate repeats pairs to fill the last batch of several processes. Their rows are left out of each tensor
        with as many rows as pairs, or a multiple. Others, such as tokens or sums of `preprocess_logits_for_metrics`,
        stay whole. So does everything in one process, which repeats no pair. `Trainer` repeats the loss of a batch as
        often as a full batch has pairs.
        """
        pairs = self._pairs_of_step
        is_first = self._gathers_loss
        self._gathers_loss = False
        if is_first and getattr(rows, "shape", None) == (self.args.eval_batch_size,):
            rows = rows[:pairs]
        gathered = self.accelerator.gather(rows)
        processes = self.accelerator.num_processes
        state = self.accelerator.gradient_state
        if processes == 1 or not (state.end_of_dataloader and state.remainder > 0):
            return gathered
        filled = processes * (pairs or self.args.eval_batch_size)

        def own(tensor: torch.Tensor) -> torch.Tensor:
            of_pair, rest = divmod(len(tensor), filled)
            return tensor if rest else tensor[: of_pair * state.remainder]

        return recursively_apply(own, gathered)

    def _share_that_ends(self, predictions: np.ndarray) -> float:
        """The share of translations (N, T) with an end token after the first token, which may be one."""
        # not of the configuration: that of an EncoderDecoderModel has none
        ends = self._base_model().generation_config.eos_token_id
        if not len(predictions) or ends is None:
            return 1.0
        return float(np.isin(predictions[:, 1:], np.atleast_1d(ends)).any(axis=1).mean())

    # A step of an evaluation

    def prediction_step(
        self,
        model: PreTrainedModel,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Skip logits (B, T, V) that the base class would drop, and translate with packed weights."""
        # transformers' collator gives rows without labels the labels None, and the base class would read them
        inputs = {name: value for name, value in inputs.items() if value is not None}
        self._pairs_of_step = find_batch_size(inputs)
        translates = self.args.predict_with_generate and not prediction_loss_only
        if self._drops_logits():
            if prediction_loss_only:
                inputs = {**inputs, "skip_logits": True}
            elif translates and self.label_smoother is None:  # it reads the logits
                model = partial(model, skip_logits=True)  # `generate` gets the inputs, too
        if translates and "labels" in inputs:
            kwargs = self._cut(inputs) | kwargs
        with self._attention_kernels(), self._autocast_around_the_step():
            if translates:
                from ...engine.optimize import optimize_if_possible

                optimize_if_possible(self.model)  # until the model trains again
                if self.starts_with_language and "labels" in inputs:
                    inputs = self._with_first_token(inputs)
                    model = _WithoutPrefix(model)
            outputs = super().prediction_step(
                model, inputs, prediction_loss_only, ignore_keys, **kwargs
            )
        self._gathers_loss = outputs[0] is not None
        return outputs

    def _drops_logits(self) -> bool:
        """True if no code of the caller's, in the model or in the loss, reads the logits of an evaluation."""
        model = self._base_model()
        is_ours = isinstance(model, VanillaTransformerForConditionalGeneration)
        return is_ours and foreign_part(self.model) is None and foreign_loss(self) is None

    @property
    def starts_with_language(self) -> bool:
        """True if a translation starts with the token of its language."""
        return self.languages is not None and bool(self.languages.target_mark)

    def _with_first_token(self, inputs: Batch) -> Batch:
        """Let `generate` start with the token of the language, the first one of each reference."""
        first = inputs["labels"][:, :1]  # (B, 1)
        start = torch.full_like(first, self._base_model().config.decoder_start_token_id)
        return {**inputs, "decoder_input_ids": torch.cat([start, first], dim=1)}

    def _cut(self, inputs: Batch) -> dict[str, object]:
        """The settings of `generate` that cut the translations of a batch soon after the end of its references.

        They are empty unless the budget of the run cuts translations.
        """
        if self.budget is None or not self.budget.cuts or not self.is_in_train:
            return {}
        most = 1 + longest_cut(inputs["labels"].shape[1])  # with the start token
        given = self._gen_kwargs.get("max_length")
        # Not `max_new_tokens`: the base class leaves a `max_length` in the settings, and `generate` warns of both.
        return {**self._gen_kwargs, "max_length": most if given is None else min(most, given)}

    def _pad_tensors_to_max_len(self, tensor: torch.Tensor, max_length: int) -> torch.Tensor:
        """Pad translations with the target's pad token. The base class takes the source's."""
        pad = getattr(self._base_model().config, "decoder_pad_token_id", None)
        if pad is None:
            return super()._pad_tensors_to_max_len(tensor, max_length)
        return F.pad(tensor, (0, max_length - tensor.shape[-1]), value=pad)

    def _attention_kernels(self) -> AbstractContextManager[None]:
        """Leave cuDNN out of the attention of any model, see `attention_kernels`."""
        choice = getattr(self._base_model().config, "attention_kernels", "auto")
        return attention_kernels(choice, self.args.device)

    @contextmanager
    def _autocast_around_the_step(self) -> Iterator[None]:
        """Autocast for `generate` as a whole. accelerate puts it into the model's `forward`, but a search with packed
        weights does not call that."""
        forward = None
        # A forward of the caller's calls accelerate's, or is called by it.
        if self.accelerator.native_amp and is_own(vars(self.model).get("forward")):
            forward = self.model.__dict__.pop("forward")
        try:
            with self.accelerator.autocast():
                yield
        finally:
            if forward is not None:
                self.model.forward = forward


class _WithoutPrefix:
    """The loss of a batch whose `decoder_input_ids` are a prefix for `generate` alone."""

    def __init__(self, model: PreTrainedModel):
        self.model = model

    def __call__(self, decoder_input_ids: object = None, **batch: object) -> ModelOutput:
        return self.model(**batch)
