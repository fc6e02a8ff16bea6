"""Modules of a few parameters, each with a structure that the engine treats in its own way: name -> (formula, shapes, input)."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from curvature_reference import Formula, draw
from torch import Tensor
from torch.nn.functional import layer_norm, linear, rms_norm


class Case(NamedTuple):
    """A formula f(parameters, x), the shapes of its parameters, and that of x."""

    f: Callable[[Any, Tensor], Tensor]
    shapes: dict[str, tuple[int, ...]]
    x: tuple[int, ...] = (2, 3, 4)

    def module(self) -> Formula:
        return Formula(self.f, **self.shapes)


def attend(x: Tensor, heads: int = 1) -> Tensor:
    """Attention of tokens that move: rows meet."""
    B, L, d = x.shape
    z = x.reshape(B, L, heads, d // heads).transpose(1, 2)
    return (torch.softmax(z @ z.mT, -1) @ z).transpose(1, 2).reshape(B, L, d)


def scores(s: Any, x: Tensor) -> Tensor:
    return (x @ s.Q) @ (x @ s.K).mT


def after(f: Callable[[Any, Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda s, x: torch.tanh(f(s, x))


def residual(s: Any, x: Tensor) -> Tensor:
    h = torch.tanh(x @ s.W)
    return h + torch.tanh(h @ s.V)


SHAPES = {"Q": (4, 5), "K": (4, 5), "V": (4, 6), "b": (6,), "E": (4, 4)}
INDEX = torch.tensor([[0, 3, 1, 6], [2, 2, 5, 0], [4, 1, 3, 3]])
KEYS, ADDED, FACTOR = draw(5, 3, seed=3), draw(2, 3, 4, seed=8), draw(4, 5, seed=8)

# Three matrices in a row: whether the engine brackets them anew.
PRODUCTS: dict[str, tuple[Callable[[Any, Tensor], Tensor], bool]] = {
    "keys": (after(scores), True),
    "keys of a linear layer": (after(lambda s, x: (x @ s.Q) @ linear(x, s.K.T).mT), True),
    "keys with a bias": (after(lambda s, x: (x @ s.Q) @ linear(x, s.K.T, s.b[:5]).mT), False),
    "keys used twice": (lambda s, x: (lambda k: torch.tanh((x @ s.Q) @ k.mT) @ k)(x @ s.K), False),
    "values": (lambda s, x: torch.softmax(x @ s.Q @ x.new_ones(5, 3), -1) @ (x @ s.V), True),
    "values with a bias": (lambda s, x: torch.softmax(x @ s.Q @ KEYS, -1) @ linear(x, s.V.T, s.b), True),
    "weights that do not sum to one": (lambda s, x: torch.tanh(x @ s.Q @ KEYS) @ linear(x, s.V.T, s.b), False),
    "attention": (lambda s, x: torch.softmax(scores(s, x), -1) @ (x @ s.V), True),
    "softmax over queries": (lambda s, x: torch.softmax(x @ s.Q @ KEYS, -2) @ linear(x, s.V.T, s.b), False),
    "logarithms of weights": (lambda s, x: torch.log_softmax(x @ s.Q @ KEYS, -1) @ linear(x, s.V.T, s.b), False),
    "tokens that move": (lambda s, x: (lambda z: torch.softmax(scores(s, z), -1) @ (z @ s.V))(torch.tanh(x @ s.E)), True),
    "tokens that move, wider than keys": (lambda s, x: torch.tanh((x @ s.E) @ (torch.tanh(x @ s.Q) @ s.K.T).mT), False),
    "one sequence": (lambda s, x: torch.softmax(scores(s, x[0]), -1) @ (x[0] @ s.V), False),
    "tokens of another sample": (lambda s, x: torch.softmax((x @ s.Q) @ (x[:1] @ s.K).mT, -1) @ (x[1:] @ s.V), False),
}

# One operation right after the value that parameters enter: its tangents are an identity, then a diagonal.
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "function": torch.exp,
    "mask": lambda z: z.masked_fill(ADDED > 0, 0.0),
    "sum": lambda z: z + ADDED,
    "difference": lambda z: ADDED - z,
    "product": lambda z: z @ FACTOR,
    "weight and bias": lambda z: linear(z, FACTOR.T, KEYS[:, 0]),
    "product by sample": lambda z: z @ ADDED.mT,
    "layernorm with gain": lambda z: layer_norm(z, (4,), FACTOR[:, 0], eps=0.3),
    "rmsnorm": lambda z: rms_norm(z, (4,), FACTOR[:, 0], 0.3),
}

# Two paths whose rows are indexed differently meet.
MEETING: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "product": lambda s, x: torch.tanh(x @ s.W) @ torch.tanh(x[0] @ s.V).mT,
    "gate by token": lambda s, x: (lambda b: torch.tanh(x @ s.W) * b)(torch.tanh(x @ s.V).mean(1, keepdim=True)),
    "gate by sample": lambda s, x: (lambda b: torch.tanh(x @ s.W) * b)(torch.tanh(x @ s.V).mean(0)),
    "weight from data": lambda s, x: (lambda b: linear(torch.tanh(x @ s.W), b))(torch.tanh(x[0] @ s.V)),
    "rows repeated": lambda s, x: torch.tanh((x[0] @ s.W).expand(3, 3, 5) * torch.tanh(x[1] @ s.V).unsqueeze(1)),
}

# Fewer parameters than entries of the tokens that they reach over several branches.
BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "residual": residual,
    "residual around a residual": lambda s, x: (lambda h: h + torch.tanh(h @ s.U))(residual(s, x)),
    "queries and keys of a residual": lambda s, x: (lambda h: h @ s.V @ (h @ s.U).mT @ h)(residual(s, x)),
    "one weight on both branches": lambda s, x: torch.tanh(x @ s.W) + torch.tanh(torch.tanh(x @ s.V) @ s.W),
}

ROWS_MEET = {
    "two attentions": Case(
        lambda s, x: attend(torch.tanh(attend(torch.tanh(x @ s.U), 2) @ s.V), 2) @ s.W,
        {"U": (3, 4), "V": (4, 4), "W": (4, 2)},
        (2, 5, 3),
    ),
    "weights stored the other way": Case(
        lambda s, x: linear(attend(torch.tanh(linear(attend(torch.tanh(linear(x, s.U, s.a))), s.V, s.b))), s.W),
        {"U": (4, 3), "a": (4,), "V": (5, 4), "b": (5,), "W": (2, 5)},
        (2, 5, 3),
    ),
    "one weight in two layers": Case(
        lambda s, x: attend(torch.tanh(attend(torch.tanh(attend(torch.tanh(x @ s.U)) @ s.V + s.a)) @ s.V + s.a)),
        {"U": (3, 4), "V": (4, 4), "a": (4,)},
        (2, 5, 3),
    ),
    "columns of a weight": Case(
        lambda s, x: attend(torch.tanh(linear(x[..., :2], s.W[:, 1:3]))) @ s.V, {"W": (4, 4), "V": (4, 2)}, (2, 5, 3)
    ),
    "one token": Case(lambda s, x: torch.tanh(attend(torch.tanh(x @ s.U))[:, 1] @ s.V), {"U": (3, 4), "V": (4, 3)}, (2, 5, 3)),
    "rows and columns change places": Case(
        lambda s, x: torch.tanh(torch.tanh(attend(torch.tanh(x @ s.U)).mT @ s.T).mT @ s.V),
        {"U": (3, 4), "T": (5, 5), "V": (4, 2)},
        (2, 5, 3),
    ),
    "entries by an index": Case(lambda s, x: torch.tanh(x + s.b[INDEX]) @ s.V, {"b": (7,), "V": (4, 4)}),
    "functions in a row": Case(lambda s, x: torch.tanh(torch.exp(torch.sin(x @ s.W)) @ s.V), {"W": (4, 4), "V": (4, 3)}),
    "tokens pooled": Case(lambda s, x: torch.tanh(x @ s.A).mean(1) @ s.B, {"A": (4, 5), "B": (5, 2)}),
    "samples meet": Case(
        lambda s, x: (lambda y: torch.tanh(y - y.mean(0)) @ s.B)(torch.tanh(x @ s.A)), {"A": (4, 5), "B": (5, 2)}
    ),
    "parts of a weight, of which one keeps rows apart": Case(
        lambda s, x: attend(x @ s.W[:, :2])[..., :1] + torch.tanh(x @ s.W[:, 2:]), {"W": (4, 5)}
    ),
    "rows that meet before a product": Case(
        lambda s, x: (lambda y: torch.softmax(y @ y.mT, -1) @ x @ s.B)(x @ s.A), {"A": (4, 5), "B": (4, 2)}
    ),
}

ROWS_APART = {
    "a weight used twice": Case(lambda s, x: torch.tanh(torch.tanh(x @ s.W) @ s.W + s.b), {"W": (4, 4), "b": (4,)}),
    "a weight and its transpose": Case(lambda s, x: torch.tanh(torch.tanh(x @ s.W) @ s.W.T), {"W": (4, 5)}),
    "parts of a weight": Case(lambda s, x: torch.tanh(torch.tanh(x @ s.W[:, :3]) @ s.W[:3, 3:]), {"W": (4, 6)}),
    "overlapping parts": Case(lambda s, x: torch.tanh(torch.tanh(x @ s.W[:, :3]) @ s.W[:3, 1:]), {"W": (4, 6)}),
    "a bias that is a row of a weight": Case(lambda s, x: torch.tanh(x @ s.W + s.W[0]), {"W": (4, 5)}),
    "a gain used as a bias": Case(lambda s, x: layer_norm(torch.tanh(x @ s.W), (5,), s.g, s.g), {"W": (4, 5), "g": (5,)}),
    "a chain of norms": Case(
        lambda s, x: rms_norm(torch.tanh(layer_norm(x @ s.A + s.b, (5,), s.g)), (5,)), {"A": (4, 5), "b": (5,), "g": (5,)}
    ),
    "a norm of a sum": Case(
        lambda s, x: torch.tanh(layer_norm(torch.tanh(x @ s.A + s.b) @ s.B + x[..., :3], (3,)) @ s.C),
        {"A": (4, 5), "b": (5,), "B": (5, 3), "C": (3, 3)},
    ),
    "a parameter as it is": Case(lambda s, x: torch.tanh(x @ torch.tanh(s.W)) * s.c.square(), {"W": (4, 5), "c": (5,)}),
    "two parameters as they are": Case(lambda s, x: torch.tanh(x @ torch.tanh(s.A) @ s.B), {"A": (4, 5), "B": (5, 4)}),
    "a table over columns": Case(lambda s, x: torch.tanh(x @ s.W + s.c), {"W": (4, 5), "c": (3, 1)}),
    "a table across columns": Case(lambda s, x: torch.tanh(x @ s.W + s.t[ACROSS]), {"W": (4, 3), "t": (6,)}),
    "norms of heads": Case(
        lambda s, x: torch.tanh(layer_norm(torch.tanh(x @ s.H).unflatten(-1, (2, 3)), (3,), s.g, s.b) @ s.V),
        {"H": (4, 6), "g": (3,), "b": (3,), "V": (3, 2)},
    ),
    # curvature between two places that is diagonal
    "a weight, then a bias": Case(lambda s, x: torch.tanh(torch.tanh(x @ s.W) + s.c), {"W": (4, 3), "c": (3,)}),
    "a bias, then a table": Case(lambda s, x: torch.tanh(torch.tanh(x + s.b) + s.c), {"b": (4,), "c": (3, 4)}),
    "without effect": Case(lambda s, x: (torch.tanh(x @ s.V), torch.tanh(x @ s.W))[1], {"W": (4, 2), "V": (4, 2)}, (3, 4)),
    # widths of consecutive layers: curvature goes back as products where the parent is much wider
    "narrow, wide, narrow": Case(
        lambda s, x: torch.tanh(torch.tanh(torch.tanh(x @ s.A) @ s.B + s.b) @ s.C),
        {"A": (4, 3), "B": (3, 9), "b": (9,), "C": (9, 2)},
    ),
    "two wide": Case(
        lambda s, x: (lambda h: torch.tanh(h @ s.B) @ s.D + torch.tanh(torch.tanh(h @ s.C) @ s.E) + h[..., :2])(
            torch.tanh(x @ s.A)
        ),
        {"A": (4, 3), "B": (3, 8), "C": (3, 7), "D": (8, 2), "E": (7, 2)},
    ),
    "a scalar in place of entries of rows": Case(
        lambda s, x: torch.where(x.reshape(-1, 4) > 0, (x @ s.W).reshape(-1, 4), s.t) @ s.V, {"W": (4, 4), "V": (4, 2), "t": ()}
    ),
}

# Parameters taken as they are that have a row for each sample.
ROW_BY_SAMPLE = {
    "a dot product by sample": Case(lambda s, x: torch.einsum("bd,bd->b", s.U, s.V).sigmoid(), {"U": (5, 3), "V": (5, 3)}),
    "a matrix by sample": Case(
        lambda s, x: torch.tanh(torch.bmm((x * s.U).unsqueeze(1), s.K).squeeze(1).sum(-1, keepdim=True) * s.V),
        {"U": (5, 3), "K": (5, 3, 2), "V": (5, 2)},
        (5, 3),
    ),
    "a number by sample": Case(
        lambda s, x: torch.tanh(torch.tanh((x @ s.W * s.U).sum(-1)) * s.v + s.v), {"W": (3, 3), "U": (5, 3), "v": (5,)}, (5, 3)
    ),
    "means by sample": Case(
        lambda s, x: torch.exp(0.3 * torch.tanh(s.V + x[:, :1]).mean(-1)) * s.v, {"V": (3, 4), "v": (3,)}, (3, 4)
    ),
}

# Where a parameter enters beside others: as a bias of a product or of something else, from the left, scaled, in part.
SITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "bias with a factor": lambda s, x: torch.add(x @ s.W, s.b, alpha=2),
    "product used before its bias": lambda s, x: (lambda z: z * (z + s.b))(x @ s.W),
    "weight from the left": lambda s, x: s.T @ x,
    "norm over two axes": lambda s, x: layer_norm(x @ s.W, (3, 4), s.G),
    "part of a bias": lambda s, x: x @ s.W + s.G[1, :4],
    "one number for all columns": lambda s, x: x @ s.W + s.b[:1],
    "vector": lambda s, x: (x @ s.W)[0, 0] + s.b,
}

CASES: dict[str, Case] = {
    **{f"products: {name}": Case(after(f), SHAPES) for name, (f, _) in PRODUCTS.items()},
    **{
        f"{last.__name__} after {name}": Case(lambda s, x, f=f, g=last: g(f(x @ s.W + s.b)), {"W": (4, 4), "b": (4,)})
        for name, f in OPERATIONS.items()
        for last in (torch.tanh, torch.square)
    },
    **{
        f"{name}, {first} first": Case(after(f), dict.fromkeys(order, (4, 5)))
        for (name, f), (first, *_), order in ((one, o, o) for one in MEETING.items() for o in ("WV", "VW"))
    },
    **{
        f"{name}, {len(shape)} axes": Case(
            lambda s, x, f=f: torch.tanh(torch.softmax(f(s, x) @ f(s, x).mT, -1) @ f(s, x)),
            {"W": (2, 2), "V": (2, 2)} | ({"U": (2, 2)} if " a residual" in name else {}),
            shape,
        )
        for name, f in BRANCHES.items()
        for shape in ((2, 9, 2), (9, 2))
    },
    **ROWS_MEET,
    **ROWS_APART,
    **ROW_BY_SAMPLE,
    **{f"sites: {name}": Case(after(f), {"W": (4, 4), "T": (5, 3), "b": (4,), "G": (3, 4)}) for name, f in SITES.items()},
}

# How a parameter enters: each with entries of the vectors p (or q, r) of 20, in an order of its own, so that uses overlap.
TOKENS = torch.tensor([[0, 1, 1], [1, 0, 1]])
ACROSS = torch.tensor([[[2, 0, 1], [1, 3, 0], [2, 0, 1]], [[2, 0, 0], [2, 0, 0], [1, 1, 0]]])  # an entry in several columns


ORDERS = [torch.randperm(20, generator=torch.Generator().manual_seed(seed)) for seed in range(7)]


def entries(p: Tensor, shape: tuple[int, ...], order: int) -> Tensor:
    return p[ORDERS[order][: torch.Size(shape).numel()]].reshape(shape)


USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "weight": lambda p, x: x @ entries(p, (4, 3), 1),
    "transposed weight": lambda p, x: linear(x.repeat(1, 1, 2)[..., :5], entries(p, (3, 5), 2)),
    "gain": lambda p, x: layer_norm(x[..., :3], (3,), entries(p, (3,), 3)),
    "bias": lambda p, x: x[..., 1:] + entries(p, (3,), 4),
    "table": lambda p, x: torch.nn.functional.embedding(TOKENS, entries(p, (2, 3), 5)),
    "table across columns": lambda p, x: x[..., 1:] + entries(p, (6,), 6)[ACROSS],
}
PAIRS = list(itertools.product(USES, repeat=2))
