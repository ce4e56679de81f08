"""A function of the user that brings texts to one form before they are compared, such as RDKit's canonical SMILES."""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from .errors import UserError, shown
from .untrusted import one_line
from .user_code import import_function

#: The form of a text, or None if the text is invalid. An exception says the same.
Normalizer: TypeAlias = Callable[[str], str | None]

#: The form of an invalid hypothesis. Unicode has no such character, so that it equals no reference, not even "".
INVALID = "\uffff"

#: A text of an n-best list, and whether it is valid. None: nobody has checked it.
FormatPlace: TypeAlias = tuple[str, bool | None]

logger = logging.getLogger(__name__)


def import_normalizer(name: str | None) -> Normalizer | None:
    """Import the function MODULE:FUNCTION. None is no function."""
    return None if name is None else import_function(name, "normalize")


def normal_form(text: str, normalize: Normalizer) -> str | None:
    """The form of a text, or None if it is invalid.

    Raises:
        UserError: the function returns something else. Its text may differ although the values are equal.
    """
    try:
        form = normalize(text)
    except Exception:  # the code of the user, which may refuse an invalid text by any exception
        return None
    if form is not None and not isinstance(form, str):
        raise UserError(f"normalize: it returned {shown(form)}, neither a text nor None")
    return form


def normalized_hypotheses(
    texts: Iterable[str], normalize: Normalizer | None
) -> tuple[list[str], int]:
    """The forms of hypotheses, `INVALID` for invalid ones, and the number of these."""
    if normalize is None:
        return list(texts), 0
    forms = [normal_form(text, normalize) for text in texts]
    return [INVALID if form is None else form for form in forms], forms.count(None)


def n_best_places(
    texts: Iterable[str], normalize: Normalizer | None
) -> dict[FormatPlace, list[int]]:
    """The places of an n-best list, best first, and the rows of `texts` that each stands for.

    A place is a text with its validity: the form of a valid text, or an invalid or unchecked text as it is. Equal
    ones are one place, the one of the best.
    """
    places: dict[FormatPlace, list[int]] = {}
    for row, text in enumerate(texts):
        form = None if normalize is None else normal_form(text, normalize)
        place = (text, None if normalize is None else False) if form is None else (form, True)
        places.setdefault(place, []).append(row)
    return places


def check_normalizer(references: Sequence[str], normalize: Normalizer | None) -> None:
    """Refuse a normaliser for which all references are invalid, because then it fails itself.

    Raises:
        UserError: with the reason of the first one.
    """
    if normalize is None or not references:
        return
    if all(normal_form(text, normalize) is None for text in references):
        reason = _reason(references[0], normalize)
        raise UserError(f"normalize: all {len(references):,} references are invalid; {reason}")


def _reason(text: str, normalize: Normalizer) -> str:
    """Why a text is invalid."""
    try:
        normalize(text)
    except Exception as error:  # the code of the user
        return f"{type(error).__name__}: {one_line(error)}"
    return f"None for {one_line(text)!r}"


def normalized_references(
    columns: Sequence[Sequence[str]], normalize: Normalizer | None
) -> list[list[str]]:
    """The forms of lists of references. An invalid one stays as it is, with a warning that counts them.

    Raises:
        UserError: all references are invalid, because then it is the normaliser that fails.
    """
    if normalize is None:
        return [list(column) for column in columns]
    forms = [[normal_form(text, normalize) for text in column] for column in columns]
    invalid = sum(form is None for column in forms for form in column)
    if invalid and invalid == sum(map(len, columns)):
        check_normalizer(columns[0], normalize)
    if invalid:
        logger.warning("normalize: %s references are invalid and stay as they are", f"{invalid:,}")
    pairs = zip(forms, columns, strict=True)
    return [
        [text if form is None else form for form, text in zip(column, texts, strict=True)]
        for column, texts in pairs
    ]
