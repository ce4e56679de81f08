"""The tokenizers of a run: load them, or train them on the training split."""

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..corpora.corpus import Corpus
from ..corpora.data_arguments import DataArguments, has_two_tokenizers, kinds_of_sides, run_task
from ..text.language_tokens import add_language_tokens
from ..text.source_form import FORMS
from ..text.symbol_tokenizers import train_any_tokenizer
from ..text.token_kinds import (
    LANGUAGE_TOKENS,
    describe_tokenizer,
    has_closed_vocabulary,
    recorded_form,
    tokenizer_task,
)
from ..text.tokenizer_files import load_tokenizers, tokenizer_digest
from ..text.tokenizer_training import describe_sample, sample_numbers
from ..utils.errors import UserError, shown
from .encoding import check_end_token

Tokenizers = tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]  # of source and target


def tokenizer_folder(data: str) -> str:
    """The folder of the tokenizers in a prepared folder."""
    return str(Path(data) / "tokenizer")


def loaded_tokenizers(data_args: DataArguments, checkpoint: Path | None) -> Tokenizers | None:
    """The tokenizers of the checkpoint that a run resumes from, or of `data` or `tokenizer_name`.

    None if the run trains them.
    """
    field = "tokenizer_name" if data_args.data is None else "data"
    name = data_args.tokenizer_name if data_args.data is None else tokenizer_folder(data_args.data)
    if checkpoint is not None:
        tokenizers = load_tokenizers(checkpoint)
        if name and tokenizer_digest(load_tokenizers(name)) != tokenizer_digest(tokenizers):
            raise UserError(
                f"{field}: {name} is not the tokenizer of {checkpoint} that a resumed run keeps: "
                "leave it out, or start a new run"
            )
        return tokenizers
    if name is None:
        return None
    source, target = load_tokenizers(name)
    check_end_token(target, name)
    return source, target


def take_task(data_args: DataArguments, tokenizers: Tokenizers | None) -> None:
    """Let a run have the task of the tokenizers that it has loaded, unless `task` is set.

    A task that the tokens suggest stays unset, as in the run that trained the tokenizers.
    """
    if tokenizers is None or data_args.task is not None:
        return
    task = tokenizer_task(*tokenizers)
    if task == "sequence" and run_task(data_args) != task:
        data_args.task = task


def take_source_form(
    data_args: DataArguments, tokenizers: Tokenizers | None, trusted: bool
) -> None:
    """Let a run have the form of the source that its loaded tokenizers name, unless `source_form` is set.

    Args:
        trusted: whether code that is not of this package runs because a folder names it.
    """
    if tokenizers is None or data_args.source_form is not None:
        return
    name = recorded_form(tokenizers[0])
    if name is not None and name not in FORMS and not trusted:
        raise UserError(
            f"source_form: the tokenizer names {shown(name)}, code that is not of this package: permit it with "
            "--source_form or --trust_remote_code"
        )
    data_args.source_form = name


def train_tokenizers(
    corpus: Corpus,
    vocab_size: int,
    data_args: DataArguments,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Tokenizers:
    """Train the tokenizers on the training split: a joint one, or one for each side.

    Those of a language learn from a sample, drawn by `seed` from an epoch, in which inputs and directions have their
    weights. `say` gets a line about it. Others need every symbol of the text.
    """
    kinds = kinds_of_sides(data_args)
    task = run_task(data_args)
    # Keys the tokenizer cache.
    content = f"{corpus.fingerprint('train')} {len(corpus.pairs['train'])}"

    def learn(tokens: str, *columns: str, lowercase: bool) -> PreTrainedTokenizerBase:
        pairs = len(corpus.pairs["train"])
        limit = max(1, data_args.tokenizer_sentences // len(columns))
        rows = None
        sample = ""
        if tokens in LANGUAGE_TOKENS and pairs > limit:
            rows = sample_numbers(pairs, limit, seed)
            sample = f" {limit} {seed}"
            say(describe_sample(limit * len(columns), of=pairs * len(columns)))
        tokenizer = train_any_tokenizer(
            corpus.texts(*columns, rows=rows),
            tokens,
            vocab_size=vocab_size,
            min_frequency=data_args.min_frequency,
            lowercase=lowercase,
            content=f"{content} {' '.join(columns)}{sample}",
            side=columns[0] if len(columns) == 1 else "text",
        )
        describe_tokenizer(tokenizer, tokens, task)
        return tokenizer

    lowercase = data_args.lowercase
    if has_two_tokenizers(data_args):
        source = learn(kinds[0], "source", lowercase=lowercase or data_args.source_lowercase)
        tokenizers = source, learn(kinds[1], "target", lowercase=lowercase)
    else:
        tokenizers = (learn(kinds[0], "source", "target", lowercase=lowercase),) * 2
    if corpus.directions:
        for tokenizer in dict.fromkeys(tokenizers):
            add_language_tokens(
                tokenizer, corpus.directions["train"], data_args.language_token == "source"
            )
    return tokenizers


def describe_sizes(tokenizers: Tokenizers, vocab_size: int, data_args: DataArguments) -> str:
    """One line on the sizes of tokenizers. It says if the text had too few words for `vocab_size`."""
    sizes = [len(each) for each in dict.fromkeys(tokenizers)]
    line = f"tokenizer: {' and '.join(f'{size:,}' for size in sizes)} tokens"
    of_languages = set(kinds_of_sides(data_args)) <= set(LANGUAGE_TOKENS)
    if data_args.tokenizer_name or not of_languages or min(sizes) >= vocab_size:
        return line
    return f"{line}; vocab_size={vocab_size:,} needs more text"


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
