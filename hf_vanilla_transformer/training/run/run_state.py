"""What a training run consists of."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...batches import EncodingReport
from ...batches.corpus_tokenizers import Tokenizers
from ...corpora.corpus import Corpus
from ...corpora.mixtures import PART
from ...evaluation.metrics import Groups
from ...modeling_vanilla_transformer import VanillaTransformerForConditionalGeneration
from .arguments import DataArguments, ModelArguments, RunArguments


@dataclass
class Run:
    """The arguments of a run, and its data and model."""

    model_args: ModelArguments
    data_args: DataArguments
    args: RunArguments
    checkpoint: Path | None  #: the one that it resumes from
    corpus: Corpus
    tokenizers: Tokenizers
    encoded: dict[str, Any]  #: the splits as token ids
    encoding: dict[str, EncodingReport]
    model: VanillaTransformerForConditionalGeneration
    #: of the base model, and chosen by the run (`facts`)
    facts: dict[str, object] = field(default_factory=dict)

    def groups(self, split: str) -> Groups | None:
        """The parts of an encoded evaluation split that are scored apart, or None."""
        names = self.corpus.parts.get(split)
        if not names or split not in self.encoded:
            return None
        return Groups(
            [names[part] for part in self.encoded[split][PART]], bool(self.corpus.directions)
        )
