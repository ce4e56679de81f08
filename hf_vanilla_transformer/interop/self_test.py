"""The test at the end of an export: its engine translates two lines from the written files as this package does."""

import json
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import MarianMTModel

from ..data.side_tokens import side_decoder, side_tokens
from ..data.tokenizer_training import load_tokenizers
from ..errors import UserError
from . import ctranslate2
from .marian_npz import from_marian_npz
from .search_settings import ends, shortest
from .transformers_js import DTYPES, GRAPHS
from .translate_exported import Translator, best_token

_TOKENS = 12  # of a translation
_WORDS = 5  # of a line


class Translation(NamedTuple):
    """The tokens of a translation, without start and end, and its text."""

    tokens: list[str]
    text: str


class Reference:
    """The model that was exported: the lines of the test, and its greedy translations.

    Args:
        model: on the CPU. tokenizers: of source and target.
    """

    def __init__(self, model: Any, tokenizers: Sequence[Any]):
        self.model, (self.source, self.target) = model, tokenizers
        self.settings = model.generation_config.to_diff_dict()
        self.ends = {*ends(self.settings), *ends({"eos_token_id": model.config.target_eos_token_id})}
        self.length = max(_TOKENS, shortest(self.settings) + 2)
        if model.config.position_encoding_type == "learned":
            self.length = min(self.length, model.config.max_position_embeddings)
        self.names = side_tokens(self.target, model.config.target_vocab_size, "target")
        self.lines = self._lines()

    def _lines(self) -> list[str]:
        """Words of the vocabulary, because the text has to be of the model's languages."""
        decode, size = side_decoder(self.source, "source"), len(self.source)
        words: list[str] = []
        for number in range(size - 1, 0, -max(1, size // 300)):
            word = decode([number]).strip()
            if word.isalpha() and number not in self.source.all_special_ids and len(words) < 2 * _WORDS:
                words.append(word)
        return [" ".join(words[:_WORDS]), " ".join(words[_WORDS:])] if len(words) > _WORDS else ["a", "a b c"]

    def pieces(self, line: str) -> list[str]:
        """The source tokens, by the tokenizer itself: names made by id would hide a wrong vocabulary."""
        ids, pieces = self.source(line)["input_ids"], self.source.tokenize(line)
        known = self.source.convert_tokens_to_ids(pieces)
        start = next((i for i in range(len(ids)) if ids[i : i + len(known)] == known), 0)
        names = side_tokens(self.source, self.model.config.vocab_size, "source")
        rest = ids[start + len(pieces) :]
        return [*(names[i] for i in ids[:start]), *pieces, *(names[i] for i in rest)]

    def named(self, ids: Sequence[int], text: str) -> Translation:
        return Translation([self.names[i] for i in ids if i not in self.ends], text.strip())

    @torch.inference_mode()
    def translations(self, **settings: Any) -> list[Translation]:
        found = []
        for line in self.lines:
            batch = self.source(line, return_tensors="pt")
            ids = self.model.generate(
                batch["input_ids"], num_beams=1, max_new_tokens=self.length, max_length=None, **settings
            )[0, 1:].tolist()
            text = self.target.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            found.append(self.named(ids, text))
        return found


def self_test(target_format: str, model: Any, tokenizers: Sequence[Any], written: Path, exact: bool = True) -> str:
    """Compare an export with the model, and return a note about it.

    Args:
        target_format: a key of `_ENGINES`.
        model, tokenizers: what was exported.
        written: the exported folder or file.
        exact: False for quantised weights, whose translations may differ.

    Raises:
        UserError: the translations differ, although `exact`.
    """
    library, translate, minimum = _ENGINES[target_format]
    reference = Reference(model.to(torch.float32) if exact else model, tokenizers)
    least = max(minimum, shortest(reference.settings))
    expected = reference.translations(**({"min_new_tokens": least} if least else {}))
    try:
        found = translate(reference, written)
    except ImportError as error:
        return f"; not checked, because {error.name or library} is not installed"
    differing = [i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1]]
    if differing and exact:
        one = differing[0]
        raise UserError(
            f"{target_format}: the export is not used, because {library} translates {reference.lines[one]!r} as "
            f"{found[one].text!r} ({' '.join(found[one].tokens)}), and the model as {expected[one].text!r} "
            f"({' '.join(expected[one].tokens)})"
        )
    same = len(expected) - len(differing)
    return f"; checked with {library} {version(library)}: {same} of {len(expected)} lines as here"


def _ctranslate2(reference: Reference, folder: Path) -> list[Translation]:
    arguments = ctranslate2.search_arguments(reference.model, reference.names)
    prefix = arguments.pop("target_prefix", None)
    return _ctranslate2_translations(
        reference, folder, list(map(reference.pieces, reference.lines)), prefix, arguments
    )


def _ctranslate2_translations(
    reference: Reference, folder: Path, rows: list[list[str]], prefix: Any, arguments: dict[str, Any]
) -> list[Translation]:
    import ctranslate2 as library

    length = reference.length - (reference.settings.get("forced_eos_token_id") is not None)
    arguments = arguments | {"beam_size": 1, "max_decoding_length": length}
    arguments.pop("length_penalty", None)
    engine = library.Translator(str(folder), "cpu", intra_threads=1)
    found = []
    for row in rows:
        tokens = engine.translate_batch([row], target_prefix=prefix, **arguments)[0].hypotheses[0]
        special = set(reference.target.all_special_tokens)
        text = reference.target.convert_tokens_to_string([token for token in tokens if token not in special])
        found.append(Translation(tokens, text.strip()))
    return found


def _argos(reference: Reference, file: Path) -> list[Translation]:
    import sentencepiece

    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(temporary)
        (package,) = Path(temporary).iterdir()
        for splitter in ("stanza/resources.json", "minisbd"):
            if not (package / splitter).exists():
                raise UserError(f"argos: the package has no sentence splitter ({splitter}), so it would download one")
        processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
        rows = [processor.encode(line, out_type=str) for line in reference.lines]
        found = _ctranslate2_translations(reference, package / "model", rows, None, {})
        return [Translation(tokens, processor.decode_pieces(tokens).strip()) for tokens, _ in found]


def _graphs(reference: Reference, folder: Path) -> list[Translation]:
    translator = Translator(folder)
    translator.settings["max_new_tokens"] = reference.length
    found = []
    for line in reference.lines:
        batch = translator.tokenizer(line, return_tensors="np")
        (ids,) = translator.greedy(*(batch[name].astype(np.int64) for name in ("input_ids", "attention_mask")))
        text = translator.target_tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        found.append(reference.named(ids, text))
    return found


def _web(reference: Reference, folder: Path) -> list[Translation]:
    import onnxruntime
    from tokenizers import Tokenizer

    suffix = next(suffix for suffix in DTYPES.values() if (folder / "onnx" / f"{GRAPHS[0]}{suffix}.onnx").is_file())
    encoder, decoder = (onnxruntime.InferenceSession(str(folder / "onnx" / f"{name}{suffix}.onnx")) for name in GRAPHS)
    settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    tokenizer, found = Tokenizer.from_file(str(folder / "tokenizer.json")), []
    for line in reference.lines:
        ids = np.array([tokenizer.encode(line).ids])
        feeds = {"encoder_attention_mask": np.ones_like(ids)}
        states = encoder.run(None, {"input_ids": ids, "attention_mask": feeds["encoder_attention_mask"]})[0]
        feeds |= {"encoder_hidden_states": states, "use_cache_branch": np.array([False])}
        for value in decoder.get_inputs():
            if value.name.startswith("past_key_values"):
                feeds[value.name] = np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
        tokens: list[int] = []
        while len(tokens) < reference.length and not reference.ends & set(tokens):
            feeds["input_ids"] = np.array([[tokens[-1] if tokens else settings["decoder_start_token_id"]]])
            outputs = dict(zip([v.name for v in decoder.get_outputs()], decoder.run(None, feeds), strict=True))
            tokens.append(best_token(outputs["logits"][0, -1], tokens, reference.length, settings))
            feeds["use_cache_branch"] = np.array([True])
            feeds |= {name.replace("present", "past_key_values"): value for name, value in outputs.items()}
            feeds = {name: value for name, value in feeds.items() if name in {v.name for v in decoder.get_inputs()}}
        found.append(reference.named(tokens, tokenizer.decode(tokens)))
    return found


def _marian(reference: Reference, folder: Path) -> list[Translation]:
    model: Any = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    exported = Reference(reference.model, load_tokenizers(folder))
    exported.model, exported.lines, exported.length = model, reference.lines, reference.length
    return exported.translations()


def _marian_npz(reference: Reference, folder: Path) -> list[Translation]:
    """Read the files back, because pymarian does not come with this package."""
    back = from_marian_npz(folder)
    back.model.eval()
    exported = Reference(back.model, (back.tokenizer, back.target_tokenizer or back.tokenizer))
    exported.lines, exported.length = reference.lines, reference.length
    return exported.translations()


_Engine = Callable[[Reference, Path], list[Translation]]

# The engine's library, its function, and the least number of tokens that it generates.
_ENGINES: dict[str, tuple[str, _Engine, int]] = {
    "argos": ("ctranslate2", _argos, 1),
    "ctranslate2": ("ctranslate2", _ctranslate2, 0),
    "marian": ("transformers", _marian, 0),
    "onnx": ("onnxruntime", _graphs, 0),
    "marian-npz": ("hf_vanilla_transformer", _marian_npz, 0),
    "torch": ("torch", _graphs, 0),
    "web": ("onnxruntime", _web, 0),
}
