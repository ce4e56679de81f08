"""Blocks of Markdown that CommonMark does not have, as rules for markdown-it-py.

These are definitions, footnotes, admonitions, tabs, formulas, tables of pandoc, and the lines that site generators
read themselves.
"""

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from markdown_it import MarkdownIt
    from markdown_it.ruler import RuleOptionsType
    from markdown_it.rules_block import StateBlock

#: A tag of a template: Liquid, Jinja or Hugo.
_TEMPLATE_TAG = r"(?:\{%.*?%\}|\{#.*?#\}|\{\{[<%].*?[>%]\}\})"
_STRING = r"[\"'][^\"'\n]+[\"']"
_EXPORTED = (
    r"\s*(?:default\s+)?(?:(?:const|let|var)\s+[\w{\[].*=|(?:async\s+)?function\b.*\(|class\s+\w+.*\{"
    r"|(?<=default )[(\[{])"
)

#: Blocks that stay.
_KEPT_BLOCKS = (
    # formulas
    r"\$\$(?:(?!\$\$)[\s\S])*\$\$[ \t]*",
    r"\\begin\{(?P<name>\w+\*?)\}(?:(?!\\end\{(?P=name)\})[\s\S])*\\end\{(?P=name)\}[ \t]*",
    r"\\\[(?=[ \t]*$|.*(?:(?<!\\)[\^_={}]|\\[A-Za-z]{2}).*\\\][ \t]*$)(?:(?!\\\])[\s\S])*\\\][ \t]*",
    # code of templates and comments
    r"\{%-?\s*(?P<tag>raw|highlight|comment|verbatim|code)\b[\s\S]*?\{%-?\s*end(?P=tag).*?%\}[ \t]*",
    r"\{\{[<%]\s*(?P<code>highlight|mermaid|katex|math|code)\b[\s\S]*?\{\{[<%]\s*/(?P=code).*?\}\}[ \t]*",
    rf"(?:{_TEMPLATE_TAG}[ \t]*)+",
    r"\{/\*[\s\S]*?\*/\}[ \t]*",
    r"%%.*%%[ \t]*",
    # tables of pandoc, up to an empty line
    r"\+(?:[-=:]{3,}\+)+[ \t]*(?:\n.*\S.*)*",
    r"(?:.*\n)?[ \t>]*-{3,}(?:[ \t]+-{3,})+[ \t]*(?:\n.*\S.*)*",
    # marks of containers with their options, tables of contents, included files, callouts, and targets
    r":{3,}(?:\{.*(?:\n[ \t]*:[\w-]+:.*)*|.*)",
    r"/{3}(?:[ \t].*)?",
    r"\[\[?_?(?i:TOC)_?\]?\][ \t]*",
    r"-+8<-+[ \t]*\n(?:.*\n)*?.*-+8<-+[ \t]*",
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
    """Lines that stay as they are."""
    match = _KEPT.match(state.src, _start(state, start))
    if match is None or state.is_code_block(start):
        return False
    content = match[0] + _rest_of_module(state.src, match)
    after = start + 1 + content.count("\n")
    if after > end:
        return False
    if not silent:
        token = state.push("kept", "", 0)
        token.content = content
        token.map = [start, after]
        state.line = after
    return True


def _rest_of_module(source: str, match: re.Match[str]) -> str:
    """The lines of a module of MDX after its first empty line, up to the one in which its brackets close."""
    text = match[0]
    depth = sum(map(text.count, "([{")) - sum(map(text.count, ")]}"))
    if depth <= 0 or not text.startswith("export"):
        return ""
    rest = source[match.end() : match.end() + _MOST_OF_MODULE]
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
        token = state.push("inline", "", 0)
        token.content = opening["title"].strip()
        token.map = [start, start + 1]
    indent = state.sCount[start] + 4
    last = start + 1
    while last < end and (state.isEmpty(last) or state.sCount[last] >= indent):
        last += 1
    state.line = start + 1
    _push_blocks(state, start + 1, last, indent)
    return True


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
