"""Split Markdown into passages of text and markup. Code, formulas, front matter, rules and targets of links stay.

markdown-it-py finds the blocks and the inline markup: CommonMark with tables, strikethrough, definitions, footnotes,
and the admonitions, tabs and formulas of common site generators. The lines of a block and the positions that its
rules read lead back to the characters of the file. Everything outside of a translation keeps its bytes.

A translation is parsed again before it is used. It must have the markup of its source. Otherwise more of its
characters are escaped.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from html import unescape
from typing import TYPE_CHECKING, TypeAlias

from ..inference.placement import Element, TranslatedPart, TranslateTexts
from ..utils.errors import UserError, naming_extras
from .guard import Reading
from .html_scanner import scan
from .html_text import (
    Event,
    Passage,
    html_event,
    joined_pieces,
    passage_of,
    split_events,
    split_html,
    translate_pieces,
    whole_elements,
    with_scripts_whole,
)
from .readings import read_html

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.ruler import RuleOptionsType
    from markdown_it.rules_block import StateBlock
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

_LINE_BREAK = re.compile(r"[ \t]*\n[ \t]*")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|[\r\n]|\Z)")
_FRONT_MATTER = re.compile(
    r"\A(---|\+\+\+)[ \t]*(?:\r\n|[\r\n]).*?(?<=[\r\n])(?:\1|\.\.\.)[ \t]*(?:\r\n|[\r\n]|\Z)",
    re.DOTALL,
)

#: Lines that are no text: marks of containers, tables of contents, kinds of GitHub's alerts, and imports of MDX.
_FIXED_LINE = re.compile(
    r":{3}|\[\[?_?TOC_?\]?\]\s*$|\[!\w+\][+-]?\s*$|(?:import\s.*\sfrom|export\s.*\sfrom|import)\s+[\"'][^\"']+[\"'];?\s*$"
)
_ABBREVIATION = re.compile(r"\*\[[^\]]+\]:[ \t]*(?=\S)")
_CONTAINER = re.compile(r"(?:!!!|\?\?\?\+?)[ \t]+\w[\w-]*[ \t]*|===[!+]*[ \t]+(?=\")")
_DEFINITION = re.compile(r"[:~][ \t]+(?=\S)|\[\^[^\]\s]+\]:[ \t]*")
_COMMENTS = re.compile(r"(?:\s*<!--.*?-->)+", re.DOTALL)
_GRID_TABLE = re.compile(r"\+(?:[-=:]{3,}\+)+\s*$")
_FORMULA_START = re.compile(r"\$\$|\\begin\{(\w+\*?)\}")

#: Inline text that stays: roles of MyST, footnote marks and formulas.
_FIXED_TEXT = re.compile(
    r":[A-Za-z][\w.:+-]*:`[^`\n]+`|\[\^[^\]\s]+\]|\$\$[^$]+\$\$"
    r"|\$(?! )(?:\w{1,2}|(?=[^$\n]*[\\^_={}])[^$\n]+(?<! ))\$(?!\d)"
    r"|\\\((?=[^\n]*[\\^_={}])(?:[^\\\n]|\\(?!\))){1,80}\\\)"
)
_CHECKBOX = re.compile(r"\[[ xX]\](?=[ \t])")
_ATTRIBUTES = re.compile(r"\{(?:[#.:]|\w+=)[^{}\n]*\}(?=\s*\Z)")
_LEFT_MARK = re.compile(r"(?:==|\+\+)(?=[^\s=+])")
_RIGHT_MARK = re.compile(r"(?<=[^\s=+])(?:==|\+\+)(?!\w)")

_ESCAPED = re.compile(
    r"\\([!-/:-@\[-`{-~])|(&(?:#[xX][0-9a-fA-F]{1,6}|#\d{1,7}|[A-Za-z][A-Za-z0-9]{0,31});)"
)
_TAG_OR_ENTITY = re.compile(r"<(?=[A-Za-z/!?])|&(?=#|[A-Za-z][A-Za-z0-9]*;)")
_PUNCTUATION = re.compile(r"[\\`*_\[\]<>#~&$|!{}=+^]")
_BLOCK_MARK = re.compile(r"\A(?:(?=[-*+>#=~`:|!?])|\d{1,9}(?=[.)](?:\s|\Z)))")

_NO_MARKUP = frozenset(["text", "text_special", "softbreak"])
_RUNS = frozenset(["emphasis", "strikethrough"])
_TAG_OF_MARK = {"*": "em", "_": "em", "**": "strong", "__": "strong", "~~": "del"}

#: The link definitions of a file, by label.
References: TypeAlias = "dict[str, dict[str, object]]"
InlineRule: TypeAlias = "Callable[[StateInline, bool], bool]"


@dataclass
class _Mark:
    """Inline markup that a rule has found, at positions of the content."""

    rule: str
    start: int
    end: int
    tokens: "list[tuple[Token, int]]"  # with the characters of each
    label_end: int = 0  # of a link


@dataclass(frozen=True)
class _Content:
    """The content of a block without the marks of its lines, and where each of its characters is in the file."""

    text: str
    positions: list[int]

    def span(self, start: int, end: int) -> tuple[int, int]:
        return self.positions[start], self.positions[end - 1] + 1


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
        expected = self._markup(self.content)
        kept = {match[1] for match in _ESCAPED.finditer(self.content) if match[1]}
        escape_kept: Callable[[str], str] = partial(_escaped, kept=kept)
        attempts: list[tuple[Callable[[str], str], bool, bool]] = [
            (escape_kept, False, False),
            (escape_kept, True, False),
            (_all_escaped, True, False),
            (_all_escaped, True, True),
        ]
        for escape, escapes_start, as_tags in attempts:
            elements = (
                [_with_tags(element) for element in self.elements] if as_tags else self.elements
            )
            text = _LINE_BREAK.sub(" ", joined_pieces(self.text, elements, parts, escape))
            if escapes_start and self.in_paragraph:
                text = _start_escaped(text)
            if self._markup(text, as_tags) == (_tags_counted(expected) if as_tags else expected):
                return text.replace("|", r"\|") if self.in_table else text
        raise UserError(f"documents: the translation of {self.text[:60]!r} would lose its Markdown")

    def _markup(self, text: str, as_tags: bool = False) -> Counter[tuple[str, str]] | None:
        """The inline markup of a text, or None if it would not stay one paragraph."""
        parser = _parser()
        if self.in_paragraph:
            blocks = parser.parse(text, {"references": dict(self.references)})
            inner = [block for block in blocks if block.type == "inline"]
            if [block.type for block in blocks] != ["paragraph_open", "inline", "paragraph_close"]:
                return None
            if inner[0].content != text.strip():
                return None
        counted = _inline_markup(text, self.references)
        return _tags_counted(counted) if as_tags else counted


def split_markdown(text: str) -> list[str | Passage]:
    """Split a document into markup, verbatim, and passages. Raise a UserError if a passage is not found in it."""
    with naming_extras():
        _parser()
    start = len(text) - len(text.removeprefix("\ufeff"))
    front = _FRONT_MATTER.match(text, start) or _FRONT_MATTER.match(text[start:])
    if front:
        start += len(front[0])
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
            inline = _inline_markup(block.content, references)
            _, tokens = _parsed(block.content, references)
            reading.add_text(_shown(tokens))
        elif block.type == "html_block":
            reading.letters += read_html(block.content).letters
        plain = {key: number for key, number in _tags_counted(inline).items() if key[0] != "image"}
        is_kept = block.type in ("fence", "code_block", "verbatim")
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
    blocks = _parser().parse(normal, environment)
    return blocks, lines, environment.get("references", {})


def _passages(text: str, start: int) -> Iterator[tuple[int, int, Passage]]:
    """The passages after a position, with their places in the text."""
    blocks, lines, references = _blocks(text[start:])
    starts = [start]
    for line in lines:
        starts.append(starts[-1] + len(line))
    kept_tag = ""  # of HTML that goes on in the next block
    cell = 0
    for number, block in enumerate(blocks):
        if block.type == "tr_open":
            cell = 0
        if block.map is None:  # a closing token
            continue
        if block.type == "html_block":
            content = _content(block.content, lines, starts, *block.map)
            pieces, kept_tag = _html_pieces(content.text, kept_tag)
        elif block.type == "inline" and not kept_tag:
            parent = blocks[number - 1].type
            if parent in ("th_open", "td_open"):
                content = _cell(block.content, lines[block.map[0]], starts[block.map[0]], cell)
                cell += 1
            else:
                content = _content(block.content, lines, starts, *block.map)
            pieces = _inline_pieces(content.text, references, parent)
        else:
            continue
        offset = 0
        for piece in pieces:
            raw = piece if isinstance(piece, str) else piece.raw
            if isinstance(piece, Passage):
                begin, end = content.span(offset, offset + len(raw))
                if isinstance(piece, MarkdownPassage):
                    piece = replace(piece, content=raw)
                yield begin, end, replace(piece, raw=text[begin:end])
            offset += len(raw)


def _content(content: str, lines: list[str], starts: list[int], first: int, last: int) -> _Content:
    """Where the characters of a block's content are. Each of its lines is a part of a line of the file."""
    positions: list[int] = []
    number = first
    for row in content.removesuffix("\n").split("\n"):
        inner = row.strip(" \t")
        line = lines[number].replace("\0", "\ufffd") if number < len(lines) else ""
        column = line.rstrip("\r\n \t").rfind(inner) if inner else len(line.rstrip("\r\n"))
        if column < 0:
            raise UserError(
                f"documents: {inner[:60]!r} is not found in line {number + 1} of this Markdown"
            )
        begin = starts[number] + column
        indent = len(row) - len(row.lstrip(" \t")) if inner else len(row)
        positions += [begin] * indent
        positions += range(begin, begin + len(inner))
        positions += [begin + len(inner)] * (len(row) - indent - len(inner) + 1)
        number += 1
    return _Content(content.removesuffix("\n"), positions)


def _cell(content: str, line: str, start: int, number: int) -> _Content:
    """Where the characters of a cell are. A cell is the text between two "|" that are not escaped."""
    text = line.rstrip("\r\n \t").replace("\0", "\ufffd")
    for column in _columns_before(text, content, number):
        positions: list[int] = []
        for character in content:
            if character == "|" and text[column : column + 2] == r"\|":
                column += 1
            if text[column : column + 1] != character:
                break
            positions.append(start + column)
            column += 1
        if len(positions) == len(content):
            return _Content(content, [*positions, start + column])
    raise UserError(
        f"documents: the cell {content[:60]!r} is not found in its row of this Markdown"
    )


def _columns_before(row: str, content: str, number: int) -> Iterator[int]:
    """The column where the text of a cell starts."""
    bars = [match.start() for match in re.finditer(r"(?<!\\)\|", row)]
    lead = len(row) - len(row.lstrip(" \t>"))
    begins = [lead, *(bar + 1 for bar in bars)]
    first = 1 if bars and not row[lead : bars[0]].strip() else 0
    order = begins[first + number :] + begins[: first + number]
    for begin in order:
        yield begin + len(row[begin:]) - len(row[begin:].lstrip(" \t"))


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
    make = partial(
        MarkdownPassage,
        references=references,
        in_paragraph=parent in ("paragraph_open", "abbreviation_open"),
        in_table=parent in ("th_open", "td_open"),
    )
    events = with_scripts_whole(
        whole_elements(_with_known_ends(list(_events(content, references))))
    )
    return split_events(events, partial(passage_of, unescape=_unescaped, passage=make))


def _with_known_ends(events: list[Event]) -> Iterator[Event]:
    """The events. A start tag of code without an end tag is no code."""
    ends = Counter(event.tag for event in events if event.kind == "end")
    for event in events:
        if event.kept and not ends[event.tag]:
            yield Event(event.kind, event.tag, event.raw, False, event.block)
        else:
            yield event


def _events(content: str, references: References) -> Iterator[Event]:
    """Text and inline markup."""
    position = 0
    for start, end, event in sorted(_marked(content, references), key=lambda marked: marked[:2]):
        if start < position:
            continue
        if start > position:
            yield Event("text", "", content[position:start])
        yield event
        position = end
    if position < len(content):
        yield Event("text", "", content[position:])


def _marked(content: str, references: References) -> Iterator[tuple[int, int, Event]]:
    """The inline markup of a content with its positions."""
    marks, _ = _parsed(content, references)
    toggles: list[_Mark] = []
    for mark in marks:
        raw = content[mark.start : mark.end]
        kinds = [token.type for token, _ in mark.tokens]
        if mark.rule in _RUNS:
            yield from _delimiters(mark)
        elif mark.rule == "link":
            yield mark.start, mark.start + 1, Event("start", "[", "[")
            closing = content[mark.label_end : mark.end]
            label = content[mark.start : mark.label_end + 1].replace("\n", " ")
            # `[text][]` and `[text]` name their definition by their text
            written = f"]{label}" if closing in ("]", "][]") else None
            yield mark.label_end, mark.end, Event("end", "[", closing, written=written)
        elif "hardbreak" in kinds:
            before = content[: mark.start]
            yield (
                len(before.rstrip(" ")),
                mark.end,
                Event("other", "", content[len(before.rstrip(" ")) : mark.end]),
            )
        elif mark.rule == "html_inline":
            for token in scan(raw):
                yield mark.start, mark.end, html_event(token)
                break
        elif mark.rule in ("code", "image", "autolink", "fixed_text"):
            yield mark.start, mark.end, Event("point", "", raw)
        elif mark.rule == "loose":
            yield mark.start, mark.end, Event("start", "{", raw)
        elif mark.rule == "toggle":
            toggles.append(mark)
    yield from _paired(toggles, content)


def _paired(toggles: list[_Mark], content: str) -> Iterator[tuple[int, int, Event]]:
    """Pairs of `==` and `++`."""
    opened: dict[str, _Mark] = {}
    for mark in sorted(toggles, key=lambda toggle: toggle.start):
        raw = content[mark.start : mark.end]
        if raw in opened and _RIGHT_MARK.match(content, mark.start):
            first = opened.pop(raw)
            yield first.start, first.end, Event("start", raw, raw)
            yield mark.start, mark.end, Event("end", raw, raw)
        elif raw not in opened and _LEFT_MARK.match(content, mark.start):
            opened[raw] = mark


def _delimiters(mark: _Mark) -> Iterator[tuple[int, int, Event]]:
    """The runs of `*`, `_` and `~~` that are markup. The second `*` of a `**` has an empty token."""
    position = mark.start
    pending = 0  # an empty token before the one of its pair
    for number, (token, length) in enumerate(mark.tokens):
        start = position
        position = position + length
        if token.type == "text" and token.content:
            continue
        if token.type == "text":
            before = mark.tokens[number - 1][0].type if number else ""
            if before == "strong_close":
                continue
            pending = length
            continue
        kind = "start" if token.type.endswith("_open") else "end"
        begin = start - pending
        end = position
        pending = 0
        follows = mark.tokens[number + 1][0] if number + 1 < len(mark.tokens) else None
        if (
            token.type == "strong_close"
            and follows is not None
            and follows.type == "text"
            and not follows.content
        ):
            end += mark.tokens[number + 1][1]
        tag = token.type.rpartition("_")[0]
        yield begin, end, Event(kind, tag, token.markup)


def _parsed(content: str, references: References) -> tuple[list[_Mark], "list[Token]"]:
    """The inline markup of a content, and its tokens."""
    tokens: list[Token] = []
    marks: list[_Mark] = []
    parser = _parser()
    parser.inline.parse(
        content, parser, {"references": references, "marks": marks, "inline": tokens}, tokens
    )
    return marks, tokens


def _inline_markup(text: str, references: References) -> Counter[tuple[str, str]]:
    """The kinds of inline markup, with the content or the target of each."""
    found = Counter[tuple[str, str]]()
    for token in _parsed(text, references)[1]:
        if token.type not in _NO_MARKUP and not token.type.endswith("_close"):
            target = token.attrs.get("href") or token.attrs.get("src") or token.content
            found[token.type, " ".join(str(target).split())] += 1
    return found


def _tags_counted(markup: "Counter[tuple[str, str]] | None") -> Counter[tuple[str, str]]:
    """The markup with tags of emphasis as emphasis."""
    found = Counter[tuple[str, str]]()
    names = {"<em>": "em_open", "<strong>": "strong_open", "<del>": "s_open"}
    for (kind, target), count in (markup or Counter()).items():
        if kind == "html_inline" and target in names:
            found[names[target], ""] += count
        elif kind != "html_inline" or target not in ("</em>", "</strong>", "</del>"):
            found[kind, target] += count
    return found


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
    return Element(
        opening,
        element.start,
        closing,
        element.end,
        [_with_tags(child) for child in element.children],
    )


def _unescaped(raw: str) -> str:
    return _ESCAPED.sub(lambda match: match[1] or unescape(match[2]), raw)


def _escaped(text: str, kept: Iterable[str]) -> str:
    """A text with escapes for the characters that its source escapes, for tags and for entities."""
    if "\\" in kept:
        text = text.replace("\\", "\\\\")
    for character in sorted(set(kept) - {"\\", "<", "&"}):
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


@cache
def _parser() -> "MarkdownIt":
    """CommonMark with tables, strikethrough, definitions, footnotes, admonitions, tabs and formulas."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": 100}).enable(["table", "strikethrough"])
    interrupting: RuleOptionsType = {
        "alt": ["paragraph", "reference", "blockquote", "list", "table"]
    }
    parser.block.ruler.before("fence", "fixed_line", _fixed_line, interrupting)
    parser.block.ruler.before("fence", "verbatim", _verbatim, interrupting)
    parser.block.ruler.before("fence", "definition", _definition, interrupting)
    parser.block.ruler.before("fence", "container", _container, interrupting)
    parser.inline.ruler.before("escape", "fixed_text", _fixed_text)
    parser.inline.ruler.before("escape", "loose", _loose)
    parser.inline.ruler.before("escape", "toggle", _toggle)
    active = parser.inline.ruler.get_active_rules()
    rules = parser.inline.ruler.getRules("")
    for name, rule in zip(active, rules, strict=True):
        parser.inline.ruler.at(name, _recording("code" if name == "backticks" else name, rule))
    parser.inline.ruler2.disable("fragments_join")
    parser.core.ruler.disable(["inline", "text_join"])
    return parser


def _recording(name: str, rule: InlineRule) -> InlineRule:
    """A rule that also records where it has found markup. The text of an image has tokens of its own."""

    def recorded(state: "StateInline", silent: bool) -> bool:
        start = state.pos
        before = len(state.tokens)
        # the first token of a run of `*` is that of the text before, if there is any
        skipped = 1 if state.pending and name in _RUNS else 0
        if not rule(state, silent):
            return False
        if silent or state.env.get("inline") is not state.tokens:
            return True
        tokens = [(token, len(token.content)) for token in state.tokens[before:][skipped:]]
        mark = _Mark(name, start, state.pos, tokens)
        if name == "link":
            mark.label_end = state.md.helpers.parseLinkLabel(state, start, True)
        state.env["marks"].append(mark)
        return True

    return recorded


def _match_at(pattern: "re.Pattern[str]") -> InlineRule:
    """An inline rule that keeps text which a pattern matches."""

    def rule(state: "StateInline", silent: bool) -> bool:
        match = pattern.match(state.src, state.pos, state.posMax)
        if match is None:
            return False
        if not silent:
            state.push("fixed_text", "", 0).content = match[0]
        state.pos = match.end()
        return True

    return rule


_fixed_text = _match_at(_FIXED_TEXT)
_attributes = _match_at(_ATTRIBUTES)
_checkbox = _match_at(_CHECKBOX)


def _loose(state: "StateInline", silent: bool) -> bool:
    """Attributes at the end of a text, and the box of a task at its start."""
    return _attributes(state, silent) or (state.pos == 0 and _checkbox(state, silent))


def _toggle(state: "StateInline", silent: bool) -> bool:
    """A mark of highlighted or inserted text: `==` or `++`."""
    if state.src[state.pos : state.pos + 2] not in ("==", "++"):
        return False
    if not silent:
        state.pending += state.src[state.pos : state.pos + 2]
    state.pos += 2
    return True


def _line_of(state: "StateBlock", line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _fixed_line(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A line without text, or the text of an abbreviation."""
    if state.is_code_block(start):
        return False
    line = _line_of(state, start)
    abbreviation = _ABBREVIATION.match(line)
    if abbreviation is None and not _FIXED_LINE.match(line):
        return False
    if silent:
        return True
    state.line = start + 1
    if abbreviation is None:
        state.push("fixed_line", "", 0).map = [start, start + 1]
        return True
    _push_text(state, "abbreviation", line[abbreviation.end() :], start)
    return True


def _push_text(state: "StateBlock", name: str, text: str, line: int) -> None:
    """The tokens of a block with the text of one line."""
    state.push(f"{name}_open", "", 1)
    token = state.push("inline", "", 0)
    token.content = text.strip()
    token.map = [line, line + 1]
    token.children = []
    state.push(f"{name}_close", "", -1)


def _verbatim(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A formula in `$$`, an environment of LaTeX, or a grid table of pandoc."""
    if state.is_code_block(start):
        return False
    last = _end_of_verbatim(state, start, end)
    if last is None:
        return False
    if not silent:
        token = state.push("verbatim", "", 0)
        token.content = state.getLines(start, last + 1, state.blkIndent, True)
        token.map = [start, last + 1]
        state.line = last + 1
    return True


def _end_of_verbatim(state: "StateBlock", start: int, end: int) -> int | None:
    """The last line of a block that stays as it is, if one starts at a line."""
    line = _line_of(state, start)
    if _GRID_TABLE.match(line):
        after = (
            number
            for number in range(start + 1, end)
            if not _line_of(state, number).startswith(("+", "|"))
        )
        return next(after, end) - 1
    opening = _FORMULA_START.match(line)
    if opening is None:
        return None
    closing = rf"\end{{{opening[1]}}}" if opening[1] else "$$"
    if closing in line[opening.end() :]:
        return start if line.rstrip().endswith(closing) else None
    return next(
        (number for number in range(start + 1, end) if closing in _line_of(state, number)), None
    )


def _definition(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A definition, the caption of a table, or a footnote: blocks after a mark, as in a list."""
    if state.is_code_block(start):
        return False
    marker = _DEFINITION.match(_line_of(state, start))
    if marker is None:
        return False
    if silent:
        return True
    column = state.sCount[start]
    for character in marker[0]:
        column += 4 - column % 4 if character == "\t" else 1
    indent = state.sCount[start] + 4 if marker[0].startswith("[") else column
    before = (
        state.bMarks[start],
        state.tShift[start],
        state.sCount[start],
        state.blkIndent,
        state.parentType,
    )
    opened = state.push("definition_open", "", 1)
    state.bMarks[start] += state.tShift[start] + marker.end()
    state.tShift[start] = 0
    state.sCount[start] = state.blkIndent = indent
    state.parentType = "definition"
    state.md.block.tokenize(state, start, end)
    (
        state.bMarks[start],
        state.tShift[start],
        state.sCount[start],
        state.blkIndent,
        state.parentType,
    ) = before
    state.push("definition_close", "", -1)
    opened.map = [start, state.line]
    return True


def _container(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """An admonition (`!!! note "Title"`) or a tab (`=== "Title"`) with the indented lines after it."""
    if state.is_code_block(start):
        return False
    line = _line_of(state, start)
    opening = _CONTAINER.match(line)
    if opening is None:
        return False
    if silent:
        return True
    indent = state.sCount[start] + 4
    last = start + 1
    while last < end and (state.isEmpty(last) or state.sCount[last] >= indent):
        last += 1
    parent = state.parentType
    block_indent = state.blkIndent
    line_max = state.lineMax
    state.push("container_open", "", 1).map = [start, last]
    title = line[opening.end() :].strip().strip('"')
    if title:
        _push_text(state, "title", title, start)
    state.parentType = "container"
    state.blkIndent = indent
    state.lineMax = last
    state.md.block.tokenize(state, start + 1, last)
    state.parentType = parent
    state.blkIndent = block_indent
    state.lineMax = line_max
    state.push("container_close", "", -1)
    state.line = last
    return True
