"""Text to text in one call: transformers' pipeline for translation, which transformers itself has no more.

`pipeline(model=FOLDER_OR_NAME, pipeline_class=TranslationPipeline)`; without this package, from a checkpoint that
carries this file, `pipeline(model=NAME, trust_remote_code=True)`.

Shapes: B sentences, S source length, T target length, R translations of each sentence.
"""

import copy
import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, Pipeline, PreTrainedTokenizerBase

TARGET_FOLDER = "target_tokenizer"  # of a checkpoint whose languages have a vocabulary each

# What config.json says of a translator that carries this file, so that `pipeline()` finds the class there.
CUSTOM_PIPELINES = {
    "translation": {
        "impl": "pipeline_vanilla_transformer.TranslationPipeline",
        "pt": ["AutoModelForSeq2SeqLM"],
        "type": "text",
    }
}


class TranslationPipeline(Pipeline):
    """Translate sentences with any sequence-to-sequence model, one by one, in batches or from a stream.

    Args:
        model, tokenizer and the others: those of `transformers.Pipeline`; whatever `generate` understands may be
            given here or in a call.
        target_tokenizer: for the text that goes out. None is the checkpoint's `target_tokenizer/`, or `tokenizer`
            where it has none.

    Raises:
        ValueError: no tokenizer, or one for the target whose words are not the model's.
    """

    _load_processor = False
    _load_image_processor = False
    _load_video_processor = False
    _load_feature_extractor = False
    _load_tokenizer = True

    def __init__(self, *args: Any, target_tokenizer: PreTrainedTokenizerBase | None = None, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.tokenizer is None:
            raise ValueError("tokenizer=None: the model reads ids; give the tokenizer that it was trained with")
        self.target_tokenizer = target_tokenizer or self._find_target_tokenizer()
        self._name_model_classes()

    def _find_target_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer beside the model, where the model has words for the target alone."""
        config = self.model.config
        own_words = getattr(config, "decoder_vocab_size", None)
        if own_words is None:
            return self.tokenizer
        name, revision = self.model.name_or_path, getattr(config, "_commit_hash", None)
        if os.path.isdir(os.path.join(name, TARGET_FOLDER)):
            return AutoTokenizer.from_pretrained(os.path.join(name, TARGET_FOLDER))
        if name and not os.path.isdir(name):
            try:
                return AutoTokenizer.from_pretrained(name, subfolder=TARGET_FOLDER, revision=revision)
            except (OSError, ValueError):
                pass  # one tokenizer for two matrices of embeddings
        if len(self.tokenizer) > own_words:
            raise ValueError(
                f"target_tokenizer=None: the model has {own_words} target words, the tokenizer {len(self.tokenizer)}; "
                f"give the tokenizer of the target"
            )
        return self.tokenizer

    def _name_model_classes(self) -> None:
        """`pipeline()` puts classes into the configuration that it read; saved again, it needs their names."""
        for entry in getattr(self.model.config, "custom_pipelines", {}).values():
            entry["pt"] = [getattr(each, "__name__", each) for each in entry.get("pt", ())]

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """Translate.

        Args:
            inputs: a sentence, a list of them, a generator or a data set of them.
            batch_size: sentences read at a time (1).
            num_return_sequences: R, how many translations of each sentence; at most as many as beams.
            **kwargs: anything else for `generate`.

        Returns:
            Of a sentence R dictionaries, the best first, with `translation_text` and, where a beam search compared
            them, `score`: log P / penalty(length). Of a list the same for each; where R is 1, the dictionary alone.
            A generator and a data set give an iterator of lists.
        """
        results = super().__call__(inputs, **kwargs)
        if isinstance(inputs, list) and all(len(result) == 1 for result in results):
            return [result[0] for result in results]
        return results

    def _sanitize_parameters(self, **generate_kwargs: Any) -> tuple[dict, dict, dict]:
        return {}, generate_kwargs, {}

    def preprocess(self, sentence: str) -> dict[str, Tensor]:
        """Ids and mask (1, S); `blank` (1,) says that there is nothing to translate."""
        if not isinstance(sentence, str):
            raise ValueError(f"inputs: a sentence is a string, not {sentence!r}")
        encoded = self.tokenizer(sentence, return_tensors="pt", return_token_type_ids=False)
        return {**encoded, "blank": torch.tensor([not sentence.strip()])}

    def _forward(self, model_inputs: dict[str, Tensor], **generate_kwargs: Any) -> dict[str, Tensor]:
        """`sequences` (B, R, T), `blank` (B,) and, from a beam search, `scores` (B, R)."""
        blank = model_inputs.pop("blank")
        config = copy.deepcopy(generate_kwargs.pop("generation_config", None))
        if config is None:
            generate_kwargs["return_dict_in_generate"] = True
        else:  # transformers warns of one beside the other
            config.return_dict_in_generate = True
        output = self.model.generate(**model_inputs, generation_config=config, **generate_kwargs)
        found = {"sequences": output.sequences.unflatten(0, (len(blank), -1)), "blank": blank}
        if output.get("sequences_scores") is not None:
            found["scores"] = output.sequences_scores.unflatten(0, (len(blank), -1))
        return found

    def postprocess(self, model_outputs: dict[str, Tensor]) -> list[dict[str, Any]]:
        """The translations of one sentence, from `sequences` (1, R, T)."""
        ids = model_outputs["sequences"][0]
        texts = self.target_tokenizer.batch_decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if model_outputs["blank"].item():
            texts = [""] * len(texts)
        results: list[dict[str, Any]] = [{"translation_text": text} for text in texts]
        if "scores" in model_outputs:
            for result, score in zip(results, model_outputs["scores"][0].tolist(), strict=True):
                result["score"] = score
        return results

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """Save model and tokenizers, and the code of this pipeline."""
        super().save_pretrained(save_directory, **kwargs)
        if self.target_tokenizer is not self.tokenizer:
            self.target_tokenizer.save_pretrained(os.path.join(save_directory, TARGET_FOLDER))


# From this `Pipeline.save_pretrained` makes the same entry, for whatever model it has.
TranslationPipeline._registered_impl = {
    "translation": {"impl": TranslationPipeline, "pt": (AutoModelForSeq2SeqLM,), "type": "text"}
}


__all__ = ["TranslationPipeline"]
