"""Recurrent layers by closed forms of their steps, against reverse over reverse through the module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from curvature_reference import draw, reverse_over_reverse
from readings import assert_readings, in_turn
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

X = draw(3, 4)


class Recurrent(nn.Module):
    """A recurrent layer over sequences, whole or of unequal lengths."""

    def __init__(self, kind: type[nn.RNNBase], *, packed: bool = False, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.packed = kind(4, 2, batch_first=True, **options).double(), packed

    def forward(self, x: Tensor) -> Tensor:
        """Return the states, (2, L, .)."""
        sequences = torch.stack([x, 2 * x])
        if not self.packed:
            return self.net(sequences)[0]
        return pad_packed_sequence(self.net(pack_padded_sequence(sequences, [3, 2], batch_first=True))[0], batch_first=True)[0]


CASES = {
    "GRU": Recurrent(nn.GRU),
    "LSTM": Recurrent(nn.LSTM),
    "tanh": Recurrent(nn.RNN),
    "relu": Recurrent(nn.RNN, nonlinearity="relu"),
    "two layers, both directions": Recurrent(nn.LSTM, num_layers=2, bidirectional=True),
    "projected, without bias": Recurrent(nn.LSTM, proj_size=1, bias=False),
    "packed GRU": Recurrent(nn.GRU, packed=True),
    "packed LSTM": Recurrent(nn.LSTM, packed=True),
}


def loss(z: Tensor, _: Any = None) -> Tensor:
    """A nonlinear loss."""
    return (z + 0.3).square().sum() / 2 + z.pow(3).sum() / 10


@pytest.mark.parametrize(("k", "name"), enumerate(CASES))
def test_recurrent_layers_are_differentiated_by_their_steps(k: int, name: str) -> None:
    module = CASES[name]
    expected = reverse_over_reverse(module, X, draw(1), loss)
    found = assert_readings(expected, module, X, draw(1), readings=in_turn(k), loss=loss)["hessian"]
    assert set(found.fallbacks) <= {"aten._pad_packed_sequence.default"}
