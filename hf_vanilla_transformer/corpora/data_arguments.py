"""The arguments of the data of a run. Recipes and command-line flags use the field names."""

from dataclasses import dataclass
from typing import Any

from transformers.hf_argparser import HfArg

from ..text.perturbations import parse_augment
from ..text.token_kinds import TASKS, check_tokens, task_of
from ..text.tokenizer_training import SENTENCES
from ..utils.errors import UserError
from ..utils.number_ranges import check_ranges
from .directions import parse_directions

# At least 1.
_COUNTS = (
    "workers",
    "numbers_size",
    "max_source_length",
    "max_target_length",
    "min_frequency",
    "tokenizer_sentences",
    "sampling_temperature",
    "max_eval_samples",
    "max_eval_length",
    "max_test_samples",
    "held_out_pairs",
)


# A type checker reads `dataclasses.field` the same way: its result goes with any annotation.
def optional_argument(help: str) -> Any:
    """A field of a dataclass of arguments that is None by default."""
    return HfArg(default=None, help=help)


@dataclass
class DataArguments:
    """Where the sentence pairs come from, and how they are tokenized."""

    data: str | None = optional_argument(
        "A folder of `vanilla-transformer prepare`, in place of the fields that it was prepared with"
    )
    workers: int = HfArg(
        default=1,
        help="Processes that encode large text. With one, the tokenizers use the cores for half of the work",
    )
    source_lang: str | None = optional_argument("Source language, such as en")
    target_lang: str | None = optional_argument("Target language, such as de")
    directions: list[str] | None = optional_argument(
        "Train one model of several directions: en-de en-fr de-en. Each reads its pairs from all inputs, by the "
        "suffixes or columns of its languages or the columns source_lang and target_lang, or from the inputs after "
        "its mark: en-de=news.tsv en-fr=talks.fr.tsv"
    )
    language_token: str = HfArg(
        default="source",
        help="Where the token of the target language stands: source (>>de<<, as in OPUS-MT) or target (the first "
        "token of a translation, as in M2M-100)",
    )
    add_languages: list[str] | None = optional_argument(
        "Fine-tuning: the languages whose embeddings new ones of directions start with: pcm_Latn=eng_Latn"
    )
    sampling_temperature: float = HfArg(
        default=5.0,
        help="T of the directions' share of the training pairs, in proportion to (their number)^(1/T) "
        "(Arivazhagan et al. 2019)",
    )
    train: list[str] | None = optional_argument(
        "Text to train on: two plain-text files, source first (train.en train.de); a TSV, CSV, JSON lines, Parquet, "
        "TMX or XLIFF file; a prefix (data/train: data/train.en, data/train.de); a folder of distil; numbers, the "
        "built-in corpus; or a dataset on the Hub (user/name or user/name:configuration). Several are mixed"
    )
    validation: list[str] | None = optional_argument(
        "The same, for evaluation during training and to select a checkpoint"
    )
    test: list[str] | None = optional_argument("The same, scored once after training")
    base_test: list[str] | None = optional_argument(
        "Fine-tuning: a test set of the base model's text, scored before and after, so that forgetting is seen"
    )
    train_weights: list[int] | None = optional_argument(
        "How often each pair of each input occurs in an epoch"
    )
    source_column: str | None = optional_argument(
        "Column of the source sentences: a name, or a number from 1 in a table without a header, for which every text "
        "file is then taken, with tabs. {3:;}{1} joins columns: the tags of the third, between ;, each as [TAG], and "
        "then the first (tokens: tagged)"
    )
    target_column: str | None = optional_argument("The same of the target sentences")
    line_pattern: str | None = optional_argument(
        "A regular expression for each line of text files, whose named groups are the columns: IN: (?P<source>.*) "
        "OUT: (?P<target>.*), or cmudict, for its pronouncing dictionary"
    )
    numbers_size: int = HfArg(
        default=20_000, help="Training pairs of the built-in corpus, number words of num2words"
    )
    max_source_length: int | None = HfArg(
        default=256, help="Drop (and report) training pairs with more source tokens"
    )
    max_target_length: int | None = HfArg(default=256, help="The same for target tokens")
    held_out_pairs: int | None = optional_argument(
        "Without validation data: validate on this many pairs of the training data (at most a tenth), the same ones "
        "with any seed"
    )
    max_eval_length: int | None = HfArg(
        default=1024,
        help="Leave out (and report) validation and test pairs with more tokens on a side: the memory of a "
        "batch grows with its longest pair",
    )
    max_eval_samples: int | None = optional_argument("Validate on the first N pairs only")
    max_test_samples: int | None = optional_argument(
        "Score the first N pairs of the test sets only"
    )
    tokenizer_name: str | None = optional_argument(
        "A folder with a tokenizer, and optionally target_tokenizer/ in it"
    )
    tokens: str = HfArg(
        default="bpe",
        help="The tokens of both sides: bpe or sentencepiece for languages; chars, bytes, words (as white space "
        "separates them), smiles, tagged (characters, and tags in brackets), or a regular expression, for other "
        "sequences",
    )
    source_tokens: str | None = optional_argument("The tokens of the source, if they differ")
    target_tokens: str | None = optional_argument("The tokens of the target, if they differ")
    task: str | None = optional_argument(
        "language or sequence (default: as the tokens suggest): a sequence is not normalised, and its scores and card "
        "are not about languages"
    )
    source_form: str | None = optional_argument(
        "A function that brings each source to one form, such as canonical SMILES, in training and whenever the model "
        "is used: MODULE:FUNCTION. A source that it refuses stays as it is"
    )
    rewrite: str | None = optional_argument(
        "Train on other spellings of each pair, drawn anew in every epoch, by a function (source, target, random "
        "numbers) -> (source, target): MODULE:FUNCTION"
    )
    separate_vocabularies: bool = HfArg(
        default=False, help="Train one tokenizer per language, not a joint one"
    )
    min_frequency: int = HfArg(default=2, help="How often a pair must occur to become a BPE merge")
    tokenizer_sentences: int = HfArg(
        default=SENTENCES,
        help="Sentences of both sides that bpe and sentencepiece learn from, at most, drawn by seed. sentencepiece "
        "needs about 2.3 GB of memory for a million",
    )
    lowercase: bool = HfArg(default=False, help="Lower-case all text")
    source_lowercase: bool = HfArg(
        default=False, help="Lower-case the source alone. Each side then has a tokenizer of its own"
    )
    bidirectional: bool = HfArg(
        default=False,
        help="Train on each pair in both directions (the first stage of Bi-SimCut, Gao et al. 2022)",
    )
    augment: list[str] | None = optional_argument(
        "Perturb random training pairs, with a probability for each kind: upper=0.05 title=0.05 typos=0.12 "
        "end_punctuation=0.08 merge=0.05 copy=0.02 noise=0.01"
    )
    metrics: list[str] | None = optional_argument(
        "The scores of evaluations: bleu, chrf, chrf++, ter, exact_match, token_error_rate, character_error_rate, "
        "sequence_error_rate, MODULE:FUNCTION, or what evaluate.load finds, a folder or a name on the Hub (default: "
        "bleu chrf; of other sequences character_error_rate, or token_error_rate if their tokens are words or matches "
        "of a regular expression; always exact_match)"
    )
    normalize: str | None = optional_argument(
        "A function that brings translations and references to one form before they are scored, and returns None for "
        "invalid ones: MODULE:FUNCTION"
    )
    bleu_tokenize: str | None = optional_argument(
        "sacreBLEU's tokenizer: 13a, none, intl, zh …; None: the one that fits the script of the target"
    )
    bleu_lowercase: bool = HfArg(default=False, help="Case-insensitive scores")

    def __post_init__(self) -> None:
        check_ranges(self, at_least_1=_COUNTS, at_most={"numbers_size": 10**8})
        parse_augment(self.augment or [])
        parse_directions(self.directions or [])
        for field_name in ("tokens", "source_tokens", "target_tokens"):
            if value := getattr(self, field_name):
                check_tokens(value, field_name)
        if self.task not in (None, *TASKS):
            raise UserError(f"task: {self.task!r}: choose from {', '.join(TASKS)}")
        if self.language_token not in ("source", "target"):
            raise UserError(f"language_token: {self.language_token} is neither source nor target")
        taken = ("source_lang", "target_lang", "train_weights", "bidirectional")
        for name in taken if self.directions else ():
            if value := getattr(self, name):
                raise UserError(f"{name}: {value}: leave it out, it does not go with directions")


def kinds_of_sides(data_args: DataArguments) -> tuple[str, str]:
    """The tokens of source and target, as `--tokens` names them."""
    return data_args.source_tokens or data_args.tokens, data_args.target_tokens or data_args.tokens


def has_two_tokenizers(data_args: DataArguments) -> bool:
    """Return whether a run trains a tokenizer for each side, not a joint one."""
    source, target = kinds_of_sides(data_args)
    return data_args.separate_vocabularies or data_args.source_lowercase or source != target


def run_task(data_args: DataArguments) -> str:
    """The `task` of a run, "language" or "sequence"."""
    return data_args.task or task_of(*kinds_of_sides(data_args))
