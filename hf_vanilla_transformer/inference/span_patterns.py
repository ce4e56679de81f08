"""The kinds of spans that no model should translate: their patterns, each with an example and a counter-example."""

import re
from dataclasses import dataclass

from ..text.words import UNSPACED


@dataclass(frozen=True)
class SpanKind:
    """A kind of spans."""

    name: str
    pattern: str
    example: str  #: one such span
    other: str  #: similar text without such a span


LETTER = rf"[^\W{UNSPACED}\uac00-\ud7af]"
#: Without ▁, which starts a piece.
_EMOJI = "\u2190-\u21ff\u2300-\u257f\u25a0-\u27bf\u2b00-\u2bff\U0001f000-\U0001fbff"
_NESTED = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"
_ADDRESS_END = r"(?<![.,;:!?'’”»\]}*_])"
_ADDRESS = (
    rf"(?:[^\s<>\"(){UNSPACED}\u3000-\u303f\uac00-\ud7af\uff00-\uffef]|\([^\s()]*\))+{_ADDRESS_END}"
)
# Hosts start with a letter of a script without spaces only after a scheme.
_HOST = (
    rf"(?=[{UNSPACED}\uac00-\ud7af])(?:[\w-]+\.)+(?:[A-Za-z]{{2,}}(?![A-Za-z])|[^\W\d_]{{2,}}(?=/))"
)
_SCHEME = r"[A-Za-z][A-Za-z0-9+.-]{1,15}://|www\.|(?:tel|sms|urn|sip|xmpp):(?=\S)"
_ROOT = r"[A-Za-z]:[\\/](?=[A-Za-z0-9_])|\\\\(?=[A-Za-z0-9_])|~/|\.\.?/(?=[A-Za-z0-9_])"
# No suffix that is a word, which may follow a full stop without a space, such as .bin and .dat.
_SUFFIXES = (
    "7z|apk|avi|avif|bak|bib|bmp|bz2|cfg|conf|cpp|css|csv|dll|dmg|doc|docm|docx|eml|epub|exe|flac|gif|gz|heic|hpp|htm|html"
    "|ics|ini|ipynb|iso|jar|jpeg|jpg|js|json|jsonl|jsx|log|md|mkv|mov|mp3|mp4|mpeg|odp|ods|odt|ogg|otf|pdf|php|png|ppt|pptx"
    "|psd|py|rar|rb|rst|rtf|scss|sh|sql|sqlite|srt|svg|tex|tgz|tif|tiff|tmp|tmx|toml|ts|tsv|tsx|ttf|txt|vtt|wav|webm|webp"
    "|woff|woff2|xlf|xliff|xls|xlsm|xlsx|xml|xz|yaml|yml|zip"
)
_SUFFIX = f"{_SUFFIXES}|{_SUFFIXES.upper()}"
_EXPRESSION = rf"\{{(?!\\)\{{?\s*[\w.$@#/^\\ \[\]-]*(?:[:!,|]{_NESTED})?\}}\}}?"
_PERCENT = r"%(?![A-Za-z0-9_%({+#'*@-]|\.\d)"

#: Letters that touch one of these belong to it, as in {count}th. The first kind that matches wins.
IN_WORDS = (
    SpanKind(
        "URL",
        rf"(?<![A-Za-z0-9])(?:{_SCHEME})(?:{_HOST}(?:(?=[/:?#]){_ADDRESS})?|{_ADDRESS})",
        "https://example.com/a?b=(x)",
        "see: this",
    ),
    SpanKind(
        "path from a drive, a share, the home or this folder",
        rf"(?<![A-Za-z0-9_.~/\\])(?:{_ROOT}){_ADDRESS}",
        r"C:\Users\ann\a.txt",
        "and/or",
    ),
    SpanKind(
        "path from the root",
        r"(?<![A-Za-z0-9_.~/<)\]])/[A-Za-z_.][A-Za-z0-9_.-]*(?:/[A-Za-z0-9_.*-]+)+(?<![.,])"
        rf"(?:\?[A-Za-z0-9_.-]+=(?:{_ADDRESS})?)?",
        "/etc/nginx/nginx.conf",
        "day/month/year",
    ),
    SpanKind(
        "host with a path",
        rf"(?<![A-Za-z0-9_./@-])(?:[A-Za-z0-9-]+\.)+[A-Za-z]{{2,}}/(?=[A-Za-z0-9_~?#]){_ADDRESS}",
        "example.com/a?b",
        "a/b. Then c.",
    ),
    SpanKind(
        "path of a file",
        r"(?<![A-Za-z0-9_./-])(?:[A-Za-z_][A-Za-z0-9_-]*/)+[A-Za-z0-9_-]+\.[a-z][a-z0-9]{0,4}(?![A-Za-z0-9_/])",
        "src/main.py",
        "input/output. Then",
    ),
    SpanKind(
        "name of a file",
        rf"(?<![A-Za-z0-9_./@-])(?:[A-Za-z0-9_][A-Za-z0-9_-]*\.)+(?:{_SUFFIX})(?![A-Za-z0-9_/@-]|\.[A-Za-z0-9])",
        "report-2.final.pdf",
        "the end.The",
    ),
    SpanKind(
        "number of a host",
        r"(?<![\d.])\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?(?![\d.]\d)",
        "192.168.0.1:8080",
        "1.234.567",
    ),
    SpanKind(
        "UUID",
        r"(?<![A-Za-z0-9_-])[\da-fA-F]{8}(?:-[\da-fA-F]{4}){3}-[\da-fA-F]{12}(?![A-Za-z0-9_-])",
        "3f2504e0-4f89-11d3-9a0c-0305e82c3301",
        "face-to-face",
    ),
    SpanKind(
        "formula of LaTeX in brackets",
        r"\\\((?:[^\\]|\\(?!\))){0,60}\\\)|\\\[(?:[^\\]|\\(?!\])){0,60}\\\]",
        r"\(a + b\)",
        "(a + b)",
    ),
    SpanKind("value in a string of Swift", r"\\\([A-Za-z0-9_.]+\)", r"\(name)", "(name)"),
    SpanKind(
        "command of LaTeX",
        rf"(?<![A-Za-z0-9])\\(?![nrt](?![a-z]))[A-Za-z]+\*?(?:\[[^\[\]]*\])*(?:\{{{_NESTED}\}})*",
        r"\cite[p. 3]{knuth}",
        r"one\n",
    ),
    SpanKind(
        "formula of LaTeX between dollars",
        r"(?<![A-Za-z0-9_$])\$(?![ \d])(?=[^$\n]*[\\^_={}])[^$\n]{1,200}(?<! )\$(?![A-Za-z0-9_$])",
        "$x^2$",
        "from $5 to $6",
    ),
    SpanKind(
        "e-mail address",
        r"(?<![A-Za-z0-9])(?:mailto:)?[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+",
        "ann.b@mail.example.org",
        "two @ five",
    ),
    SpanKind(
        "placeholder in braces, with a currency or a percent sign",
        rf"[$#@%€£¥]?(?:\{{{{2,3}}[^{{}}]*\}}{{2,3}}|{_EXPRESSION})(?:[°€£¥]|{_PERCENT})?",
        "{n, plural, one {# item} other {# items}}",
        "{one; two}",
    ),
    SpanKind("link of a wiki", r"\[\[[^\[\]]*\]\]", "[[x y]]", "[x y]"),
    SpanKind(
        "variable of a shell",
        r"(?<![A-Za-z0-9])\$(?:[A-Za-z_]\w*(?:\([^()\s]*\))?|\([A-Za-z_]\w*\))",
        "$(VAR)",
        "a$ or $5",
    ),
    SpanKind(
        "mention of a user",
        r"(?<![A-Za-z0-9_/@.])@[A-Za-z_](?:[A-Za-z0-9_./@-]*[A-Za-z0-9_])?(?::[A-Za-z0-9-]+\.[A-Za-z]+)?",
        "@ann:matrix.org",
        "two @ five",
    ),
    SpanKind("hashtag", rf"(?<![A-Za-z0-9_&#/])#(?!\d){LETTER}+", "#größe", "C# and #1"),
    SpanKind(
        "named parameter",
        r"(?<![A-Za-z0-9_:/)\]]):[A-Za-z_][A-Za-z0-9_]*(?![A-Za-z0-9_:]|[a-z0-9_+-]*:)",
        ":name",
        "note: this",
    ),
    SpanKind("variable between percent signs", r"%%[A-Za-z_]\w*%%", "%%Name_1%%", "50%% off"),
    SpanKind(
        "named format",
        r"%(?:\([^()\s]*\)|<\w+>)[-+#0]*\d*(?:\.\d+)?[a-zA-Z]",
        "%(name)s",
        "50% (about)",
    ),
    SpanKind("variable of Windows", r"%[A-Za-z_]\w+%(?!%)", "%count%", "5% or 6% of it"),
    SpanKind("escaped percent sign", "%%", "%%", "50% %"),
    SpanKind(
        "format of C",
        r"(?<![\d%])%(?:\d+\$)?[-+#0'_^,]*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh?|ll?|[jtzqL]|I64)?[A-Za-z@]",
        "%-5.2f",
        "100%ige",
    ),
    SpanKind("numbered argument", r"(?<![\d%])%[1-9](?!\d)", "%1", "a %50"),
    SpanKind(
        "entity of a letter",
        r"&[A-Za-z](?:acute|grave|circ|uml|tilde|cedil|ring|slash|caron|lig);|&szlig;",
        "&eacute;",
        "R&D; so",
    ),
    SpanKind(
        "code",
        r"```[^`\n]+```|``(?!\s)[^`\n]+(?:`[^`\n]+)*``|`(?![\s`])[^`\n]+`",
        "``a`b``",
        "6` long",
    ),
    SpanKind(
        "time",
        r"(?:(?<!\d)\d{4}-\d\d-\d\dT|(?<![\d:.]))\d{1,2}:\d\d(?::\d\d(?:\.\d+)?)?(?:Z\b|[+-]\d\d:\d\d)?(?![\d:])",
        "2024-01-31T12:00:00Z",
        "1:1",
    ),
)

#: Letters that touch one of these are words for the model.
BETWEEN_WORDS = (
    SpanKind("format of subtitles", r"\{\\[A-Za-z][^{}]*\}", r"{\i1}", "{1}"),
    SpanKind(
        "BBCode",
        r"\[/[A-Za-z][\w-]*\]|\[[biusq]\]|\[[A-Za-z][\w-]*(?:=| [\w-]+=)[^\[\]]+\]",
        '[gallery ids="1,2"]',
        "[a note]",
    ),
    SpanKind("tag", r"</?[A-Za-z][^<>]*>|</?\d+/?>", '<g id="2">', "a < b > c"),
    SpanKind("mention of a chat", r"<[@#!:&][^<>\s]+>", "<@123>", "< @123 >"),
    SpanKind(
        "code of a template", r"<%[^%]*%>|<\?[^?]*\?>|\{%[^{}]*%\}", "{% if x %}", "{ % } <% a"
    ),
    SpanKind("field of a mailing", r"\*\|[^|\s]+\|\*", "*|FNAME|*", "*| two |*"),
    SpanKind("escaped tag", r"&lt;/?[A-Za-z][^<>&]*&gt;", "&lt;b&gt;", "a &lt; b"),
    SpanKind("entity", r"&(?:#\d+|#[xX][\da-fA-F]+|[A-Za-z]\w*);", "&#160;", "R&D and so"),
    SpanKind(
        "emoji by name",
        r"(?<![A-Za-z0-9_:]):[a-z+-][a-z0-9_+-]*:(?![A-Za-z0-9_:])",
        ":arrow-up:",
        "one: two:",
    ),
    SpanKind("emoticon", r"(?<!\S)[:;]['’]?-?[()DPp](?![\w()])", ":-)", "(one:)"),
    SpanKind("escaped line break", r"\\[nrt](?![a-z])", r"\n", r"\next"),
    SpanKind(
        "emoji",
        rf"[0-9#*]\ufe0f?\u20e3|(?:[{_EMOJI}]|[^\w\s]\ufe0f)[\u200d\ufe0f\u20e3\U000e0020-\U000e007f]*",
        "❤\ufe0f",
        "▁a 5 #",
    ),
)


def _any_of(kinds: tuple[SpanKind, ...]) -> str:
    return "|".join(kind.pattern for kind in kinds)


#: One span.
SPAN = re.compile(
    rf"(?<!{LETTER})(?:{LETTER}*(?:{_any_of(IN_WORDS)}))+{LETTER}*|{_any_of(BETWEEN_WORDS)}"
)
#: A character of every span, so that a sentence without spans costs no more than this search.
SIGN = re.compile(
    rf"[{{%<&@`:;#$/\\\ufe0f\u20e3{_EMOJI}]|\[[\[/A-Za-z]|\*\||\d\.\d+\.\d|[\da-fA-F]-[\da-fA-F]{{4}}-|www\.|\w\.[A-Za-z7][A-Za-z0-9]"
)
