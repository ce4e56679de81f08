from ..engine.optimize import deoptimize as deoptimize
from ..engine.optimize import optimize_for_inference as optimize_for_inference
from .hypothesis import Hypothesis as Hypothesis
from .translator import Translator as Translator
