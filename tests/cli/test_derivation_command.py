"""``derive`` and ``hessiankit derive``: names, formats, exit codes, and what is refused, each in one line that says what to do."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from hessiankit import InputError, Transformer, TransformerBlock, VisionTransformer, derive
from hessiankit.cli.main import main


def printed(capsys, *arguments):
    assert main(["derive", *arguments]) == 0
    return capsys.readouterr().out


def test_text_is_what_python_prints(capsys):
    text = printed(capsys, "--placement", "hybridnorm", "--wrt", "query", "value", "--norm", "rmsnorm")
    block = TransformerBlock(4, 5, placement="hybridnorm", norm="rmsnorm")
    assert text == f"{derive(block, wrt=('query', 'value'))}\n"
    assert text.startswith("∂²Z/(∂W_Q ∂W_V) = (J_ZY")


def test_options_reach_the_block(capsys):
    options = ["--activation", "swiglu", "--heads", "4", "--kv-heads", "2", "--causal", "--rotary", "--bias"]
    text = printed(capsys, "--wrt", "gate", "key", "--placement", "pre", *options, "--format", "explain")
    assert "rows turned by R_l" in text
    assert "σ(U_G)" in text
    assert "b_G" in text
    assert "H_KV: heads of keys and values" in text
    lns = printed(capsys, "--placement", "lns", "--layer", "3", "--wrt", "down", "--format", "explain")
    assert lns.startswith("ℓ = 3\n")


def test_one_name_is_a_jacobian(capsys):
    assert printed(capsys, "--wrt", "down").startswith("∂Z/∂W_2 = J_Z (σ(U) ⊗ I_d)")


def test_json_and_latex(tmp_path, capsys):
    found = json.loads(printed(capsys, "--loss", "mse", "--format", "json"))
    assert found["wrt"] == ["attention.W_Q", "attention.W_V"]
    assert found["loss"] == "mse"
    assert found["lines"][0]["symbol"] == r"\frac{\partial^2 \mathcal{L}}{\partial W_Q\,\partial W_V}"
    assert len(found["terms"]) == 2
    path = tmp_path / "post.tex"
    assert printed(capsys, "--format", "latex", "--out", str(path)) == ""
    assert path.read_text(encoding="utf-8").startswith(r"\documentclass")


BLOCK = TransformerBlock(4, 5)
X = torch.zeros(3, 4)
NAN = torch.full((3, 4), float("nan"))


REFUSED = [
    # of a block
    (BLOCK, {"wrt": "valu"}, "derive: wrt='valu' is not known; did you mean 'value'"),
    (BLOCK, {"wrt": ("query", "output")}, "wrt='output' is not known.*hoose one of query, key, value, up, down"),
    (BLOCK, {"wrt": ("query", "key", "value")}, "is not one or two names; pass one for a Jacobian"),
    (BLOCK, {"wrt": (1, 2)}, "is not one or two names"),
    (BLOCK, {"inputs": torch.zeros(3, 5)}, r"inputs have shape \(3, 5\).*pass \(L, 4\)"),
    (BLOCK, {"inputs": torch.zeros(2, 3, 4)}, r"inputs have shape \(2, 3, 4\); a formula is of one sequence"),
    (BLOCK, {"inputs": torch.zeros(0, 4)}, r"inputs has shape \(0, 4\), with no entries"),
    (BLOCK, {"inputs": torch.zeros(3, 4, dtype=torch.long)}, "inputs are torch.int64; pass a tensor of floating point"),
    (BLOCK, {"inputs": [[0.0] * 4]}, "inputs are list; pass a tensor"),
    (BLOCK, {"inputs": NAN}, "inputs contains NaN or infinity"),
    (BLOCK, {"length": 0}, "length=0, expected at least 1"),
    (BLOCK, {"loss": "mae"}, "loss='mae' is not known"),
    (BLOCK, {"target": X}, "there is a target and no loss"),
    (BLOCK, {"loss": "mse", "target": torch.zeros(3, 5)}, r"target has shape \(3, 5\), .* needs equal shapes"),
    (BLOCK, {"loss": "mse", "target": torch.zeros(2, 3, 4)}, r"target has shape \(2, 3, 4\), .* needs equal shapes"),
    (BLOCK, {"loss": "mse", "target": NAN}, "target contains NaN or infinity"),
    (BLOCK, {"loss": "mse", "target": [0.0]}, "the target is a list; pass a tensor"),
    (BLOCK, {"loss": "cross_entropy", "target": torch.tensor([0, 4, 1])}, r"labels lie in \[0, 4\], expected 0 to 3"),
    (BLOCK, {"loss": "cross_entropy", "target": torch.tensor([0, 1])}, r"target has shape \(2,\), expected \(3,\)"),
    (BLOCK, {"loss": "cross_entropy", "target": torch.zeros(3)}, "target is torch.float32; cross entropy needs integer"),
    (BLOCK, {"loss": "cross_entropy", "target": torch.tensor([0, -100, 1])}, "a label is -100, and a formula has no tokens"),
    # what has no closed form by itself
    (
        nn.Sequential(nn.Linear(4, 4)),
        {},
        "Sequential as it is set has no closed form by itself, and its trace needs inputs; pass inputs=X",
    ),
    (nn.Softmax(dim=0), {}, "Softmax as it is set has no closed form"),
    (nn.MSELoss(reduction="sum"), {}, "MSELoss as it is set has no closed form"),
    (nn.CrossEntropyLoss(torch.ones(3)), {}, "CrossEntropyLoss as it is set has no closed form"),
    (nn.CrossEntropyLoss(label_smoothing=0.1), {}, "CrossEntropyLoss as it is set has no closed form"),
    (nn.CrossEntropyLoss(ignore_index=1), {}, "CrossEntropyLoss as it is set has no closed form"),
    (nn.Embedding(5, 2, max_norm=1.0), {}, "Embedding as it is set has no closed form"),
    (nn.LayerNorm((2, 3)), {}, "LayerNorm over 2 axes"),
    (3, {}, "got int; pass a module, the name of a chapter or a statement"),
    ("layernrm", {}, "what='layernrm' is not known; did you mean 'layernorm'"),
    ("curvature-gap/thm33", {}, "did you mean 'curvature-gap/thm3'"),
    ("thm3", {}, "did you mean 'curvature-gap/thm3'?"),
    (Transformer(11, 8, 16, 2, 2), {}, r"a Transformer is a stack.*pass one of them, such as model.blocks\[0\]"),
    (VisionTransformer(4, 16, 10, d_model=4, d_ff=5), {}, "a VisionTransformer is a stack"),
    # of a chapter or a statement
    (nn.Embedding(5, 2), {"inputs": torch.zeros(3)}, r"inputs are torch.float32 \(3,\); an embedding takes integer tokens"),
    (nn.Embedding(5, 2), {"inputs": torch.tensor([0, 5])}, "tokens run from 0 to 5; this embedding has rows 0 to 4"),
    (nn.Embedding(5, 2), {"inputs": torch.zeros(0, dtype=torch.long)}, "an embedding takes integer tokens"),
    (nn.Embedding(5, 2), {"inputs": [0, 1]}, "inputs are list; an embedding takes integer tokens"),
    ("embedding", {"length": 0}, "length=0, expected at least 1"),
    ("mse", {"loss": "mse"}, "loss='mse' of 'mse', which is a loss itself; drop loss="),
    ("linear", {"target": torch.zeros(3, 6)}, "there is a target and no loss"),
    ("cross_entropy", {"target": torch.zeros(3)}, "cross entropy needs integer class labels"),
    (nn.LayerNorm(4, eps=0.0), {"inputs": torch.ones(3, 4)}, "derive: LayerNormAt: the scale of row 0 is 0"),
    (TransformerBlock(1, 2, placement="kv-post", eps=0.0), {}, "derive: LayerNormAt: the scale of row 0 is 0"),
    ("curvature-gap/thm6", {}, r"a statement that is no derivative: papers.claims\(id=...\)"),
]
"""What is derived, options, and what the refusal says."""


@pytest.mark.parametrize(("what", "options", "message"), REFUSED)
def test_what_cannot_be_used(what, options, message):
    with pytest.raises(InputError, match=message) as caught:
        derive(what, **options)
    assert "\n" not in str(caught.value)


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
