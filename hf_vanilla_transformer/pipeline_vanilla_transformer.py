"""A `translation` pipeline for `transformers.pipeline`. Transformers 5 has none itself.

`pipeline(model=FOLDER_OR_NAME, pipeline_class=TranslationPipeline)`. Without this package, from a checkpoint that
contains this file, `pipeline(model=NAME, trust_remote_code=True)`.

Shapes: B sentences, S source length, T target length, R translations of each sentence.
"""

import copy
import os
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Pipeline, PreTrainedTokenizerBase
from transformers.utils import logging

logger = logging.get_logger(__name__)

TARGET_FOLDER = "target_tokenizer"  # in a checkpoint with separate vocabularies

# Written into config.json, where `pipeline()` finds the class.
_TASK = {
    "impl": "pipeline_vanilla_transformer.TranslationPipeline",
    "pt": ["AutoModelForSeq2SeqLM"],
    "type": "text",
}
CUSTOM_PIPELINES = {"translation": _TASK}


class TranslationPipeline(Pipeline):
    """Translate sentences with any sequence-to-sequence model: single ones, batches or a stream.

    Arguments: as in `transformers.Pipeline` and, here or in a call, `generate`. In addition `target_tokenizer`, which
    decodes the translations: None means the checkpoint's `target_tokenizer/`, or `tokenizer` where there is none. No
    tokenizer, or a target tokenizer with more tokens than the model, is a ValueError.

    The text goes to the tokenizer as it is. `vanilla-transformer translate` and `serve` also normalise characters that
    look the same, keep placeholders and addresses verbatim, and cut long sentences. A tokenizer whose text has a form,
    such as canonical SMILES, is a warning that names it. This file needs no package.
    """

    _load_processor = _load_image_processor = _load_video_processor = _load_feature_extractor = (
        False
    )
    _load_tokenizer = True

    def __init__(
        self, *args: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any
    ):
        super().__init__(*args, **kwargs)
        if self.tokenizer is None:
            raise ValueError(
                "tokenizer=None: the model reads ids; give the tokenizer that it was trained with"
            )
        form = self.tokenizer.init_kwargs.get("source_form")
        if form is not None:
            logger.warning(
                "source_form: the text must have the form of %.80r, which is not applied here", form
            )
        self.target_tokenizer = target_tokenizer or self._find_target_tokenizer()
        # `pipeline()` replaces class names in the loaded configuration by classes, and JSON has none.
        for entry in getattr(self.model.config, "custom_pipelines", {}).values():
            entry["pt"] = [getattr(each, "__name__", each) for each in entry.get("pt", ())]

    def _find_target_tokenizer(self) -> PreTrainedTokenizerBase:
        config = self.model.config
        name = self.model.name_or_path
        target_size = getattr(config, "decoder_vocab_size", None)
        if target_size is None:
            return self.tokenizer
        if name:
            revision = getattr(config, "_commit_hash", None)
            try:
                return AutoTokenizer.from_pretrained(
                    name, subfolder=TARGET_FOLDER, revision=revision
                )
            except (OSError, ValueError):
                pass  # one tokenizer, two embedding matrices
        source_size = getattr(config, "vocab_size", target_size)
        padding = target_size & -target_size  # the largest power of 2 to which it can be padded
        is_padded = padding >= 8 and target_size - len(self.tokenizer) < padding
        is_of_source = len(self.tokenizer) == source_size != target_size and not is_padded
        if len(self.tokenizer) > target_size or is_of_source:
            raise ValueError(
                f"target_tokenizer=None: the model has {target_size} target tokens, the tokenizer "
                f"{len(self.tokenizer)}; give the tokenizer of the target"
            )
        return self.tokenizer

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate a sentence, or a list, generator or dataset of sentences.

        `kwargs` are `batch_size` (1) and arguments of `generate`. `num_return_sequences` is R. A sentence gives R
        dictionaries, best first: `translation_text` and, from a beam search, `score`, the length-penalised log
        probability. A list gives one such list for each sentence, or one dictionary if R is 1. A generator or a
        dataset gives an iterator of lists.
        """
        if isinstance(inputs, list):
            if not inputs:
                return []
            inputs = [_text_of(item, f"inputs: item {row}") for row, item in enumerate(inputs)]
        results = super().__call__(inputs, **kwargs)
        if isinstance(inputs, list) and all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def _sanitize_parameters(self, **generate_kwargs: Any) -> tuple[dict, dict, dict]:
        return {}, generate_kwargs, {}

    def preprocess(self, sentence: str) -> dict[str, Tensor]:
        """Ids and mask (1, S), and `blank` (1,), True for white space alone."""
        sentence = _text_of(sentence, "inputs: a sentence")
        encoded = self.tokenizer(sentence, return_tensors="pt", return_token_type_ids=False)
        return {**encoded, "blank": torch.tensor([not sentence.strip()])}

    def _forward(
        self, model_inputs: dict[str, Tensor], **generate_kwargs: Any
    ) -> dict[str, Tensor]:
        """`sequences` (B, R, T), `blank` (B,) and, from a beam search, `scores` (B, R)."""
        blank = model_inputs.pop("blank")
        config = copy.deepcopy(generate_kwargs.pop("generation_config", None))
        if config is None:
            generate_kwargs["return_dict_in_generate"] = True
        else:  # transformers warns about a config and an argument together
            config.return_dict_in_generate = True
        output = self.model.generate(**model_inputs, generation_config=config, **generate_kwargs)
        tensors = {"sequences": output.sequences.unflatten(0, (len(blank), -1)), "blank": blank}
        if output.get("sequences_scores") is not None:
            tensors["scores"] = output.sequences_scores.unflatten(0, (len(blank), -1))
        return tensors

    def postprocess(self, model_outputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """The translations of one sentence, from `sequences` (1, R, T)."""
        ids = model_outputs["sequences"][0]
        texts = self.target_tokenizer.batch_decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        blank = model_outputs["blank"].item()
        results: list[dict[str, Any]] = [
            {"translation_text": "" if blank else text} for text in texts
        ]
        if "scores" not in model_outputs:
            return results
        scores = model_outputs["scores"][0].tolist()
        return [result | {"score": score} for result, score in zip(results, scores, strict=True)]

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model, tokenizers and the code of this pipeline."""
        super().save_pretrained(save_directory, **kwargs)
        if self.target_tokenizer is not self.tokenizer:
            self.target_tokenizer.save_pretrained(os.path.join(save_directory, TARGET_FOLDER))


def _text_of(sentence: Any, where: str) -> str:
    """The text of a sentence, "" for the missing values of `text.cells.text_of`."""
    is_nan = isinstance(sentence, Real) and sentence != sentence
    if sentence is None or is_nan or type(sentence).__name__ in ("NAType", "NaTType"):
        return ""
    if not isinstance(sentence, str):
        raise ValueError(f"{where} is {sentence!r} ({type(sentence).__name__}), not text")
    if sentence != sentence.encode(errors="ignore").decode():  # lone surrogates, which JSON permits
        raise ValueError(f"{where} is {sentence!a}, not valid Unicode")
    return sentence


# `Pipeline.save_pretrained` writes this entry into the config of any model.
_REGISTERED = {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
TranslationPipeline._registered_impl = {"translation": _REGISTERED}

__all__ = ["TranslationPipeline"]
