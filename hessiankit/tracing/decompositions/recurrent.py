"""Recurrent layers as the operations of their steps, by torch itself; a version of torch that cannot keeps them whole."""

from __future__ import annotations

from torch._decomp import decompositions

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
