"""The models of transformers that fine-tuning may start from."""

from .fairseq_folders import from_fsmt, from_m2m100
from .marian import from_marian

#: model type -> the function that converts a folder
IMPORTERS = {"marian": from_marian, "fsmt": from_fsmt, "m2m_100": from_m2m100}
