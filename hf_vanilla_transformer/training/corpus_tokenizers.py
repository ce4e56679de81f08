"""The tokenizers of a run: load them, or train them on the training split."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from ..configuration_vanilla_transformer import VanillaTransformerConfig
from ..data import load_tokenizers
from ..data.encoding import name_end_token
from ..data.language_tokens import add_language_tokens
from ..data.symbol_tokenizers import train_any_tokenizer
from ..data.token_kinds import (
    LANGUAGE_TOKENS,
    describe_tokenizer,
    has_closed_vocabulary,
    tokenizer_task,
)
from ..data.tokenizer_files import tokenizer_digest
from ..utils.errors import UserError
from .arguments import (
    DataArguments,
    ModelArguments,
    has_two_tokenizers,
    run_task,
    side_tokens,
)
from .corpus import ROWS_READ, Corpus
from .distributed import print_main

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
    corpus: Corpus, model_args: ModelArguments, data_args: DataArguments, checkpoint: Path | None
) -> Tokenizers:
    """Load the tokenizers, or train them on the training split. A resumed run loads them from its checkpoint."""
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
        tokenizers = _train_tokenizers(corpus, model_args, data_args)
        if corpus.directions:
            for tokenizer in dict.fromkeys(tokenizers):
                add_language_tokens(
                    tokenizer, corpus.directions["train"], data_args.language_token == "source"
                )
    described = " and ".join(f"{len(each):,}" for each in dict.fromkeys(tokenizers))
    print_main(f"tokenizer: {described} tokens{_missed(tokenizers, model_args, data_args)}")
    return tokenizers


def _train_tokenizers(
    corpus: Corpus, model_args: ModelArguments, data_args: DataArguments
) -> Tokenizers:
    """Train the tokenizers on the training split: a joint one, or one for each side."""
    train = corpus.pairs["train"]
    fingerprint = corpus.fingerprint("train")  # it keys the cache of tokenizers
    kinds = side_tokens(data_args)
    task = run_task(data_args)

    def learn(tokens: str, *columns: str, lowercase: bool) -> PreTrainedTokenizerBase:
        content = f"{fingerprint} {' '.join(columns)} {len(train)}"
        # Read in batches: row by row, a million rows take 20 s.
        batches = (
            (column, train.select_columns([column, "line"]).iter(ROWS_READ)) for column in columns
        )
        rows = (
            (text, line)
            for column, read in batches
            for batch in read
            for text, line in zip(batch[column], batch["line"], strict=True)
        )
        tokenizer = train_any_tokenizer(
            rows,
            tokens,
            vocab_size=model_args.vocab_size or VanillaTransformerConfig().vocab_size,
            min_frequency=data_args.min_frequency,
            lowercase=lowercase,
            content=content,
            side=columns[0] if len(columns) == 1 else "text",
        )
        describe_tokenizer(tokenizer, tokens, task)
        return tokenizer

    lowercase = data_args.lowercase
    if not has_two_tokenizers(data_args):
        return (learn(kinds[0], "source", "target", lowercase=lowercase),) * 2
    source = learn(kinds[0], "source", lowercase=lowercase or data_args.source_lowercase)
    return source, learn(kinds[1], "target", lowercase=lowercase)


def _missed(tokenizers: Tokenizers, model_args: ModelArguments, data_args: DataArguments) -> str:
    """The end of the line on the tokenizers, if the text has too few words for `vocab_size`."""
    size = model_args.vocab_size or VanillaTransformerConfig().vocab_size
    if data_args.tokenizer_name or set(side_tokens(data_args)) - set(LANGUAGE_TOKENS):
        return ""
    return f"; vocab_size={size:,} needs more text" if min(map(len, tokenizers)) < size else ""


def match_case(tokenizers: Tokenizers, data_args: DataArguments) -> None:
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
        print_main("scores ignore case, because the target tokenizer lower-cases all text")


def _lowercases(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer lower-cases all text. One with a closed vocabulary may lack these letters."""
    if has_closed_vocabulary(tokenizer):
        normalizer = tokenizer.backend_tokenizer.normalizer
        return normalizer is not None and normalizer.normalize_str("ABC") == "abc"
    text = tokenizer.decode(tokenizer("A B C")["input_ids"], skip_special_tokens=True)
    return text.split() == ["a", "b", "c"]
