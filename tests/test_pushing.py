"""What is known of the structure of tangents, against the tangents themselves and torch.autograd."""

from __future__ import annotations

import pytest
import torch
from curvature_reference import draw
from torch import Tensor
from torch.autograd.functional import hessian, jacobian

from derivations.activation import Activation
from derivations.elementwise import Elementwise
from derivations.linear import Add, Linear, MaskedFill, MatMul, Multiple, Shift
from derivations.loss import MeanSquaredError
from derivations.normalization import LayerNorm, RMSNorm
from hessiankit.engine.pushforward import LazyLinearisation, contract, push_forward, structured_curvature
from hessiankit.engine.tangents import EntrywiseTangents, StackedTangents, TangentGroup, by_row

X, GAIN = draw(2, 3, 4), draw(4, seed=3)
SLOPES = EntrywiseTangents(draw(2, 3, 4, seed=5), 7, 2)
UNIT = EntrywiseTangents(torch.ones(()).to(X).expand(X.shape), 7, 2, unit=True)
PRIMITIVES = {
    "activation": (Activation("gelu"), (X,)),
    "function": (Elementwise("exp"), (X,)),
    "scale": (Multiple(-2.0), (X,)),
    "shift": (Shift(1.0), (X,)),
    "mask": (MaskedFill(X > 0, 0.0), (X,)),
    "sum": (Add(), (X, draw(2, 3, 4, seed=8))),
    "difference": (Add(-1.0), (X, draw(2, 3, 4, seed=8))),
    "sum of other shapes": (Add(), (X, draw(4, seed=8))),
    "product": (MatMul(), (X, draw(4, 5, seed=8))),
    "weight and bias": (Linear(), (X, draw(5, 4, seed=8), draw(5, seed=9))),
    "product by sample": (MatMul(), (X, draw(2, 4, 5, seed=8))),
    "layernorm": (LayerNorm(eps=0.3), (X,)),
    "layernorm with gain": (LayerNorm(eps=0.3), (X, GAIN, None)),
    "rmsnorm": (RMSNorm(eps=0.3), (X, GAIN)),
}


def group(stack: StackedTangents, inputs: tuple[Tensor | None, ...]) -> TangentGroup:
    return TangentGroup(2, stack.vertices, stack.widths, [stack, *[None] * (len(inputs) - 1)])


@pytest.mark.parametrize(
    "stack", [SLOPES, UNIT, StackedTangents(draw(3, 2, 3, 4, seed=6), (7,), (3,))], ids=["slopes", "unit", "dense"]
)
@pytest.mark.parametrize("name", PRIMITIVES)
def test_tangents_are_those_of_the_columns(name, stack):
    primitive, inputs = PRIMITIVES[name]
    moving = [True, *[False] * (len(inputs) - 1)]
    out = push_forward(LazyLinearisation(primitive, inputs, None, moving), group(stack, inputs))
    expected = primitive.jvp(inputs, [stack.data, *[None] * (len(inputs) - 1)])
    assert out.data.shape == expected.shape
    assert (out.data - expected).abs().max() <= 1e-14 * expected.abs().max()
    assert out.units == (stack.units if name == "sum" else frozenset())


@pytest.mark.parametrize("name", ["layernorm", "layernorm with gain", "rmsnorm"])
def test_curvature_of_a_norm_at_its_own_input(name):
    primitive, inputs = PRIMITIVES[name]
    adjoint = draw(2, 3, 4, seed=11)
    K = structured_curvature(
        LazyLinearisation(primitive, inputs, adjoint, [True, *[False] * (len(inputs) - 1)]), group(UNIT, inputs)
    )
    assert K is not None
    for n, (x, w) in enumerate(zip(X.reshape(-1, 4), adjoint.reshape(-1, 4), strict=True)):
        gain = inputs[1] if len(inputs) > 1 else torch.ones(4).to(X)

        def value(z: Tensor, w: Tensor = w, gain: Tensor = gain) -> Tensor:
            m = z - z.mean() if isinstance(primitive, LayerNorm) else z
            return (w * gain * m / (m.square().mean() + 0.3).sqrt()).sum()

        expected = hessian(value, x)
        assert (K[n] - expected).abs().max() <= 1e-13 * expected.abs().max()


@pytest.mark.parametrize("stack", [SLOPES, UNIT], ids=["slopes", "unit"])
def test_curvature_of_entries_is_a_diagonal(stack):
    z, target, adjoint = X, draw(2, 3, 4, seed=12), draw(2, 3, 4, seed=11)
    K = structured_curvature(LazyLinearisation(Activation("tanh"), (z,), adjoint, [True]), group(stack, (z,)))
    bent = torch.stack([hessian(torch.tanh, one) for one in z.reshape(-1)]).reshape(z.shape)
    assert torch.allclose(K, (adjoint * bent * stack.slopes.square()).reshape(6, 4), rtol=1e-13)
    loss = MeanSquaredError(24.0, constant_target=True)
    K = structured_curvature(
        LazyLinearisation(loss, (z, target), torch.tensor(3.0).to(X), [True, False]), group(stack, (z, target))
    )
    assert torch.allclose(K, (3 * 2 / 24 * stack.slopes.square()).reshape(6, 4), rtol=1e-14)
    K = structured_curvature(LazyLinearisation(Activation("relu"), (z,), adjoint, [True]), group(stack, (z,)))
    assert K.numel() == 0


@pytest.mark.parametrize("stack", [SLOPES, UNIT], ids=["slopes", "unit"])
def test_contraction_with_diagonal_tangents(stack):
    covectors = draw(5, 2, 3, 4, seed=13)
    found = contract(group(stack, (X,)), 0, by_row(covectors, 2))
    expected = torch.einsum("sabf,cabf->absc", stack.data, covectors).reshape(6, 4, 5)
    assert (found - expected).abs().max() <= 1e-14 * expected.abs().max()


def test_tangents_of_a_chain():
    """Identity, activation and weight, one after the other, against the Jacobian of the whole."""
    weight = draw(4, 5, seed=8)
    bent = push_forward(LazyLinearisation(Activation("tanh"), (X,), None, [True]), group(UNIT, (X,)))
    out = push_forward(LazyLinearisation(MatMul(), (torch.tanh(X), weight), None, [True, False]), group(bent, (X, weight)))
    J = jacobian(lambda x: torch.tanh(x) @ weight, X.reshape(6, 4))  # (6, 5, 6, 4)
    expected = J[torch.arange(6), :, torch.arange(6)].mT  # (row, vertex's column, entry)
    assert (by_row(out.data, 2) - expected).abs().max() <= 1e-14 * expected.abs().max()
