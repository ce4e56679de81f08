from .optimize import deoptimize as deoptimize
from .optimize import optimize_for_inference as optimize_for_inference
