"""One description of a toolkit's checkpoint. The importers give it, and it becomes a model with its tokenizers."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .converted import Converted, Fields, Tensors
from .state_dicts import Locate, build_model
from .transformers_folders import set_generation_config
from .vocabularies import TextSide, with_tokenizers


@dataclass(frozen=True)
class Checkpoint:
    """The content of a toolkit's files, under the names of this package."""

    tensors: Tensors
    #: maps the name of our parameter to the toolkit's tensor
    locate: Locate
    fields: Fields  #: of the configuration, without those that the weights decide
    search: Fields  #: settings of `generate`
    unused: Iterable[str] = ()  #: tensors that may be left out
    sides: Sequence[TextSide] = ()  #: the text of source and target, if there are vocabularies
    notes: Sequence[str] = ()  #: for the user

    def converted(self) -> Converted:
        """The model with these weights, search and tokenizers."""
        model = build_model(self.fields, self.tensors, self.locate, self.unused)
        set_generation_config(model, self.search)
        converted = with_tokenizers(model, *self.sides) if self.sides else Converted(model)
        converted.notes += self.notes
        return converted
