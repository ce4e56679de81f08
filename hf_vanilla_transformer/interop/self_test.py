"""The test at the end of an export: its engine computes this package's log-probabilities from the written files.

Shapes: T tokens of a target and its end, V target vocabulary.
"""

import tempfile
import zipfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import MarianMTModel, PreTrainedModel, PreTrainedTokenizerBase

from ..text.side_tokens import side_decoder, side_tokens
from ..text.tokenizer_files import load_tokenizers
from ..utils.errors import UserError
from .search_settings import banned_tokens, flat, longest
from .transformers_js import DTYPES, GRAPHS

_WORDS = 8  # of the source
_TOKENS = 8  # of the target and its end
_TOLERANCE = 1e-3  # of a log-probability in float32


class Probe:
    """A model on the CPU, and a pair of a source and a target that it has to score."""

    def __init__(
        self, model: PreTrainedModel, tokenizers: Sequence[PreTrainedTokenizerBase], exact: bool
    ):
        self.model = model
        self.exact = exact
        source, target = tokenizers
        config = model.config
        settings = model.generation_config.to_diff_dict()
        positions = config.max_position_embeddings
        self.text = _text(source, positions)
        self.ids: list[int] = source(self.text)["input_ids"]
        self.names = side_tokens(source, config.vocab_size, "source")
        self.target_names = side_tokens(target, config.target_vocab_size, "target")
        self.banned = banned_tokens(settings)
        size = len(target)
        unused = {*target.all_special_ids, *self.banned}
        numbers = range(size - 1, 0, -max(1, size // 50))
        length = min(_TOKENS, positions, longest(settings) or _TOKENS) - 1
        self.target = [number for number in numbers if number not in unused][:length]
        end = settings.get("eos_token_id")
        self.end = flat(config.target_eos_token_id if end is None else end)[0]

    @torch.inference_mode()
    def scores_of(self, model: PreTrainedModel, ids: list[int]) -> Tensor:
        """The log-probabilities (T) that a model computes for the target after a source."""
        tokens = torch.tensor([[_start(model), *self.target]])
        return self.scores(model(torch.tensor([ids]), decoder_input_ids=tokens).logits[0])

    def scores(self, logits: Tensor) -> Tensor:
        """The log-probabilities (T) from logits (T, V), without the tokens that are never chosen."""
        allowed = logits.float().clone()
        allowed[:, [token for token in self.banned if token < logits.shape[1]]] = -torch.inf
        labels = torch.tensor([*self.target, self.end])
        return allowed.log_softmax(dim=-1).gather(1, labels[:, None])[:, 0]


def _start(model: PreTrainedModel) -> int:
    """The first token of the decoder in a search."""
    start = model.generation_config.decoder_start_token_id
    return model.config.decoder_start_token_id if start is None else start


def _text(tokenizer: PreTrainedTokenizerBase, positions: int) -> str:
    """Words of the vocabulary, because a text has to be of the model's language, with at most `positions` tokens."""
    decode = side_decoder(tokenizer, "source")
    numbers = range(len(tokenizer) - 1, 0, -max(1, len(tokenizer) // 300))
    decoded = (decode([number]).strip() for number in numbers)
    words = list(islice(filter(str.isalpha, decoded), _WORDS)) or ["a", "b"]
    while words and len(tokenizer(" ".join(words))["input_ids"]) > positions:
        words.pop()
    return " ".join(words)


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
    library, scores_of_engine = _ENGINES[target_format]
    probe = Probe(model.to(torch.float32) if exact else model, tokenizers, exact)
    expected = probe.scores_of(model, probe.ids)
    try:
        scores = scores_of_engine(probe, written)
    except ImportError as error:
        return f"; not checked, because {error.name or library} is not installed"
    known = expected.isfinite()  # an end may be among the tokens that are never chosen
    difference = float((scores - expected)[known].abs().max())
    if exact and not difference <= _TOLERANCE:
        reason = f"{library} computes log-probabilities that differ by {difference:.2g}"
        raise UserError(f"{target_format}: the export is not used, because {reason}")
    checked = f"; checked with {library} {version(library)}"
    return f"{checked}: log-probabilities differ by at most {difference:.0e}"


def _ctranslate2(probe: Probe, folder: Path) -> Tensor:
    return _scores_of_ctranslate2(probe, folder, [probe.names[i] for i in probe.ids])


def _scores_of_ctranslate2(probe: Probe, folder: Path, pieces: list[str]) -> Tensor:
    import ctranslate2

    precision = "float32" if probe.exact else "default"
    engine = ctranslate2.Translator(str(folder), "cpu", compute_type=precision, intra_threads=1)
    names = [probe.target_names[i] for i in probe.target]
    return torch.tensor(engine.score_batch([pieces], [names])[0].log_probs)


def _argos(probe: Probe, file: Path) -> Tensor:
    import sentencepiece

    with tempfile.TemporaryDirectory() as temporary:
        with zipfile.ZipFile(file) as archive:
            archive.extractall(temporary)
        (package,) = Path(temporary).iterdir()
        model = str(package / "sentencepiece.model")
        processor = sentencepiece.SentencePieceProcessor(model_file=model)
        pieces = processor.encode(probe.text, out_type=str)
        return _scores_of_ctranslate2(probe, package / "model", pieces)


def _onnx(probe: Probe, folder: Path) -> Tensor:
    import onnxruntime
    from tokenizers import Tokenizer

    suffix = next(
        end for end in DTYPES.values() if (folder / "onnx" / f"{GRAPHS[0]}{end}.onnx").is_file()
    )
    encoder, decoder = (
        onnxruntime.InferenceSession(str(folder / "onnx" / f"{name}{suffix}.onnx"))
        for name in GRAPHS
    )
    ids = np.array([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(probe.text).ids])
    mask = np.ones_like(ids)
    (states,) = encoder.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})
    feeds = {
        value.name: np.zeros([1, value.shape[1], 0, value.shape[3]], np.float32)
        for value in decoder.get_inputs()
        if value.name.startswith("past_key_values")
    }
    past_names = list(feeds)
    feeds |= {"encoder_hidden_states": states, "encoder_attention_mask": mask}
    logits: list[np.ndarray] = []
    # the first step, and the others from its cache
    for tokens in ([_start(probe.model)], probe.target):
        feeds["input_ids"] = np.array([tokens])
        feeds["use_cache_branch"] = np.array([bool(logits)])
        present = [name.replace("past_key_values", "present") for name in past_names]
        step, *caches = decoder.run(["logits", *present], feeds)
        logits.append(step[0])
        feeds |= zip(past_names, caches, strict=True)
    return probe.scores(torch.from_numpy(np.concatenate(logits)))


def _marian(probe: Probe, folder: Path) -> Tensor:
    model = MarianMTModel.from_pretrained(folder, dtype=torch.float32).eval()
    return probe.scores_of(model, load_tokenizers(folder)[0](probe.text)["input_ids"])


# The engine's library, and the function that computes its log-probabilities.
_ENGINES: dict[str, tuple[str, Callable[[Probe, Path], Tensor]]] = {
    "argos": ("ctranslate2", _argos),
    "ctranslate2": ("ctranslate2", _ctranslate2),
    "marian": ("transformers", _marian),
    "onnx": ("onnxruntime", _onnx),
}
