"""The parser of Markdown, and the inline markup that it finds, with its place in the text.

markdown-it-py gives the places of blocks, but not those of inline markup. So its rules are wrapped by functions that
record where each of them has read.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, TypeAlias

from .html_scanner import scan
from .html_text import html_event
from .markdown_blocks import add_block_rules
from .passages import Event

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.rules_inline import StateInline
    from markdown_it.token import Token

#: Attributes of the element before them, as in `{.note #id width="300"}`, `{: .note}` and `{=html}`.
_ATTRIBUTE = r"[#.][\w:-]+|[\w-]*=(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s{}\"'=]+)"
_ATTRIBUTES = rf"\{{:?[ \t]*(?:{_ATTRIBUTE})(?:[ \t]+(?:{_ATTRIBUTE}|[\w-]+))*[ \t]*\}}"
_CODE = r"`[^`\n]+`"
_FORMULA_SIGN = r"[\\^_={}]"
#: Of a formula in brackets. Writers of Markdown escape brackets of text, and its signs.
_BARE_SIGN = r"(?:(?<!\\)[\^_={}]|\\[A-Za-z]{2})"
_KEY = r"[a-z0-9]+(?:-[a-z]+)*"

#: Inline text that stays: roles of MyST, attributes, keys of a keyboard, footnote marks, formulas and comments of MDX.
_FIXED_TEXT = re.compile(
    rf":[A-Za-z][\w.:+-]*:(?:{_CODE}|{_ATTRIBUTES})|\{{[A-Za-z][\w.:+-]*\}}{_CODE}|{_ATTRIBUTES}"
    rf"|\+\+{_KEY}(?:\+{_KEY})+\+\+|\[\^[^\]\s]+\]|\$\$[^$]+\$\$"
    rf"|\$(?! )(?:\w{{1,2}}|(?=[^$\n]*{_FORMULA_SIGN})[^$\n]+(?<! ))\$(?!\d)"
    rf"|\\\((?=(?:(?!\\\))[^\n])*?{_BARE_SIGN})(?:[^\\\n]|\\(?!\))){{1,80}}\\\)"
    rf"|\\\[(?=(?:(?!\\\])[^\n])*?{_BARE_SIGN})(?:[^\\\n]|\\(?!\])){{1,80}}\\\]"
    r"|\{/\*(?:(?!\*/\}).)*\*/\}",
    re.DOTALL,
)
_ONLY_ATTRIBUTES = re.compile(_ATTRIBUTES)
_CHECKBOX = re.compile(r"\[[ xX]\](?=[ \t])")
#: What stands at the end of a text: attributes of its block, or a name of Obsidian.
_BLOCK_END = re.compile(rf"(?:{_ATTRIBUTES}|(?<=\s)\^[A-Za-z0-9-]+)(?=\s*\Z)")
_LEFT_MARK = re.compile(r"(?:==|\+\+)(?=[^\s=+])")
_RIGHT_MARK = re.compile(r"(?<=[^\s=+])(?:==|\+\+)(?!\w)")

_NO_MARKUP = frozenset(["text", "text_special", "softbreak"])
_RUNS = frozenset(["emphasis", "strikethrough"])
_LABELLED = frozenset(["link", "span"])
#: Markup that stays whole, and moves with its words.
_WHOLE = frozenset(["code", "image", "autolink", "fixed_text"])

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
    label_end: int = 0  # of a link or a span


def inline_events(content: str, references: References) -> list[Event]:
    """The text and the inline markup of a content. Attributes belong to the markup before them."""
    events: list[Event] = []
    position = 0
    for start, end, event in sorted(_marked(content, references), key=lambda marked: marked[:2]):
        if start < position:
            continue
        if start > position:
            events.append(Event("text", "", content[position:start]))
        before = events[-1] if events else event
        if before.kind in ("point", "end") and _ONLY_ATTRIBUTES.fullmatch(event.raw):
            written = None if before.written is None else before.written + event.raw
            event = replace(before, raw=before.raw + event.raw, written=written)
            events.pop()
        events.append(event)
        position = end
    if position < len(content):
        events.append(Event("text", "", content[position:]))
    return events


def _marked(content: str, references: References) -> Iterator[tuple[int, int, Event]]:
    """The inline markup of a content with its positions."""
    toggles: list[_Mark] = []
    marks, _ = _parsed(content, references)
    for mark in marks:
        raw = content[mark.start : mark.end]
        if mark.rule == "toggle":
            toggles.append(mark)
        elif mark.rule in _RUNS:
            yield from _delimiters(mark)
        elif mark.rule in _LABELLED:
            yield from _label(mark, content)
        elif any(token.type == "hardbreak" for token, _ in mark.tokens):
            start = len(content[: mark.start].rstrip(" "))
            yield start, mark.end, Event("other", "", content[start : mark.end])
        elif mark.rule == "html_inline":
            yield mark.start, mark.end, html_event(next(scan(raw)))
        elif mark.rule in _WHOLE:
            yield mark.start, mark.end, Event("point", "", raw)
        elif mark.rule == "loose":
            yield mark.start, mark.end, Event("start", "{", raw)
    yield from _paired(toggles, content)


def _label(mark: _Mark, content: str) -> Iterator[tuple[int, int, Event]]:
    """The brackets of a link or a span. `[text][]` and `[text]` name their definition by their text."""
    yield mark.start, mark.start + 1, Event("start", "[", "[")
    closing = content[mark.label_end : mark.end]
    label = content[mark.start : mark.label_end + 1].replace("\n", " ")
    written = f"]{label}" if closing in ("]", "][]") else None
    yield mark.label_end, mark.end, Event("end", "[", closing, written=written)


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


def inline_tokens(content: str, references: References) -> "list[Token]":
    """The tokens of the inline markup and the texts of a content."""
    _, tokens = _parsed(content, references)
    return tokens


def _parsed(content: str, references: References) -> "tuple[list[_Mark], list[Token]]":
    """The marks of a content, and its tokens."""
    tokens: list[Token] = []
    marks: list[_Mark] = []
    parser = markdown_parser()
    parser.inline.parse(
        content, parser, {"references": references, "marks": marks, "inline": tokens}, tokens
    )
    return marks, tokens


def inline_markup(tokens: "Iterable[Token]") -> Counter[tuple[str, str]]:
    """The kinds of inline markup among some tokens, with the content or the target of each."""
    found = Counter[tuple[str, str]]()
    for token in tokens:
        if token.type not in _NO_MARKUP and not token.type.endswith("_close"):
            target = token.attrs.get("href") or token.attrs.get("src") or token.content
            found[token.type, " ".join(str(target).split())] += 1
    return found


@cache
def markdown_parser() -> "MarkdownIt":
    """CommonMark with tables, strikethrough, definitions, footnotes, admonitions, tabs and formulas."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": 100}).enable(["table", "strikethrough"])
    add_block_rules(parser)
    for name, rule in (("loose", _loose), ("fixed_text", _fixed_text), ("toggle", _toggle)):
        parser.inline.ruler.before("escape", name, rule)
    parser.inline.ruler.before("link", "span", _span)
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
        if name in _LABELLED:
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
_block_end = _match_at(_BLOCK_END)
_checkbox = _match_at(_CHECKBOX)


def _loose(state: "StateInline", silent: bool) -> bool:
    """Attributes or a name at the end of a text, and the box of a task at its start."""
    return _block_end(state, silent) or (state.pos == 0 and _checkbox(state, silent))


def _toggle(state: "StateInline", silent: bool) -> bool:
    """A mark of highlighted or inserted text: `==` or `++`."""
    if state.src[state.pos : state.pos + 2] not in ("==", "++"):
        return False
    if not silent:
        state.pending += state.src[state.pos : state.pos + 2]
    state.pos += 2
    return True


def _span(state: "StateInline", silent: bool) -> bool:
    """A text with attributes, as in `[text]{.note}`."""
    if state.src[state.pos] != "[":
        return False
    label_end = state.md.helpers.parseLinkLabel(state, state.pos)
    attributes = _ONLY_ATTRIBUTES.match(state.src, label_end + 1, state.posMax)
    if label_end < 0 or attributes is None:
        return False
    if not silent:
        position_max = state.posMax
        state.pos += 1
        state.posMax = label_end
        state.push("span_open", "", 1).content = attributes[0]
        state.md.inline.tokenize(state)
        state.push("span_close", "", -1)
        state.posMax = position_max
    state.pos = attributes.end()
    return True
