"""A function of the user that brings texts to one form before they are compared, such as RDKit's canonical SMILES."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from .errors import UserError
from .untrusted import one_line
from .user_code import import_object

#: The form of a text, or None if the text is invalid. An exception says the same.
Normalizer: TypeAlias = Callable[[str], str | None]

logger = logging.getLogger(__name__)


def import_normalizer(name: str | None) -> Normalizer | None:
    """Import the function MODULE:FUNCTION. None is no function."""
    if name is None:
        return None
    try:
        return import_object(name)
    except Exception as error:  # the code of the user
        raise UserError(f"normalize: {name}: {one_line(error)}; give MODULE:FUNCTION") from error


def normal_form(text: str, normalize: Normalizer) -> str | None:
    """The form of a text, or None if it is invalid."""
    try:
        form = normalize(text)
    except Exception:  # the code of the user, which may refuse an invalid text by any exception
        return None
    return None if form is None else str(form)


def normalized_hypotheses(
    texts: Iterable[str], normalize: Normalizer | None
) -> tuple[list[str], int]:
    """The forms of hypotheses, "" for invalid ones, and the number of these."""
    if normalize is None:
        return list(texts), 0
    forms = [normal_form(text, normalize) for text in texts]
    return [form or "" for form in forms], sum(form is None for form in forms)


def normalized_references(
    columns: Sequence[Sequence[str]], normalize: Normalizer | None
) -> list[list[str]]:
    """The forms of lists of references. An invalid one stays as it is, with a warning that counts them."""
    if normalize is None:
        return [list(column) for column in columns]
    forms = [[normal_form(text, normalize) for text in column] for column in columns]
    invalid = sum(form is None for column in forms for form in column)
    if invalid:
        logger.warning("normalize: %s references are invalid and stay as they are", f"{invalid:,}")
    pairs = zip(forms, columns, strict=True)
    return [
        [text if form is None else form for form, text in zip(column, texts, strict=True)]
        for column, texts in pairs
    ]
