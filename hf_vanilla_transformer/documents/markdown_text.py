"""Split Markdown into passages of text and markup. Code, formulas, front matter, rules and targets of links stay.

markdown-it-py finds the blocks and the inline markup: CommonMark with tables and strikethrough, and what common site
generators add (`markdown_blocks`, `markdown_inline`). The lines of a block and the positions that its rules read lead
back to the characters of the file. Everything outside of a translation keeps its bytes.

A translation is parsed again before it is used. It must have the markup of its source. Otherwise more of its
characters are escaped.
"""

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from ..inference.placement import Element, TranslatedPart, TranslateTexts
from ..utils.errors import UserError, naming_extras
from .guard import Reading
from .html_scanner import scan
from .html_text import split_html, whole_elements
from .markdown_inline import (
    References,
    empty_markup,
    inline_events,
    inline_markup,
    inline_tokens,
    markdown_parser,
)
from .passages import (
    Passage,
    passage_of,
    split_events,
    translate_pieces,
    with_elements,
)
from .readings import read_html

if TYPE_CHECKING:
    from markdown_it.token import Token

_LINE_BREAK = re.compile(r"[ \t]*[\r\n]+[ \t]*")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|[\r\n]|\Z)")
_FRONT_MATTER = re.compile(
    r"(---|\+\+\+)[ \t]*(?:\r\n|[\r\n]).*?(?<=[\r\n])(?:\1|\.\.\.)[ \t]*(?:\r\n|[\r\n]|\Z)",
    re.DOTALL,
)

_COMMENTS = re.compile(r"(?:\s*<!--.*?-->)+", re.DOTALL)

_ADDRESS = re.compile(r"((?:https?://|www\.)[^\s<>]+)")
_TAG_OR_ENTITY = re.compile(r"<(?=[A-Za-z/!?])|&(?=#|[A-Za-z][A-Za-z0-9]*;)")
_PUNCTUATION = re.compile(r"[\\`*_\[\]<>#~&$|!{}=+^]")
_BLOCK_MARK = re.compile(r"\A(?:(?=[-*+>#=~`:|!?])|\d{1,9}(?=[.)](?:\s|\Z)))")

# A cell of a table, or what separates cells. Bars of filters of templates separate none.
_CELL = re.compile(r"(?:\{[{%][^{}\n]*[%}]\}|\\.|[^|\n])+|[|\n]")
_CELLS = frozenset(["th_open", "td_open"])

_TAG_OF_MARK = {"*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del"}


@dataclass(frozen=True)
class MarkdownPassage(Passage):
    """A passage of Markdown."""

    content: str = ""  #: the markup, without the marks of its lines in the file, such as `>`
    references: References = field(default_factory=dict)  #: the link definitions of the file
    in_paragraph: bool = True
    in_table: bool = False

    def translated(self, parts: Sequence[TranslatedPart]) -> str:
        """The translation with the markup of the passage, with as few escapes as keep it.

        Raises:
            UserError: no escapes do.
        """
        if all(part.target == part.source for part in parts):
            return self.raw
        tokens = inline_tokens(self.content, self.references)
        expected = inline_markup(tokens)
        escapes = {token.content for token in tokens if token.info == "escape"}
        like_source = partial(_escaped, kept=escapes)
        tagged = [_with_tags(element) for element in self.elements]
        attempts: list[tuple[list[Element], Callable[[str], str], bool]] = [
            (self.elements, like_source, False),
            (self.elements, like_source, True),
            (self.elements, _all_escaped, True),
            (tagged, _all_escaped, True),
        ]
        for elements, escape, escapes_start in attempts:
            text = with_elements(self.text, elements, parts, escape)
            text = _LINE_BREAK.sub(" ", text).strip(" \t")
            if escapes_start and self.in_paragraph:
                text = _start_escaped(text)
            markup = inline_markup(inline_tokens(text, self.references))
            if self._is_one_block(text) and markup == expected:
                return text.replace("|", r"\|") if self.in_table else text
        raise UserError(f"documents: the translation of {self.text[:60]!r} would lose its Markdown")

    def _is_one_block(self, text: str) -> bool:
        """Return whether a text would stay one paragraph, if the passage is one."""
        if not self.in_paragraph:
            return True
        blocks = markdown_parser().parse(text, {"references": dict(self.references)})
        types = [block.type for block in blocks]
        is_paragraph = types == ["paragraph_open", "inline", "paragraph_close"]
        return is_paragraph and blocks[1].content == text.strip()


def split_markdown(text: str) -> list[str | Passage]:
    """Split a document into markup, verbatim, and passages. Raise a UserError if a passage is not found in it."""
    with naming_extras():
        markdown_parser()
    start = len(text) - len(text.removeprefix("\ufeff"))
    front = _FRONT_MATTER.match(text, start)
    if front:
        start = front.end()
    pieces: list[str | Passage] = []
    position = 0
    for begin, end, passage in _passages(text, start):
        if begin < position:
            raise UserError(
                f"documents: {passage.text[:60]!r} is no separate passage of this Markdown"
            )
        pieces += [text[position:begin], passage]
        position = end
    return [piece for piece in [*pieces, text[position:]] if piece != ""]


def translate_markdown(text: str, translate: TranslateTexts) -> str:
    """Translate the text of a document."""
    return translate_pieces(split_markdown(text), translate)


def read_markdown(text: str) -> Reading:
    """Read the blocks, the inline markup and the texts of a document from the tokens of the parser."""
    reading = Reading()
    blocks, _, references = _blocks(text.removeprefix("\ufeff"))
    for block in blocks:
        inline = Counter[tuple[str, str]]()
        if block.type == "inline":
            tokens = inline_tokens(block.content, references)
            inline = inline_markup(tokens)
            reading.empty += empty_markup(tokens)
            reading.add_text(_shown(tokens))
        elif block.type == "html_block":
            reading.letters += read_html(block.content).letters
        plain = {key: number for key, number in inline.items() if key[0] != "image"}
        is_kept = block.type in ("fence", "code_block", "kept")
        kept = block.content if is_kept else ""
        reading.order.append((block.type, block.level, block.info, kept, *sorted(plain.items())))
    return reading


def _shown(tokens: "Iterable[Token]") -> str:
    """The text of inline tokens. That of an image stands in tokens of its own."""
    shown = [
        _shown(token.children or []) if token.type == "image" else token.content
        for token in tokens
        if token.type != "html_inline"
    ]
    return "".join(shown)


def _blocks(text: str) -> tuple["list[Token]", list[str], References]:
    """The tokens of the blocks of a text, its lines, and its link definitions."""
    environment: dict[str, References] = {}
    lines = [match[0] for match in _LINE.finditer(text)]
    normal = "\n".join(line.rstrip("\r\n") for line in lines)
    blocks = markdown_parser().parse(normal, environment)
    return blocks, lines, environment.get("references", {})


def _passages(text: str, start: int) -> Iterator[tuple[int, int, Passage]]:
    """The passages after a position, with their places in the text."""
    blocks, lines, references = _blocks(text[start:])
    starts = list(accumulate(map(len, lines), initial=start))
    kept_tag = ""  # of HTML that goes on in the next block
    cells_end = 0  # of the cells of a row before this one
    place: Callable[[int], int]
    for number, block in enumerate(blocks):
        if block.type == "tr_open":
            cells_end = 0
        if block.map is None:  # a closing token
            continue
        first = block.map[0]
        content = block.content.removesuffix("\n")
        parent = blocks[number - 1].type
        if block.type == "html_block":
            pieces, kept_tag = _html_pieces(content, kept_tag)
        elif block.type == "inline" and content and not kept_tag:
            pieces = _inline_pieces(content, references, parent)
        else:
            continue
        if parent in _CELLS and block.type == "inline":
            column, cells_end = _find_cell(content, lines[first], cells_end)
            place = partial(_place_in_cell, text, content, starts[first] + column)
        else:
            place = _places_in_lines(content, lines, starts, first)
        offset = 0
        for piece in pieces:
            raw = piece if isinstance(piece, str) else piece.raw
            if isinstance(piece, Passage):
                begin = place(offset)
                end = place(offset + len(raw))
                if isinstance(piece, MarkdownPassage):
                    piece = replace(piece, content=raw)
                yield begin, end, replace(piece, raw=text[begin:end])
            offset += len(raw)


def _places_in_lines(
    content: str, lines: list[str], starts: list[int], first: int
) -> Callable[[int], int]:
    """A function for the place of a character of a block in the file. Each row is a part of a line."""
    rows = content.split("\n")
    ends = list(accumulate(len(row) + 1 for row in rows))

    def place(offset: int) -> int:
        number = bisect_right(ends, offset)
        row = rows[number]
        inner = row.strip(" \t")
        line = _shown_line(lines[first + number]) if first + number < len(lines) else ""
        column = line.rfind(inner)
        if column < 0:
            raise UserError(
                f"documents: {inner[:60]!r} is not found in line {first + number + 1} of this Markdown"
            )
        indent = len(row) - len(row.lstrip(" \t"))
        inside = offset - ends[number] + len(row) + 1 - indent
        return starts[first + number] + column + min(max(inside, 0), len(inner))

    return place


def _shown_line(line: str) -> str:
    return line.rstrip("\r\n \t").replace("\0", "\ufffd")


def _find_cell(content: str, line: str, position: int) -> tuple[int, int]:
    """Where a cell of a row is after a position: all the text between two "|"."""
    pattern = rf"(?:^[^|]*?(?<![^\s>])|(?<!\\)\|[ \t]*)({_in_cell(content)})[ \t]*(?=\||$)"
    match = re.compile(pattern).search(_shown_line(line), position)
    if match is None:
        raise UserError(
            f"documents: the cell {content[:60]!r} is not found in its row of this Markdown"
        )
    return match.span(1)


def _place_in_cell(text: str, content: str, start: int, offset: int) -> int:
    """The place of a character of a cell in the file."""
    before = re.compile(_in_cell(content[:offset]).replace("\ufffd", "[\0\ufffd]"))
    return before.match(text, start).end()  # type: ignore[union-attr]


def _in_cell(text: str) -> str:
    r"""A pattern for a text of a cell. "\|" is a character."""
    return re.escape(text).replace(r"\|", r"\\?\|")


def _html_pieces(content: str, kept_tag: str) -> tuple[list[str | Passage], str]:
    """The pieces of a block of HTML, and the tag of a verbatim element that its last line leaves open."""
    if kept_tag:
        end = re.search(rf"</{kept_tag}\s*>", content, re.IGNORECASE)
        if end is None:
            return [content], kept_tag
        pieces, kept_tag = _html_pieces(content[end.end() :], "")
        return [content[: end.end()], *pieces], kept_tag
    open_tags = Counter[str]()
    for token in scan(content):
        if token.tag in ("pre", "code", "textarea", "svg", "math"):
            open_tags[token.tag] += {"start": 1, "end": -1}.get(token.kind, 0)
    opened = next((tag for tag, count in open_tags.items() if count > 0), "")
    comments = _COMMENTS.match(content)  # they start the block, and stay there
    start = comments.end() if comments else 0
    return [
        piece for piece in (content[:start], *split_html(content[start:])) if piece != ""
    ], opened


def _inline_pieces(content: str, references: References, parent: str) -> list[str | Passage]:
    from markdown_it.common.utils import unescapeAll

    make = partial(
        MarkdownPassage,
        references=references,
        in_paragraph=parent == "paragraph_open",
        in_table=parent in _CELLS,
    )
    contents = [content]
    # Rows of a table that only a template completes, or verses of pandoc.
    if parent == "paragraph_open" and all(row.startswith("|") for row in content.split("\n")):
        make = partial(make, in_paragraph=False, in_table=True)
        contents = _CELL.findall(content)
    passage = partial(passage_of, unescape=unescapeAll, passage=make)
    pieces: list[str | Passage] = []
    for part in contents:
        events = whole_elements(inline_events(part, references))
        pieces += split_events(events, passage) if part.strip() else [part]
    return pieces


def _with_tags(element: Element) -> Element:
    """An element with tags of HTML for emphasis, which need no white space around them, and space around code."""
    opening = element.opening
    closing = element.closing
    mark = opening.strip()
    if not closing and mark[:1] in ("`", "$", ":"):
        opening = f" {opening} "
    if mark and mark == closing.strip() and mark in _TAG_OF_MARK:
        opening = opening.replace(mark, f"<{_TAG_OF_MARK[mark]}>")
        closing = closing.replace(mark, f"</{_TAG_OF_MARK[mark]}>")
    children = [_with_tags(child) for child in element.children]
    return replace(element, opening=opening, closing=closing, children=children)


def _escaped(text: str, kept: set[str]) -> str:
    """A text with escapes for the characters that its source escapes, for tags and for entities.

    Addresses stay as they are, because sites make links of them.
    """
    pieces = _ADDRESS.split(text)
    pieces[::2] = [_escaped_words(piece, kept) for piece in pieces[::2]]
    return "".join(pieces)


def _escaped_words(text: str, kept: set[str]) -> str:
    if "\\" in kept:
        text = text.replace("\\", "\\\\")
    for character in sorted(kept - {"\\", "<", "&"}):
        text = text.replace(character, f"\\{character}")
    return _TAG_OR_ENTITY.sub(lambda match: f"\\{match[0]}", text)


def _all_escaped(text: str) -> str:
    return _PUNCTUATION.sub(lambda match: f"\\{match[0]}", text)


def _start_escaped(text: str) -> str:
    """A paragraph that starts no other block. An entity for a space stands before a tag or a comment."""
    if text.startswith("<"):
        return f"&#32;{text}"
    mark = _BLOCK_MARK.match(text)
    return text if mark is None else f"{mark[0]}\\{text[mark.end() :]}"
