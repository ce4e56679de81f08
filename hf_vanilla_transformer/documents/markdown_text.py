"""Split Markdown into passages of text and markup. Code, formulas, front matter, rules and targets of links stay."""

import re
from collections.abc import Iterator
from functools import partial

from .html_text import Event, Passage, passage_of, split_html

_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\r?\n.*?^(?:\1|\.\.\.)[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL)
#: Blocks that stay, by their first line after quotation marks, and their last line.
_MATH_BLOCK = re.compile(r"[ \t]*\\begin\{(\w+\*?)\}")
_FENCE, _MATH = re.compile(r"[ \t]*(?:[-*+][ \t]+|\d{1,9}[.)][ \t]+)*(`{3,}|~{3,})"), re.compile(r"[ \t]*\$\$")
#: HTML, as CommonMark starts it: what ends with a certain mark, and what ends at a blank line.
_HTML_START = re.compile(r" {0,3}(?:<(pre|script|style|textarea)\b|<!--|<\?|<!\[CDATA\[)", re.IGNORECASE)
_HTML_BLOCK = re.compile(
    r" {0,3}</?(?:address|article|aside|blockquote|body|center|dd|details|dialog|dir|div|dl|dt|fieldset|figcaption"
    r"|figure|footer|form|h[1-6]|head|header|hr|html|iframe|legend|li|link|main|menu|nav|ol|optgroup|option|p|section"
    r"|summary|table|tbody|td|tfoot|th|thead|title|tr|track|ul)(?=[\s/>])| {0,3}</?[a-z][^<>]*>\s*$",
    re.IGNORECASE,
)
#: Marks of quotations, lists, definitions, footnotes and headings.
_MARKS = re.compile(
    r"[ \t]*(?:>[ \t]*|(?:!!!|\?\?\?\+?)[ \t]+\w[\w-]*[ \t]*|===[ \t]+(?=\")|\*\[[^\]]+\]:[ \t]*"
    r"|(?:[-*+:]|\d{1,9}[.)]|#{1,6}|\[\^[^\]]+\]:)(?:[ \t]+|(?=\r?\n|\Z))(?:\[[ xX]\][ \t]+)?)*"
)
_QUOTE = re.compile(r"[ \t]*(?:>[ \t]*)*")
_QUOTED_LINE, _UNDERLINE = re.compile(r"\n[ \t]*(?:>[ \t]*)+"), re.compile(r"[ \t]*(?:=+|-+)[ \t]*\r?\n?")
#: Lines that stay: definitions of links, marks of containers, rules, tables of contents, imports and code.
_VERBATIM = re.compile(
    r"[ \t]*(?:\[(?!\^)[^\]]+\]:\s|:{3}|(?:>[ \t]*)+\[!\w+\]\s*$|(?:(?:\*[ \t]*){3,}|(?:_[ \t]*){3,})$"
    r"|\[\[?_?TOC_?\]?\]\s*$)|import\s.*\sfrom\s+[\"'][^\"']+[\"'];?\s*$|(?: {4}|\t)"
)
_TABLE_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-*:?[ \t]*)+\r?\n?")
_CELL_END = re.compile(r"((?<!\\)\|)")
_HARD_BREAK = re.compile(r"(?:  +|\\)\r?\n|<br\s*/?>|[ \t]+#+[ \t]*(?:\r?\n)?\Z", re.IGNORECASE)
_BLOCK_MARK = re.compile(r"\A(\s*(?:(?=(?:[-+*>]|#{1,6})(?:\s|$))|\d{1,9}(?=[.)](?:\s|$))))")

_TARGET = r"(?:\(<[^<>\n]*>(?:\s+[\"'][^)]*)?\)|\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+[\"'][^)]*)?\)|\[[^\]]*\])"
_INLINE = re.compile(
    rf"(?P<point>(`+)(?!`).+?(?<!`)\2(?!`)|!\[[^\]]*\]{_TARGET}|\[\^[^\]]+\]|<[a-zA-Z!/][^<>]*>"
    r"|\$\$[^$]+\$\$|\$(?! )(?:\w{1,2}|(?=[^$\n]*[\\^_={}])[^$\n]+(?<! ))\$(?!\d))"
    r"|(?P<outer>(?<=[\s)\]`])\{(?:[#.:]|\w+=)[^{}\n]*\}(?=\s*$))"
    rf"|(?P<open>\[)(?=[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\](?:\(|\[))|(?P<close>\]{_TARGET})"
    r"|(?P<left>(?<![\w\\])(?:\*{1,3}|_{1,3}|~~|==|\+\+)(?=[^\s*_~=+]))|(?P<right>(?<=[^\s*_~=+\\])(?:\*{1,3}|_{1,3}|~~|==|\+\+)(?!\w))",
    re.DOTALL,
)


def split_markdown(text: str) -> list[str | Passage]:
    """Split a document into verbatim markup and passages to translate. Their `raw` joined is the document.

    The lines of a paragraph are one passage. Its translation is one line.
    """
    front = _FRONT_MATTER.match(text)
    start = front.end() if front else 0
    pieces: list[str | Passage] = [text[:start]]
    paragraph, in_list, in_table, blank, quotes = "", False, False, True, 0
    lines, index = text[start:].splitlines(keepends=True), 0
    while index < len(lines):
        line = lines[index]
        marks, quote = _MARKS.match(line)[0], _QUOTE.match(line)[0]  # type: ignore[index]
        content, depth = line[len(quote) :].strip(), quote.count(">")
        stop = _end_of_block(lines, index, len(quote))
        in_table = "|" in line and (in_table or _is_rule(lines, index))
        is_table = in_table or ("|" in line and _is_rule(lines, index + 1))
        indented = _VERBATIM.match(line) is not None and not (line[:1].isspace() and (in_list or not blank))
        underline = bool(paragraph) and _UNDERLINE.fullmatch(line) is not None
        is_layout = not content or indented or underline
        if stop > index or is_layout or is_table or marks.strip(" >\t") or depth > quotes:
            pieces += _passages(paragraph)
            paragraph = ""
        if stop > index:
            block = "".join(lines[index:stop])
            pieces += split_html(block) if content.startswith("<") else [block]
            index, blank = stop, False
            continue
        if is_layout:
            pieces.append(line)
        elif is_table:
            for number, cell in enumerate(_CELL_END.split(line)):
                pieces += [cell] if number % 2 or _is_rule(lines, index) else _passages(cell)
        elif paragraph:
            paragraph += line
        else:
            pieces.append(marks)
            quotes, paragraph = depth, line[len(marks) :]
        if "#" in marks or marks.lstrip().startswith(("!!!", "???", "===")):
            pieces += _passages(paragraph)
            paragraph = ""
        in_list = bool(marks.strip(" >\t#")) or (in_list and (not content or line[:1].isspace()))
        blank, index = not content, index + 1
    return [piece for piece in [*pieces, *_passages(paragraph)] if piece != ""]


def _end_of_block(lines: list[str], start: int, quote: int) -> int:
    """The index after a block of code, mathematics or HTML that starts at a line, or `start` if none does."""
    line = lines[start][quote:]
    if fence := _FENCE.match(line):
        if fence[1][0] == "`" and "`" in line[fence.end() :]:
            return start
        end = re.compile(rf"[ \t>]*{fence[1]}{fence[1][0]}*\s*$")
    elif _MATH.match(line):
        if line.count("$$") > 1:
            return start + line.rstrip().endswith("$$")
        end = re.compile(r".*\$\$")
    elif block := _MATH_BLOCK.match(line):
        end = re.compile(rf".*\\end\{{{re.escape(block[1])}\}}")
        if end.match(line):
            return start + 1
    elif html := _HTML_START.match(line):
        end = re.compile(rf".*(?:</{html[1]}>)" if html[1] else r".*(?:-->|\?>|\]\]>)", re.IGNORECASE)
        if end.match(line):
            return start + 1
    elif _HTML_BLOCK.match(line):
        end = re.compile(r"[ \t>]*$")
    else:
        return start
    return next((index + 1 for index in range(start + 1, len(lines)) if end.match(lines[index])), len(lines))


def _is_rule(lines: list[str], index: int) -> bool:
    return index < len(lines) and _TABLE_RULE.fullmatch(lines[index]) is not None


def _passages(paragraph: str) -> Iterator[str | Passage]:
    """The passages between the hard line breaks of a paragraph."""
    marked = _BLOCK_MARK.match(paragraph) is not None

    def finish(translation: str) -> str:
        """No translation becomes a heading, a list or a quotation."""
        return translation if marked else _BLOCK_MARK.sub(r"\1\\", translation, count=1)

    position = 0
    for match in [*_HARD_BREAK.finditer(paragraph), None]:
        part = paragraph[position : match.start() if match else None]
        unescape = partial(_QUOTED_LINE.sub, "\n")
        yield from passage_of(list(_events(part)), unescape, escape=str, finish=finish) if part else []
        if match:
            yield match[0]
            position = match.end()


def _events(text: str) -> Iterator[Event]:
    """Text and inline markup."""
    position = 0
    stack: list[str] = []
    for match in _INLINE.finditer(text):
        if match.start() > position:
            yield Event("text", "", text[position : match.start()])
        kind, raw = str(match.lastgroup), match[0]
        position = match.end()
        if kind in ("open", "outer"):  # the attributes of a heading have no partner
            yield Event("start", "[" if kind == "open" else "{", raw)
        elif kind == "close":
            yield Event("end", "[", raw)
        elif kind == "left" and not (stack and stack[-1] == raw and not text[position : position + 1].strip()):
            stack.append(raw)
            yield Event("start", raw, raw)
        elif kind == "right" and raw in stack:
            stack.remove(raw)
            yield Event("end", raw, raw)
        else:
            yield Event("point", "", raw)
    if position < len(text):
        yield Event("text", "", text[position:])
