"""The data of a run: read, tokenized and encoded, or mapped from a folder that `prepare` wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from datasets import config as datasets_config

from ...batches.corpus_encoding import changed_in_each_epoch, encode_corpus
from ...batches.corpus_tokenizers import (
    Tokenizers,
    describe_sizes,
    loaded_tokenizers,
    match_case,
    take_source_form,
    take_task,
    tokenizer_folder,
    train_tokenizers,
)
from ...batches.encoded_blocks import ShardEncoded
from ...batches.encoding import EncodingReport
from ...batches.prepared import Prepared, read_prepared, write_prepared
from ...batches.redrawing import unchanged_rows
from ...configuration_vanilla_transformer import VanillaTransformerConfig
from ...corpora.corpus import Corpus, PairWarnings, load_corpus
from ...inference.languages import model_languages, name_languages
from ...inference.loading import import_class, trust_code
from ...text.token_kinds import record_form, set_task, tokenizer_task
from ...text.tokenizer_files import load_tokenizers, tokenizer_digest
from ...utils.atomic_write import report_full_disk
from ...utils.errors import UserError
from ..state.distributed import broadcast_from_main, print_main, taking_turns
from ..state.fingerprint import REMEDY, read_run_state, require_same
from .arguments import DataArguments, ModelArguments, ParsedArguments, RunArguments
from .facts import model_facts
from .fine_tuning import (
    NO_IMPORTERS,
    Importers,
    ModelClass,
    PretrainedTranslator,
    base_folder,
    load_base_model,
    prepare_model,
)
from .languages import run_languages
from .planning import choose_by_pairs

# Draws what is held out, and the built-in corpus: the seed of the recipes. Not that of the run: runs that differ by
# seed are scored on the same pairs.
_SEED_OF_PAIRS = 1

# Data arguments that do not decide the pairs, their ids or the tokenizers.
_OF_TRAINING = (
    "data",
    "workers",
    "augment",
    "rewrite",
    "metrics",
    "normalize",
    "bleu_tokenize",
    "bleu_lowercase",
)


@dataclass
class RunData:
    """The data of a run, and its arguments, some of which depend on the data."""

    model_args: ModelArguments
    data_args: DataArguments
    args: RunArguments
    chosen: dict[str, object]  #: facts about what was chosen for this number of pairs
    corpus: Corpus
    tokenizers: Tokenizers
    encoded: dict[str, Any]  #: the splits as token ids
    encoding: dict[str, EncodingReport]


def prepare_run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: RunArguments,
    pair_warnings: PairWarnings | None = None,
    importers: Importers = NO_IMPORTERS,
    shard: tuple[int, int] | None = None,
) -> None:
    """Write the data of a run to the new folder `args.output_dir`, for the argument `data` of other runs.

    A `shard` (i, N) encodes its share of the training pairs into the cache, for a call without it.

    Raises:
        UserError: a mistake that the user can correct.
    """
    folder = Path(args.output_dir)
    if args.world_size > 1:
        raise UserError(
            f"prepare: {args.world_size} processes of torchrun or accelerate would write one folder: start it "
            "without them, with --workers N"
        )
    if data_args.data:
        raise UserError(f"data: {data_args.data} is prepared already: leave it out, or train on it")
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"output_dir: {folder} exists already: name a new folder")
    base, _, _ = load_base(args, None, importers)
    try:
        with report_full_disk(datasets_config.HF_DATASETS_CACHE):
            data = load_data((model_args, data_args, args), None, base, pair_warnings, shard)
    except ShardEncoded:
        print_main("encoded: after all shards, the same command without --shard joins them")
        return
    encoded = data.encoded | {"train": unchanged_rows(data.encoded["train"])}
    settings = _settings(data.model_args, data.data_args) | {"seed": args.seed}
    prepared = Prepared(settings, data.corpus, encoded, data.encoding)
    write_prepared(folder, prepared, data.tokenizers)
    print_main(f"prepared: {len(encoded['train']):,} training pairs in {folder}")


def load_base(
    args: RunArguments, checkpoint: Path | None, importers: Importers
) -> tuple[PretrainedTranslator | None, ModelClass | None, dict[str, object]]:
    """Load the model that training starts from, or None for fresh weights and for those of a checkpoint.

    Return it with the class that the run trains, or None for the default, and the facts about both.
    """
    # A checkpoint of adapters has the adapters alone.
    starts = args.model_name_or_path is not None and (checkpoint is None or args.lora_r > 0)
    facts = model_facts(args, base_folder(args, fetch=starts))
    if checkpoint is not None:
        require_same(checkpoint, read_run_state(checkpoint).fixed, facts, REMEDY)
    model_class = None if args.model_class is None else import_class(args.model_class)
    if args.trust_remote_code:
        for trusted in (args.model_name_or_path, *(args.teacher or ())):
            if trusted is not None:
                trust_code(Path(trusted))
    base = None
    if starts:
        base = load_base_model(str(args.model_name_or_path), model_class, importers)
    return base, model_class, facts


def load_data(
    parsed: ParsedArguments,
    checkpoint: Path | None,
    base: PretrainedTranslator | None,
    pair_warnings: PairWarnings | None = None,
    shard: tuple[int, int] | None = None,
) -> RunData:
    """Load the data of a run, with the tokenizers of the base model or of the checkpoint, if there are some.

    Raises:
        ShardEncoded: `shard` is one of `encode_blocks`, and its part is encoded.
    """
    model_args, data_args, args = parsed
    fine_tuned = args.model_name_or_path is not None
    prepared = None if data_args.data is None else read_prepared(Path(data_args.data))
    if prepared is not None:
        yielded = _take_settings(prepared.settings, args, data_args, model_args)
    loaded = base.tokenizers if base is not None else loaded_tokenizers(data_args, checkpoint)
    take_task(data_args, loaded)
    take_source_form(data_args, loaded, args.trust_remote_code)
    is_first = args.local_process_index == 0  # the other ranks of a host read its cache
    if prepared is None:
        languages = model_languages(str(args.model_name_or_path)) if fine_tuned else None
        with taking_turns("reading", is_first):
            corpus = load_corpus(data_args, _SEED_OF_PAIRS, languages, print_main, pair_warnings)
    else:
        corpus = prepared.corpus
        print_main(f"data: {data_args.data}, prepared with seed {prepared.settings['seed']}")
        for split in corpus.pairs:
            print_main(f"{split}: {corpus.summary(split)}")
    model_args, data_args, args, chosen = choose_by_pairs(
        (model_args, data_args, args), corpus, checkpoint
    )
    if prepared is not None:
        yielded |= _take_settings(prepared.settings, args, data_args, model_args)
        if yielded:
            values = ", ".join(
                f"{name}={prepared.settings[name]} (recipe: {value})"
                for name, value in yielded.items()
            )
            print_main(f"data: {data_args.data} was prepared with {values}")
    take_task(data_args, loaded)  # the chosen arguments may be others
    take_source_form(data_args, loaded, args.trust_remote_code)
    vocab_size = model_args.vocab_size or VanillaTransformerConfig.vocab_size
    if base is not None:
        prepare_model(base, model_args, data_args)
    tokenizers = loaded or broadcast_from_main(
        lambda: train_tokenizers(corpus, vocab_size, data_args, args.seed, print_main),
        step="tokenizer training",
    )
    if base is None:
        print_main(describe_sizes(tokenizers, vocab_size, data_args))
    if data_args.task is not None:
        set_task(tokenizers, data_args.task, new=not fine_tuned)
    record_form(tokenizers[0], data_args.source_form)
    match_case(tokenizers, data_args, print_main)
    if tokenizer_task(*tokenizers) == "language":
        name_languages(tokenizers, run_languages(data_args, args))
    if prepared is None:
        with taking_turns("encoding", is_first):
            encoded, encoding = encode_corpus(corpus, tokenizers, data_args, print_main, shard)
    else:
        _require_tokenizers(data_args, tokenizers)
        encoded, encoding = prepared.encoded, prepared.encoding
    encoded["train"] = changed_in_each_epoch(
        corpus, encoded["train"], tokenizers, data_args, args.seed
    )
    return RunData(model_args, data_args, args, chosen, corpus, tokenizers, encoded, encoding)


def _settings(*arguments: ModelArguments | DataArguments) -> dict[str, object]:
    """The arguments that decide the data, as JSON values."""
    return {
        field.name: getattr(each, field.name)
        for each in arguments
        for field in fields(each)
        if (isinstance(each, DataArguments) and field.name not in _OF_TRAINING)
        or field.name == "vocab_size"
    }


def _take_settings(
    settings: Mapping[str, object],
    args: RunArguments,
    data_args: DataArguments,
    model_args: ModelArguments,
) -> dict[str, object]:
    """Let arguments have the settings of the prepared folder, and return the values of the recipe that yield to them.

    Another value of a flag is refused, also a default.
    """
    yielded: dict[str, object] = {}
    refused: dict[str, object] = {}
    arguments: list[DataArguments | ModelArguments] = [data_args, model_args]
    for each in arguments:
        for field in fields(each):
            if field.name not in settings:
                continue
            value = getattr(each, field.name)
            if value != settings[field.name]:
                if field.name in args.of_recipe:
                    yielded[field.name] = value
                elif field.name in args.named or value != field.default:
                    refused[field.name] = value
            setattr(each, field.name, settings[field.name])
    if refused:
        given = ", ".join(f"{name}: {value}" for name, value in refused.items())
        prepared = ", ".join(str(settings[name]) for name in refused)
        it = "it" if len(refused) == 1 else "them"
        raise UserError(
            f"{given}, but {data_args.data} was prepared with {prepared}: leave {it} out, or prepare the data again"
        )
    return yielded


def _require_tokenizers(data_args: DataArguments, tokenizers: Tokenizers) -> None:
    """Refuse tokenizers with other ids than those of the prepared data."""
    own = load_tokenizers(tokenizer_folder(str(data_args.data)))
    if tokenizer_digest(own) != tokenizer_digest(tokenizers):
        raise UserError(
            f"data: {data_args.data} was prepared with another tokenizer than that of the model: prepare it again, "
            "with the same model_name_or_path"
        )
