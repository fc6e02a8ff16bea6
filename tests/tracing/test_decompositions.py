"""Operations taken apart, and the layers of real models that are written with them: exact, and with nothing left over."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from curvature_reference import Formula, assert_exact, draw, randomised
from torch import Tensor, nn

import hessiankit as hk
from derivations.linear import Add, Linear, MatMul
from hessiankit.engine.jacobians import find_sites
from hessiankit.tracing.decompositions import COMPOSITE, DECOMPOSITIONS, aten
from hessiankit.tracing.trace import Trace


class Decoder(nn.Module):
    """Tables for tokens and positions, layers by addmm, three projections in one weight, a tied head."""

    def __init__(self, d: int = 4, vocabulary: int = 5) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, d), nn.Embedding(6, d)
        self.norm, self.drop = nn.LayerNorm(d), nn.Dropout(0.1)
        shapes = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 6), "down": (6, d)}
        self.weights = nn.ParameterDict({name: torch.zeros(shape) for name, shape in shapes.items()})
        self.biases = nn.ParameterDict({name: torch.zeros(shape[1]) for name, shape in shapes.items()})
        self.register_buffer("past", torch.ones(6, 6, dtype=torch.bool).tril())

    def layer(self, name: str, x: Tensor) -> Tensor:
        rows = torch.addmm(self.biases[name], x.view(-1, x.shape[-1]), self.weights[name])
        return rows.view(*x.shape[:-1], -1)

    def forward(self, ids: Tensor) -> Tensor:
        batch, length = ids.shape
        x = self.drop(self.tokens(ids) + self.places(torch.arange(length)))
        heads = (y.view(batch, length, 2, -1).transpose(1, 2) for y in self.layer("qkv", self.norm(x)).split(x.shape[-1], 2))
        q, k, v = heads
        scores = q @ k.transpose(-1, -2) / torch.full([], v.shape[-1] ** 0.5, dtype=x.dtype)
        scores = torch.where(self.past[:length, :length], scores, torch.finfo(x.dtype).min)
        mixed = self.drop(F.softmax(scores, -1)) @ v
        x = x + self.layer("out", mixed.transpose(1, 2).contiguous().view(batch, length, -1))
        h = self.layer("up", self.norm(x))
        x = x + self.layer("down", 0.5 * h * (1 + torch.tanh(0.8 * (h + 0.04 * torch.pow(h, 3)))))
        return x @ self.tokens.weight.T


class Rotary(nn.Module):
    """Gains by hand, rotated queries and keys, one head of keys for two of queries, a gated feed-forward."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(d))
        self.q, self.k, self.v, self.o = (nn.Linear(d, n, bias=False) for n in (d, 2, 2, d))
        self.gate, self.up, self.down = nn.Linear(d, 3), nn.Linear(d, 3), nn.Linear(3, d)

    def norm(self, x: Tensor) -> Tensor:
        return self.gain * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    @staticmethod
    def rotate(x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[-2]).double(), torch.tensor([0.7, 0.7]).double())
        left, right = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-right, left), -1) * angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (f(h).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        k, v = (y[:, :, None].expand(-1, 1, 2, -1, -1).flatten(1, 2) for y in (self.rotate(k), v))
        future = torch.full((x.shape[1],) * 2, -torch.inf).double().triu(1)
        a = F.softmax(torch.einsum("bhid,bhjd->bhij", self.rotate(q), k) + future, -1, dtype=torch.float64).to(x.dtype)
        x = x + self.o((a @ v).transpose(1, 2).reshape(x.shape))
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Patches(nn.Module):
    """Patches by a convolution, a class token, positions, and the three projections by unbind."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.embed, self.norm = nn.Conv2d(1, d, 2, 2), nn.LayerNorm(d)
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, d)), nn.Parameter(torch.zeros(1, 5, d))
        self.qkv, self.out, self.head = nn.Linear(d, 3 * d), nn.Linear(d, d), nn.Linear(d, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.places
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        a = (q * 0.7 @ k.transpose(-2, -1)).softmax(-1)
        x = x + self.out((a @ v).transpose(1, 2).reshape(x.shape))
        return self.head(x[:, 0])


def test_a_decoder_over_tokens():
    inputs, target = torch.tensor([[0, 1, 4], [2, 2, 3]]), torch.tensor([[1, 2, 3], [0, -100, 4]])
    found = assert_exact(randomised(Decoder()).eval(), inputs, target, loss="cross_entropy", tolerance=1e-11)
    assert found.fallbacks == ()


@pytest.mark.parametrize(("module", "shape"), [(Rotary, (2, 3, 4)), (Patches, (2, 1, 4, 4))])
def test_other_families(module, shape):
    assert assert_exact(randomised(module()).eval(), draw(*shape), tolerance=1e-11).fallbacks == ()


def applied(f: object, *inputs: Tensor, **shapes: tuple[int, ...]) -> Trace:
    module = Formula(f, **shapes)
    return hk.trace_module(lambda p, *x: torch.func.functional_call(module, p, x).sum(), dict(module.named_parameters()), inputs)


def test_weight_and_bias_of_addmm_are_one_site():
    traced = applied(lambda s, x: torch.addmm(s.b, x, s.W), draw(3, 4), W=(4, 2), b=(2,))
    assert [type(a.primitive) for a in traced.applications[:2]] == [MatMul, Add]
    assert [[jacobian.parameter for jacobian in site.jacobians] for site in find_sites(traced).values() if site.jacobians] == [
        ["W", "b"]
    ]


@pytest.mark.parametrize(("equation", "shape", "kind"), [("...i,ij->...j", (4, 2), MatMul), ("bli,ji->blj", (2, 4), Linear)])
def test_a_weight_in_einsum_is_a_site(equation, shape, kind):
    traced = applied(lambda s, x: torch.einsum(equation, x, s.W), draw(2, 3, 4), W=shape)
    assert isinstance(traced.applications[0].primitive, kind)
    assert len(find_sites(traced)) == 1


def test_a_piece_of_what_stands_still_does_not_move():
    traced = applied(lambda s, x: torch.mul(*torch.broadcast_tensors(x @ s.W, x[:1, :1])), draw(3, 4), W=(4, 2))
    assert [a.name.rpartition("_")[0] or a.name for a in traced.applications][:2] == ["matmul", "getitem"]
    assert len(traced.applications) == 4  # product, one broadcast, product, sum


def test_what_torch_takes_apart_exists():
    split = (n.partition(".") for n in COMPOSITE)
    known = [getattr(getattr(aten, packet, None), overload or "default", None) for packet, _, overload in split]
    assert all(operation in DECOMPOSITIONS for operation in known if operation is not None)
    assert len([operation for operation in known if operation is not None]) >= len(COMPOSITE) - 2
