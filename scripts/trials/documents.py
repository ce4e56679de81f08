"""`python -m scripts.trials.documents PATH …` translates documents, and those in folders, with every word changed.

Two translations are tried: all words in upper case, and all words in reverse order with their alignment, so that tags
move. A program that was not written here reads each document before and after: pandoc reads Markdown, DOCX and ODT,
polib and msgfmt read PO, translate-toolkit reads XLIFF, the HTML parser of Python reads HTML, webvtt-py and srt read
subtitles.

    python -m scripts.trials.documents /usr/share/doc ~/clones --limit 1300

prints, for each format, the documents tried, those with the same structure and the same words, the refused ones with
their reasons, and every difference. PO and XLIFF files are tried without their translations. With a limit, documents
are drawn from all folders in turn, so that none dominates.
"""

import argparse
import gzip
import json
import random
import re
import subprocess
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from hf_vanilla_transformer.documents.document_files import SUFFIXES, translate_document
from hf_vanilla_transformer.inference.placement import TranslatedPart
from hf_vanilla_transformer.inference.protected import spans_in, word_links
from hf_vanilla_transformer.utils.errors import UserError

LARGEST = 2_000_000  # bytes
#: Emphasis may be written in tags.
_EMPHASIS_TAG = re.compile("</?(?:em|strong|del)>")
#: Blocks of MkDocs, whose text pandoc takes for code.
_MKDOCS = re.compile(rb"^[ \t]*(?:!!!|\?\?\?\+?|===[!+]*) ", re.MULTILINE)


def changed(text: str) -> str:
    """A text in upper case, but for what the translator protects, such as addresses and placeholders."""
    pieces = []
    position = 0
    for start, end in spans_in(text):
        pieces += [text[position:start].upper(), text[start:end]]
        position = end
    return "".join([*pieces, text[position:].upper()])


def upper(texts: list[str]) -> list[list[TranslatedPart]]:
    return [[TranslatedPart(text, changed(text))] for text in texts]


def in_reverse(texts: list[str]) -> list[list[TranslatedPart]]:
    """Texts with their words in reverse order and the alignment of their words. Protected spans stay whole."""
    translations = []
    for text in texts:
        inner = text.strip()
        before, _, after = text.partition(inner) if inner else (text, "", "")
        pairs = []
        reverse = ""
        for start, end in reversed(_tokens(inner)):
            reverse += " " if reverse else ""
            pairs += [(position, len(reverse) + position - start) for position in range(start, end)]
            reverse += changed(inner[start:end])
        links = word_links(pairs, inner, reverse)
        layout = [TranslatedPart(space, space) for space in (before, after)]
        translations.append([layout[0], TranslatedPart(inner, reverse, links), layout[1]])
    return translations


def _tokens(text: str) -> list[tuple[int, int]]:
    """Where the words of a text are. White space in a protected span separates none."""
    inside = {position for start, end in spans_in(text) for position in range(start, end)}
    spaces = [match.span() for match in re.finditer(r"\s+", text) if match.start() not in inside]
    ends = [start for start, _ in spaces] + [len(text)]
    starts = [0, *(end for _, end in spaces)]
    return [(start, end) for start, end in zip(starts, ends, strict=True) if start < end]


TRANSLATIONS: dict[str, Callable[..., list[list[TranslatedPart]]]] = {
    "upper": upper,
    "reversed": in_reverse,
}


@dataclass
class Read:
    """What another program finds: the structure, in order, and the words, in any order."""

    structure: list[Any]
    text: str

    def letters(self) -> Counter[str]:
        return Counter(letter for letter in self.text.upper() if letter.isalnum())


def by_pandoc(data: bytes, suffix: str) -> Read:
    kind = {".docx": "docx+styles", ".odt": "odt"}.get(suffix, "gfm")
    command = ["pandoc", "-f", kind, "-t", "json"]
    if suffix == ".docx":
        command.append("--track-changes=all")
    written = subprocess.run(command, input=data, check=True, capture_output=True).stdout.decode()
    if suffix in (".docx", ".odt"):
        # names that pandoc makes of the texts of headings, and of their order
        written = re.sub('"#[^"]*"', '"#"', written)
    blocks = json.loads(written)["blocks"]
    read = Read([], "")
    texts: list[str] = []
    _walk(blocks, read.structure, texts)
    read.text = " ".join(texts)
    return read


def _walk(node: Any, structure: list[Any], texts: list[str]) -> None:
    """Blocks in their order. A block with text has the number of its elements of each kind."""
    if isinstance(node, list):
        for child in node:
            _walk(child, structure, texts)
    if not isinstance(node, dict):
        return
    kind = node.get("t")
    content = node.get("c")
    if kind in ("Para", "Plain", "Header"):
        inline: Counter[str] = Counter()
        _inline(content, inline, texts, structure)
        structure.append((kind, sorted(inline.items())))
    elif kind in ("CodeBlock", "RawBlock"):
        structure.append((kind, content[1] if kind == "CodeBlock" else sorted(_tags(content[1]))))
        if kind == "RawBlock":
            texts.append(unescape(re.sub(r"<[^<>]*>", "", content[1])))
    elif kind == "DefinitionList":
        structure.append(kind)
        for term, definitions in content:
            _walk([{"t": "Plain", "c": term}, definitions], structure, texts)
    elif kind is not None:
        structure.append(kind)
        _walk(content, structure, texts)
    else:
        for child in node.values():
            _walk(child, structure, texts)


def _tags(markup: str) -> list[str]:
    return re.findall(r"</?[A-Za-z][^<>]*>", markup)


def _inline(node: Any, inline: Counter[str], texts: list[str], structure: list[Any]) -> None:
    if isinstance(node, list):
        for child in node:
            _inline(child, inline, texts, structure)
        return
    if not isinstance(node, dict):
        return
    kind = node.get("t", "")
    content = node.get("c")
    if kind == "Str":
        texts.append(content)
    elif kind in ("Code", "Math", "RawInline"):
        written = " ".join(content[1].split())
        if not _EMPHASIS_TAG.fullmatch(written):
            inline[f"{kind} {written}"] += 1
    elif kind == "Note":
        inline[kind] += 1
        _walk(content, [], texts)
    elif kind in ("Link", "Image"):
        inline[f"{kind} {content[2][0]}"] += 1
        _inline(content[1], inline, texts, structure)
    else:
        _inline(content, inline, texts, structure)


class _Tags(HTMLParser):
    """The tags of HTML with their attributes, and its text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[Any] = Counter()
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags[tag, tuple(attrs)] += 1

    def handle_endtag(self, tag: str) -> None:
        self.tags["end", tag] += 1

    def handle_comment(self, data: str) -> None:
        self.tags["comment", data] += 1

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def by_html_parser(data: bytes, suffix: str) -> Read:
    parser = _Tags()
    parser.feed(data.decode("utf-8", "replace"))
    parser.close()
    return Read(sorted(map(repr, parser.tags.items())), " ".join(parser.texts))


def by_polib(data: bytes, suffix: str) -> Read:
    import polib

    entries = polib.pofile(data.decode())
    structure = [
        (
            entry.msgctxt,
            entry.msgid,
            entry.msgid_plural,
            entry.comment,
            entry.flags,
            entry.occurrences,
            entry.obsolete,
        )
        for entry in entries
    ]
    targets = [
        [entry.msgstr, *entry.msgstr_plural.values()] for entry in entries if not entry.obsolete
    ]
    return Read(structure, _unnumbered(" ".join(text for target in targets for text in target)))


def _unnumbered(text: str) -> str:
    """A text without the numbers of formats, which a translation gets if it has them in another order."""
    return re.sub(r"(?<=[%*])\d+\$", "", text)


def by_translate_toolkit(data: bytes, suffix: str) -> Read:
    from translate.storage import xliff, xliff2

    reader = (
        xliff2.Xliff2File if b"urn:oasis:names:tc:xliff:document:2" in data else xliff.xlifffile
    )
    units = [unit for unit in reader.parsestring(data).units if not unit.isheader()]
    structure = [(unit.getid(), str(unit.source), unit.getnotes()) for unit in units]
    return Read(structure, " ".join(str(unit.target or "") for unit in units))


def by_subtitle_reader(data: bytes, suffix: str) -> Read:
    if suffix == ".srt":
        import srt

        cues = list(srt.parse(data.decode("utf-8-sig")))
        return Read(
            [(cue.start, cue.end) for cue in cues],
            " ".join(re.sub("<[^>]*>", "", cue.content) for cue in cues),
        )
    import webvtt

    captions = webvtt.from_string(data.decode("utf-8-sig"))
    times = [(caption.start, caption.end, caption.identifier) for caption in captions]
    texts = [unescape(caption.text) for caption in captions]
    return Read([*times, *(style.text for style in captions.styles)], " ".join(texts))


READERS: dict[str, Callable[[bytes, str], Read]] = {
    **dict.fromkeys([".md", ".markdown", ".docx", ".odt"], by_pandoc),
    **dict.fromkeys([".html", ".htm", ".xhtml"], by_html_parser),
    **dict.fromkeys([".po", ".pot"], by_polib),
    **dict.fromkeys([".xlf", ".xliff"], by_translate_toolkit),
    **dict.fromkeys([".srt", ".vtt"], by_subtitle_reader),
}
#: Formats with a translation next to each source.
FILLED = (".po", ".pot", ".xlf", ".xliff")


@dataclass
class Tally:
    """The documents of one format."""

    documents: int = 0
    passages: int = 0
    equal: Counter[str] = field(default_factory=Counter)
    unreadable: list[str] = field(default_factory=list)  # by the other program
    refused: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)


def without_translations(data: bytes, suffix: str) -> bytes:
    """A PO or XLIFF file as a translator gets it. XLIFF gets its targets anew."""
    if suffix in (".xlf", ".xliff"):
        from lxml import etree

        root = etree.fromstring(data)
        for target in list(root.iter("{*}target")):
            target.getparent().remove(target)
        return etree.tostring(root.getroottree(), xml_declaration=True, encoding="UTF-8")
    import polib

    catalogue = polib.pofile(data.decode())
    for entry in catalogue:
        entry.msgstr = ""
        entry.msgstr_plural = dict.fromkeys(entry.msgstr_plural, "")
        entry.flags = [flag for flag in entry.flags if flag != "fuzzy"]
    return str(catalogue).encode()


def check(name: str, data: bytes, suffix: str, tally: Tally) -> None:
    """Try the translations of a document."""
    tally.documents += 1
    if suffix in (".md", ".markdown") and _MKDOCS.search(data):
        tally.unreadable.append(f"{name}: has blocks of MkDocs")
        return
    read = READERS[suffix]
    try:
        data = without_translations(data, suffix) if suffix in FILLED else data
        before = read(data, suffix)
    except Exception as error:
        tally.unreadable.append(f"{name}: {error!r:.150}")
        return
    for kind, translate in TRANSLATIONS.items():
        sources: list[str] = []

        def recorded(
            texts: list[str], translate: Any = translate, sources: list[str] = sources
        ) -> Any:
            sources.extend(texts)
            return translate(texts)

        try:
            translated = translate_document(data, suffix, recorded, "en", "de")
        except UserError as error:
            tally.refused.append(f"{name} ({kind}): {error}")
            continue
        except Exception as error:
            tally.differences.append(f"{name} ({kind}): fails: {error!r:.200}")
            continue
        tally.passages += len(sources)
        if difference := _difference(before, translated, suffix, sources):
            tally.differences.append(f"{name} ({kind}): {difference}")
        else:
            tally.equal[kind] += 1


def _difference(before: Read, translated: bytes, suffix: str, sources: list[str]) -> str:
    try:
        after = READERS[suffix](translated, suffix)
    except Exception as error:
        return f"not readable: {error!r:.200}"
    if after.structure != before.structure:
        pairs = zip([*before.structure, None], [*after.structure, None], strict=False)
        first = next((pair for pair in pairs if pair[0] != pair[1]), None)
        return f"structure: {first!r:.400}"
    expected = (
        Read([], _unnumbered(" ".join(sources))).letters() if suffix in FILLED else before.letters()
    )
    if after.letters() != expected:
        return f"letters: lost {expected - after.letters()}, added {after.letters() - expected}"[
            :400
        ]
    return _fault_of_msgfmt(translated) if suffix in (".po", ".pot") else ""


def _fault_of_msgfmt(data: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".po") as file:
        file.write(data)
        file.flush()
        command = ["msgfmt", "--check-format", "-o", "/dev/null", file.name]
        done = subprocess.run(command, capture_output=True, text=True)
    return f"msgfmt: {done.stderr[-300:]}" if done.returncode else ""


def documents_in(paths: list[Path]) -> Iterator[tuple[Path, str]]:
    """The documents among some files and in some folders, with their suffixes. Debian compresses some."""
    for start in paths:
        for path in sorted(start.rglob("*")) if start.is_dir() else [start]:
            name = path.name.lower().removesuffix(".gz")
            suffix = Path(name).suffix
            if (
                suffix in READERS
                and suffix in SUFFIXES
                and path.is_file()
                and not path.is_symlink()
            ):
                yield path, suffix


def in_turn(paths: list[Path], seed: int) -> list[Path]:
    """The paths in a random order, with one of each folder before the second of any."""
    shuffled = list(paths)
    random.Random(seed).shuffle(shuffled)
    drawn: Counter[Path] = Counter()
    rounds: dict[Path, int] = {}
    for path in shuffled:
        rounds[path] = drawn[path.parent]
        drawn[path.parent] += 1
    return sorted(shuffled, key=rounds.__getitem__)


def run(
    paths: list[Path], limit: int | None, seed: int = 0, kinds: list[str] | None = None
) -> Iterator[tuple[str, Tally]]:
    """Try at most `limit` documents of each format, each content once. Yield each format with its results."""
    of_formats: dict[str, list[Path]] = defaultdict(list)
    for path, suffix in documents_in(paths):
        if not kinds or suffix in kinds:
            of_formats[suffix].append(path)
    for suffix, documents in of_formats.items():
        tally = Tally()
        seen: set[bytes] = set()
        for path in in_turn(documents, seed):
            data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            if data in seen or len(data) > LARGEST:
                continue
            seen.add(data)
            check(str(path), data, suffix, tally)
            if tally.documents == limit:
                break
        yield suffix, tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", nargs="+", type=Path, help="documents, or folders with documents")
    parser.add_argument("--limit", type=int, help="documents of each format")
    parser.add_argument("--kinds", nargs="*", help="suffixes, such as .md")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for suffix, tally in run(arguments.paths, arguments.limit, arguments.seed, arguments.kinds):
        print(
            f"{suffix}: {tally.documents} documents, {tally.passages} passages, equal {dict(tally.equal)}, "
            f"{len(tally.refused)} refused, {len(tally.differences)} differences, "
            f"{len(tally.unreadable)} not readable by the other program",
            flush=True,
        )
        for line in (*tally.refused, *tally.differences, *tally.unreadable):
            print("  " + line, flush=True)


if __name__ == "__main__":
    main()
