"""XML of unknown origin: without entities, DTDs, the network and huge trees."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, TypeAlias

from .errors import UserError
from .untrusted import one_line

if TYPE_CHECKING:
    from lxml.etree import _Element

#: An element of lxml, which its functions import when they need it.
XmlElement: TypeAlias = "_Element"

#: Arguments of lxml's parsers. `huge_tree` stays off: it would lift the limits on depth and on one text (10 MB).
SAFE = {"resolve_entities": False, "load_dtd": False, "no_network": True}

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

#: White space and byte order marks.
_BEFORE_XML = b" \t\r\n\xef\xbb\xbf\xff\xfe\0"


def parse_xml(data: bytes, name: str) -> XmlElement:
    """The root element of a document in UTF-8.

    Raises:
        UserError: it is not well-formed, or declares an entity. The message starts with `name`.
    """
    from lxml import etree

    parser = etree.XMLParser(**SAFE, strip_cdata=False, encoding="utf-8")
    try:
        with memory_errors(name):
            root = etree.fromstring(data, parser)
    except (etree.XMLSyntaxError, ValueError) as error:
        raise UserError(f"{name} is no well-formed XML: {one_line(error)}") from None
    refuse_entities(root, name)
    return root


def root_name(data: bytes, name: str) -> str:
    """The name of the root element of a document without its namespace, or "" if the data is no XML at all.

    Raises:
        UserError: the start of the document is not well-formed. The message starts with `name`.
    """
    from lxml import etree

    if not data.lstrip(_BEFORE_XML).startswith(b"<"):
        return ""
    elements = etree.iterparse(BytesIO(data), events=("start",), **SAFE)
    try:
        # a damaged document has names with prefixes
        return next(local_name(element).rpartition(":")[2] for _, element in elements)
    except (etree.XMLSyntaxError, StopIteration) as error:
        raise UserError(f"{name} is no well-formed XML: {one_line(error)}") from None


@contextmanager
def memory_errors(name: str) -> Iterator[None]:
    """Raise a MemoryError where lxml raises a syntax error without a reason: libxml2 has no memory to give one."""
    from lxml import etree

    try:
        yield
    except etree.XMLSyntaxError as error:
        if error.msg is None or error.msg.startswith("unknown error"):
            raise MemoryError(f"{name}: the memory is full") from None
        raise


def refuse_entities(root: XmlElement, name: object) -> None:
    """Raise a UserError if a document declares an entity. It can refer to other files or grow without bound."""
    dtd = root.getroottree().docinfo.internalDTD
    declared = [] if dtd is None else [entity.name for entity in dtd.iterentities()]
    if declared:
        raise UserError(
            f"{name} declares the entity {declared[0]!r}, which is refused: write its text in its place"
        )


def xml_characters(text: str) -> str:
    """A text without the characters that XML does not allow."""
    return _NOT_XML.sub("", text)


def local_name(element: XmlElement) -> str:
    """The name of an element without its namespace, or "" for a comment."""
    return element.tag.rpartition("}")[2] if isinstance(element.tag, str) else ""
