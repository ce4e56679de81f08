"""The encoding of a document by what it declares. Labels mean what the standard for browsers says.

See https://encoding.spec.whatwg.org/#names-and-labels and https://html.spec.whatwg.org/#determining-the-character-encoding.
"""

import codecs
import re

from ..utils.errors import UserError
from .html_scanner import Token, scan
from .passages import names

#: The codec that reads an encoding as browsers do, and its labels. Those of UTF-16 are in ASCII, so they mean UTF-8.
_LABELS = """
utf-8         unicode-1-1-utf-8 unicode11utf8 unicode20utf8 utf-8 utf8 x-unicode20utf8
utf-8         csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff unicodefffe utf-16 utf-16be utf-16le
cp866         866 cp866 csibm866 ibm866
iso8859-2     csisolatin2 iso-8859-2 iso-ir-101 iso8859-2 iso88592 iso_8859-2 iso_8859-2:1987 l2 latin2
iso8859-3     csisolatin3 iso-8859-3 iso-ir-109 iso8859-3 iso88593 iso_8859-3 iso_8859-3:1988 l3 latin3
iso8859-4     csisolatin4 iso-8859-4 iso-ir-110 iso8859-4 iso88594 iso_8859-4 iso_8859-4:1988 l4 latin4
iso8859-5     csisolatincyrillic cyrillic iso-8859-5 iso-ir-144 iso8859-5 iso88595 iso_8859-5 iso_8859-5:1988
iso8859-6     arabic asmo-708 csiso88596e csiso88596i csisolatinarabic ecma-114 iso-8859-6 iso-8859-6-e iso-8859-6-i
iso8859-6     iso-ir-127 iso8859-6 iso88596 iso_8859-6 iso_8859-6:1987
iso8859-7     csisolatingreek ecma-118 elot_928 greek greek8 iso-8859-7 iso-ir-126 iso8859-7 iso88597 iso_8859-7
iso8859-7     iso_8859-7:1987 sun_eu_greek
iso8859-8     csiso88598e csisolatinhebrew hebrew iso-8859-8 iso-8859-8-e iso-ir-138 iso8859-8 iso88598 iso_8859-8
iso8859-8     iso_8859-8:1988 visual csiso88598i iso-8859-8-i logical
iso8859-10    csisolatin6 iso-8859-10 iso-ir-157 iso8859-10 iso885910 l6 latin6
iso8859-13    iso-8859-13 iso8859-13 iso885913
iso8859-14    iso-8859-14 iso8859-14 iso885914
iso8859-15    csisolatin9 iso-8859-15 iso8859-15 iso885915 iso_8859-15 l9
iso8859-16    iso-8859-16
koi8-r        cskoi8r koi koi8 koi8-r koi8_r
koi8-u        koi8-ru koi8-u
mac-roman     csmacintosh mac macintosh x-mac-roman
mac-cyrillic  x-mac-cyrillic x-mac-ukrainian
cp874         dos-874 iso-8859-11 iso8859-11 iso885911 tis-620 windows-874
cp1250        cp1250 windows-1250 x-cp1250
cp1251        cp1251 windows-1251 x-cp1251
windows-1252  ansi_x3.4-1968 ascii cp1252 cp819 csisolatin1 ibm819 iso-8859-1 iso-ir-100 iso8859-1 iso88591
windows-1252  iso_8859-1 iso_8859-1:1987 l1 latin1 us-ascii windows-1252 x-cp1252
cp1253        cp1253 windows-1253 x-cp1253
cp1254        cp1254 csisolatin5 iso-8859-9 iso-ir-148 iso8859-9 iso88599 iso_8859-9 iso_8859-9:1989 l5 latin5
cp1254        windows-1254 x-cp1254
cp1255        cp1255 windows-1255 x-cp1255
cp1256        cp1256 windows-1256 x-cp1256
cp1257        cp1257 windows-1257 x-cp1257
cp1258        cp1258 windows-1258 x-cp1258
gbk           chinese csgb2312 csiso58gb231280 gb2312 gb_2312 gb_2312-80 gbk iso-ir-58 x-gbk
gb18030       gb18030
big5hkscs     big5 big5-hkscs cn-big5 csbig5 x-x-big5
euc-jp        cseucpkdfmtjapanese euc-jp x-euc-jp
iso-2022-jp   csiso2022jp iso-2022-jp
cp932         csshiftjis ms932 ms_kanji shift-jis shift_jis sjis windows-31j x-sjis
cp949         cseuckr csksc56011987 euc-kr iso-ir-149 korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 windows-949
"""
CODECS = {
    label: codec for codec, *labels in map(str.split, _LABELS.split("\n")[1:-1]) for label in labels
}
#: Labels that the standard lacks: those that gettext has, and a usual mistake.
CODECS |= dict.fromkeys(["latin-1"], "windows-1252")
CODECS |= {label: label for label in names("cp850 cp874 cp932 cp949 cp950 johab koi8-t")}

_XML = re.compile(rb"^\s*<\?xml[^>]+encoding\s*=\s*[\"']([\w.:-]+)")
_LABEL = re.compile(r"[\w.:-]+")
_IN_CONTENT = re.compile(
    r"""charset\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s;"'][^\s;]*))""", re.IGNORECASE
)


def html_encoding(data: bytes) -> str:
    """The codec of a page, as browsers read it. Without a declaration it is UTF-8, or ASCII if all bytes are.

    In the windows-1252 that browsers assume then, the letters of a translation must be references.
    """
    label = _of_meta(data) or _of_xml(data)
    if label is None:
        return "ascii" if data.isascii() else "utf-8"
    return _codec(label)


def xhtml_encoding(data: bytes) -> str:
    """The codec of a page that is XML, or that browsers read as HTML."""
    label = _of_xml(data)
    return html_encoding(data) if label is None else _codec(label)


def xml_encoding(data: bytes) -> str:
    """The codec that the declaration of XML names."""
    return exact_codec(_of_xml(data))


def exact_codec(label: str | None) -> str:
    """The codec of an encoding as other programs read it: ISO 8859-1, for example, is not windows-1252."""
    if label is None:
        return "utf-8"
    codec = _codec(label)
    if codec == "utf-8":
        return codec
    try:
        return codecs.lookup(label).name
    except LookupError:  # a label that Python lacks
        return codec


def _codec(label: str) -> str:
    """The codec of a label.

    Raises:
        UserError: the label is none of the table. Codecs of Python such as idna and utf-7 would change a text.
    """
    try:
        return CODECS[label.lower()]
    except KeyError:
        raise UserError(
            f"documents: {label} is no encoding of documents; save the file in UTF-8 and declare that"
        ) from None


def _of_xml(data: bytes) -> str | None:
    declared = _XML.match(data)
    return declared[1].decode("ascii") if declared else None


def _of_meta(data: bytes) -> str | None:
    """The label in the first `meta` that has one. Those in comments and scripts are none."""
    for token in scan(data.decode("latin-1")):
        if token.tag == "meta" and (label := _of_attributes(token)):
            return label
    return None


def _of_attributes(meta: Token) -> str | None:
    """The label of an element, if it is one. Others have code of a template in its place."""
    label = meta.attributes.get("charset")
    if label is None and meta.attributes.get("http-equiv", "").lower() == "content-type":
        found = _IN_CONTENT.search(meta.attributes.get("content", ""))
        label = found[found.lastindex or 0] if found else None
    is_label = label is not None and _LABEL.fullmatch(label.strip())
    return label.strip() if label and is_label else None
