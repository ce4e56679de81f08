"""Blocks of Markdown that CommonMark does not have, as rules for markdown-it-py.

These are definitions, footnotes, admonitions, tabs, formulas, tables of pandoc, and the lines that site generators
read themselves.
"""

import re
from bisect import bisect_left
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.ruler import RuleOptionsType
    from markdown_it.rules_block import StateBlock

#: A tag of a template: Liquid, Jinja or Hugo.
_TEMPLATE_TAG = r"(?:\{%(?:(?!%\}).)*%\}|\{#(?:(?!#\}).)*#\}|\{\{[<%](?:(?![>%]\}\}).)*[>%]\}\})"
_STRING = r"[\"'][^\"'\n]+[\"']"
_EXPORTED = (
    r"\s*(?:default\s+)?(?:(?:const|let|var)\s+[\w{\[].*=|(?:async\s+)?function\b.*\(|class\s+\w+.*\{"
    r"|(?<=default )[(\[{])"
)

#: Blocks that stay up to their end: what opens them, and what ends them. A group of both must be equal.
_ENDED_BLOCKS = [
    (re.compile(opening), re.compile(end, re.MULTILINE))
    for opening, end in (
        # formulas
        (r"\$\$", r"\$\$"),
        (r"\\begin\{(\w+\*?)\}", r"\\end\{(\w+\*?)\}"),
        (
            r"\\\[(?=[ \t]*(?:\n|\Z)|(?=.*\\\][ \t]*(?:\n|\Z)).*(?:(?<!\\)[\^_={}]|\\[A-Za-z]{2}))",
            r"\\\]",
        ),
        # code of templates, comments, and included files
        (
            r"\{%-?\s*(raw|highlight|comment|verbatim|code)\b",
            r"\{%-?\s*end(raw|highlight|comment|verbatim|code)[^%{\n]*%\}[ \t]*$",
        ),
        (
            r"\{\{[<%]\s*(highlight|mermaid|katex|math|code)\b",
            r"\{\{[<%]\s*/(highlight|mermaid|katex|math|code)[^{\n]*\}\}[ \t]*$",
        ),
        (r"\{/\*", r"\*/\}"),
        (r"-+8<-+[ \t]*\n", r"-8<-+[ \t]*$"),
    )
]
_BLANK_REST = re.compile(r"[ \t]*$", re.MULTILINE)

#: Other blocks that stay.
_KEPT_BLOCKS = (
    rf"(?:{_TEMPLATE_TAG}[ \t]*)+",
    r"%%.*%%[ \t]*",
    # tables of pandoc, up to an empty line
    r"\+(?:[-=:]{3,}\+)+[ \t]*(?:\n.*\S.*)*",
    r"(?:.*\n)?[ \t>]*-{3,}(?:[ \t]+-{3,})+[ \t]*(?:\n.*\S.*)*",
    # marks of containers with their options, tables of contents, included files, callouts, and targets
    r":{3,}(?:\{.*(?:\n[ \t]*:[\w-]+:.*)*|.*)",
    r"/{3}(?:[ \t].*)?",
    r"\[\[?_?(?i:TOC)_?\]?\][ \t]*",
    r"-+8<-+.*",
    r"\[!\w+\].*",
    r"\*\[[^\]\n]+\]:.*",
    r"\([\w.:-]+\)=[ \t]*",
    rf"import\s(?:.*\sfrom\s+)?{_STRING};?[ \t]*",
    # modules of MDX, up to an empty line, or to the end of their brackets
    r"import\s*\{[^}\n]*(?:\n.*\S.*)*",
    rf"export\s(?:.*\sfrom\s+{_STRING};?[ \t]*|{_EXPORTED}.*(?:\n.*\S.*)*)",
)
_MOST_OF_MODULE = 20_000  # letters
_KEPT = re.compile(rf"(?:{'|'.join(_KEPT_BLOCKS)})$", re.MULTILINE)

_CONTAINER = re.compile(
    r"(?:(?:!!!|\?\?\?\+?)[ \t]*[\w-]+(?:[ \t]+[\w-]+)*|===[!+]*(?=[ \t]+\"))(?:[ \t]+\"(?P<title>.*)\")?[ \t]*$"
)
# Titles of Docusaurus, VitePress and Python-Markdown's blocks. After other names stand classes and options.
_ADMONITION = "(?:note|tip|info|warning|danger|caution|important|success|details)"
_TITLED = re.compile(
    rf"(:{{3,}}[ \t]*{_ADMONITION}(?:[ \t]+|\[)|/{{3}}[ \t]*{_ADMONITION}[ \t]*\|[ \t]*)"
    r"([^\s{\[\]:=][^\]{}=\n]*?)\]?[ \t]*"
)
_DEFINITION = re.compile(r"[:~][ \t]+(?=\S)|\[\^[^\]\s]+\]:[ \t]*")


def add_block_rules(parser: "MarkdownIt") -> None:
    """Add the rules to a parser, before those of CommonMark."""
    interrupting: RuleOptionsType = {
        "alt": ["paragraph", "reference", "blockquote", "list", "table"]
    }
    for rule in (_kept, _definition, _container):
        parser.block.ruler.before("fence", rule.__name__, rule, interrupting)


def _start(state: "StateBlock", line: int) -> int:
    return state.bMarks[line] + state.tShift[line]


def _kept(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """Lines that stay as they are, but for a title at their end."""
    begin, last = _start(state, start), state.eMarks[end - 1]
    match = _KEPT.match(state.src, begin, last)
    content = _ended_block(state, begin, last)
    if content is None and match is not None:
        content = match[0] + _rest_of_module(state.src, match, last)
    if content is None or state.is_code_block(start):
        return False
    if not silent:
        after = start + 1 + content.count("\n")
        titled = _TITLED.fullmatch(content)
        token = state.push("kept", "", 0)
        token.content = titled[1] if titled else content
        token.map = [start, after]
        if titled:
            _push_title(state, titled[2], start)
        state.line = after
    return True


def _ended_block(state: "StateBlock", begin: int, last: int) -> str | None:
    """The text of a block from its opening to its end on the last of its lines, or None."""
    for number, (opening, end) in enumerate(_ENDED_BLOCKS):
        opened = opening.match(state.src, begin, last)
        if opened is None:
            continue
        index = state.env.setdefault("ends", {})
        if number not in index:  # one pass for all openings, because many may have no end
            index[number] = _ends(state.src, end)
        starts = index[number].get(opened.groups(), [])
        following = bisect_left(starts, opened.end())
        if following < len(starts) and starts[following] < last:
            closed = end.match(state.src, starts[following])
            rest = closed and _BLANK_REST.match(state.src, closed.end(), last)
            if rest:
                return state.src[begin : rest.end()]
    return None


def _ends(source: str, end: re.Pattern[str]) -> dict[tuple[str, ...], list[int]]:
    """Where the ends of a kind of block start, by their groups. They may overlap, as in `$$$`."""
    starts: dict[tuple[str, ...], list[int]] = {}
    for found in re.finditer(f"(?={end.pattern})", source, re.MULTILINE):
        starts.setdefault(found.groups(), []).append(found.start())
    return starts


def _rest_of_module(source: str, match: re.Match[str], last: int) -> str:
    """The lines of a module of MDX after its first empty line, up to the one in which its brackets close."""
    text = match[0]
    depth = sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
    if depth <= 0 or not text.startswith("export"):
        return ""
    rest = source[match.end() : min(last, match.end() + _MOST_OF_MODULE)]
    for bracket in re.finditer(r"[()\[\]{}]", rest):
        depth += 1 if bracket[0] in "([{" else -1
        if depth == 0:
            return rest[: bracket.end()] + rest[bracket.end() :].partition("\n")[0]
    return ""


def _definition(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """A definition, the caption of a table, or a footnote: blocks after a mark, as in a list."""
    begin = _start(state, start)
    mark = _DEFINITION.match(state.src, begin, state.eMarks[start])
    if mark is None or state.is_code_block(start):
        return False
    if silent:
        return True
    before = (state.bMarks[start], state.tShift[start], state.sCount[start])
    is_footnote = mark[0].startswith("[")
    indent = before[2] + (4 if is_footnote else len(mark[0].expandtabs(4)))
    state.bMarks[start] = mark.end()
    state.tShift[start] = 0
    state.sCount[start] = indent
    _push_blocks(state, start, end, indent)
    state.bMarks[start], state.tShift[start], state.sCount[start] = before
    return True


def _container(state: "StateBlock", start: int, end: int, silent: bool) -> bool:
    """An admonition (`!!! note "Title"`) or a tab (`=== "Title"`) with the indented lines after it."""
    opening = _CONTAINER.match(state.src, _start(state, start), state.eMarks[start])
    if opening is None or state.is_code_block(start):
        return False
    if silent:
        return True
    if opening["title"]:
        _push_title(state, opening["title"].strip(), start)
    indent = state.sCount[start] + 4
    last = start + 1
    while last < end and (state.isEmpty(last) or state.sCount[last] >= indent):
        last += 1
    state.line = start + 1
    _push_blocks(state, start + 1, last, indent)
    return True


def _push_title(state: "StateBlock", title: str, line: int) -> None:
    token = state.push("inline", "", 0)
    token.content = title
    token.map = [line, line + 1]


def _push_blocks(state: "StateBlock", start: int, end: int, indent: int) -> None:
    """The tokens of some lines with an indent, between those of an element."""
    before = (state.blkIndent, state.parentType, state.lineMax)
    opened = state.push("indented_open", "", 1)
    state.blkIndent = indent
    state.parentType = "indented"
    state.lineMax = end
    state.md.block.tokenize(state, start, end)
    opened.map = [start, state.line]
    state.push("indented_close", "", -1)
    state.blkIndent, state.parentType, state.lineMax = before
