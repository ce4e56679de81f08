"""Translate text line by line with a trained model.

  echo 'Good morning!' | vanilla-transformer translate --model en_de
  vanilla-transformer translate --model runs/numbers_en_de < source.txt > translation.txt
  vanilla-transformer translate --model runs/numbers_en_de --input source.txt.gz --output translation.txt
  vanilla-transformer translate --model runs/numbers_en_de --input source.txt --score translation.txt > scores.tsv
  vanilla-transformer translate --model runs/first runs/second --input source.txt --n_best 4 > best.txt

The output has as many lines as the input, in the same order. An empty line stays empty. Text is UTF-8, and only a line
feed ends a line. Lines are read some batches ahead and sorted by length. --batch_size 1 answers each line at once.
A killed translation into a file resumes with the same command. Jobs of a scheduler take --shard 1/64 to --shard 64/64,
in any order. Then `vanilla-transformer merge --output F`, or this command without --shard, joins them. --ray spreads
the work over a cluster of Ray, or over local workers. An output named .jsonl or .parquet gets rows with line, source
and translation.

HTML, Markdown, subtitles (.srt, .vtt), .po, .docx and .odt files, and .xlf and .tmx files with an output of the same
kind, are translated as a whole. All but their text stays as it is (extra: documents).

--n_best N writes up to N lines for each line of the input, best first, as Moses, fairseq and Marian do:
  i ||| translation ||| score
where i counts the lines of the input from 0 and the score is the log-probability over the length penalty. --format tsv
writes instead the number of the line and the rank, both from 1, the text, the score and the probability among the
candidates, --format jsonl a list of these for each line. The same texts are one candidate, also after --normalize.
--alignment adds " ||| " and the word alignment in Pharaoh format: 0-0 1-2 links the first word of the source with the
first of the translation, the second with the third. Words are separated by white space in every language, as in other
aligners.
--score writes, for each pair of lines, the natural log-probability of the translation, a tab, and one log-probability
for each token, including the end-of-sentence token. A killed call resumes, and shards share it, as a translation.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from .lines import OF_OUTPUTS, add_line_flags, check_files, write_lines
from .models import load_translator
from .parsing import (
    CELLS,
    COLUMNS,
    COLUMNS_TITLE,
    DECODING,
    Flag,
    Parser,
    add_flags,
    add_shared_flags,
    columns_of,
    given_values,
)


def add_arguments(parser: Parser) -> None:
    add_flags(
        parser,
        model=Flag(
            "DIR",
            "model folder, en_de or en_fr; several form an ensemble",
            required=True,
            nargs="+",
        ),
        input=Flag(
            "F", "text to translate, .gz too, a table or a document (default: standard input)"
        ),
    )
    add_line_flags(parser, "translation")
    add_flags(
        parser,
        alignment="write the word alignment",
        paragraphs="documents: split each line into sentences; blank lines, indentation and list marks stay, and "
        "sentences longer than any in training are cut and named (extra: documents)",
        raw="give the model every line as it is; by default addresses, placeholders such as {name} and %%s, markup, "
        "emoji, times and lines without a letter, such as numbers, are kept",
    )
    add_shared_flags(parser.add_argument_group(COLUMNS_TITLE), *COLUMNS)


def languages_of(arguments: argparse.Namespace) -> tuple[str | None, str | None]:
    """The languages of the text and of its translation, by the flags or the model."""
    from hf_vanilla_transformer.inference.directions import Directions
    from hf_vanilla_transformer.inference.languages import model_languages
    from hf_vanilla_transformer.text import load_tokenizers

    folder = arguments.model[0]
    directions = Directions(*load_tokenizers(folder))
    if directions.source is not None:
        source, target = directions.completed(arguments.source_lang, arguments.target_lang)
        return source or "en", target
    source, target = model_languages(folder) or ("en", None)
    return arguments.source_lang or source, arguments.target_lang or target


def translate_document_file(arguments: argparse.Namespace) -> None:
    """Translate a document, a format with more than lines of text."""
    from hf_vanilla_transformer.documents.document_files import translate_document
    from hf_vanilla_transformer.documents.documents import text_translator
    from hf_vanilla_transformer.inference.text_io import open_to_write

    data = Path(arguments.input).read_bytes()
    settings = given_values(arguments, *DECODING)
    languages = languages_of(arguments)
    translator = load_translator(arguments, arguments.model)
    translate = text_translator(translator, *languages, protect=not arguments.raw, **settings)
    translated = translate_document(data, Path(arguments.input).suffix, translate, *languages)
    if arguments.output in (None, "-"):
        sys.stdout.buffer.write(translated)
        return
    with open_to_write(arguments.output) as stream:
        stream.write(translated)


def main(arguments: argparse.Namespace) -> None:
    from hf_vanilla_transformer.documents.document_files import check_output, is_document
    from hf_vanilla_transformer.documents.documents import translate_documents
    from hf_vanilla_transformer.utils.errors import UserError

    document = False
    if not arguments.score:
        document = is_document(arguments.input, arguments.output)
        check_output(arguments.input, arguments.output)
    arguments.paragraphs |= document
    check_files(arguments)
    if arguments.paragraphs:
        for name in given_values(arguments, *OF_OUTPUTS, "score"):
            raise UserError(f"--paragraphs translates documents, --{name} is for single sentences")
    if document:
        for name in given_values(arguments, "shard", "ray", *CELLS):
            raise UserError(
                f"--{name} is for lines of text, {arguments.input} is translated as a whole"
            )
        return translate_document_file(arguments)
    columns = columns_of(arguments, arguments.model[0], arguments.input, arguments.score)
    settings: dict[str, Any] = {"protect": not arguments.raw}
    if arguments.paragraphs:
        source, target = languages_of(arguments)
        settings["paragraphs"] = partial(
            translate_documents, language=source, target_language=target
        )
    write_lines(arguments, columns, **settings)
