"""Structured matrix expressions over torch tensors or exact numbers.

>>> import torch
>>> A, B = Dense(torch.randn(3, 2), "A"), Dense(torch.randn(4, 5), "B")
>>> expression = kron(A, B.T) @ Commutation(2, 4)
>>> expression.shape, expression.latex()
((15, 8), '\\\\left(A\\\\otimes B^\\\\top\\\\right)\\\\,K_{2,4}')
"""

from derivations.matrix.algebra import Kronecker, Product, Scaled, Sum, add, kron, product, scaled
from derivations.matrix.diagonal import BlockDiagonal, Diagonal, DiagonalLift, DiagonalTake
from derivations.matrix.expression import Matrix
from derivations.matrix.inequalities import Inequality, inequalities
from derivations.matrix.leaves import Dense, Identity, Ones, Zero
from derivations.matrix.letters import dimensions, in_letters, letters
from derivations.matrix.named import Named, definitions
from derivations.matrix.permutation import Commutation, VecIdentity
from derivations.matrix.vectorized import SliceTranspose, Vec

__all__ = [
    "BlockDiagonal",
    "Commutation",
    "Dense",
    "Diagonal",
    "DiagonalLift",
    "DiagonalTake",
    "Identity",
    "Inequality",
    "Kronecker",
    "Matrix",
    "Named",
    "Ones",
    "Product",
    "Scaled",
    "SliceTranspose",
    "Sum",
    "Vec",
    "VecIdentity",
    "Zero",
    "add",
    "definitions",
    "dimensions",
    "in_letters",
    "inequalities",
    "kron",
    "letters",
    "product",
    "scaled",
]
