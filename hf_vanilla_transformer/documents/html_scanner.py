"""Split HTML into tags, comments and text, in time linear in its length, with the rules of the standard's tokenizer.

`html.parser` needs quadratic time for some malformed documents. See https://html.spec.whatwg.org/#tokenization.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import regex

#: Elements with content that is no markup. The content of `title` is text.
_RAW = frozenset(("script", "style", "textarea", "title", "xmp", "iframe", "noembed", "noframes"))

_NEXT = re.compile(r"<(?=[a-zA-Z!?/%])|\{[{%]")
_NAME = re.compile(r"</?[a-zA-Z]")
#: A tag with its attributes. A value may have quotation marks, and ">" between them. Nothing is read twice.
_TAG = regex.compile(
    r"""
    </?(?P<tag>[a-z][^\s/>]*+)
    (?:
        \s++
        | (?P<slash>/)
        | (?P<name>=[^\s/>=]*+|[^\s/>=]++)
          (?:
              \s*+=\s*+ (?:"(?P<value>[^"]*+)" | '(?P<value>[^']*+)' | (?!["'])(?P<value>[^\s>]*+))
              | (?!\s*+=)(?P<value>)
          )
    )*+
    >
    """,
    regex.VERBOSE | regex.IGNORECASE,
)

#: Markup by its first characters, with its end.
_DECLARATIONS = {
    "<!--": "-->",
    "<![CDATA[": "]]>",
    "<!": ">",
    "<?php": "?>",
    "<?=": "?>",
    "<?": ">",
    "</": ">",
}

#: Code of a template, which may have "<" and ">".
_TEMPLATE_CODE = {"<%": "%>", "{%": "%}", "{{": "}}"}
_LONGEST_CODE = 2000  # characters


class Token(NamedTuple):
    """A piece of a document. The `raw` of all tokens joined is the document."""

    kind: str  # "start", "empty" (<br/>), "end", "text", "comment" or "other"
    tag: str
    raw: str
    attributes: dict[str, str] = {}


def scan(document: str) -> Iterator[Token]:
    """Yield the tokens of a document. Markup that does not end is one token up to the end of the document."""
    text_start = 0
    position = 0
    while match := _NEXT.search(document, position):
        start = match.start()
        token = _token(document, start)
        if token is None:
            position = match.end()
            continue
        if start > text_start:
            yield Token("text", "", document[text_start:start])
        yield token
        position = start + len(token.raw)
        if token.kind == "start" and token.tag in _RAW:
            end = re.compile(rf"</{token.tag}(?=[\s/>])", re.IGNORECASE).search(document, position)
            content = document[position : end.start() if end else len(document)]
            if content:
                yield Token("text" if token.tag == "title" else "other", "", content)
            position += len(content)
        text_start = position
    if text_start < len(document):
        yield Token("text", "", document[text_start:])


def _token(document: str, start: int) -> Token | None:
    """The markup that starts at `start`, if there is some."""
    if document[start : start + 2] in _TEMPLATE_CODE:
        return _template_code(document, start)
    if _NAME.match(document, start):
        return _tag(document, start)
    return _declaration(document, start)


def _template_code(document: str, start: int) -> Token | None:
    """Code of a template. Code in braces is text, unless it has signs of markup."""
    closing = _TEMPLATE_CODE[document[start : start + 2]]
    end = document.find(closing, start + 2, start + _LONGEST_CODE)
    if end < 0:
        return None
    code = document[start + 2 : end]
    if document[start] == "{" and not any(sign in code for sign in "<>&"):
        return None
    return Token("comment", "", document[start : end + 2])


def _declaration(document: str, start: int) -> Token:
    """A comment, a doctype, or similar markup."""
    opening, closing = next(
        pair for pair in _DECLARATIONS.items() if document.startswith(pair[0], start)
    )
    # <!--> and <!---> are comments too
    end = document.find(closing, start + (2 if opening == "<!--" else len(opening)))
    raw = document[start : len(document) if end < 0 else end + len(closing)]
    return Token("comment" if opening in ("<!--", "</") else "other", "", raw)


def _tag(document: str, start: int) -> Token:
    """The tag that starts at `start`."""
    match = _TAG.match(document, start)
    if match is None:  # no closing quote, or no ">"
        return Token("other", "", document[start:])
    tag = match["tag"].lower()
    if match[0].startswith("</"):
        return Token("end", tag, match[0])
    attributes = dict[str, str]()
    for name, value in zip(match.captures("name"), match.captures("value"), strict=True):
        attributes.setdefault(name.lower(), value)
    is_empty = match.end("slash") == match.end() - 1
    return Token("empty" if is_empty else "start", tag, match[0], attributes)
