"""The test at the end of an export: its engine translates two lines from the written files as this package does."""

import copy
import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import MarianMTModel, PreTrainedModel, PreTrainedTokenizerBase

from ..data.side_tokens import AS_TEXT, side_decoder, side_tokens
from ..data.tokenizer_files import load_tokenizers
from ..inference.directions import Directions
from ..utils.errors import UserError
from . import ctranslate2
from .converted import Fields
from .marian_npz import from_marian_npz
from .search_settings import best_token, ends, longest, shortest
from .transformers_js import DTYPES, GRAPHS

_TOKENS = 12  # of a translation
_WORDS = 5  # of a line
_UNLIMITED = 10**9


class Translation(NamedTuple):
    """The tokens of a translation, without start and end, and its text."""

    tokens: list[str]
    text: str


class Reference:
    """A model on the CPU, its tokenizers of source and target, and the lines of the test."""

    def __init__(self, model: PreTrainedModel, tokenizers: Sequence[PreTrainedTokenizerBase]):
        self.model = model
        self.source, self.target = tokenizers
        self.settings = model.generation_config.to_diff_dict()
        self.directions = Directions(
            self.source, self.target, self.settings.get("forced_bos_token_id")
        )
        self.direction = self.directions.chosen
        self.prefix = self.directions.prefix(self.direction)  # ids
        self.ends = {
            *ends(self.settings),
            *ends({"eos_token_id": model.config.target_eos_token_id}),
        }
        self.names = side_tokens(self.target, model.config.target_vocab_size, "target")
        is_learned = model.config.position_encoding_type == "learned"
        self.positions = model.config.max_position_embeddings if is_learned else _UNLIMITED
        self.length = min(
            max(_TOKENS, shortest(self.settings) + 2),
            self.positions,
            longest(self.settings) or _UNLIMITED,
        )
        words = self._words()
        self.lines = [self._fitting(words[:_WORDS]), self._fitting(words[_WORDS:])]

    def _words(self) -> list[str]:
        """Words of the vocabulary, because the text has to be of the model's languages."""
        decode = side_decoder(self.source, "source")
        size = len(self.source)
        special = self.source.all_special_ids
        numbers = range(size - 1, 0, -max(1, size // 300))
        words = (decode([number]).strip() for number in numbers if number not in special)
        found = list(islice(filter(str.isalpha, words), 2 * _WORDS))
        return found if len(found) > _WORDS else list("abcdefgh")

    def _fitting(self, words: list[str]) -> str:
        """As many of these words as the model has positions for."""
        while words and len(self.ids(" ".join(words))) > self.positions:
            words = words[:-1]
        return " ".join(words)

    def ids(self, line: str) -> list[int]:
        """The ids of a line, with the mark of the direction."""
        return self.directions.mark(self.source(line)["input_ids"], self.direction, 1)

    def marked(self, line: str) -> str:
        """A line for an engine that reads the mark of its target in the text."""
        languages = self.directions.source
        target = self.direction[1]
        return line if languages is None or target is None else f">>{target}<< {line}"

    def pieces(self, line: str) -> list[str]:
        """The source tokens, by the tokenizer itself: names made by id would hide a wrong vocabulary."""
        ids = self.ids(line)
        pieces = self.source.tokenize(line)
        known = self.source.convert_tokens_to_ids(pieces)
        start = next((i for i in range(len(ids)) if ids[i : i + len(known)] == known), 0)
        tokens = side_tokens(self.source, self.model.config.vocab_size, "source")
        named = [tokens[i] for i in ids]
        named[start : start + len(pieces)] = pieces
        return named

    def named(self, ids: Sequence[int], decode: Callable[..., str]) -> Translation:
        return Translation([self.names[i] for i in ids if i not in self.ends], decode(ids).strip())

    @torch.inference_mode()
    def translations(self, **settings: Any) -> list[Translation]:
        """The model's greedy translations of the lines."""
        start = [self.model.config.decoder_start_token_id, *self.prefix]
        if self.prefix:
            settings["decoder_input_ids"] = torch.tensor([start])
        translations = []
        for line in self.lines:
            rows = self.model.generate(
                torch.tensor([self.ids(line)]),
                num_beams=1,
                num_return_sequences=1,
                do_sample=False,
                max_new_tokens=self.length,
                max_length=None,
                **settings,
            )
            ids = rows[0, len(start) :].tolist()
            translations.append(self.named(ids, partial(self.target.decode, **AS_TEXT)))
        return translations

    def of_another(
        self, model: PreTrainedModel, tokenizers: Sequence[PreTrainedTokenizerBase]
    ) -> list[Translation]:
        """The translations of a model that was read back."""
        exported = copy.copy(self)
        exported.model = model.eval()
        exported.source, exported.target = tokenizers
        exported.directions = Directions(*tokenizers)
        exported.names = side_tokens(exported.target, len(self.names), "target")
        return exported.translations()


def self_test(
    target_format: str,
    model: PreTrainedModel,
    tokenizers: Sequence[PreTrainedTokenizerBase],
    written: Path,
    exact: bool = True,
) -> str:
    """Compare a `written` export with the model, and return a note about it.

    A difference is a UserError if the export is `exact`, as without quantised weights.
    """
    library, translate, minimum = _ENGINES[target_format]
    reference = Reference(model.to(torch.float32) if exact else model, tokenizers)
    least = max(minimum, shortest(reference.settings))
    expected = reference.translations(**({"min_new_tokens": least} if least else {}))
    try:
        translations = translate(reference, written)
    except ImportError as error:
        return f"; not checked, because {error.name or library} is not installed"
    differing = [
        triple
        for triple in zip(reference.lines, expected, translations, strict=True)
        if triple[1] != triple[2]
    ]
    if differing and exact:
        line, *pair = differing[0]
        ours, theirs = (f"{text!r} ({' '.join(tokens)})" for tokens, text in pair)
        reason = f"{library} translates {line!r} as {theirs}, and the model as {ours}"
        raise UserError(f"{target_format}: the export is not used, because {reason}")
    lines = len(reference.lines)
    same = f"{lines - len(differing)} of {lines} lines as here"
    return f"; checked with {library} {version(library)}: {same}"


def _ctranslate2(reference: Reference, folder: Path) -> list[Translation]:
    arguments = ctranslate2.search_arguments(reference.model, reference.names)
    special = set(reference.target.all_special_tokens)
    join = reference.target.convert_tokens_to_string
    translations = []
    for line in reference.lines:
        row = _ctranslate2_row(reference, folder, reference.pieces(line), arguments)
        text = join([token for token in row if token not in special])
        translations.append(Translation(row, text.strip()))
    return translations


def _ctranslate2_row(
    reference: Reference, folder: Path, pieces: list[str], arguments: Fields
) -> list[str]:
    import ctranslate2 as library

    prefix = [reference.names[i] for i in reference.prefix]
    length = len(prefix) + reference.length
    if reference.settings.get("forced_eos_token_id") is not None:
        length -= 1
    arguments |= {"beam_size": 1, "length_penalty": 1, "max_decoding_length": length}
    if prefix and reference.settings.get("forced_bos_token_id") is None:
        arguments["target_prefix"] = [prefix]
    engine = library.Translator(str(folder), "cpu", intra_threads=1)
    return engine.translate_batch([pieces], **arguments)[0].hypotheses[0][len(prefix) :]


def _argos(reference: Reference, file: Path) -> list[Translation]:
    import sentencepiece

    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(temporary)
        (package,) = Path(temporary).iterdir()
        model = str(package / "sentencepiece.model")
        processor = sentencepiece.SentencePieceProcessor(model_file=model)
        translations = []
        for line in reference.lines:
            pieces = processor.encode(line, out_type=str)
            row = _ctranslate2_row(reference, package / "model", pieces, {})
            translations.append(Translation(row, processor.decode_pieces(row).strip()))
        return translations


def _onnx(reference: Reference, folder: Path) -> list[Translation]:
    import onnxruntime
    from tokenizers import Tokenizer

    suffix = next(
        end for end in DTYPES.values() if (folder / "onnx" / f"{GRAPHS[0]}{end}.onnx").is_file()
    )
    encoder, decoder = (
        onnxruntime.InferenceSession(str(folder / "onnx" / f"{name}{suffix}.onnx"))
        for name in GRAPHS
    )
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    shapes = {value.name: value.shape for value in decoder.get_inputs()}
    outputs = [value.name for value in decoder.get_outputs()]
    translations = []
    for line in reference.lines:
        ids = np.array([tokenizer.encode(reference.marked(line)).ids])
        mask = np.ones_like(ids)
        (states,) = encoder.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})
        feeds = {
            name: np.zeros([1, shape[1], 0, shape[3]], np.float32)
            for name, shape in shapes.items()
            if name.startswith("past_key_values")
        }
        feeds |= {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        tokens: list[int] = []
        while len(tokens) < reference.length and not reference.ends & set(tokens):
            last = tokens[-1] if tokens else settings["decoder_start_token_id"]
            feeds["input_ids"] = np.array([[last]])
            feeds["use_cache_branch"] = np.array([bool(tokens)])
            results = dict(zip(outputs, decoder.run(None, feeds), strict=True))
            tokens.append(best_token(results["logits"][0, -1], tokens, reference.length, settings))
            for name, value in results.items():
                past = name.replace("present", "past_key_values")
                if past in shapes:
                    feeds[past] = value
        translations.append(reference.named(tokens, tokenizer.decode))
    return translations


def _marian(reference: Reference, folder: Path) -> list[Translation]:
    model = MarianMTModel.from_pretrained(folder, dtype=torch.float32)
    return reference.of_another(model, load_tokenizers(folder))


def _marian_npz(reference: Reference, folder: Path) -> list[Translation]:
    """Read the files back, because pymarian does not come with this package."""
    back = from_marian_npz(folder)
    return reference.of_another(
        back.model, (back.tokenizer, back.target_tokenizer or back.tokenizer)
    )


_Engine = Callable[[Reference, Path], list[Translation]]

# The engine's library, its function, and the least number of tokens that it generates.
_ENGINES: dict[str, tuple[str, _Engine, int]] = {
    "argos": ("ctranslate2", _argos, 1),
    "ctranslate2": ("ctranslate2", _ctranslate2, 0),
    "marian": ("transformers", _marian, 0),
    "onnx": ("onnxruntime", _onnx, 0),
    "marian-npz": ("hf_vanilla_transformer", _marian_npz, 0),
}
