"""Tokenizers for other toolkits' vocabularies, in classes of transformers that load without this package.

Their input is text that is tokenized already, raw text for SentencePiece, or raw text for Moses and a byte-pair
encoding of subword-nmt or fastBPE.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..text.token_kinds import PATTERNS, describe_tokenizer
from ..text.tokenizer_files import load_tokenizer
from ..text.tokenizer_training import fast_tokenizer
from ..utils.errors import UserError, naming_extras
from ..utils.untrusted import one_line, require_file
from .charsmap import changed_rule, charsmap_steps
from .converted import Converted, Fields, File

_USER_DEFINED = 4
_PIECES = (1, _USER_DEFINED)
_BYTE = 6  # the types of normal and user-defined pieces, and of bytes
_UNIGRAM = 1
_BPE = 2  # the types of models
_KNOWN_RULES = ("nmt_nfkc", "nfkc", "nmt_nfkc_cf", "nfkc_cf")
# noncharacters, which Unicode leaves to programs
_START = "\ufdd2"
_END = "\ufdd3"
_HIDDEN = "\ufdd4"
_ALL = 1000  # spaces at the end of a text
JOINER = "@@"  # subword-nmt and fastBPE end a token with it if the next one continues the word
_NO_LIMIT = int(1e9)  # of the tokens of a text
_SMILES = re.compile(PATTERNS["smiles"])
_SMILES_SHARE = 0.8  # of the tokens. The rest are classes of reactions, and fill a vocabulary up
# Notes for users.
PRETOKENIZED = "it takes text that is tokenized already, with spaces between tokens"
SEQUENCES = (
    'its tokens look like the atoms and bonds of SMILES: "task": "sequence" is in its tokenizer_config.json, so that '
    "nothing speaks of languages"
)
SPLIT_AT_SPACES = (
    "codes split the words between spaces, as the transform bpe; tokenize sources first if the training did, and "
    "split target text for a training by the codes"
)


@dataclass(frozen=True)
class TextSide:
    """The text of source or target. Without a file for raw text it is tokenized already."""

    tokens: list[str]  #: by id
    special: Mapping[str, str]  #: `unk_token`, `eos_token`, `pad_token` and perhaps `bos_token`
    origin: object = "the vocabulary"  #: the file of the tokens, for messages
    ends: bool = True  #: a text ends with `eos_token`
    is_tokenized: bool = (
        True  #: without a file for raw text: it is tokenized already, not only split at white space
    )
    lowercase: bool = False  #: tokenized text is lower-cased
    spm: Path | None = None  #: a SentencePiece model
    codes: Path | None = None  #: a file of byte-pair codes
    language: str = "en"  #: for Moses, before the codes


def ids_by_token(tokens: Sequence[str], origin: object = "the vocabulary") -> dict[str, int]:
    """The id of each token. Raises a UserError if one occurs twice."""
    ids = {token: number for number, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if ids[token] != number)
        raise UserError(f"{origin}: {twice!r} occurs twice")
    return ids


def both_sides(source: File, target: File = None) -> list[Path]:
    """The files of source and target, of which one may serve both, or none."""
    return [Path(source or target or ""), Path(target or source or "")] if source or target else []


def raw_text(sentencepiece: Sequence[Path], codes: Sequence[Path]) -> list[Fields]:
    """The fields `spm` and `codes` of both sides, from the files of `both_sides`."""
    if sentencepiece and codes:
        raise UserError(f"codes={codes[0]}, sentencepiece={sentencepiece[0]}: give one of them")
    field = "spm" if sentencepiece else "codes"
    return [{field: file} for file in sentencepiece or codes] or [{}, {}]


def with_tokenizers(model: PreTrainedModel, source: TextSide, target: TextSide) -> Converted:
    """The model with tokenizers of source and target."""
    sizes = model.config.vocab_size, model.config.target_vocab_size
    for side, size in zip((source, target), sizes, strict=True):
        if len(side.tokens) != size:
            tokens = f"{len(side.tokens)} tokens with the special ones"
            raise UserError(f"{side.origin}: {tokens}, but the model has {size}")
    if source.spm and source.ends:
        return Converted(model, sentencepiece_tokenizer(source, target))
    if source.spm:
        return Converted(model, *map(fast_sentencepiece_tokenizer, (source, target)))
    if source.codes and source.ends:
        return Converted(model, bpe_tokenizer(source), bpe_tokenizer(target))
    for_target = whitespace_tokenizer(target)
    is_same = replace(source, origin=target.origin, language=target.language) == target
    tokenizer = for_target if is_same else whitespace_tokenizer(source)
    notes = [PRETOKENIZED] if source.is_tokenized or target.is_tokenized else []
    if source.codes:
        tokenizer, notes = endless_bpe_tokenizer(source), [SPLIT_AT_SPACES]
    if _are_atoms(source) and _are_atoms(target):
        notes.append(SEQUENCES)
        for each in (tokenizer, for_target):
            describe_tokenizer(each, "words", "sequence")
    return Converted(model, tokenizer, for_target, notes)


def _are_atoms(side: TextSide) -> bool:
    """Return whether the tokens are atoms and bonds of SMILES, and no words."""
    symbols = [token for token in side.tokens if token not in side.special.values()]
    atoms = sum(_SMILES.fullmatch(symbol) is not None for symbol in symbols)
    return atoms > _SMILES_SHARE * len(symbols)


def whitespace_tokenizer(side: TextSide) -> PreTrainedTokenizerFast:
    """A tokenizer for text that is tokenized already."""
    ids = ids_by_token(side.tokens, side.origin)
    backend = Tokenizer(models.WordLevel(ids, unk_token=side.special["unk_token"]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = [decoders.Replace(Regex("$"), " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*spaced, decoders.Replace(f"{JOINER} ", ""), decoders.Replace(Regex(" $"), "")]
    )
    if side.lowercase:
        backend.normalizer = normalizers.Lowercase()
    return fast_tokenizer(backend, side.ends, **side.special)


def given_tokenizer(
    path: Path, ids: Mapping[str, int | None], starts: bool
) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or in a tokenizer.json.

    `ids` has the special tokens. A folder that names none for padding gets that of the model, which batches need. With
    `starts` a text starts with `bos_token`, in a tokenizer.json.
    """
    if path.is_dir():
        tokenizer = load_tokenizer(path)
        if tokenizer.pad_token is None and ids["pad_token"] is not None:
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(ids["pad_token"])
        return tokenizer
    content = "\n".join(vocabulary_lines(path))
    try:
        backend = Tokenizer.from_str(content)
    except Exception as error:  # the library raises nothing more specific
        raise UserError(f"{path}: no tokenizer.json ({one_line(error)})") from None
    special = {name: number for name, number in ids.items() if number is not None}
    for name, number in special.items():
        if not 0 <= number < backend.get_vocab_size():
            raise UserError(f"{name}_id={number}: {path} has {backend.get_vocab_size()} tokens")
    tokens = {name: str(backend.id_to_token(number)) for name, number in special.items()}
    return fast_tokenizer(backend, True, starts, **tokens)


def tokens_by_id(ids: Fields, refusal: str) -> list[str]:
    """The tokens in the order of their ids. Raises a UserError unless these count from 0."""
    try:
        by_id = sorted((int(number), str(token)) for token, number in ids.items())
    except (ValueError, TypeError) as error:
        raise UserError(f"{refusal} ({one_line(error)})") from None
    if [number for number, _ in by_id] != list(range(len(by_id))):
        raise UserError(f"{refusal}: its ids do not count from 0")
    return [token for _, token in by_id]


def fast_sentencepiece_tokenizer(side: TextSide) -> PreTrainedTokenizerFast:
    """A tokenizer for raw text, with the ids of the toolkit. Unlike a `MarianTokenizer` it need not end a sentence."""
    path = require_file(side.spm or Path())
    with _reading_sentencepiece(str(path)):
        backend, missing = sentencepiece_backend(path.read_bytes(), side.tokens, side.special)
    is_bpe = isinstance(backend.model, models.BPE)  # which merges single characters
    if needed := [piece for piece in missing if len(piece) > 1 or is_bpe]:
        reason = f"the vocabulary lacks {needed[0]!r}: tokenize the text first, and leave out sentencepiece"
        raise UserError(f"{path}: {reason}")
    return fast_tokenizer(backend, side.ends, **side.special)


def sentencepiece_backend(
    model: bytes, tokens: Sequence[str], special: Mapping[str, str], of_marian: bool = False
) -> tuple[Tokenizer, list[str]]:
    """A tokenizer with the pieces of a SentencePiece model, their places in `tokens` as ids, and the pieces without.

    SentencePiece joins unknown characters in sequence, and toolkits look for the result in the vocabulary, which may
    have tokens of another model. So a text gets marks around such characters, and so do the tokens that consist of
    them. No text contains the other tokens.

    Args:
        of_marian: the pieces without an id get ids after all others, and `decode` removes all spaces around a text.

    Raises:
        RuntimeError: no SentencePiece model, or of another kind.
    """
    proto = _sentencepiece_model(model)
    is_bpe = proto.trainer_spec.model_type == _BPE
    if of_marian and is_bpe:
        raise RuntimeError("it is a BPE")
    normal = proto.normalizer_spec
    ids = ids_by_token(tokens)
    missing = [
        piece.piece
        for piece in proto.pieces
        if piece.type in (*_PIECES, _BYTE) and piece.piece not in ids
    ]
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in _PIECES}
    if of_marian:
        tokens = [*tokens, *missing]
    else:
        scores = {piece: score for piece, score in scores.items() if piece in ids}
    # a text contains these as a sequence of their characters
    byte_pieces = {piece.piece for piece in proto.pieces if piece.type == _BYTE}
    apart = byte_pieces.union(special.values()).intersection(tokens)
    has_bytes = proto.trainer_spec.byte_fallback
    prepend_scheme = "always" if normal.add_dummy_prefix else "never"
    steps = _normalizer_steps(normal)
    if normal.add_dummy_prefix:
        # Metaspace adds its prefix only to a text that does not begin with one
        steps.append(normalizers.Replace(Regex(r"\A[ ▁]"), "  "))
    splits: list[Any] = [pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme, split=False)]
    hidden = [token for token in tokens if token not in scores and token not in apart]
    known = {" ", *"".join(scores)}
    names = _names_of_hidden(hidden, set() if has_bytes else known)
    steps += [] if has_bytes else _marks_around_unknown(known)
    splits.append(_split_before_end_of(apart))
    normalizer = normalizers.Sequence(steps)
    defined = {piece.piece for piece in proto.pieces if piece.type == _USER_DEFINED}
    symbols = [piece for piece in scores if piece in defined]
    if changed := [symbol for symbol in symbols if normalizer.normalize_str(symbol) != symbol]:
        reason = f"its normalisation changes its symbol {changed[0]!r}"
        raise RuntimeError(f"{reason}: tokenize the text first")
    named = [names.get(token, token) for token in tokens]
    if is_bpe:
        splits.append(_split_around_whole(symbols))
        backend = Tokenizer(_bpe_model(named, scores, special["unk_token"], has_bytes))
    else:
        lowest = min(scores.values())
        vocabulary = [(name, scores.get(name, lowest)) for name in named]
        backend = Tokenizer(models.Unigram(vocabulary, ids[special["unk_token"]], has_bytes))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    marks = decoders.Replace(Regex(f"[{_START}{_END}{_HIDDEN}]"), "")
    spaces = (_ALL, _ALL) if of_marian else (int(normal.add_dummy_prefix), 0)
    joined = [marks, decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", *spaces)]
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), *joined])
    return backend, missing


def _bpe_model(
    tokens: Sequence[str], scores: Mapping[str, float], unk_token: str, has_bytes: bool
) -> models.BPE:
    """A BPE whose merges are all pairs of pieces that give a piece, in the order of its score."""
    pairs = ((piece[:i], piece[i:]) for piece in scores for i in range(1, len(piece)))
    merges = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
    merges.sort(key=lambda pair: -scores["".join(pair)])
    return models.BPE(
        ids_by_token(tokens),
        merges,
        unk_token=unk_token,
        fuse_unk=True,
        byte_fallback=has_bytes,
        ignore_merges=True,  # a part that is a token is not merged
    )


def _split_around_whole(symbols: Sequence[str]) -> Any:
    """A pre-tokenizer that splits a text around these symbols, the longest first, and around unknown characters."""
    longest_first = sorted(symbols, key=len, reverse=True)
    parts = [f"{_START}[^{_END}]*{_END}", *map(re.escape, longest_first)]
    return pre_tokenizers.Split(Regex("|".join(parts)), "isolated")


def _names_of_hidden(hidden: Sequence[str], known: set[str]) -> dict[str, str]:
    """The names of tokens that are no pieces: no text contains them, unless all their characters are not `known`."""
    names = {token: f"{_HIDDEN}{token}" for token in hidden}
    if known:
        of_unknown = [token for token in hidden if known.isdisjoint(token)]
        names |= {token: f"{_START}{token}{_END}" for token in of_unknown}
    return names


def _marks_around_unknown(known: set[str]) -> list[Any]:
    """Normalizers that put marks around each sequence of characters that are not `known`."""
    letters = (f"\\{c}" if c in "\\^]-[&~" else c for c in sorted(known))
    unknown = f"[^{''.join(letters)}]"
    return [
        normalizers.Replace(Regex(f"(?<!{unknown})(?={unknown})"), _START),
        normalizers.Replace(Regex(f"(?<={unknown})(?!{unknown})"), _END),
    ]


def _split_before_end_of(tokens: set[str]) -> Any:
    """A pre-tokenizer that splits a text before the last character of these tokens, so that it contains none."""
    last = (f"(?<={re.escape(token[:-1])}){re.escape(token[-1])}" for token in sorted(tokens))
    return pre_tokenizers.Split(Regex("|".join(last)), "merged_with_next")


def _sentencepiece_model(model: bytes) -> Any:
    """The parsed file of a unigram model or a BPE."""
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(model)
    except Exception as error:  # DecodeError of protobuf
        raise RuntimeError("it is damaged") from error
    spec = proto.trainer_spec
    if spec.model_type not in (_UNIGRAM, _BPE) or spec.treat_whitespace_as_suffix:
        raise RuntimeError("it is neither a unigram model nor a BPE: tokenize the text first")
    return proto


def _normalizer_steps(normal: Any) -> list[Any]:
    """The normalizers of a SentencePiece model's `normalizer_spec`.

    Raises:
        RuntimeError: its own rules replace sequences of characters in a way that these cannot.
    """
    steps: list[Any] = []
    if normal.precompiled_charsmap:
        own = normal.name not in _KNOWN_RULES
        if own and (changed := changed_rule(normal.precompiled_charsmap)):
            reason = f"its normalisation replaces the sequence {changed!r}"
            raise RuntimeError(f"{reason}: tokenize the text first")
        steps += charsmap_steps(normal.precompiled_charsmap)
    if normal.remove_extra_whitespaces:
        # other spaces at an end stay, unless they have become this one
        steps += [
            normalizers.Replace(Regex(r"\A +|[ ▁]+\z"), ""),
            normalizers.Replace(Regex(" {2,}"), " "),
        ]
    return steps


def sentencepiece_tokenizer(source: TextSide, target: TextSide) -> PreTrainedTokenizerBase:
    """A `MarianTokenizer` for raw text, with the ids of the toolkit."""
    spm_models = {
        name: str(require_file(side.spm or Path()))
        for name, side in (("source_spm", source), ("target_spm", target))
    }
    separate = source.tokens != target.tokens
    with TemporaryDirectory() as folder, _reading_sentencepiece(", ".join(spm_models.values())):
        vocabularies = {"vocab": _write_ids(Path(folder) / "vocab.json", source.tokens)}
        if separate:
            file = Path(folder) / "target_vocab.json"
            vocabularies["target_vocab_file"] = _write_ids(file, target.tokens)
        return transformers.MarianTokenizer(
            **spm_models,
            **vocabularies,
            **source.special,
            separate_vocabs=separate,
            model_max_length=_NO_LIMIT,
            split_special_tokens=True,  # "</s>" in a text is text
        )


def _write_ids(file: Path, tokens: Sequence[str]) -> str:
    file.write_text(json.dumps(ids_by_token(tokens)), encoding="utf-8")
    return str(file)


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
        with naming_extras():
            yield
    except UserError:
        raise
    except (RuntimeError, OSError) as error:
        raise UserError(f"{files}: no SentencePiece model ({error})") from None


def bpe_tokenizer(side: TextSide) -> PreTrainedTokenizerBase:
    """An `FSMTTokenizer` for raw text of a language: Moses, then a byte-pair encoding. It ends each sentence.

    The codes are of subword-nmt 0.2 or newer, or of fastBPE. The class marks the end of a word with "</w>". The tokens
    here mark the continuation with `JOINER`.
    """
    special = side.special.values()
    tokens = [token if token in special else _with_end(token) for token in side.tokens]
    eos = side.special["eos_token"]
    settings = {"bos_token": eos, "sep_token": eos, **side.special}
    with TemporaryDirectory() as folder, naming_extras():
        file = _write_ids(Path(folder) / "vocab.json", tokens)
        return transformers.FSMTTokenizer(
            langs=[side.language] * 2,
            src_vocab_file=file,
            tgt_vocab_file=file,
            merges_file=_write_merges(folder, side),
            model_max_length=_NO_LIMIT,
            split_special_tokens=True,
            **settings,
        )


def endless_bpe_tokenizer(side: TextSide) -> PreTrainedTokenizerBase:
    """A `CTRLTokenizer`: a byte-pair encoding of text that is split at white space. It adds no end of a sentence."""
    with TemporaryDirectory() as folder:
        return transformers.CTRLTokenizer(
            _write_ids(Path(folder) / "vocab.json", side.tokens),
            _write_merges(folder, side),
            model_max_length=_NO_LIMIT,
            split_special_tokens=True,
            clean_up_tokenization_spaces=False,
            **side.special,
        )


def _write_merges(folder: str, side: TextSide) -> str:
    file = Path(folder) / "merges.txt"
    lines = ["#version: 0.2", *_merges(side.codes or Path()), ""]
    file.write_text("\n".join(lines), encoding="utf-8")
    return str(file)


def _with_end(token: str) -> str:
    return token.removesuffix(JOINER) if token.endswith(JOINER) else f"{token}</w>"


def _merges(codes: Path) -> list[str]:
    """The merges of a file of codes. fastBPE adds a count to each."""
    lines = vocabulary_lines(codes)
    if lines and lines[0].startswith("#version:"):
        version = lines[0].split(":", 1)[1].strip()
        lines = lines[1:]
    else:
        # no version line: subword-nmt before 0.2, or fastBPE
        version = "0.2" if all(len(line.split()) == 3 for line in lines) else "0.1"
    if not re.match(r"0\.[2-9]", version):
        raise UserError(
            f"{codes}: codes of subword-nmt {version} end words differently; learn them with 0.2 or newer"
        )
    for number, line in enumerate(lines, 1):
        if len(line.split()) not in (2, 3):
            raise UserError(f"{codes}: line {number} of the merges is no pair of tokens")
    return [" ".join(line.split()[:2]) for line in lines]


def vocabulary_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 text, without a byte order mark. Raises a UserError if it is missing or not UTF-8."""
    try:
        return require_file(path).read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: no UTF-8 text ({error})") from None
