"""Operations that move entries: actions against torch.func on torch's own indexing, and what each claims about rows."""

from __future__ import annotations

import pytest
import torch
from action_reference import check_actions
from second_order_reference import random_point

from derivations.indexing import Concatenate, Select, Slice, Stack, Take, Where

X, Y, Z = random_point(60, X=(2, 3, 4), Y=(2, 5, 4), Z=(2, 3, 4)).values()
AT = torch.tensor([[3, 3, 0], [23, 7, 3]])
CONDITION = torch.tensor([[True], [False], [True]])

CASES = {
    "select": (Select(1, 2), lambda x: x[:, 2], (X,)),
    "select from the end": (Select(-1, -3), lambda x: x[..., 1], (X,)),
    "slice": (Slice(1, 1), lambda x: x[:, 1:], (X,)),
    "slice from the end": (Slice(-1, -3, -1), lambda x: x[..., -3:-1], (X,)),
    "slice with a step": (Slice(2, None, None, 3), lambda x: x[..., ::3], (X,)),
    "slice too far": (Slice(1, 1, 2**62), lambda x: x[:, 1:], (X,)),
    "slice of nothing": (Slice(0), lambda x: x * 1, (X,)),
    "concatenate": (Concatenate(1), lambda x, y: torch.cat([x, y], 1), (X, Y)),
    "concatenate from the end": (Concatenate(-2), lambda x, y, z: torch.cat([x, y, z], 1), (X, Y, Z)),
    "stack": (Stack(-1), lambda x, z: torch.stack([x, z], 3), (X, Z)),
    "stack in front": (Stack(0), lambda x, z: torch.stack([x, z]), (X, Z)),
    "take": (Take(AT), lambda x: x.flatten()[AT], (X,)),
    "where": (Where(CONDITION), lambda x, z: torch.where(CONDITION, x, z), (X, Z)),
    "where, broadcast": (Where(CONDITION), lambda x, z: torch.where(CONDITION, x, z), (X[:, :1, :1], Z[0, 0])),
}


@pytest.mark.parametrize("name", CASES)
def test_actions(name):
    primitive, f, inputs = CASES[name]
    check_actions(primitive, f, inputs, range(len(inputs)))
    for k in range(len(inputs)):
        check_actions(primitive, f, inputs, [k])
    assert primitive.is_linear


@pytest.mark.parametrize("operation", [lambda x: x.flip(1), lambda x: x.roll(1, 2), lambda x: x.repeat(1, 2, 1), lambda x: x.mT])
def test_positions_come_from_the_operation_itself(operation):
    check_actions(Take(operation(torch.arange(X.numel()).reshape(X.shape))), operation, (X,), [0])


def test_pieces_add_up():
    """Cutting and joining again is the identity, forwards and backwards."""
    pieces = [Slice(1, 0, 1), Slice(1, 1, 3)]
    joined = Concatenate(1).value(*(piece.value(X) for piece in pieces))
    assert torch.equal(joined, X)
    pulled = Concatenate(1).vjp([piece.value(X) for piece in pieces], Y[:, :3].unsqueeze(0))
    assert torch.equal(sum(piece.vjp((X,), w)[0] for piece, w in zip(pieces, pulled, strict=True))[0], Y[:, :3])


def test_rows():
    assert Select(2, 0).rowwise((X,), 2, (True,))
    assert not Select(1, 0).rowwise((X,), 2, (True,))
    assert Slice(2, 1).rowwise((X,), 2, (True,))
    assert not Slice(1, 1).rowwise((X,), 2, (True,))
    assert Slice(1, 0, 2**62).rowwise((X,), 3, (True,))  # all of an axis
    assert Concatenate(-1).rowwise((X, Z), 2, (True, True))
    assert Stack(-1).rowwise((X, Z), 3, (True, True))
    flipped = torch.arange(24).reshape(2, 3, 4).flip(-1)
    assert Take(flipped).rowwise((X,), 2, (True,))
    assert not Take(flipped).rowwise((X,), 3, (True,))
    assert Where(CONDITION).rowwise((X, Z), 3, (True, True))
    assert not Where(CONDITION).rowwise((X, Z[0]), 1, (True, True))


def test_infinite_constants_do_not_reach_the_derivatives():
    masked = Where(CONDITION)
    minus = torch.tensor(-torch.inf, dtype=torch.float64)
    assert masked.vjp((minus, X), torch.ones(1, *X.shape))[1].isfinite().all()
    assert masked.jvp((minus, X), (None, X.unsqueeze(0))).isfinite().all()


@pytest.mark.parametrize("primitive", [Select(0, 0), Slice(0), Take(AT), Concatenate(0), Stack(0), Where(CONDITION)])
def test_errors(primitive):
    with pytest.raises(ValueError, match="jvp: "):
        primitive.jvp((X,), (None,))
