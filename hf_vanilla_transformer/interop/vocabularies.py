"""Tokenizers for other toolkits' vocabularies, in classes of transformers that load without this package.

Their input is text that is tokenized already, raw text for SentencePiece, or raw text for Moses and a byte-pair
encoding of subword-nmt or fastBPE.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.tokenizer_training import fast_tokenizer
from ..errors import UserError
from ..untrusted import require_file

JOINER = "@@"  # subword-nmt and fastBPE end a token with it if the next one continues the word
PRETOKENIZED = "it takes text that is tokenized already, with spaces between tokens"  # a note for users


def ids_by_token(tokens: Sequence[str], origin: object = "the vocabulary") -> dict[str, int]:
    """The id of each token. Raises a UserError if one occurs twice."""
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise UserError(f"{origin}: {twice!r} occurs twice")
    return ids


def require_size(tokens: list[str], size: int, file: Path) -> list[str]:
    """Return `tokens` if the model has as many, or raise a UserError."""
    if len(tokens) != size:
        raise UserError(f"{file}: {len(tokens)} tokens with the special ones, but the model has {size}")
    return tokens


def whitespace_tokenizers(
    sides: Sequence[Sequence[str]],
    special: Sequence[Mapping[str, str]],
    origins: Sequence[object] = ("the vocabulary",) * 2,
    lowercase: Sequence[bool] = (False, False),
) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Tokenizers of source and target for text that is tokenized already, one object if both are the same.

    Args:
        sides: the tokens of source and target, by id.
        special: for source and target, `unk_token`, `eos_token`, `pad_token` and perhaps `bos_token`.
        origins: the files of source and target, for messages.
        lowercase: for source and target, lower-case the text.
    """
    source, target = zip(special, sides, origins, lowercase, strict=True)
    tokenizer = _whitespace_tokenizer(*source)
    is_same = list(source[1]) == list(target[1]) and source[::3] == target[::3]
    return tokenizer, tokenizer if is_same else _whitespace_tokenizer(*target)


def _whitespace_tokenizer(
    special: Mapping[str, str], tokens: Sequence[str], origin: object, lowercase: bool
) -> PreTrainedTokenizerFast:
    ids = ids_by_token(tokens, origin)
    backend = Tokenizer(models.WordLevel(ids, unk_token=special["unk_token"]))
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = [decoders.Replace(Regex("$"), " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*spaced, decoders.Replace(f"{JOINER} ", ""), decoders.Replace(Regex(" $"), "")]
    )
    return fast_tokenizer(backend, **special)


def sentencepiece_tokenizer(
    spm_models: Sequence[Path], sides: Sequence[Sequence[str]], special: Mapping[str, str]
) -> PreTrainedTokenizerBase:
    """A `MarianTokenizer` for raw text, with the ids of the toolkit, from SentencePiece models of source and target.

    `sides` and `special` are as in `whitespace_tokenizers`.
    """
    separate = list(sides[0]) != list(sides[1])
    with TemporaryDirectory() as folder:
        vocabularies = {}
        for name, tokens in zip(("vocab", "target_vocab_file")[: 1 + separate], sides, strict=False):
            vocabularies[name] = str(Path(folder) / f"{name}.json")
            Path(vocabularies[name]).write_text(json.dumps(ids_by_token(tokens)), encoding="utf-8")
        source, target = map(str, map(require_file, spm_models))
        with _reading_sentencepiece(f"{source}, {target}"):
            return transformers.MarianTokenizer(
                source_spm=source,
                target_spm=target,
                separate_vocabs=separate,
                model_max_length=int(1e9),
                **vocabularies,
                **special,
            )


def sentencepiece_pieces(path: Path) -> list[str]:
    """The pieces of a SentencePiece model, by id."""
    require_file(path)
    with _reading_sentencepiece(str(path)):
        import sentencepiece

        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    return [processor.id_to_piece(number) for number in range(processor.get_piece_size())]


@contextmanager
def _reading_sentencepiece(files: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise UserError("SentencePiece models need sentencepiece: pip install sentencepiece") from error
    except (RuntimeError, OSError) as error:
        raise UserError(f"{files}: no SentencePiece model ({error})") from None


def bpe_tokenizer(codes: Path, sides: Sequence[Sequence[str]], languages: tuple[str, str]) -> PreTrainedTokenizerBase:
    """An `FSMTTokenizer` for raw text: Moses, then a byte-pair encoding.

    It marks the end of a word with "</w>". The tokens here mark the continuation with `JOINER`.

    Args:
        codes: a file of subword-nmt 0.2 or newer, or of fastBPE.
        sides: the tokens of source and target, by id; the first four are "<s>", "<pad>", "</s>" and "<unk>".
        languages: the languages of Moses.
    """
    with TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / name) for name in ("src_vocab_file", "tgt_vocab_file", "merges_file")}
        for name, tokens in zip(("src_vocab_file", "tgt_vocab_file"), sides, strict=True):
            ids = ids_by_token([*tokens[:4], *map(_with_end, tokens[4:])])
            Path(files[name]).write_text(json.dumps(ids), encoding="utf-8")
        Path(files["merges_file"]).write_text("".join(f"{merge}\n" for merge in _merges(codes)), encoding="utf-8")
        try:
            return transformers.FSMTTokenizer(langs=list(languages), model_max_length=int(1e9), **files)
        except ImportError as error:
            raise UserError("byte-pair codes need sacremoses: pip install sacremoses") from error


def _with_end(token: str) -> str:
    return token.removesuffix(JOINER) if token.endswith(JOINER) else f"{token}</w>"


def _merges(codes: Path) -> list[str]:
    """The merges of a file of codes. fastBPE adds a count to each."""
    lines = read_lines(codes)
    if lines and lines[0].startswith("#version:"):
        version, lines = lines[0].split(":", 1)[1].strip(), lines[1:]
    else:
        # no version line: subword-nmt before 0.2, or fastBPE
        version = "0.2" if all(len(line.split()) == 3 for line in lines) else "0.1"
    if not re.match(r"0\.[2-9]", version):
        raise UserError(f"{codes}: codes of subword-nmt {version} end words differently; learn them with 0.2 or newer")
    wrong = next((number for number, line in enumerate(lines, 1) if len(line.split()) not in (2, 3)), None)
    if wrong is not None:
        raise UserError(f"{codes}: line {wrong} of the merges is no pair of tokens")
    return [" ".join(line.split()[:2]) for line in lines]


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text. Raises a UserError if it is missing or not UTF-8."""
    try:
        return require_file(path).read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error})") from None
