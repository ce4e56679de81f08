"""The languages of a run."""

from pathlib import Path

from ...batches.corpus_tokenizers import tokenizer_folder
from ...corpora.corpus import split_inputs
from ...corpora.data_arguments import DataArguments
from ...corpora.readers import file_format
from ...corpora.translation_memories import FORMATS, memory_languages
from ...inference.languages import NAMES, language_code, model_languages
from .arguments import RunArguments


def run_languages(data_args: DataArguments, args: RunArguments) -> tuple[str, str] | None:
    """The languages of a run: of the recipe, of the base model, of a memory, or of the names of files or columns.

    None if they are unknown, or several directions.
    """
    if data_args.directions:
        return None
    if data_args.source_lang and data_args.target_lang:
        return data_args.source_lang, data_args.target_lang
    if args.model_name_or_path and (languages := model_languages(args.model_name_or_path)):
        return languages
    if data_args.data:  # the text may be gone
        return model_languages(tokenizer_folder(data_args.data))
    for files in (each.files for each in split_inputs(data_args, "train")):
        if len(files) == 1 and file_format(files[0]) in FORMATS:
            return memory_languages(files[0], data_args.source_lang, data_args.target_lang)
        suffixes = [Path(file.name.removesuffix(".gz")).suffix[1:] for file in files]
        for names in (suffixes, [data_args.source_column, data_args.target_column]):
            codes = [
                code
                for name in names
                if (code := language_code(name)) and code.split("-")[0] in NAMES
            ]
            if len(set(codes)) == 2:
                return codes[0], codes[1]
    return None
