"""The parser of Markdown, and the inline markup that it finds, with its place in the text.

markdown-it-py gives the places of blocks, but not those of inline markup. So its rules are wrapped by functions that
record where each of them has read.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
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
_NAME = r"(?<=\s)\^[A-Za-z0-9-]+(?=\s*\Z)"
_CHECKBOX = r"\[[ xX]\](?=[ \t])"

#: Inline text that stays: roles of MyST, attributes, keys of a keyboard, footnote marks, formulas and comments of MDX.
#: Each has a bound, so that starts without an end take a time that is linear in their number.
_FIXED_TEXT = re.compile(
    rf":[A-Za-z][\w.:+-]{{0,60}}:(?:{_CODE}|{_ATTRIBUTES})|\{{[A-Za-z][\w.:+-]*\}}{_CODE}|{_ATTRIBUTES}"
    rf"|\+\+{_KEY}(?:\+{_KEY})+\+\+|\[\^[^\]\s]+\]|\$\$[^$]+\$\$"
    rf"|\$(?! )(?:\w{{1,2}}|(?=[^$\n]*{_FORMULA_SIGN})[^$\n]+(?<! ))\$(?!\d)"
    rf"|\\\((?=(?:(?!\\\))[^\n]){{0,160}}?{_BARE_SIGN})(?:[^\\\n]|\\(?!\))){{1,80}}\\\)"
    rf"|\\\[(?=(?:(?!\\\])[^\n]){{0,160}}?{_BARE_SIGN})(?:[^\\\n]|\\(?!\])){{1,80}}\\\]"
    rf"|\{{/\*(?:(?!\*/\}}|\{{/\*).)*\*/\}}|\A{_CHECKBOX}|{_NAME}|\[[^\[\]\n]+\]{_ATTRIBUTES}",
    re.DOTALL,
)
_ONLY_ATTRIBUTES = re.compile(_ATTRIBUTES)
#: Attributes, the box of a task, or a name of Obsidian. At an end of a text they stay there.
_OUTER = re.compile(rf"{_ATTRIBUTES}|{_CHECKBOX}|{_NAME}")
#: The tokens of emphasis that is written in tags.
_TAGS = {"<em>": "em_open", "<strong>": "strong_open", "<del>": "s_open"}

_NO_MARKUP = frozenset(["text", "text_special", "softbreak"])
_RUNS = frozenset(["emphasis", "strikethrough"])
#: The name for the rule, the start and the end of the markup of a token.
_PLACE = "place"

#: The link definitions of a file, by label.
References: TypeAlias = "dict[str, dict[str, object]]"
InlineRule: TypeAlias = "Callable[[StateInline, bool], bool]"


def inline_events(content: str, references: References) -> list[Event]:
    """The text and the inline markup of a content. Attributes belong to the markup before them."""
    events: list[Event] = []
    position = 0
    for start, end, event in _marked(content, references):
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
    """The inline markup of a content with its positions, from the tokens with a place."""
    label = 0  # of a link
    for token in inline_tokens(content, references):
        if token.type in _NO_MARKUP or _PLACE not in token.meta:
            continue
        rule, start, end = token.meta[_PLACE]
        raw = content[start:end]
        name, _, side = token.type.rpartition("_")
        if rule in _RUNS:  # the token of a "**" has the place of its inner "*"
            length = len(token.markup)
            start = end - length if side == "open" else start
            kind = "start" if side == "open" else "end"
            yield start, start + length, Event(kind, name, token.markup)
        elif side == "open":
            label = start
            yield start, end, Event("start", name, raw)
        elif side == "close" and rule != "autolink":
            # `[text][]` and `[text]` name their definition by their text
            named = content[label : start + 1].replace("\n", " ")
            written = f"]{named}" if raw in ("]", "][]") else None
            yield start, end, Event("end", name, raw, written=written)
        elif token.type == "hardbreak":
            start = len(content[:start].rstrip(" "))
            yield start, end, Event("other", "", content[start:end])
        elif token.type == "html_inline":
            event = html_event(next(scan(raw)))
            has_end = content.find(f"</{event.tag}", end) >= 0
            yield start, end, replace(event, kept=event.kept and has_end)
        else:
            is_first_or_last = not content[:start].strip() or not content[end:].strip()
            is_outer = is_first_or_last and _OUTER.match(content, start) is not None
            yield start, end, Event("other" if is_outer else "point", "", raw)


def inline_tokens(content: str, references: References) -> "list[Token]":
    """The tokens of the inline markup and the texts of a content."""
    tokens: list[Token] = []
    parser = markdown_parser()
    parser.inline.parse(content, parser, {"references": references, "inline": tokens}, tokens)
    return tokens


def inline_markup(tokens: "Iterable[Token]") -> Counter[tuple[str, str]]:
    """The kinds of inline markup among some tokens, with the content or the target of each."""
    found = Counter[tuple[str, str]]()
    for token in tokens:
        name = token.content.replace("/", "")
        if token.type == "html_inline" and name in _TAGS:
            if name == token.content:
                found[_TAGS[name], ""] += 1
        elif token.type not in _NO_MARKUP and not token.type.endswith("_close"):
            target = token.attrs.get("href") or token.attrs.get("src") or token.content
            found[token.type, " ".join(str(target).split())] += 1
    return found


def empty_markup(tokens: "Iterable[Token]") -> int:
    """The number of links and emphases without text or an image."""
    empty = texts = 0
    opened: list[int] = []  # how many texts stand before each mark that is open
    for token in tokens:
        is_tag = token.type == "html_inline" and token.content.replace("/", "") in _TAGS
        if token.nesting > 0 or (is_tag and "/" not in token.content):
            opened.append(texts)
        elif token.nesting < 0 or is_tag:
            empty += bool(opened) and opened.pop() == texts
        elif token.type != "html_inline" and token.content.strip():
            texts += 1
    return empty


@cache
def markdown_parser() -> "MarkdownIt":
    """CommonMark with tables, strikethrough and the rules of this package."""
    from markdown_it import MarkdownIt

    parser = MarkdownIt("commonmark", {"maxNesting": 100}).enable(["table", "strikethrough"])
    add_block_rules(parser)
    parser.inline.ruler.before("escape", "fixed_text", _fixed_text)
    active = parser.inline.ruler.get_active_rules()
    rules = parser.inline.ruler.getRules("")
    for name, rule in zip(active, rules, strict=True):
        parser.inline.ruler.at(name, _placing(name, rule))
    parser.inline.ruler2.disable("fragments_join")
    parser.core.ruler.disable(["inline", "text_join"])
    return parser


def _placing(name: str, rule: InlineRule) -> InlineRule:
    """A rule that also gives its tokens the places of their markup."""

    def placing(state: "StateInline", silent: bool) -> bool:
        start = state.pos
        before = len(state.tokens)
        if not rule(state, silent):
            return False
        tokens = state.tokens[before:]
        if silent or not tokens:
            return True
        end = state.pos
        if name == "link":
            opening = next(token for token in tokens if token.nesting == 1)
            opening.meta[_PLACE] = (name, start, start + 1)
            start = state.md.helpers.parseLinkLabel(state, start, True)
        if name not in _RUNS:
            tokens[-1].meta[_PLACE] = (name, start, end)
            return True
        for token in reversed(tokens):
            begin = end - len(token.content)
            if begin >= start:  # not the text before the run
                token.meta[_PLACE] = (name, begin, end)
            end = begin
        return True

    return placing


def _fixed_text(state: "StateInline", silent: bool) -> bool:
    match = _FIXED_TEXT.match(state.src, state.pos, state.posMax)
    if match is None:
        return False
    if not silent:
        state.push("fixed_text", "", 0).content = match[0]
    state.pos = match.end()
    return True
