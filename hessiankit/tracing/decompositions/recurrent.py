"""Recurrent layers as the operations of their steps, by torch itself; a version of torch that cannot keeps them whole. Cells."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._decomp import decompositions
from torch.nn import functional as F

from hessiankit.tracing.decompositions.registry import aten, decomposes

PARTS = {
    "gru.input": "gru_impl",
    "gru.data": "gru_impl_data",
    "lstm.input": "lstm_impl",
    "lstm.data": "lstm_data_impl",
    "rnn_tanh.input": "rnn_tanh_input",
    "rnn_tanh.data": "rnn_tanh_data",
    "rnn_relu.input": "rnn_relu_input",
    "rnn_relu.data": "rnn_relu_data",
}
"""Names of operations, and of torch's functions that take them apart; of sequences of equal length, and of packed ones."""

for _operation, _parts in PARTS.items():
    _packet, _, _overload = _operation.partition(".")
    if hasattr(decompositions, _parts):
        decomposes(getattr(getattr(aten, _packet), _overload))(getattr(decompositions, _parts))


@decomposes(aten.rnn_tanh_cell.default)
def rnn_tanh_cell(x: Tensor, h: Tensor, W: Tensor, V: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """h' = tanh(W x + b + V h + c)."""
    return torch.tanh(F.linear(x, W, b) + F.linear(h, V, c))


@decomposes(aten.rnn_relu_cell.default)
def rnn_relu_cell(x: Tensor, h: Tensor, W: Tensor, V: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """h' = relu(W x + b + V h + c)."""
    return torch.relu(F.linear(x, W, b) + F.linear(h, V, c))


@decomposes(aten.gru_cell.default)
def gru_cell(x: Tensor, h: Tensor, W: Tensor, V: Tensor, b: Tensor | None = None, c: Tensor | None = None) -> Tensor:
    """h' = (1 - z) n + z h, with gates r and z and the new state n, in this order in the weights."""
    (r, z, n), (r_h, z_h, n_h) = F.linear(x, W, b).chunk(3, -1), F.linear(h, V, c).chunk(3, -1)
    z = torch.sigmoid(z + z_h)
    return (1 - z) * torch.tanh(n + torch.sigmoid(r + r_h) * n_h) + z * h


@decomposes(aten.lstm_cell.default)
def lstm_cell(
    x: Tensor, state: Sequence[Tensor], W: Tensor, V: Tensor, b: Tensor | None = None, c: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(h', s') with s' = f s + i g and h' = o tanh(s'), the gates i, f, g, o in this order in the weights."""
    h, s = state
    i, f, g, o = (F.linear(x, W, b) + F.linear(h, V, c)).chunk(4, -1)
    s = torch.sigmoid(f) * s + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(s), s
