"""The vocabulary of code and documents: the terms of CONTRIBUTING's glossary, and none of their private synonyms.

Text is everything in a file: names, comments, docstrings, messages and prose. A failure lists how often each file has
a synonym, and the first line that has it.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "hf_vanilla_transformer"
NOT_READ = {"tests/test_words.py"}  # it lists the synonyms


def files() -> dict[str, str]:
    """path -> text of everything that somebody reads to use or change the project."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml")]
    for folder in (PACKAGE, "scripts", "tests"):
        for suffix in ("py", "md", "sh", "yaml"):
            paths += sorted((ROOT / folder).rglob(f"*.{suffix}"))
    texts = {path.relative_to(ROOT).as_posix(): path for path in paths}
    return {name: path.read_text(encoding="utf-8") for name, path in texts.items() if name not in NOT_READ}


FILES = files()


class Synonym(NamedTuple):
    """A text that the glossary replaces.

    Attributes:
        pattern: regular expression; `(?<![A-Za-z])` rather than a word boundary also finds it after an underscore.
        term: what to write.
        permitted: expressions that contain it and mean something else.
        files: paths where the English word is meant.
    """

    pattern: str
    term: str
    permitted: str = r"(?!)"
    files: str = r"(?!)"


# Where white space separates words: alignments, word vectors, number words, what BPE splits, options of other
# toolkits; and the key "words" of recorded checkpoints.
WORD_FILES = (
    r"align|word_vectors|numbers|bpe|tokenizer_training|vocabular|metrics|interop/foreign|old_checkpoints|"
    r"html_text|serving/service|interop/toolkits"
)

TEXT = {
    "word": Synonym(
        r"(?<![A-Za-z0-9])[Ww]ords?(?![a-z0-9])",
        "token",
        # lines about white space and alignment, the corpus of number words, and names in other libraries
        r"(?i).*(?:align|pharaoh|white[- ]?space|spaces separate|last word|\.split\().*|number[ _-]words?|"
        r"word[ _-]vectors?|word for word|whole words?|test_words|(?:bad|force|stop|to)_words\w*|end_of_word\w*|"
        r"word_ids?\b|\w*word_embeddings?|level.: .word|word[ -]?(?:piece|level)s?|word-penalty|mini-batch-words",
        WORD_FILES,
    ),
    "program": Synonym(
        r"(?<![A-Za-z])[Pp]rograms?(?![a-z])",
        "compiled module; exported program for torch.export's; framework or tool for software",
        r"(?i)export(?:ed)?[ _]?programs?",
        r"interop/.*export|test_onnx",
    ),
    "place": Synonym(
        r"(?i)(?<![a-z])places(?![a-z])",
        "slot, position or index",
        r"(?i)decimal places",
    ),
    "room": Synonym(r"\b_?room\b|\bROOM\b|_ROOM\b", "capacity or space"),
    "eight bits": Synonym(r"(?i)eight[ _]?bits?|_in_eight", "int8 or dynamic int8"),
    "laid out": Synonym(r"\b[Ll]aid[ _-]?[Oo]ut|\bLaidOut|\b_?lay(?:ing)?_out|_LAYING_OUT", "packed"),
    "at once": Synonym(r"\bof_any_size\b|\b_only_sizes\b", "mark_dynamic, shape_guards_only"),
    "side by side": Synonym(r"side_by_side|beside each other", "benchmark harness; in parallel"),
    "waiting room": Synonym(r"WAITING_ROOM|[Ww]aiting room", "staging folder"),
    "files of others": Synonym(
        r"(?<!test_)damaged_files|text_lines|large_jobs", "untrusted, text_io, file_translation"
    ),
    # speed/worker drives earlier commits, which had it
    "decoder_weights": Synonym(r"\bdecoder_weights\b", 'quantization="int8"', files="speed/worker"),
    "reader of a step": Synonym(
        r"\bStepReader|\bStepDecoder|\bModuleReader|\bread_prefix\b|\bSentencePrograms|\bSentenceLayer|\bStepLayer",
        "PackedDecoder, ModuleDecoder, prefill",
    ),
    "products": Synonym(
        r"\bAsItStands|\bEightBits|\badded_to\b|\bwith_relu\b|products_vanilla", "PackedLinear, kernel"
    ),
    "beam places": Synonym(r"\bBeamPlaces|\bSentencePlaces", "BeamCacheSlots"),
    "likeliest": Synonym(r"\b_?likeliest\b|\b_largest\b", "topk_log_probs, blockwise_topk"),
    "ranks": Synonym(
        r"\bhush_others\b|\bone_voice\b|\bfrom_first\b|\banywhere\(",
        "silence_other_ranks, errors_on_main_rank_only, broadcast_from_main, any_rank",
    ),
    "samplers": Synonym(
        r"\bGroupedPairSampler|\bUpdateSampler|\bUpdateStream",
        "LengthGroupedSampler, TokenBatchSampler, StreamingTokenBatches",
    ),
    "memos": Synonym(r"\b_MADE\b|\b_LAST\b|\b_looked_at\b", "state that belongs to the model"),
    "batches of tokens": Synonym(r"(?i)batch(?:es)? of tokens", "token batch"),
}

# Names of definitions, arguments, variables and attributes -> the term. English words in prose are left alone.
ENGINE = rf"{PACKAGE}/(?:inference/.*|(?:layers|stacks|generation)_vanilla_transformer\.py)"
NAMES = {
    ENGINE: {
        **dict.fromkeys(("seen", "shown"), "visible"),
        **dict.fromkeys(("entries", "own"), "kv, self_kv"),
        **{"Open": "BeamState", "Group": "SearchBatch", "Rules": "SearchConfig", "_Job": "SearchRequest"},
        **{"more": "next_batch", "renew": "refill", "put": "replace_rows", "kind": "specialization key"},
        **{"Score": "LengthPenalty", "of_paper": 'formula="gnmt"'},
        **{"Product": "PackedLinear", "Way": "kernel", "Reader": "Decoder"},
    },
    rf"{PACKAGE}/(?:data|training)/.*": {
        **{"say": "print_main", "deal": "shard_batches", "cut": "split_into_batches"},
    },
}


def occurrences(text: str, synonym: Synonym) -> list[str]:
    """The lines that have it, each as often as it stands there."""
    found: list[str] = []
    pattern = re.compile(synonym.pattern)
    for line in text.splitlines():
        rest = re.sub(synonym.permitted, "", line) if pattern.search(line) else ""
        found += [line.strip()] * len(pattern.findall(rest))
    return found


def names(source: str) -> Iterator[tuple[str, int]]:
    """Every name that a file defines, and its line: definitions, arguments, variables, attributes that it sets."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno


@pytest.mark.parametrize("key", TEXT)
def test_text_has_no_synonym(key: str) -> None:
    synonym = TEXT[key]
    found = {name: occurrences(text, synonym) for name, text in FILES.items() if not re.search(synonym.files, name)}
    found = {name: lines for name, lines in found.items() if lines}
    report = [f"{name}: {len(lines)}, such as {lines[0][:100]!r}" for name, lines in found.items()]
    assert not report, f"write {synonym.term}\n" + "\n".join(report)


@pytest.mark.parametrize("scope", NAMES)
def test_names_are_no_synonym(scope: str) -> None:
    terms = NAMES[scope]
    report = [
        f"{path}, line {line}: {name} (write {terms[name]})"
        for path, text in FILES.items()
        if path.endswith(".py") and re.fullmatch(scope, path)
        for name, line in names(text)
        if name in terms
    ]
    assert not report, "\n".join(report)


def test_files_where_a_word_is_meant_exist() -> None:
    for synonym in TEXT.values():
        for pattern in synonym.files.split("|"):
            assert pattern == r"(?!)" or any(re.search(pattern, name) for name in FILES), pattern


def test_test_names_begin_with_their_subject() -> None:
    # a name that begins with a pronoun tells a story
    story = re.compile(r"def test_(?:what|whatever|who|whoever|it|its|they|nobody|somebody|there|that|those|this)_\w+")
    found = {name: story.findall(text) for name, text in FILES.items() if name.startswith("tests/")}
    report = [f"{name}: {len(each)}, such as {each[0]}" for name, each in found.items() if each]
    assert not report, "\n".join(report)


@pytest.mark.parametrize(
    ("key", "text", "count"),
    [
        ("word", "the words of a target; eos_word, Word", 3),
        ("word", "number words, bad_words_ids, tie_word_embeddings, keyword, num2words, WordPiece", 0),
        ("program", "SentencePrograms, a program", 1),
        ("program", "an ExportedProgram, exported programs, exported_program, export_programs", 0),
        ("place", "places, _places, BEAM_PLACES, in place of, move_into_place", 3),
        ("room", "room, _room, a bedroom", 2),
        ("laid out", "LaidOut, laid out, layout", 2),
    ],
)
def test_pattern_finds_the_synonym_only(key: str, text: str, count: int) -> None:
    assert len(occurrences(text, TEXT[key])) == count


def test_names_are_read_from_code_only() -> None:
    source = "# seen\nclass Open:\n    def put(self, own):\n        self.shown = 'entries'\n        return self.more\n"
    assert sorted(name for name, _ in names(source)) == ["Open", "own", "put", "self", "shown"]
