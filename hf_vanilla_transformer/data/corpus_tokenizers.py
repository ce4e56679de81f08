"""The tokenizers of a run: load them, or train them on the training split."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError
from .arguments import DataArguments, has_two_tokenizers, run_task, side_tokens
from .corpus import Corpus
from .encoding import name_end_token
from .language_tokens import add_language_tokens
from .symbol_tokenizers import train_any_tokenizer
from .token_kinds import (
    LANGUAGE_TOKENS,
    describe_tokenizer,
    has_closed_vocabulary,
    tokenizer_task,
)
from .tokenizer_files import load_tokenizers, tokenizer_digest

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  # of source and target


def loaded_tokenizers(data_args: DataArguments, checkpoint: Path | None) -> Tokenizers | None:
    """The tokenizers of the checkpoint that a run resumes from, or of `tokenizer_name`. None if it trains them."""
    if checkpoint is not None:
        return load_tokenizers(checkpoint)
    if data_args.tokenizer_name:
        return load_tokenizers(data_args.tokenizer_name)
    return None


def take_task(data_args: DataArguments, tokenizers: Tokenizers | None) -> None:
    """Let a run have the task of the tokenizers that it has loaded, unless `task` is set."""
    if tokenizers is None or data_args.task is not None:
        return
    if tokenizer_task(*tokenizers) == "sequence":
        data_args.task = "sequence"


def choose_tokenizers(
    corpus: Corpus,
    vocab_size: int,
    data_args: DataArguments,
    checkpoint: Path | None = None,
    say: Callable[[str], None] = print,
) -> Tokenizers:
    """Load the tokenizers, or train them on the training split. A resumed run loads them from its checkpoint.

    `say` gets a line about their sizes.
    """
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
        name = data_args.tokenizer_name
        if name and tokenizer_digest(load_tokenizers(name)) != tokenizer_digest(tokenizers):
            raise UserError(
                f"tokenizer_name: {name} is not the tokenizer of {checkpoint} that a resumed run keeps: "
                "leave it out, or start a new run"
            )
        return tokenizers
    if data_args.tokenizer_name:
        tokenizers = load_tokenizers(data_args.tokenizer_name)
        source, target = tokenizers
        name_end_token(target, data_args.tokenizer_name)
        if source is not target:
            name_end_token(source, data_args.tokenizer_name, required=False)
    else:
        tokenizers = _train_tokenizers(corpus, vocab_size, data_args)
        if corpus.directions:
            for tokenizer in dict.fromkeys(tokenizers):
                add_language_tokens(
                    tokenizer, corpus.directions["train"], data_args.language_token == "source"
                )
    described = " and ".join(f"{len(each):,}" for each in dict.fromkeys(tokenizers))
    say(f"tokenizer: {described} tokens{_missed(tokenizers, vocab_size, data_args)}")
    return tokenizers


def _train_tokenizers(corpus: Corpus, vocab_size: int, data_args: DataArguments) -> Tokenizers:
    """Train the tokenizers on the training split: a joint one, or one for each side."""
    kinds = side_tokens(data_args)
    task = run_task(data_args)
    # Keys the tokenizer cache.
    content = f"{corpus.fingerprint('train')} {len(corpus.pairs['train'])}"

    def learn(tokens: str, *columns: str, lowercase: bool) -> PreTrainedTokenizerBase:
        tokenizer = train_any_tokenizer(
            corpus.texts(*columns),
            tokens,
            vocab_size=vocab_size,
            min_frequency=data_args.min_frequency,
            lowercase=lowercase,
            content=f"{content} {' '.join(columns)}",
            side=columns[0] if len(columns) == 1 else "text",
        )
        describe_tokenizer(tokenizer, tokens, task)
        return tokenizer

    lowercase = data_args.lowercase
    if not has_two_tokenizers(data_args):
        return (learn(kinds[0], "source", "target", lowercase=lowercase),) * 2
    source = learn(kinds[0], "source", lowercase=lowercase or data_args.source_lowercase)
    return source, learn(kinds[1], "target", lowercase=lowercase)


def _missed(tokenizers: Tokenizers, vocab_size: int, data_args: DataArguments) -> str:
    """The end of the line on the tokenizers, if the text has too few words for `vocab_size`."""
    if data_args.tokenizer_name or set(side_tokens(data_args)) - set(LANGUAGE_TOKENS):
        return ""
    too_few = min(map(len, tokenizers)) < vocab_size
    return f"; vocab_size={vocab_size:,} needs more text" if too_few else ""


def match_case(
    tokenizers: Tokenizers, data_args: DataArguments, say: Callable[[str], None] = print
) -> None:
    """Ignore case in all scores if the target tokenizer lower-cases: it cannot write the capitals of a reference."""
    lowercases = [_lowercases(each) for each in tokenizers]
    for field, are_lowered in (("lowercase", all(lowercases)), ("source_lowercase", lowercases[0])):
        if getattr(data_args, field) and not are_lowered:
            raise UserError(
                f"{field}: True: the tokenizer {data_args.tokenizer_name or 'of the checkpoint'} keeps capitals; "
                f"leave {field} out, or train a tokenizer"
            )
    if lowercases[1] and not data_args.bleu_lowercase:
        data_args.bleu_lowercase = True
        say("scores ignore case, because the target tokenizer lower-cases all text")


def _lowercases(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer lower-cases all text. One with a closed vocabulary may lack these letters."""
    if has_closed_vocabulary(tokenizer):
        normalizer = tokenizer.backend_tokenizer.normalizer
        return normalizer is not None and normalizer.normalize_str("ABC") == "abc"
    text = tokenizer.decode(tokenizer("A B C")["input_ids"], skip_special_tokens=True)
    return text.split() == ["a", "b", "c"]
