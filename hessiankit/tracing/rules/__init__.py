"""Rules that map operations of torch's tracer to primitives.

Each rule takes the arguments of one ``aten`` operation and returns the primitive and the tensors it acts on. A rule may
ask for the operation's ``result``, and where there are several outputs for the position of its ``output_index``. Whatever has
no rule, or whose rule declines by returning None, falls back on automatic differentiation of that one operation.
"""

from hessiankit.tracing.rules import axes, choosing, functions, layers, linear, shapes
from hessiankit.tracing.rules.registry import RULES, rule

__all__ = ["RULES", "axes", "choosing", "functions", "layers", "linear", "rule", "shapes"]
