"""What derive refuses, each in one line that says what to do."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hessiankit import InputError, Transformer, TransformerBlock, VisionTransformer, derive

BLOCK = TransformerBlock(4, 5)
X = torch.zeros(3, 4)
NAN = torch.full((3, 4), float("nan"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": "valu"}, "derive: wrt='valu' is not known; did you mean 'value'"),
        ({"wrt": ("query", "output")}, "wrt='output' is not known.*hoose one of query, key, value, up, down"),
        ({"wrt": ("query", "key", "value")}, "is not one or two names; pass one for a Jacobian"),
        ({"wrt": ()}, "is not one or two names"),
        ({"wrt": (1, 2)}, "is not one or two names"),
        ({"inputs": torch.zeros(3, 5)}, r"inputs have shape \(3, 5\).*pass \(L, 4\)"),
        ({"inputs": torch.zeros(2, 3, 4)}, r"inputs have shape \(2, 3, 4\); a formula is of one sequence"),
        ({"inputs": torch.zeros(0, 4)}, r"inputs have shape \(0, 4\)"),
        ({"inputs": torch.zeros(3, 4, dtype=torch.long)}, "inputs are torch.int64; pass a tensor of floating point"),
        ({"inputs": [[0.0] * 4]}, "inputs are list; pass a tensor"),
        ({"inputs": NAN}, "inputs hold NaN or infinite entries"),
        ({"length": 0}, "length=0, expected at least 1"),
        ({"loss": "mae"}, "loss='mae' is not known"),
        ({"target": X}, "there is a target and no loss"),
        ({"loss": "mse", "target": torch.zeros(3, 5)}, r"the target is torch.float32 \(3, 5\); mse needs"),
        ({"loss": "mse", "target": NAN}, "mse needs finite numbers"),
        ({"loss": "mse", "target": [0.0]}, "the target is a list; pass a tensor"),
        ({"loss": "cross_entropy", "target": torch.tensor([0, 4, 1])}, "labels run from 0 to 4.*pass labels from 0 to 3"),
        ({"loss": "cross_entropy", "target": torch.tensor([0, -1, 1])}, "labels run from -1 to 1"),
        ({"loss": "cross_entropy", "target": torch.tensor([0, 1])}, r"torch.int64 \(2,\); cross_entropy needs 3 integers"),
        ({"loss": "cross_entropy", "target": torch.zeros(3)}, "torch.float32.*cross_entropy needs 3 integers"),
    ],
)
def test_what_cannot_be_used(options, message):
    with pytest.raises(InputError, match=message) as caught:
        derive(BLOCK, **options)
    assert "\n" not in str(caught.value)


def test_what_is_no_block():
    with pytest.raises(InputError, match=r"expected a hessiankit.TransformerBlock, got Linear"):
        derive(nn.Linear(4, 4))
    with pytest.raises(InputError, match=r"a Transformer is a stack.*pass one of them, such as model.blocks\[0\]"):
        derive(Transformer(11, 8, 16, 2, 2))
    with pytest.raises(InputError, match=r"a VisionTransformer is a stack"):
        derive(VisionTransformer(4, 16, 10, d_model=4, d_ff=5))


def test_options_are_named():
    with pytest.raises(TypeError):
        derive(BLOCK, ("query", "value"))


@pytest.mark.parametrize("name", ["query", "attention.W_Q", "W_Q", "Q"])
def test_a_parameter_has_four_names(name):
    assert derive(BLOCK, wrt=name).wrt == ("attention.W_Q",)


def test_single_precision_stays():
    rotary = TransformerBlock(4, 5, 2, "hybridnorm", rotary=True)
    for block in (BLOCK, rotary):
        assert derive(block).dense().dtype == torch.float32
        assert derive(block.double()).dense().dtype == torch.float64
        block.float()
