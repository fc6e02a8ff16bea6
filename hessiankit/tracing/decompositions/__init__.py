"""Composite operations, recorded as the operations that they consist of, each with its closed form.

``torch.einsum`` is permutations and one product, ``addmm`` a product and a sum (so that the weight and the bias of a
layer written with it are recognised), a convolution over patches that do not overlap is a linear map of each patch.
"""

from hessiankit.tracing.decompositions import convolutions, functions, losses, norms, products, recurrent, statistics
from hessiankit.tracing.decompositions.registry import COMPOSITE, DECOMPOSITIONS, aten, decomposes

__all__ = [
    "COMPOSITE", "DECOMPOSITIONS", "aten", "convolutions", "decomposes", "functions", "losses", "norms", "products", "recurrent",
    "statistics",
]  # fmt: skip
