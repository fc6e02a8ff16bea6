"""The flow of data tells block types in models whose names say nothing, and contradicts names that lie."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit as hk
from hessiankit.training.partition import model_parts
from hessiankit.training.partition.flow_findings import flow

D, H, W = 8, 2, 4


class Mixing(nn.Module):
    """Attention with one weight ``a`` of (in, 3 W H), whose columns go [head][v, q, k], in plain products; ``b`` is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.c = nn.Parameter(torch.randn(D, 3 * H * W)), nn.Parameter(torch.randn(3 * H * W))
        self.b = nn.Parameter(torch.randn(H * W, D))

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = (x @ self.a + self.c).unflatten(-1, (H, 3, W)).unbind(-2)
        scores = torch.einsum("blhw,bmhw->bhlm", F.normalize(q, dim=-1), k)
        mixed = torch.einsum("bhlm,bmhw->blhw", scores.softmax(-1), v)
        return mixed.flatten(2) @ self.b


class Row(nn.Module):
    """An RMS norm by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.d * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


class Step(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.e, self.f, self.g, self.h = Row(), Mixing(), Row(), nn.Parameter(torch.full((D,), 0.1))
        self.i, self.j = nn.Parameter(torch.randn(2 * 5, D)), nn.Parameter(torch.randn(5, D))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.h * self.f(self.e(x))
        left, right = F.linear(self.g(x), self.i).chunk(2, -1)
        return x + F.silu(left) * right @ self.j


class Nameless(nn.Module):
    """A language model whose parameters are letters."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.k, self.l = nn.Parameter(torch.randn(11, D)), nn.Parameter(torch.randn(6, D))
        self.m = nn.ModuleList([Step(), Step()])
        self.n = Row()
        self.o = None if tied else nn.Parameter(torch.randn(D, 11))
        self.p = nn.Parameter(torch.randn(1, 1, D))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.k[tokens] + self.l[: tokens.shape[1]]
        x = torch.cat([self.p.expand(len(x), -1, -1), x], 1)
        for step in self.m:
            x = step(x)
        return self.n(x) @ (self.k.T if self.o is None else self.o)


TOKENS = torch.tensor([[1, 4, 2], [7, 3, 9]])
X = draw(2, 3, D)
STEP = {"f.b": ("VO", "output"), "h": ("Norm", "gain"), "i": ("FFN", "up"), "j": ("FFN", "down")}
STEP |= {"e.d": ("Norm", "gain"), "g.d": ("Norm", "gain")}
WHOLE = {"k": ("Emb", "embedding"), "l": ("Emb", "position embedding"), "p": ("Emb", "learned token")}
WHOLE |= {"o": ("Head", "head"), "n.d": ("Norm", "gain")}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)


def test_a_model_of_letters() -> None:
    found = {name: [(f.type, f.role) for f in said] for name, said in flow(Nameless(), TOKENS).items()}
    expected = dict(WHOLE)
    for k in range(2):
        expected |= {f"m.{k}.{name}": said for name, said in STEP.items()}
    assert {name: said[0] for name, said in found.items() if ".f.a" not in name and ".f.c" not in name} == expected
    for k in range(2):
        for leaf, axis, suffix in (("a", 1, ""), ("c", 0, " bias")):
            slices = {f.role: (f.axis, f.segments) for f in flow(Nameless(), TOKENS)[f"m.{k}.f.{leaf}"]}
            assert slices == {
                f"value{suffix}": (axis, ((0, 4), (12, 16))),
                f"query{suffix}": (axis, ((4, 8), (16, 20))),
                f"key{suffix}": (axis, ((8, 12), (20, 24))),
            }


def test_names_and_modules_alone_do_not_know_it() -> None:
    with pytest.raises(hk.InputError, match=r"not recognised: 'k' \(Nameless\), 'l' \(Nameless\), 'o' .*'m.0.f.a' .*'m.1.f.b'"):
        model_parts(Nameless())
    parts = model_parts(Nameless(), inputs=TOKENS)
    assert sum(part.size for part in parts) == sum(p.numel() for p in Nameless().parameters())


@pytest.mark.parametrize("tied", ["Emb", "Head"])
def test_a_tie_that_only_the_flow_shows(tied: str) -> None:
    """The embedding is looked up by an index, and its transpose is the head."""
    types = hk.block_types(Nameless(tied=True), inputs=TOKENS, tied=tied)
    assert types["k"] == tied
    assert "Head" not in set(types.values()) - {tied}


def types_of(f: Callable[..., Tensor], **parts: Any) -> dict[str, str]:
    return hk.block_types(Formula(f, **parts), inputs=X)


def test_a_contradiction_is_an_error_that_says_both() -> None:
    """Attention whose queries and values have each other's names."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return m.o_proj(F.scaled_dot_product_attention(m.v_proj(x), m.k_proj(x), m.q_proj(x)))

    liar = Formula(forward, **{f"{letter}_proj": nn.Linear(D, D) for letter in "qkvo"})
    both = "'q_proj.weight' is by its module QK .q_proj of Formula., by the flow of data VO .what makes the values"
    with pytest.raises(hk.InputError, match=f"contradict each other: {both}.*'v_proj.bias' is by its module VO"):
        model_parts(liar, inputs=X)
    types = hk.block_types(liar, inputs=X, overrides={r"^q_proj": "VO", r"^v_proj": "QK"})
    assert (types["q_proj.weight"], types["v_proj.bias"]) == ("VO", "QK")
    assert hk.block_types(liar)["q_proj.weight"] == "QK"


def test_attention_without_softmax_is_not_guessed() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.a(x).chunk(3, -1)
        return x + m.b(q @ (k.mT @ v))

    with pytest.raises(hk.InputError, match=r"not recognised: 'a.weight' .Linear., 'a.bias'.*'b.bias'.*pass overrides="):
        types_of(forward, a=nn.Linear(D, 3 * D), b=nn.Linear(D, D))


def test_a_weight_that_makes_queries_and_keys() -> None:
    """As in Reformer; there is no other."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q = x @ m.a
        return (q @ q.mT).softmax(-1) @ x

    (part,) = model_parts(Formula(forward, a=(D, D)), inputs=X)
    assert (part.type, part.role, part.axis) == ("QK", "query and key", None)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.TransformerEncoderLayer(D, H, 5, dropout=0.5, batch_first=True)
    model.norm1.eval()
    modes = [m.training for m in model.modules()]
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = torch.get_rng_state()
    model_parts(model, inputs=torch.ones(1, 3, D))
    assert [m.training for m in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    for name, p in model.named_parameters():
        assert p.grad is None
        assert p.requires_grad
        assert torch.equal(p, before[name])


def test_inputs_that_do_not_fit() -> None:
    with pytest.raises(hk.InputError, match=r"model_parts: the model does not run on inputs= \(.*\); pass a tensor"):
        model_parts(nn.TransformerEncoderLayer(D, H, 5), inputs=torch.ones(1, 3, D + 1))


def test_several_products_before_one_softmax() -> None:
    """Disentangled attention: content and position each have keys; all of them are QK."""

    def forward(m: Any, x: Tensor) -> Tensor:
        q = x @ m.a
        scores = q @ (x @ m.b).mT + q @ (m.e @ m.c).expand(len(x), -1, -1).mT
        return x + scores.softmax(-1) @ (x @ m.d)

    types = types_of(forward, a=(D, D), b=(D, D), c=(D, D), d=(D, D), e=(3, D))
    assert types == {"a": "QK", "b": "QK", "c": "QK", "d": "VO", "e": "Emb"}


def test_attention_without_output_layer_ends_at_the_residual() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = x + F.scaled_dot_product_attention(*m.a(x).chunk(3, -1))
        return x + m.c(m.b(x).relu())

    types = types_of(forward, a=nn.Linear(D, 3 * D), b=nn.Linear(D, 5), c=nn.Linear(5, D))
    assert types["b.weight"] == types["c.bias"] == "FFN"
    assert types["a.weight[0:8]"] == types["a.bias[8:16]"] == "QK"
    assert types["a.weight[16:24]"] == "VO"


def test_what_is_added_is_a_bias_only_with_one_number_for_each_feature() -> None:
    """Positions added to a layer's output are an embedding; one row added to a norm's is a bias, however it is stored."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x) + m.d
        y = m.e + m.b(x)
        return x + m.c(y, y, y, need_weights=False)[0]

    attention = nn.MultiheadAttention(D, H, batch_first=True)
    start = Formula(forward, a=nn.Linear(D, D), b=nn.LayerNorm(D), c=attention, d=(3, D), e=(1, 1, D))
    said = {name: [(f.type, f.role) for f in found] for name, found in flow(start, X).items()}
    assert said["d"] == [("Emb", "position embedding")]
    assert said["e"] == said["b.bias"] == [("Norm", "norm bias")]
    assert said["a.bias"] == [("Emb", "input map bias")]


class Sums(nn.Module):
    """A transformer without a norm's module, every sum of which is added up in an order that a generator chooses.

    ``split``: products by one weight are sums of products by its pieces, of one head each.
    """

    def __init__(self, generator: random.Random, split: bool) -> None:
        super().__init__()
        self.draw, self.split = generator, split
        self.embedding, self.positions = nn.Parameter(torch.randn(11, D)), nn.Parameter(torch.randn(6, D))
        self.blocks = nn.ModuleList(nn.ParameterDict(self.block()) for _ in range(2))
        self.head, self.head_bias = nn.Parameter(torch.randn(D, 11)), self.vector(11)

    def vector(self, size: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*[1] * self.draw.randrange(3), size))

    def block(self) -> dict[str, nn.Parameter]:
        sizes = {**dict.fromkeys(("query", "key", "value"), (D, H * W)), "output": (H * W, D), "up": (D, 10), "down": (10, D)}
        weights = {name: nn.Parameter(0.3 * torch.randn(size)) for name, size in sizes.items()}
        biases = {f"{name}_bias": self.vector(size[1]) for name, size in sizes.items() if name != "key"}
        gains = {name: nn.Parameter(torch.rand(D)) for name in ("gain", "second_gain")}
        shifts = {name: self.vector(D) for name in ("shift", "second_shift")}
        return {**weights, **biases, **gains, **shifts, "relative": nn.Parameter(torch.randn(H, 3, 3))}

    def sum(self, terms: list[Tensor]) -> Tensor:
        """Add up in a random order, by a random operation each."""
        terms = list(terms)
        while len(terms) > 1:
            self.draw.shuffle(terms)
            a, b = terms.pop(), terms.pop()
            same = a.shape == b.shape
            way = self.draw.randrange(4)
            if way == 0 and same:
                terms.append(torch.stack([a, b]).sum(0))
            elif way == 1 and a.numel() > b.numel():
                terms.append(a.clone().add_(b))
            elif way == 2 and a.numel() > b.numel():
                terms.append(a - (-b.expand(a.shape)))
            else:
                terms.append(torch.add(a, b))
        return terms[0]

    def product(self, x: Tensor, weight: Tensor) -> list[Tensor]:
        pieces = range(0, len(weight), W) if self.split else []
        return [x[..., k : k + W] @ weight[k : k + W] for k in pieces] or [x @ weight]

    def norm(self, x: Tensor, gain: Tensor, shift: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return self.sum([gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)), shift])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.sum([self.embedding[tokens], self.positions[: tokens.shape[1]]])
        mask = torch.full((3, 3), -1e4).triu(1)
        for p in self.blocks:
            h = self.norm(x, p["gain"], p["shift"])
            q, v = (self.sum([*self.product(h, p[name]), p[f"{name}_bias"]]) for name in ("query", "value"))
            q, k, v = (z.unflatten(-1, (H, W)).transpose(1, 2) for z in (q, self.sum(self.product(h, p["key"])), v))
            scores = self.sum([q @ k.mT / W**0.5, p["relative"], mask])
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
            x = self.sum([x, *self.product(mixed, p["output"]), p["output_bias"]])
            h = self.norm(x, p["second_gain"], p["second_shift"])
            u = self.sum([*self.product(h, p["up"]), p["up_bias"]])
            u = 0.5 * u * (1 + torch.tanh(0.8 * (u + 0.04 * u**3)))
            x = self.sum([x, *self.product(u, p["down"]), p["down_bias"]])
        return self.sum([*self.product(x, self.head), self.head_bias])


KINDS = {"query": "QK", "key": "QK", "value": "VO", "output": "VO", "up": "FFN", "down": "FFN", "gain": "Norm", "shift": "Norm"}
KINDS |= {"second": "Norm", "relative": "Emb", "embedding": "Emb", "positions": "Emb", "head": "Head"}


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_types_do_not_depend_on_the_order_of_additions(seed: int, split: bool) -> None:
    model = Sums(random.Random(seed), split)
    said = flow(model, TOKENS)
    types = {name: {f.type for f in said.get(name, [])} for name, _ in model.named_parameters()}
    assert types == {name: {KINDS[name.split(".")[-1].split("_")[0]]} for name in types}


def parallel(order: int | None) -> nn.Module:
    """Attention and feed-forward layer of one block added up with two biases, which no order of additions tells apart."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = F.layer_norm(x, (D,))
        mixed, up = F.scaled_dot_product_attention(*m.a(h).chunk(3, -1)), m.u(h).relu()
        if order is None:  # biases of layers
            return x + F.linear(mixed, m.o, m.b) + F.linear(up, m.d, m.c)
        o, d = F.linear(mixed, m.o), F.linear(up, m.d)
        return (x + (o + m.b) + (d + m.c), x + o + d + m.b + m.c, x + (o + d) + (m.b + m.c))[order]

    return Formula(forward, a=nn.Linear(D, 3 * D), u=nn.Linear(D, 5), o=(D, D), d=(D, 5), b=(D,), c=(D,))


@pytest.mark.parametrize("order", range(3))
def test_biases_of_one_sum_of_two_layers_are_not_guessed(order: int) -> None:
    reason = "flow: it is added to a sum of FFN and VO"
    with pytest.raises(hk.InputError, match=f"not recognised: 'b' .{reason}., 'c' .{reason}.; pass overrides="):
        model_parts(parallel(order), inputs=X)
    types = hk.block_types(parallel(None), inputs=X)
    assert (types["b"], types["c"]) == ("VO", "FFN")


def test_a_bias_of_what_attention_averages() -> None:
    """P (V + b) = P V + b, since the rows of a softmax sum to 1."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return x + m.o(F.scaled_dot_product_attention(*m.a(x).chunk(3, -1)) + m.b)

    (found,) = flow(Formula(forward, a=nn.Linear(D, 3 * D), o=nn.Linear(D, D), b=(D,)), X)["b"]
    assert (found.type, found.role) == ("VO", "value bias")


def test_weights_of_experts_that_an_index_chooses_and_an_output_after_integers() -> None:
    """Weights and biases are gathered for every token; the output comes after the choices."""

    def forward(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.a(x)
        y = F.layer_norm(x, (D,))
        best = m.r(y).softmax(-1).amax(-1)
        choice = m.r(y).topk(1)[1][:, 0]
        up = torch.bmm(y.unsqueeze(1), m.u[choice]) + m.b[choice].unsqueeze(1)
        down = torch.bmm(up.relu(), m.d[choice]).squeeze(1) + m.c[choice]
        return choice, m.h(F.layer_norm(x + best.unsqueeze(1) * down, (D,)))

    layers = {"a": nn.Linear(D, D), "r": nn.Linear(D, 4, bias=False), "h": nn.Linear(D, 3)}
    gathered = Formula(forward, **layers, u=(4, D, 6), b=(4, 6), d=(4, 6, D), c=(4, D))
    said = {name: {f.type for f in found} for name, found in flow(gathered, X[0]).items()}
    ends = {"a.weight": {"Emb"}, "a.bias": {"Emb"}, "h.weight": {"Head"}, "h.bias": {"Head"}, "r.weight": {"Other"}}
    assert said == {**{name: {"FFN"} for name in "ubdc"}, **ends}


def test_the_flow_decides_on_a_fused_layer_whose_order_is_only_supposed() -> None:
    """Values first, and no number of heads by which one could tell."""

    def forward(m: Any, x: Tensor) -> Tensor:
        v, q, k = m.c_attn(x).chunk(3, -1)
        return x + m.c_proj(F.scaled_dot_product_attention(q, k, v))

    types = types_of(forward, c_attn=nn.Linear(D, 3 * D), c_proj=nn.Linear(D, D))
    assert [types[f"c_attn.weight[{at}]"] for at in ("0:8", "8:16", "16:24")] == ["VO", "QK", "QK"]


class Gated(Mixing):
    """Attention whose output is multiplied by a gate: one number for each head, or for each entry."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.d = nn.Parameter(torch.randn(D, H * W if whole else H))

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = (x @ self.a + self.c).unflatten(-1, (H, 3, W)).unbind(-2)
        mixed = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v))).transpose(1, 2)
        gate = torch.sigmoid(x @ self.d).unflatten(-1, (H, -1))
        return (mixed * gate).flatten(2) @ self.b


class Chosen(Mixing):
    """Attention to the two keys with the largest scores of an indexer, whose weights get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.j, self.w = nn.Parameter(torch.randn(D, 6)), nn.Parameter(torch.randn(D, 3)), nn.Parameter(torch.randn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        v, q, k = (x @ self.a + self.c).unflatten(-1, (H, 3, W)).unbind(-2)
        scores = torch.relu(torch.einsum("blhw,bmw->blmh", (x @ self.i).unflatten(-1, (2, 3)), x @ self.j))
        chosen = torch.einsum("blmh,blh->blm", scores, x @ self.w).topk(2, dim=-1).indices
        mask = torch.full((len(x), x.shape[1], x.shape[1]), -torch.inf).to(x).scatter(-1, chosen, 0.0)
        attend = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), attn_mask=mask.unsqueeze(1))
        return attend.transpose(1, 2).flatten(2) @ self.b


def with_attention(kind: Callable[[], nn.Module]) -> Nameless:
    model = Nameless()
    for step in model.m:
        step.f = kind()
    return model


@pytest.mark.parametrize("whole", [False, True])
def test_gates_of_attention(whole: bool) -> None:
    parts = {part.parameter: part for part in model_parts(with_attention(lambda: Gated(whole)), inputs=TOKENS)}
    for k in range(2):
        assert (parts[f"m.{k}.f.d"].type, parts[f"m.{k}.f.d"].role) == ("Other", "attention gate")
        assert parts[f"m.{k}.f.b"].role == "output"


def test_an_indexer_whose_largest_scores_are_taken() -> None:
    types = hk.block_types(with_attention(Chosen), inputs=TOKENS)
    assert {types[f"m.{k}.f.{leaf}"] for k in range(2) for leaf in "ijw"} == {"Other"}
    assert types.entries["QK"] == 2 * 2 * (D + 1) * H * W


SCALES: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "of logits": (lambda x, W, s: x @ W * s, "Head"),
    "exponential": (lambda x, W, s: s.exp() * (x @ W), "Head"),
    "of cosines": (lambda x, W, s: F.normalize(x, dim=-1) @ F.normalize(W, dim=0) * s, "Head"),
    "of the head's input": (lambda x, W, s: (x * s) @ W, "Norm"),
    "of a norm of logits": (lambda x, W, s: F.normalize(x @ W, dim=-1) * s, "Norm"),
}


@pytest.mark.parametrize("name", SCALES)
def test_scales_of_logits(name: str) -> None:
    class Scaled(Nameless):
        def __init__(self) -> None:
            super().__init__()
            self.s = nn.Parameter(torch.ones(()))

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.k[tokens] + self.l[: tokens.shape[1]]
            for step in self.m:
                x = step(x)
            return SCALES[name][0](self.n(x), self.o, self.s)

    model = Scaled()
    del model.p
    assert hk.block_types(model, inputs=TOKENS)["s"] == SCALES[name][1]


def test_an_exported_program() -> None:
    """It has no ``eval()``, and needs none unless an operation of it is in training mode."""
    model = nn.Sequential(nn.Embedding(11, D), nn.TransformerEncoderLayer(D, H, 6, 0.0, batch_first=True), nn.Linear(D, 11))
    exported = torch.export.export(model.eval(), (TOKENS,)).module()
    found, expected = hk.block_types(exported, inputs=TOKENS), hk.block_types(model, inputs=TOKENS)
    assert dict(found) == dict(expected)
    training = nn.Sequential(model[0], nn.Dropout(0.5), nn.Linear(D, 11)).train()
    with pytest.raises(
        hk.InputError, match=r"^block_types: eval\(\) of the GraphModule raises .* what torch.export makes of model.eval\(\)"
    ):
        hk.block_types(torch.export.export(training, (TOKENS,)).module(), inputs=TOKENS)


def test_a_chain_of_concatenations() -> None:
    """Each joins two slices of the one before, so that 2^50 paths lead to the first."""

    class Chain(Nameless):
        def forward(self, tokens: Tensor) -> Tensor:
            x = self.k[tokens] + self.l[: tokens.shape[1]]
            for step in self.m:
                x = step(x)
            for _ in range(50):
                x = torch.cat([x[..., :3], x[..., 3:]], -1)
            return self.n(x) @ self.o

    model = Chain()
    del model.p
    types = hk.block_types(model, inputs=TOKENS)
    assert types["o"] == "Head"
    assert set(types.values()) == {"Emb", "QK", "VO", "FFN", "Norm", "Head"}
