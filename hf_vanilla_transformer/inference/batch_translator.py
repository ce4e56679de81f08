"""Translation as a function of a batch of rows, for `datasets.map`, Ray Data and Spark."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..text.cells import text_of
from .translator import Translator


class BatchTranslator:
    """Add a column with translations to batches of rows. The model is loaded once per process, at its first batch.

    With Hugging Face datasets, Ray Data and Spark:

        dataset.map(BatchTranslator("runs/mine"), batched=True, num_proc=4)
        ray_dataset.map_batches(BatchTranslator, fn_constructor_args=["runs/mine"], concurrency=4)
        frame.mapInPandas(BatchTranslator("runs/mine").map_in_pandas, schema)

    Args:
        model: a model folder, or several as an ensemble.
        source: the column with sentences.
        target: the column for translations.
        device, dtype, workers: as in `Translator.from_pretrained`.
        settings: as in `Translator.translate`.
    """

    def __init__(
        self,
        model: str | Path | Sequence[str | Path],
        *,
        source: str = "source",
        target: str = "translation",
        device: str | None = None,
        dtype: str | None = None,
        workers: int | None = None,
        **settings: Any,
    ):
        self.models = [str(one) for one in ([model] if isinstance(model, str | Path) else model)]
        self.source = source
        self.target = target
        self.settings = settings
        self.device = device
        self.dtype = dtype
        self.workers = workers
        # `datasets` caches by the pickled function. A retrained model in the same folder is a different one.
        files = sorted(file for one in self.models for file in Path(one).glob("*.safetensors"))
        self.stamp = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        self._translator: Translator | None = None

    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"_translator": None}  # a worker loads the model itself

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the columns of `batch`, lists or arrays of equal length, and the translations.

        A missing value (`text.cells.text_of`) has None for a translation.

        Raises:
            KeyError: there is no column `source`.
            UserError: a value is no text, or as in `Translator.translate`.
        """
        if self._translator is None:
            first, *others = self.models
            self._translator = Translator.from_pretrained(
                first, self.device, self.dtype, others, self.workers
            )
        sentences = [
            text_of(cell, f"{self.source}: row {number} of the batch")
            for number, cell in enumerate(batch[self.source])
        ]
        texts = [sentence for sentence in sentences if sentence is not None]
        translated = iter(self._translator.translate(texts, **self.settings))
        translations = [None if sentence is None else next(translated) for sentence in sentences]
        return dict(batch) | {self.target: translations}

    def map_in_pandas(self, frames: Iterable[Any]) -> Iterator[Any]:
        """Yield each pandas frame with the translations, for Spark's `mapInPandas`."""
        for frame in frames:
            yield frame.assign(
                **{self.target: self({self.source: frame[self.source]})[self.target]}
            )
