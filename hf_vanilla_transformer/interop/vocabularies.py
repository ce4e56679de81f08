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
from typing import Any

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..data.tokenizer_training import fast_tokenizer, load_tokenizers
from ..errors import UserError, naming_extras
from ..untrusted import one_line, read_json_object, require_file

_PIECES, _NEVER = (1, 4), -1e5  # normal and user-defined pieces, and the score of tokens that no text contains
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
    ends: Sequence[bool] = (True, True),
) -> tuple[PreTrainedTokenizerFast, PreTrainedTokenizerFast]:
    """Tokenizers of source and target for text that is tokenized already, one object if both are the same.

    Args:
        sides: the tokens of source and target, by id.
        special: for source and target, `unk_token`, `eos_token`, `pad_token` and perhaps `bos_token`.
        origins: the files of source and target, for messages.
        lowercase: for source and target, lower-case the text.
    """
    source, target = zip(special, sides, origins, lowercase, ends, strict=True)
    tokenizer = _whitespace_tokenizer(*source)
    is_same = list(source[1]) == list(target[1]) and source[::3] == target[::3] and source[4] == target[4]
    return tokenizer, tokenizer if is_same else _whitespace_tokenizer(*target)


def _whitespace_tokenizer(
    special: Mapping[str, str], tokens: Sequence[str], origin: object, lowercase: bool, ends: bool
) -> PreTrainedTokenizerFast:
    backend = _whitespace_backend(tokens, origin, special["unk_token"])
    if lowercase:
        backend.normalizer = normalizers.Lowercase()
    return fast_tokenizer(backend, ends, **special)


def _whitespace_backend(tokens: Sequence[str], origin: object, unk_token: str = "<unk>") -> Tokenizer:
    backend = Tokenizer(models.WordLevel(ids_by_token(tokens, origin), unk_token=unk_token))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    spaced = [decoders.Replace(Regex("$"), " "), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*spaced, decoders.Replace(f"{JOINER} ", ""), decoders.Replace(Regex(" $"), "")]
    )
    return backend


def given_tokenizer(path: Path, size: int, ids: Mapping[str, int | None], starts: bool) -> PreTrainedTokenizerBase:
    """The tokenizer in a folder or a file, or one for text that is tokenized already, from a file of tokens.

    The model has `size` tokens. `ids` are those of special tokens. A text starts with `bos_token` if it `starts`.
    """
    tokenizer = load_tokenizers(path)[0] if path.is_dir() else _tokenizer_of_file(path, ids, starts)
    if len(tokenizer) > size:
        raise UserError(f"{path}: {len(tokenizer)} tokens, but the model has {size}")
    return tokenizer


def _tokenizer_of_file(path: Path, ids: Mapping[str, int | None], starts: bool) -> PreTrainedTokenizerBase:
    backend = _given_backend(path, ids["unk_token"])
    special: dict[str, str] = {}
    for name, number in ids.items():
        if number is not None:
            if not 0 <= number < backend.get_vocab_size():
                raise UserError(f"{name}_id={number}: {path} has {backend.get_vocab_size()} tokens")
            special[name] = str(backend.id_to_token(number))
    tokenizer = fast_tokenizer(backend, True, **special)
    if starts:
        pair = [(special[name], ids[name]) for name in ("bos_token", "eos_token")]
        template = f"{pair[0][0]} $A {pair[1][0]}"
        tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=template, pair=f"{template} $B", special_tokens=pair
        )
    return tokenizer


def _given_backend(path: Path, unk: int | None) -> Tokenizer:
    tokens = read_lines(path)
    if path.suffix == ".json":
        content = read_json_object(path)
        if isinstance(content.get("model"), dict):
            try:
                return Tokenizer.from_str("\n".join(tokens))
            except Exception as error:  # the library raises nothing more specific
                raise UserError(f"{path}: no tokenizer ({one_line(error)})") from None
        tokens = tokens_by_id(content, f"{path}: no vocabulary")
    if unk is None or not 0 <= unk < len(tokens):
        raise UserError(f"unk_token_id={unk}: {path} has {len(tokens)} tokens; give the id of the unknown one")
    return _whitespace_backend(tokens, path, tokens[unk])


def tokens_by_id(ids: Mapping[str, Any], refusal: str) -> list[str]:
    """The tokens in the order of their ids. Raises a UserError unless these count from 0."""
    try:
        by_id = sorted((int(number), str(token)) for token, number in ids.items())
    except (ValueError, TypeError) as error:
        raise UserError(f"{refusal} ({one_line(error)})") from None
    if [number for number, _ in by_id] != list(range(len(by_id))):
        raise UserError(f"{refusal}: its ids do not count from 0")
    return [token for _, token in by_id]


def fast_sentencepiece_tokenizer(
    path: Path, tokens: Sequence[str], special: Mapping[str, str], ends: bool
) -> PreTrainedTokenizerFast:
    """A tokenizer for raw text, with the ids of the toolkit. Unlike a `MarianTokenizer` it need not end a sentence."""
    with _reading_sentencepiece(str(require_file(path))):
        from sentencepiece import sentencepiece_model_pb2

        proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
        try:
            proto.ParseFromString(path.read_bytes())
        except Exception as error:  # DecodeError of protobuf
            raise RuntimeError("it is damaged") from error
    ids, trained, normal = ids_by_token(tokens), proto.trainer_spec, proto.normalizer_spec
    pieces = {piece.piece: piece for piece in proto.pieces if piece.type in _PIECES}
    missing = [piece for piece in pieces if len(piece) > 1 and piece not in ids]
    if missing or trained.model_type not in (1, 2) or trained.treat_whitespace_as_suffix:
        reason = f"the vocabulary lacks {missing[0]!r}" if missing else "it is neither a unigram model nor a BPE"
        raise UserError(f"{path}: {reason}: tokenize the text first, and leave out sentencepiece")
    scores = {token: pieces[token].score if token in pieces else _NEVER for token in tokens}
    settings: dict[str, Any] = {"byte_fallback": trained.byte_fallback}
    if trained.model_type == 1:
        model: Any = models.Unigram(list(scores.items()), ids[special["unk_token"]], **settings)
    else:
        pairs = ((piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece)))
        merges = [pair for pair in pairs if pair[0] in pieces and pair[1] in pieces]
        merges.sort(key=lambda pair: -scores["".join(pair)])
        model = models.BPE(ids, merges, unk_token=special["unk_token"], fuse_unk=True, **settings)
    backend = Tokenizer(model)
    steps: list[Any] = [normalizers.Precompiled(normal.precompiled_charsmap)] if normal.precompiled_charsmap else []
    if normal.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    # no text contains a special token: its last character becomes another one that is unknown, or is split off
    others = [token for token in tokens if token not in pieces and len(token) > 1 and trained.model_type == 1]
    split = [token for token in others if trained.byte_fallback or token[-1] in pieces]
    hidden = [token for token in others if token not in split]
    steps += [normalizers.Replace(Regex(_last_characters(hidden)), "\ue000")] if hidden else []
    backend.normalizer = normalizers.Sequence(steps)
    prefix = "always" if normal.add_dummy_prefix else "never"
    steps = [pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)]
    steps += [pre_tokenizers.Split(Regex(_last_characters(split)), "merged_with_next")] if split else []
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    strip = [decoders.Strip(" ", 1, 0)] if normal.add_dummy_prefix else []
    steps = [decoders.ByteFallback(), decoders.Replace("▁", " "), decoders.Fuse(), *strip]
    backend.decoder = decoders.Sequence(steps)
    return fast_tokenizer(backend, ends, **special)


def _last_characters(tokens: Sequence[str]) -> str:
    return "|".join(f"(?<={re.escape(token[:-1])}){re.escape(token[-1])}" for token in tokens)


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
        with naming_extras():
            yield
    except UserError:
        raise
    except (RuntimeError, OSError) as error:
        raise UserError(f"{files}: no SentencePiece model ({error})") from None


def bpe_tokenizer(
    codes: Path, sides: Sequence[Sequence[str]], languages: tuple[str, str], special: Mapping[str, str]
) -> PreTrainedTokenizerBase:
    """An `FSMTTokenizer` for raw text: Moses for `languages`, then a byte-pair encoding.

    `codes` is a file of subword-nmt 0.2 or newer, or of fastBPE. `sides` are the tokens of source and target, by id.
    The tokenizer marks the end of a word with "</w>". The tokens here mark the continuation with `JOINER`.
    """
    eos = special["eos_token"]
    settings = {"bos_token": special.get("bos_token", eos), "sep_token": eos, "pad_token": special["pad_token"]}
    with TemporaryDirectory() as folder:
        files = {name: str(Path(folder) / name) for name in ("src_vocab_file", "tgt_vocab_file", "merges_file")}
        for name, tokens in zip(("src_vocab_file", "tgt_vocab_file"), sides, strict=True):
            ids = ids_by_token([token if token in special.values() else _with_end(token) for token in tokens])
            Path(files[name]).write_text(json.dumps(ids), encoding="utf-8")
        Path(files["merges_file"]).write_text("".join(f"{merge}\n" for merge in _merges(codes)), encoding="utf-8")
        settings |= {"unk_token": special["unk_token"], **files}
        with naming_extras():
            return transformers.FSMTTokenizer(langs=list(languages), model_max_length=int(1e9), **settings)


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
