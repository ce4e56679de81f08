"""Blocks of Markdown that CommonMark does not have, as rules for markdown-it-py.

These are definitions, footnotes, admonitions, tabs, callouts, formulas, tables of pandoc, and the lines that site
generators read themselves.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.ruler import RuleOptionsType
    from markdown_it.rules_block import StateBlock

#: A tag of a template: Liquid, Jinja or Hugo.
_TEMPLATE_TAG = r"(?:\{%.*?%\}|\{#.*?#\}|\{\{[<%].*?[>%]\}\})"

#: Lines that are no text: marks of containers, tables of contents, included files, comments, and targets of links.
_FIXED_LINE = re.compile(
    r":{3}|/{3}(?:\s|$)|\[\[?_?TOC_?\]?\]\s*$|-+8<-+|%%.*%%\s*$|\([\w.:-]+\)=\s*$"
    rf"|\[!\w+\][+-]?\s*$|(?:{_TEMPLATE_TAG}\s*)+$",
    re.IGNORECASE,
)
#: Lines of options after the mark of a directive of MyST.
_DIRECTIVE = re.compile(r":{3,}\{")
_OPTION = re.compile(r":[\w-]+:(?:\s|$)")

_ABBREVIATION = re.compile(r"\*\[[^\]]+\]:[ \t]*(?=\S)")
_CALLOUT = re.compile(r"\[![\w|-]+\][+-]?[ \t]+(?=\S)")
_CONTAINER = re.compile(
    r"(?:(?:!!!|\?\?\?\+?)[ \t]*[\w-]+(?:[ \t]+[\w-]+)*|===[!+]*(?=[ \t]+\"))(?:[ \t]+\"(?P<title>.*)\")?[ \t]*$"
)
_DEFINITION = re.compile(r"[:~][ \t]+(?=\S)|\[\^[^\]\s]+\]:[ \t]*")

_GRID_TABLE = re.compile(r"\+(?:[-=:]{3,}\+)+\s*$")
_SIMPLE_TABLE = re.compile(r"-{3,}(?:[ \t]+-{3,})+\s*$")
#: A line of JavaScript in MDX.
_MODULE = re.compile(
    r"import\s*\{[^}]*$|import\s.*\sfrom\s+[\"'][^\"']+[\"'];?\s*$|import\s+[\"'][^\"']+[\"'];?\s*$"
    r"|export\s.*\sfrom\s+[\"'][^\"']+[\"'];?\s*$"
    r"|export\s+(?:default\s+)?(?:(?:const|let|var)\s+[\w{\[].*=|(?:async\s+)?function\b.*\(|class\s+\w+.*\{)"
)
#: The opening of verbatim text with its closing, which may repeat a name.
_VERBATIM = [
    (re.compile(r"\$\$"), r"\$\$"),
    (re.compile(r"\\begin\{(\w+\*?)\}"), r"\\end\{NAME\}"),
    (re.compile(r"\\\[(?=\s*$|.*(?:(?<!\\)[\^_={}]|\\[A-Za-z]{2}).*\\\]\s*$)"), r"\\\]"),
    (
        re.compile(r"\{%-?\s*(raw|highlight|comment|verbatim|code)\b.*?%\}"),
        r"\{%-?\s*endNAME.*?%\}",
    ),
    (
        re.compile(r"\{\{[<%]\s*(highlight|mermaid|katex|math|code)\b.*?\}\}"),
        r"\{\{[<%]\s*/NAME.*?\}\}",
    ),
    (re.compile(r"-+8<-+\s*$"), r"-+8<-+"),
    (re.compile(r"\{/\*"), r"\*/\}"),
]


def add_block_rules(parser: "MarkdownIt") -> None:
    """Add the rules to a parser, before those of CommonMark."""
    interrupting: RuleOptionsType = {
        "alt": ["paragraph", "reference", "blockquote", "list", "table"]
    }
    for name, rule in (
        ("verbatim", _verbatim),
        ("fixed_line", _fixed_line),
        ("title", _title),
        ("definition", _definition),
        ("container", _container),
    ):
        parser.block.ruler.before("fence", name, rule, interrupting)


def _line_of(state: "StateBlock", line: int) -> str:
    return state.src[state.bMarks[line] + state.tShift[line] : state.eMarks[line]]


def _verbatim(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A formula, code of a template or a module, or a table of pandoc."""
    if state.is_code_block(start):
        return False
    after = _end_of_verbatim(state, start, end)
    if after is None:
        return False
    if not silent:
        _push_kept(state, "verbatim", start, after)
    return True


def _push_kept(state: "StateBlock", name: str, start: int, after: int) -> None:
    """The token of lines that stay as they are."""
    token = state.push(name, "", 0)
    token.content = state.getLines(start, after, state.blkIndent, True)
    token.map = [start, after]
    state.line = after


def _end_of_verbatim(state: "StateBlock", start: int, end: int) -> int | None:
    """The line after a block that stays as it is, if one starts at a line."""
    line = _line_of(state, start)
    following = range(start + 1, end)
    if _GRID_TABLE.match(line):
        rows = ("+", "|")
        return next((row for row in following if not _line_of(state, row).startswith(rows)), end)
    has_rule = _SIMPLE_TABLE.match(line) or (
        start + 1 < end and _SIMPLE_TABLE.match(_line_of(state, start + 1))
    )
    if has_rule or _MODULE.match(line):
        return next((number for number in following if state.isEmpty(number)), end)
    return _end_of_delimited(state, start, end)


def _end_of_delimited(state: "StateBlock", start: int, end: int) -> int | None:
    """The line after verbatim text between an opening and a closing, if it starts at a line."""
    line = _line_of(state, start)
    for pattern, template in _VERBATIM:
        opening = pattern.match(line)
        if opening is None:
            continue
        name = re.escape(opening[1]) if opening.re.groups else ""
        closing = re.compile(template.replace("NAME", name))
        closed = closing.search(line, opening.end())
        if closed:
            return None if line[closed.end() :].strip() else start + 1
        for number in range(start + 1, end):
            if closing.search(_line_of(state, number)):
                return number + 1
        return None
    return None


def _fixed_line(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A line without text. The options of a directive belong to its mark."""
    line = _line_of(state, start)
    if state.is_code_block(start) or not _FIXED_LINE.match(line):
        return False
    if silent:
        return True
    after = start + 1
    if _DIRECTIVE.match(line):
        while after < end and _OPTION.match(_line_of(state, after)):
            after += 1
    _push_kept(state, "fixed_line", start, after)
    return True


def _title(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A line whose text starts after a mark: an abbreviation, or the title of a callout."""
    if state.is_code_block(start):
        return False
    line = _line_of(state, start)
    mark = _ABBREVIATION.match(line)
    if mark is None and state.parentType == "blockquote":
        mark = _CALLOUT.match(line)
    if mark is None:
        return False
    if not silent:
        state.line = start + 1
        _push_text(state, line[mark.end() :], start)
    return True


def _push_text(state: "StateBlock", text: str, line: int) -> None:
    """The tokens of a block with the text of one line."""
    state.push("title_open", "", 1)
    token = state.push("inline", "", 0)
    token.content = text.strip()
    token.map = [line, line + 1]
    token.children = []
    state.push("title_close", "", -1)


def _definition(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A definition, the caption of a table, or a footnote: blocks after a mark, as in a list."""
    if state.is_code_block(start):
        return False
    mark = _DEFINITION.match(_line_of(state, start))
    if mark is None:
        return False
    if silent:
        return True
    column = state.sCount[start]
    for character in mark[0]:
        column += 4 - column % 4 if character == "\t" else 1
    is_footnote = mark[0].startswith("[")
    indent = state.sCount[start] + 4 if is_footnote else column
    with _nested(state, "definition", start, indent):
        state.bMarks[start] += state.tShift[start] + mark.end()
        state.tShift[start] = 0
        state.sCount[start] = indent
        state.md.block.tokenize(state, start, end)
    return True


def _container(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """An admonition (`!!! note "Title"`) or a tab (`=== "Title"`) with the indented lines after it."""
    if state.is_code_block(start):
        return False
    opening = _CONTAINER.match(_line_of(state, start))
    if opening is None:
        return False
    if silent:
        return True
    indent = state.sCount[start] + 4
    last = start + 1
    while last < end and (state.isEmpty(last) or state.sCount[last] >= indent):
        last += 1
    with _nested(state, "container", start, indent):
        if opening["title"]:
            _push_text(state, opening["title"], start)
        state.lineMax = last
        state.md.block.tokenize(state, start + 1, last)
        state.line = last
    return True


@contextmanager
def _nested(state: "StateBlock", name: str, start: int, indent: int) -> Iterator[None]:
    """Add the tokens around the blocks that are parsed in this context, and restore the parser's state after them."""
    line_before = (state.bMarks[start], state.tShift[start], state.sCount[start])
    block_before = (state.blkIndent, state.parentType, state.lineMax)
    opened = state.push(f"{name}_open", "", 1)
    state.blkIndent = indent
    state.parentType = name
    yield
    opened.map = [start, state.line]
    state.push(f"{name}_close", "", -1)
    state.bMarks[start], state.tShift[start], state.sCount[start] = line_before
    state.blkIndent, state.parentType, state.lineMax = block_before
