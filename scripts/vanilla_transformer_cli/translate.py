"""Translate text line by line with a trained model.

  vanilla-transformer translate --model runs/numbers_en_de < source.txt > translation.txt
  vanilla-transformer translate --model runs/numbers_en_de --input source.txt.gz --output translation.txt
  vanilla-transformer translate --model runs/numbers_en_de --input source.txt --score translation.txt > scores.tsv
  vanilla-transformer translate --model runs/first runs/second --input source.txt --n_best 4 > best.txt

Without --input in a terminal it prompts for sentences. Arrow keys recall earlier ones, Ctrl-D ends.

The output has as many lines as the input, in the same order. An empty line stays empty. Text is UTF-8, and only a line
feed ends a line. Lines are read some batches ahead and sorted by length. --batch_size 1 answers each line at once.
A killed translation into a file resumes with the same command. Several processes can share the work:
accelerate launch --num_processes 4 --module vanilla_transformer_cli translate --model DIR --input F --output F
Jobs of a scheduler take --shard 1/64 to --shard 64/64, in any order. Then `vanilla-transformer merge --output F`, or
this command without --shard, joins them. --ray spreads the work over a cluster of Ray, or over local workers.
An output named .jsonl or .parquet gets rows with line, source and translation.

HTML, Markdown, subtitles (.srt, .vtt), .po, .docx and .odt files, and .xlf and .tmx files with an output of the same
kind, are translated as a whole. All but their text stays as it is (extra: documents).

--n_best N writes up to N lines for each line of the input, best first, as Moses, fairseq and Marian do:
  i ||| translation ||| score
where i counts the lines of the input from 0 and the score is the log-probability over the length penalty. --format tsv
writes instead the number of the line and the rank, both from 1, the text, the score and the probability among the
candidates, --format jsonl a list of these for each line. The same texts are one candidate, also after --normalize.
--alignment
adds " ||| " and the word alignment in Pharaoh format: 0-0 1-2 links the first word of the source with the first of the
translation, the second with the third. Words are separated by white space in every language, as in other aligners.
--probabilities adds " ||| " and each token with its probability: Ġhouse:0.9876 </s>:0.9912 (Ġ is a space).
--score writes, for each pair of lines, the natural log-probability of the translation, a tab, and one log-probability
for each token, including the end-of-sentence token.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .models import (
    MODEL_CODE,
    answer_at_a_prompt,
    check_files,
    codes_of,
    is_at_a_prompt,
    load_translator,
    ray_pool,
    score_lines,
    shared_work,
    writes_a_file,
)
from .parsing import (
    CANDIDATES,
    COLUMNS,
    COLUMNS_TITLE,
    DECODING,
    Parser,
    add_shared_flags,
    candidate_values,
    columns_of,
    given_values,
)


def parse_arguments(arguments: list[str] | None, prog: str | None) -> argparse.Namespace:
    parser = Parser(prog, __doc__)
    add = parser.add_argument
    add(
        "--model",
        required=True,
        nargs="+",
        metavar="DIR",
        help="model folder; several form an ensemble",
    )
    add(
        "--input",
        metavar="F",
        help="text to translate, .gz too, a table or a document (default: standard input)",
    )
    add("--output", metavar="F", help="file for the translations (default: standard output)")
    add(
        "--n_best",
        type=int,
        metavar="N",
        help="write N translations of each line, with their scores",
    )
    add_shared_flags(parser, *CANDIDATES)
    add(
        "--prefix",
        metavar="F",
        help="file with the start of each translation, one per line; an empty line forces nothing, and the last word "
        "of a prefix may be continued",
    )
    add("--alignment", action="store_true", help="write the word alignment")
    add(
        "--alignment_layer",
        type=int,
        metavar="N",
        help="its decoder layer, from 1 (default: the last but one)",
    )
    add(
        "--probabilities",
        action="store_true",
        help="write the probability of each token, from 0 to 1",
    )
    add(
        "--paragraphs",
        action="store_true",
        help="documents: split each line into sentences; blank lines, indentation and list marks stay, and sentences "
        "longer than any in training are cut and named (extra: documents)",
    )
    add(
        "--unwrap",
        action="store_true",
        help="with --paragraphs: only a blank line or a list mark ends a paragraph",
    )
    add(
        "--raw",
        action="store_true",
        help="give the model every line as it is; by default addresses, placeholders such as {name} and %%s, markup, "
        "emoji, times and lines without a letter, such as numbers, are kept",
    )
    add(
        "--score",
        metavar="F",
        help="existing translations, one per line: write their log-probabilities",
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)
    group = parser.add_argument_group("decoding (defaults: the model's generation_config.json)")
    add_shared_flags(group, *DECODING, "workers", "shortlist", "device", "dtype", "shard", "ray")
    add_shared_flags(parser, *MODEL_CODE)
    return parser.parse_args(arguments)


def check_combination(arguments: argparse.Namespace) -> None:
    """Refuse flags that would have no effect, and two files from one pipe."""
    from hf_vanilla_transformer.documents.document_files import check_output, is_document
    from hf_vanilla_transformer.utils.errors import UserError

    document = not arguments.score and is_document(arguments.input, arguments.output)
    if not arguments.score:
        check_output(arguments.input, arguments.output)
    for_sentences = (
        "n_best",
        "n_best_format",
        "normalize",
        "spellings",
        "prefix",
        "alignment",
        "alignment_layer",
        "probabilities",
    )
    requested = [name for name in for_sentences if getattr(arguments, name)]
    arguments.paragraphs |= document
    if arguments.paragraphs and (requested or arguments.score):
        raise UserError(
            f"--paragraphs translates documents, --{(requested or ['score'])[0]} is for single sentences"
        )
    if not arguments.paragraphs:
        columns_of(arguments, arguments.model[0], arguments.input, arguments.score)
    requested += ["paragraphs"] if arguments.paragraphs else []
    if arguments.unwrap and (document or not arguments.paragraphs):
        raise UserError("--unwrap is for plain text with --paragraphs: give both, or neither")
    if arguments.score and requested:
        raise UserError(f"--score is for existing translations, --{requested[0]} is for new ones")
    if arguments.alignment_layer is not None and not arguments.alignment:
        raise UserError("--alignment_layer needs --alignment: give both, or neither")
    check_files(arguments)
    for name in given_values(arguments, "shard", "ray"):
        if document:
            raise UserError(
                f"--{name} is for lines of text, {arguments.input} is translated as a whole"
            )


def output_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `translated_lines` that are given."""
    settings = given_values(
        arguments, *DECODING, "n_best", "alignment", "alignment_layer", "probabilities"
    )
    settings |= candidate_values(arguments)
    settings["protect"] = not arguments.raw
    if arguments.paragraphs:
        from hf_vanilla_transformer.documents.documents import Paragraphs

        settings["paragraphs"] = Paragraphs(*languages_of(arguments))
    return settings


def languages_of(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The languages of the text and of its translation, by the flags or the model."""
    from hf_vanilla_transformer.inference.languages import model_languages

    source, target = model_languages(arguments.model[0]) or ("en", None)
    return arguments.source_lang or source, arguments.target_lang or target


def sentences_to_translate(arguments: argparse.Namespace) -> Iterator[str]:
    """The sentences of --input."""
    from hf_vanilla_transformer.documents.documents import unwrapped
    from hf_vanilla_transformer.inference.sentences import read_sentences

    lines = read_sentences(
        arguments.input, "source", columns_of(arguments, arguments.model[0], arguments.input)
    )
    return unwrapped(lines, languages_of(arguments)[0]) if arguments.unwrap else lines


def translate_to_file(arguments: argparse.Namespace) -> None:
    """Translate in chunks that all processes share, and that a killed job leaves for the next one."""
    from hf_vanilla_transformer.inference.file_translation import translate_file

    with shared_work(arguments) as (processes, device, progress):
        translator = load_translator(arguments, arguments.model, device)
        translate_file(
            translator,
            sentences_to_translate(arguments),
            arguments.output,
            processes,
            prefixes=arguments.prefix,
            codes=codes_of(arguments, translator, arguments.input),
            shard=arguments.shard,
            pool=ray_pool(arguments, "model"),
            progress=progress,
            **output_settings(arguments),
        )


def scores(translator: Any, arguments: argparse.Namespace) -> Iterator[str]:
    """One line for each pair of lines of --input and --score."""
    from hf_vanilla_transformer.inference.sentences import read_sentence_pairs

    columns = columns_of(arguments, arguments.model[0], arguments.input, arguments.score)
    sources, targets = read_sentence_pairs(arguments.input, arguments.score, columns)
    settings = given_values(arguments, "batch_size", "max_tokens_per_batch")
    settings |= codes_of(arguments, translator, arguments.input)
    return score_lines(translator, zip(sources, targets, strict=True), **settings)


def translate_document_file(arguments: argparse.Namespace) -> None:
    """Translate a document, a format with more than lines of text."""
    from hf_vanilla_transformer.documents.document_files import text_translator, translate_document
    from hf_vanilla_transformer.inference.text_io import open_to_write

    data = Path(arguments.input).read_bytes()
    settings = output_settings(arguments)
    del settings["paragraphs"]
    languages = languages_of(arguments)
    translate = text_translator(load_translator(arguments, arguments.model), *languages, **settings)
    translated = translate_document(data, Path(arguments.input).suffix, translate, *languages)
    if arguments.output in (None, "-"):
        sys.stdout.buffer.write(translated)
        return
    with open_to_write(arguments.output) as stream:
        stream.write(translated)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.documents.document_files import is_document
    from hf_vanilla_transformer.inference.file_translation import translated_lines
    from hf_vanilla_transformer.inference.text_io import line_writer, read_lines

    check_combination(arguments)
    if not arguments.score and is_document(arguments.input, arguments.output):
        return translate_document_file(arguments)
    if writes_a_file(arguments):
        return translate_to_file(arguments)
    if is_at_a_prompt(arguments):
        return answer_at_a_prompt(arguments, output_settings(arguments))
    with line_writer(arguments.output) as write:
        translator = load_translator(arguments, arguments.model)
        if arguments.score:
            lines = scores(translator, arguments)
        else:
            prefixes = None if arguments.prefix is None else read_lines(arguments.prefix)
            settings = output_settings(arguments)
            settings |= {"prefixes": prefixes} | codes_of(arguments, translator, arguments.input)
            lines = translated_lines(translator, sentences_to_translate(arguments), **settings)
        for line in lines:
            write(line)
