"""The inference engine: fast decoding with packed and int8 weights. It imports the bundle and utils only.

Each fast path has one function that returns why it cannot be taken, as the text of its line, or None:

    path                  in place of            why not                           otherwise
    own search            transformers' loops    plan_search: the uncovered names  the loops
    continuous batches    batches of fixed rows  plan_search(refill=True)          refused
    packed weights        modules                not_optimizable                   the modules
    int8                  products               int8_error                        refused
    captured steps        launches               CapturedDecoder._eager_reason     steps of packed weights
    C functions           torch's operators      c_kernels.library                 the operators
    whole stacks in C     calls from Python      CStack.most_rows                  layer by layer
"""

from .. import stub_names

__getattr__, __all__ = stub_names(__name__, __file__)
