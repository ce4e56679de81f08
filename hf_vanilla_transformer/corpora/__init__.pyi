from .inputs import Input as Input
from .inputs import parse_inputs as parse_inputs
from .mixtures import MixtureReport as MixtureReport
from .mixtures import load_pairs as load_pairs
from .numbers import number_pairs as number_pairs
from .pairs import PairReport as PairReport
from .readers import read_lines as read_lines
