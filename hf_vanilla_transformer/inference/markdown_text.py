"""Split Markdown into passages of text and markup. Code, front matter, rules, targets of links and HTML stay."""

import re
from collections.abc import Iterator

from .html_text import Event, Passage, passage_of

_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,}|\$\$(?!.*\$\$))")
#: HTML over several lines with content that is no text, and its end.
_RAW_START = re.compile(r"[ \t]*<(?:(!--)|(pre|script|style|textarea)\b)", re.IGNORECASE)
_FRONT_MATTER = re.compile(r"\A(---|\+\+\+)[ \t]*\r?\n.*?^\1[ \t]*(?:\r?\n|\Z)", re.MULTILINE | re.DOTALL)
#: Quotation and list marks, and the marks of a heading.
_MARKS = re.compile(
    r"[ \t]*(?:>[ \t]*|(?:[-*+:]|\d{1,9}[.)]|#{1,6}|\[\^[^\]]+\]:)(?:[ \t]+|(?=\r?\n|\Z))(?:\[[ xX]\][ \t]+)?)*"
)
_QUOTE = re.compile(r"[ \t]*(?:>[ \t]*)*")
_QUOTED_LINE, _UNDERLINE = re.compile(r"\n[ \t]*(?:>[ \t]*)+"), re.compile(r"[ \t]*(?:=+|-+)[ \t]*\r?\n?")
_VERBATIM = re.compile(
    r"[ \t]*(?:\[(?!\^)[^\]]+\]:\s|</?[a-zA-Z!][^>]*>\s*$|:{3}|(?:>[ \t]*)+\[!\w+\]\s*$)|(?: {4}|\t)"
)
_TABLE_RULE = re.compile(r"[ \t]*\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-*:?[ \t]*)+\r?\n?")
_CELL_END = re.compile(r"((?<!\\)\|)")
_HARD_BREAK = re.compile(r"(?:  +|\\)\r?\n|<br\s*/?>|[ \t]+#+[ \t]*(?:\r?\n)?\Z", re.IGNORECASE)

_INLINE = re.compile(
    r"(?P<point>(`+)(?!`).+?(?<!`)\2(?!`)|!\[[^\]]*\](?:\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+[\"'][^)]*)?\)|\[[^\]]*\])"
    r"|\[\^[^\]]+\]|<[a-zA-Z!/][^<>]*>|\{[#.:][^{}]*\}|\$\$[^$]+\$\$"
    r"|\$(?! )(?:\w{1,2}|(?=[^$\n]*[\\^_={}])[^$\n]+(?<! ))\$(?!\d))"
    r"|(?P<open>\[)(?=[^\[\]]*(?:\[[^\[\]]*\][^\[\]]*)*\](?:\(|\[))"
    r"|(?P<close>\](?:\(<[^<>\n]*>(?:\s+[\"'][^)]*)?\)|\([^()\s]*(?:\([^()]*\)[^()\s]*)*(?:\s+[\"'][^)]*)?\)|\[[^\]]*\]))"
    r"|(?P<left>(?<![\w\\])(?:\*{1,3}|_{1,3}|~~)(?=[^\s*_~]))|(?P<right>(?<=[^\s*_~\\])(?:\*{1,3}|_{1,3}|~~)(?!\w))",
    re.DOTALL,
)


def split_markdown(text: str) -> list[str | Passage]:
    """Split a document into verbatim markup and passages to translate. Their `raw` joined is the document.

    The lines of a paragraph are one passage. Its translation is one line.
    """
    front = _FRONT_MATTER.match(text)
    start = front.end() if front else 0
    pieces: list[str | Passage] = [text[:start]]
    paragraph, fence, in_list, in_table, blank, quoted = "", "", False, False, True, 0
    lines = text[start:].splitlines(keepends=True)
    for index, line in enumerate(lines):
        mark = _MARKS.match(line)
        marks, content = (mark[0] if mark else ""), line.strip("> \t\r\n")
        fence_mark = _FENCE.match(line[len(_QUOTE.match(line)[0]) :])  # type: ignore[index]
        raw = None if fence else _RAW_START.match(line)
        in_table = "|" in line and (in_table or _is_rule(lines, index))
        is_table = in_table or ("|" in line and _is_rule(lines, index + 1))
        indented = _VERBATIM.match(line) is not None and not (line[:1].isspace() and (in_list or not blank))
        underline = bool(paragraph) and _UNDERLINE.fullmatch(line) is not None
        new_block = bool(marks.strip(" >\t")) or marks.count(">") > quoted
        if fence or fence_mark or raw or not content or indented or is_table or underline or new_block:
            pieces += _passages(paragraph)
            paragraph = ""
        if fence or fence_mark or raw:
            pieces.append(line)
            if raw:
                fence = "-->" if raw[1] else f"</{raw[2].lower()}"
            elif not fence and fence_mark:
                fence = fence_mark[1]
            elif fence_mark and fence_mark[1].startswith(fence) and not content.strip("`~$ "):
                fence = ""
            fence = "" if fence[:1] in ("-", "<") and fence in line.lower() else fence
        elif not content or indented or underline:
            pieces.append(line)
        elif is_table:
            for number, cell in enumerate(_CELL_END.split(line)):
                pieces += [cell] if number % 2 or _is_rule(lines, index) else _passages(cell)
        elif paragraph:
            paragraph += line
        else:
            pieces.append(marks)
            quoted = marks.count(">")
            paragraph = line[len(marks) :]
        if "#" in marks:
            pieces += _passages(paragraph)
            paragraph = ""
        in_list = bool(marks.strip(" >\t#")) or (in_list and (not content or line[:1].isspace()))
        blank = not content
    return [piece for piece in [*pieces, *_passages(paragraph)] if piece != ""]


def _is_rule(lines: list[str], index: int) -> bool:
    return index < len(lines) and _TABLE_RULE.fullmatch(lines[index]) is not None


def _passages(paragraph: str) -> Iterator[str | Passage]:
    """The passages between the hard line breaks of a paragraph."""
    position = 0
    for match in [*_HARD_BREAK.finditer(paragraph), None]:
        part = paragraph[position : match.start() if match else None]
        yield from passage_of(list(_events(part)), _without_quote_marks) if part else []
        if match:
            yield match[0]
            position = match.end()


def _without_quote_marks(text: str) -> str:
    """The text of quoted lines."""
    return _QUOTED_LINE.sub("\n", text)


def _events(text: str) -> Iterator[Event]:
    """Text and inline markup."""
    position = 0
    stack: list[str] = []
    for match in _INLINE.finditer(text):
        if match.start() > position:
            yield Event("text", "", text[position : match.start()])
        kind, raw = str(match.lastgroup), match[0]
        position = match.end()
        if kind == "open":
            yield Event("start", "[", raw)
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
