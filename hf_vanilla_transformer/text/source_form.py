"""The form of a model's source text, such as canonical SMILES: a function that its tokenizer names.

`source_form` of tokenizer_config.json is MODULE:FUNCTION. It was applied once to each training source, and is applied
once to each source afterwards. A function of `FORMS` runs without being asked. Any other one is the code of somebody,
and a model folder does not decide whether that is imported.
"""

from transformers import PreTrainedTokenizerBase

from ..utils.errors import UserError, shown
from ..utils.normalization import Normalizer, normal_form
from ..utils.user_code import import_function
from . import smiles, source_text
from .token_kinds import recorded_form

_FORMS: tuple[Normalizer, ...] = (smiles.canonical, source_text.spelling, source_text.normalize)
#: The functions of this package that a model folder may name.
FORMS = {f"{form.__module__}:{form.__name__}": form for form in _FORMS}
_CANONICAL = next(iter(FORMS))


class SourceForm:
    """The form of one model's source text.

    Args:
        name: MODULE:FUNCTION.
        trusted: whether a function that is not of this package is imported.

    Raises:
        UserError: such a function cannot be imported.
    """

    def __init__(self, name: str, trusted: bool = False) -> None:
        self.name = name
        self.function: Normalizer | None = None
        #: one line that says why the form is not applied, or None
        self.problem: str | None = None
        if name not in FORMS and not trusted:
            self.problem = (
                f"source_form: the model reads texts in the form that {shown(name)} makes, code that is not of this "
                "package and does not run: give texts in this form, or permit it with trust_remote_code"
            )
            return
        self.function = FORMS.get(name) or import_function(name, "source_form")
        if name not in FORMS:
            return
        try:
            self.function("")
        except UserError as error:  # an extra is missing
            self.function = None
            what = "canonical SMILES, as RDKit writes them" if name == _CANONICAL else name
            self.problem = f"source_form: the input must be {what}: {error}"
        except ValueError:  # it does not take an empty text
            return

    def __call__(self, text: str) -> tuple[str, str | None]:
        """The form of a text, or the text if it has none, and its fault, as far as one is seen."""
        if self.function is not None:
            if form := normal_form(text, self.function):
                return form, None
            return text, f"source_form: {shown(self.name)} refuses the text, which is read as it is"
        if self.name == _CANONICAL and smiles.looks_kekule(text):
            return text, "source_form: Kekulé's spelling of a ring, which the model does not read"
        return text, None


def form_note(tokenizer: PreTrainedTokenizerBase) -> str:
    """What an exported model's user has to know about its form, to append to a line. Empty without one."""
    name = recorded_form(tokenizer)
    return "" if name is None else f"; give it texts in the form of {shown(name)}"
