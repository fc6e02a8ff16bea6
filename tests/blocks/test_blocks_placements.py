"""Every placement against its formula in the papers, written out again on plain functions; the rules by layer; the registry."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from blocks_reference import attention_by_hand, feedforward_by_hand, norm_by_hand
from curvature_reference import draw, randomised
from torch import nn

import hessiankit as hk
from hessiankit.blocks import NORMS, PLACEMENTS, Placement, Scale, register
from hessiankit.blocks.placements import placement_of_layer

LAYERS = 4
INSIDE = ("qkvc", "qkv", "qkc", "qk", "kv", "kc")


def sublayer(x, branch, norm, switch):
    """HybridNorm, App. E: no norm, ``pre``: f(N(X)) + X, or ``post``: f(N(X)) + N(X)."""
    read = x if switch == "none" else norm(x)
    return branch(read) + (read if switch == "post" else x)


def switched(attention: str, network: str, inside: str = "") -> tuple[str, Callable]:
    """Two switches and the letters of attn_#: Eqs. 41-52."""
    return inside, lambda x, p, _: sublayer(sublayer(x, p.A, p.N1, attention), p.F, p.N2, network)


def original(x, p, _):
    y = p.N1(p.A(x) + x)
    return p.N2(p.F(y) + y)


def lns(x, p, layer):
    y = x + p.A(p.N1(x) / math.sqrt(layer))  # Eq. 51 of The Curse of Depth
    return y + p.F(p.N2(y) / math.sqrt(layer))


def at(*, before=0, norm_a=0, norm_f=0, out_a=0, out_f=0, residual=0) -> tuple[str, Callable]:
    """Pre-Norm with 1 / sqrt(l) at some places, each switched on by a 1 (The Curse of Depth, Table 8)."""

    def formula(x, p, layer):
        r = math.sqrt(layer)
        y = (x + p.A(p.N1(x / r**before) / r**norm_a) / r**out_a) / r**residual
        return (y + p.F(p.N2(y / r**before) / r**norm_f) / r**out_f) / r**residual

    return "", formula


def deepnorm(x, p, _):
    alpha = math.sqrt(math.sqrt(2 * LAYERS))
    y = p.N1(x * alpha + p.A(x))
    return p.N2(y * alpha + p.F(y))


def admin(x, p, _):
    y = p.N1(torch.einsum("...d,d->...d", x, p["omega_1"]) + p.A(x))
    return p.N2(torch.einsum("...d,d->...d", y, p["omega_2"]) + p.F(y))


def sandwich(x, p, _):
    y = x + p.N3(p.A(p.N1(x)))
    return y + p.N4(p.F(p.N2(y)))


def scaled(x, p, _):
    y = x + p.A(p.N1(x)) @ (p["lambda_1"] * torch.eye(x.shape[-1]).double())
    return y + p.F(p.N2(y)) @ (p["lambda_2"] * torch.eye(x.shape[-1]).double())


def olmo2(x, p, _):
    y = x + p.N1(p.A(x))
    return y + p.N2(p.F(y))


def by_layer(first: tuple[str, Callable], others: tuple[str, Callable]) -> Callable[[int], tuple[str, Callable]]:
    return lambda layer: first if layer == 1 else others


HYBRID = switched("none", "post", "qkv")
BY_HAND: dict[str, tuple[str, Callable] | Callable[[int], tuple[str, Callable]]] = {
    "post": ("", original),
    "pre": switched("pre", "pre"),
    "post-shifted": switched("post", "post"),
    "hybridnorm": HYBRID,
    "hybridnorm*": by_layer(switched("pre", "pre", "qkv"), HYBRID),
    "first-qkv-pre": by_layer(switched("none", "pre", "qkv"), HYBRID),
    "embednorm-hybridnorm": HYBRID,
    **{f"{inside}-{network}": switched("none", network, inside) for inside in INSIDE for network in ("post", "pre")},
    **{f"pre-{inside}-{network}": switched("pre", network, inside) for inside in INSIDE for network in ("post", "pre")},
    "pre-post": switched("pre", "post"),
    "post-pre": switched("post", "pre"),
    "mix-ln": by_layer(("", original), switched("pre", "pre")),  # floor(0.25 * 4) = 1
    "lns": ("", lns),
    "lns-before-ln": at(before=1),
    "lns-after-branch": at(out_a=1, out_f=1),
    "lns-after-residual": at(residual=1),
    "lns-only-attention": at(out_a=1),
    "lns-only-ffn": at(out_f=1),
    "lns-only-attention-ln": at(norm_a=1),
    "lns-only-ffn-ln": at(norm_f=1),
    "deepnorm": ("", deepnorm),
    "admin": ("", admin),
    "sandwich": ("", sandwich),
    "group-ln": switched("pre", "pre"),
    "layerscale": ("", scaled),
    "skipinit": ("", scaled),
    "olmo2": ("qk", olmo2),
}


class Parts(dict):
    """The parameters of a block by name, and its branches and norms by hand."""

    def __init__(self, block: hk.TransformerBlock, kind: str, inside: str, scope: str, groups: int) -> None:
        super().__init__({name: p.detach() for name, p in block.named_parameters()})
        self.kind, self.inside, self.scope, self.groups = kind, inside, scope, groups

    def under(self, prefix: str) -> dict[str, torch.Tensor]:
        return {name[len(prefix) :]: p for name, p in self.items() if name.startswith(prefix)}

    def A(self, x):
        return attention_by_hand(
            x, self.under("attention."), 2, True, kind=self.kind, normed=self.inside, scope=self.scope, eps=0.2
        )  # fmt: skip

    def F(self, y):
        return feedforward_by_hand(y, self.under("feedforward."), "gelu")

    def norm(self, k, x):
        p = self.under(f"norm_{k}.")
        y = torch.cat([norm_by_hand(self.kind, part, eps=0.2) for part in x.tensor_split(self.groups, -1)], -1)
        return y * p["weight"] + p.get("bias", 0)

    def __getattr__(self, name):
        """N1 ... N4."""
        return partial(self.norm, int(name.removeprefix("N")))


def build(placement: str, **options) -> hk.TransformerBlock:
    block = hk.TransformerBlock(6, 5, 2, placement, activation="gelu", causal=True, eps=0.2, n_layers=LAYERS, **options)
    return randomised(block)


@pytest.mark.parametrize("layer", [1, 3])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_placement_by_hand(placement, norm, layer):
    block, x = build(placement, norm=norm, layer=layer, groups=3), draw(4, 6)
    entry = BY_HAND[placement]
    inside, formula = entry if isinstance(entry, tuple) else entry(layer)
    groups = 3 if placement == "group-ln" else 1
    expected = formula(x, Parts(block, norm, inside, "full" if placement == "olmo2" else "head", groups), layer)
    assert (block(x) - expected).abs().max() < 1e-12 * (1 + expected.abs().max())
    count = len(block.own_placement.norms) + len(block.own_placement.attention_norms)
    assert len({name for name, _ in block.named_parameters() if "norm_" in name}) == count * (2 if norm == "layernorm" else 1)


def test_every_placement_is_written_out():
    assert set(BY_HAND) == set(PLACEMENTS)
    assert all(name == placement.name == name.lower() for name, placement in PLACEMENTS.items())
    assert all(placement.description and placement.source for placement in PLACEMENTS.values())
    assert str(PLACEMENTS["pre"]).startswith("pre: Pre-Norm: a norm before each branch (HybridNorm, Eqs. 5-6")


@pytest.mark.parametrize(
    ("placement", "n_layers", "alpha", "expected"),
    [
        ("mix-ln", 12, 0.25, ["post"] * 3 + ["pre"] * 9),
        ("mix-ln", 3, 0.25, ["pre"] * 3),
        ("mix-ln", 100, 0.29, ["post"] * 29 + ["pre"] * 71),  # 0.29 * 100 is 28.999999999999996
        ("mix-ln", 2, 1.0, ["post"] * 2),
        ("hybridnorm*", 3, 0.25, ["pre-qkv-pre", "hybridnorm", "hybridnorm"]),
        ("first-qkv-pre", 2, 0.25, ["qkv-pre", "hybridnorm"]),
        ("sandwich", 2, 0.25, ["sandwich"] * 2),
    ],
)
def test_rules_by_layer(placement, n_layers, alpha, expected):
    assert [placement_of_layer(placement, layer, n_layers, alpha).name for layer in range(1, n_layers + 1)] == expected


def test_factors_and_initial_scales_by_depth():
    def block(placement, layer=1, n_layers=1, **options):
        return hk.TransformerBlock(4, 5, placement=placement, layer=layer, n_layers=n_layers, **options)

    assert [block("lns", layer).factor for layer in (1, 4, 16)] == [1.0, 0.5, 0.25]
    assert block("lns", 4, factor=0.125).factor == 0.125
    assert block("deepnorm", 3, 8).factor == 2.0
    assert block("pre", 4).factor is None
    assert [block("skipinit", 3, n).lambda_2.item() for n in (1, 16)] == [1.0, 0.25]
    assert block("skipinit").lambda_1.shape == ()
    for n_layers, initial in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        torch.testing.assert_close(block("layerscale", 2, n_layers).lambda_1.data, torch.full((4,), initial))
    assert block("layerscale", scale_init=0.5).lambda_2.tolist() == [0.5] * 4
    assert block("admin").omega_2.tolist() == [1.0] * 4


def stack(placement: str, n_layers: int = 4, **options) -> hk.Transformer:
    return hk.Transformer(7, 4, 5, n_layers, placement=placement, head=None, seed=0, **options).double()


@pytest.mark.parametrize("placement", ["lns", "lns-after-branch", "deepnorm", "mix-ln", "skipinit"])
def test_a_layer_keeps_its_depth_when_others_go(placement):
    pruned = stack(placement, alpha=0.75)  # of which mix-ln alone takes notice; by default it has fewer Post-Norm layers
    ids = torch.tensor([[1, 5, 2]])
    x, whole = pruned.embedding(ids), copy.deepcopy(pruned)
    del pruned.blocks[0]
    for block in whole.blocks[1:]:
        x = block(x)
    expected = x if whole.final_norm is None else whole.final_norm(x)
    assert torch.equal(pruned(ids), expected)
    rebuilt = stack(placement, 3)  # numbers its layers from 1 again
    rebuilt.load_state_dict(pruned.state_dict())
    assert torch.equal(rebuilt(ids), expected)
    if placement != "skipinit":
        assert [block.layer for block in rebuilt.blocks] == [2, 3, 4]
        state = pruned.state_dict()
        assert state["blocks.0.depth"][:2].tolist() == [2, 4]
        del state["blocks.0.depth"]
        with pytest.raises(RuntimeError, match="Missing key"):
            stack(placement, 3).load_state_dict(state)


def test_a_block_of_another_kind_does_not_load():
    pruned = stack("hybridnorm*")
    del pruned.blocks[0]
    with pytest.raises(RuntimeError, match="layer 2 is a hybridnorm block, this one was built as pre-qkv-pre"):
        stack("hybridnorm*", 3).load_state_dict(pruned.state_dict())


def test_a_placement_of_ones_own():
    def gated(b, X):
        return X + b.factor * b.attention(b.norm_1(X)) * b.mu_1

    mine = Placement("test-gated", gated, "a test", "here", norms=(1,), scales=(Scale("mu", True, lambda layer, n: layer / n),),
                     factor=lambda layer, n: 1 / layer)  # fmt: skip
    register(mine)
    try:
        register(mine)  # again, as a notebook does
        block = hk.TransformerBlock(4, 5, placement="test-gated", layer=2, n_layers=4).double()
        x = draw(3, 4)
        assert (block(x) - x - 0.25 * block.attention(block.norm_1(x))).abs().max() < 1e-15
        late = Placement("test-late", gated, "", "", rule=lambda layer, n, alpha: "test-gated" if layer > 2 else "pre")
        register(late)  # a rule may lead to a placement with a factor
        stack = hk.Transformer(7, 4, 5, 3, placement="test-late")
        assert [block.factor for block in stack.blocks] == [None, None, 1 / 3]
        assert stack(torch.tensor([[1, 2]])).shape == (1, 2, 7)
    finally:
        PLACEMENTS.pop("test-gated")
        PLACEMENTS.pop("test-late", None)
    with pytest.raises(hk.InputError, match="register: 'pre' is one of hessiankit's placements; choose another name"):
        register(Placement("pre", gated, "", ""))


def test_the_how_to_names_every_field():
    text = (Path(__file__).parents[2] / "docs" / "placements-howto.md").read_text()
    fields = set(Placement.__dataclass_fields__) - {"name", "equation", "description", "source"}
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", text, flags=re.MULTILINE)))) == fields


MODERN = {"norm": "rmsnorm", "activation": "swiglu", "n_kv_heads": 1, "rotary": True, "causal": True}


def generic(module: nn.Module) -> nn.Module:
    """Generic parameters, small enough that a stack's softmaxes are not saturated."""
    for p in randomised(module).parameters():
        p.data *= 0.5
    return module


@pytest.mark.parametrize("placement", {p.equation: name for name, p in PLACEMENTS.items()}.values())  # one of each equation
def test_no_operation_is_left_to_autograd(placement):
    block = generic(hk.TransformerBlock(4, 3, 2, placement, **MODERN, layer=2, n_layers=3))
    hessian = hk.hessian(block, draw(3, 4), draw(3, 4, seed=2))
    assert hessian.fallbacks == ()
    assert torch.isfinite(hessian.matrix).all()
