"""A fixed set of modules and chapters on which ``hessiankit.check`` alone is to see an error in a formula or in the engine.

Between them they reach the closed forms of the toolkit: placements, activations, heads, masks, both losses, and an
``nn.Sequential`` or a few lines of a user's own for every further kind of operation. Each is checked with its default options.
Then every chapter is, in exact arithmetic.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hessiankit
from hessiankit.theory.exact.check import chapters, check_exact

Case = Callable[[], dict[str, Any]]
CASES: dict[str, Case] = {}
RTOL = 1e-10


def case(build: Case) -> Case:
    """Add a case: a function that returns the arguments of ``check``."""
    CASES[build.__name__.replace("_", " ")] = build
    return build


class Own(nn.Module):
    """A user's module: parameters by name, and a forward of a few lines."""

    def __init__(self, forward: Callable[..., Tensor], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.run = forward
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))

    def forward(self, x: Tensor) -> Tensor:
        """Run it."""
        return self.run(self, x)


def mse(module: nn.Module, *shape: int, **options: Any) -> dict[str, Any]:
    """Return the arguments for a squared error at generic inputs."""
    x = torch.randn(*shape)
    with torch.no_grad():
        return {"block_or_module": module, "inputs": x, "target": torch.randn_like(module(x)), **options}


def labels(module: nn.Module, *shape: int, ignored: bool = False) -> dict[str, Any]:
    """Return the arguments for a cross entropy at generic inputs."""
    x = torch.randn(*shape)
    with torch.no_grad():
        z = module(x)
    y = torch.randint(z.shape[-1], z.shape[:-1])
    if ignored:
        y[..., 0] = -100
    return {"block_or_module": module, "inputs": x, "target": y, "loss": "cross_entropy"}


@case
def post_norm_block() -> dict[str, Any]:
    return {"block_or_module": hessiankit.TransformerBlock(4, 5, d_k=2, activation="gelu")}


@case
def pre_norm_block_with_heads() -> dict[str, Any]:
    block = hessiankit.TransformerBlock(4, 5, 2, "pre", activation="silu", bias=True, attention_bias=True, causal=True)
    return {"block_or_module": block, "loss": "cross_entropy"}


@case
def post_norm_block_with_heads() -> dict[str, Any]:
    return {"block_or_module": hessiankit.TransformerBlock(4, 5, 2, activation="tanh", bias=True)}


@case
def hybrid_norm_with_rms() -> dict[str, Any]:
    return {"block_or_module": hessiankit.TransformerBlock(4, 3, 2, "hybridnorm", "rmsnorm", "gelu")}


@case
def rotary_with_shared_heads() -> dict[str, Any]:
    return {"block_or_module": hessiankit.TransformerBlock(8, 3, 4, "sandwich", n_kv_heads=2, rotary=True, activation="gelu")}


@case
def language_model() -> dict[str, Any]:
    model = hessiankit.Transformer(5, 4, 6, 2, 2, max_len=4, causal=True, activation="gelu", seed=0)
    return {"block_or_module": model, "loss": "cross_entropy"}


@case
def vision_transformer() -> dict[str, Any]:
    model = hessiankit.VisionTransformer(5, 3, 4, d_model=4, d_ff=3, n_heads=2, activation="gelu")
    return {"block_or_module": model, "loss": "cross_entropy"}


@case
def wide_network() -> dict[str, Any]:
    return mse(nn.Sequential(nn.Linear(6, 40), nn.GELU(), nn.LayerNorm(40), nn.Linear(40, 3)), 2, 3, 6)


@case
def classifier() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 6), nn.RMSNorm(6), nn.Sigmoid(), nn.Linear(6, 4))
    return labels(model, 2, 5, 3, ignored=True)


@case
def confident_classifier() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.LayerNorm(5), nn.Linear(5, 4))
    with torch.no_grad():
        model[3].weight.mul_(15)  # weights of 0.99998, and of 0.989
    found = labels(model, 6, 3)
    return {**found, "target": model(found["inputs"]).argmax(-1)}


@case
def encoder_layer() -> dict[str, Any]:
    return mse(nn.TransformerEncoderLayer(4, 2, 6, 0.0, "gelu", batch_first=True), 2, 3, 4)


@case
def deep_with_shared_weights() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + F.layer_norm(torch.tanh(x @ m.W + m.b), (4,), m.g) @ m.W.mT
        return x * m.s + x.softmax(-1) @ m.V

    return mse(Own(forward, W=(4, 4), b=(4,), g=(4,), s=(4,), V=(4, 4)), 3, 2, 4)


@case
def wide_with_shared_weights() -> dict[str, Any]:
    return mse(Own(lambda m, x: torch.tanh(torch.tanh(x @ m.W) @ m.W.mT) @ m.W + m.W.mean(0), W=(20, 20)), 3, 20)


@case
def mixing_over_tokens() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = m.T @ F.gelu(x @ m.W)
        return torch.sub((m.S @ h.cumsum(-2)).mT @ torch.tanh(h) * m.c, h[:, :3], alpha=0.3)

    return mse(Own(forward, T=(4, 3), W=(2, 3), S=(4, 4), c=(3, 3)), 2, 3, 2)


@case
def convolutional() -> dict[str, Any]:
    layers = [nn.Conv2d(2, 4, 2), nn.GroupNorm(2, 4), nn.SiLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4, 3), nn.Softplus()]
    return mse(nn.Sequential(*layers), 3, 2, 3, 3)


@case
def pooled_and_chosen() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.sin(x @ m.W)
        top = h.topk(2, -1).values @ m.U
        h = torch.where(h > 0, h * m.g, h.exp()) + torch.maximum(h, m.g)
        return torch.cat([top, h.amax(-1, keepdim=True), h[..., [2, 0]], h.sort(-1).values.roll(1, -1)], -1)

    return mse(Own(forward, W=(3, 4), U=(2, 3), g=(4,)), 2, 5, 3)


@case
def scalar_functions() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = (x @ m.W).square() + 0.5
        parts = [h.log(), h.sqrt(), h.rsqrt(), h.pow(1.7), h.reciprocal(), h.erf(), h.log1p(), h.expm1() / 50, h.cos(), h.atan()]
        return torch.stack([*parts, F.elu(h - 1), F.mish(h), F.logsigmoid(h), F.hardswish(h), h**m.e, m.e.exp() / h]).sum(1)

    return mse(Own(forward, W=(2, 3), e=(3,)), 3, 2)


@case
def products_and_norms() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.einsum("bld,de->ble", x, m.W)
        h = F.normalize(h, dim=-1) + h.std(-1, keepdim=True) * m.g + h.norm(dim=-1, keepdim=True)
        return h.logsumexp(-1) + torch.bmm(h, h.mT).prod(-1) + h.log_softmax(-1).mean(-1) + F.cosine_similarity(h, m.g, -1)

    return mse(Own(forward, W=(2, 3), g=(3,)), 2, 2, 2)


@case
def masked_attention() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = (x @ w for w in (m.Q, m.K, m.V))
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        one = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        scores = (q * 12 @ k.mT).masked_fill(~mask, -torch.inf)
        return one + scores.softmax(-1) @ v

    return mse(Own(forward, Q=(3, 2), K=(3, 2), V=(3, 2)), 2, 4, 3)


@case
def looked_up() -> dict[str, Any]:
    model = nn.Sequential(nn.Embedding(6, 3), nn.LayerNorm(3), nn.Linear(3, 4, bias=False), nn.LogSoftmax(-1))
    x = torch.tensor([[0, 2, 2], [5, 1, 0]])
    return {"block_or_module": model, "inputs": x, "target": torch.randn(2, 3, 4)}


@case
def inverse_functions() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        h = torch.sigmoid(x @ m.W)  # within (0, 1)
        parts = [h.log2(), h.log10(), h.logit(), h.tan(), h.asin(), h.acos(), h.sinh(), h.cosh(), h.asinh(), (h + 1.1).acosh()]
        parts += [h.atanh(), h.erfc(), h.erfinv(), F.threshold(h, 0.5, 0.1), F.hardshrink(h, 0.4), F.softshrink(h, 0.3)]
        parts += [torch.atan2(h, m.e), torch.logaddexp(h, m.e), torch.minimum(h, m.e), torch.hypot(h, m.e), h.clamp(0.3, 0.6)]
        return torch.stack(parts).sum(1)

    return mse(Own(forward, W=(2, 3), e=(3,)), 3, 2)


@case
def products_of_weights() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.tanh(x @ (m.A @ m.B)) @ torch.bmm(m.S, m.S.mT).sum(0) + torch.outer(m.A[:, 0], m.B[0]).sum() * m.T[m.at].sum(
            1
        )

    module = Own(forward, A=(3, 2), B=(2, 4), S=(2, 4, 3), T=(5, 4))
    module.at = torch.tensor([[0, 2, 2], [4, 4, 4]])  # a row of a table counts twice in a sum
    return mse(module, 2, 3)


@case
def grouped_queries() -> dict[str, Any]:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = ((x @ w).unflatten(-1, (-1, 2)).transpose(1, 2) for w in (m.Q, m.K, m.V))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return F.rms_norm(out.transpose(1, 2).flatten(2), (8,), m.g)

    return mse(Own(forward, Q=(3, 8), K=(3, 4), V=(3, 4), g=(8,)), 2, 3, 3)


@case
def normed_logits() -> dict[str, Any]:
    return labels(nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.LayerNorm(6)), 4, 3)


@case
def normed_logits_by_rms() -> dict[str, Any]:
    return labels(nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.RMSNorm(6), nn.SiLU()), 4, 3)


@case
def confident_by_hand() -> dict[str, Any]:
    """Written with log_softmax, most rows saturated: 1 - p has to come from the other classes."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LogSoftmax(-1))
    found = labels(model, 5, 3)
    with torch.no_grad():
        model[0].weight.mul_(25)
        y = model(found["inputs"]).argmax(-1)
    return {**found, "target": y, "loss": lambda out, y: F.nll_loss(out, y)}


@case
def at_the_kink() -> dict[str, Any]:
    """One weight is zero, so that ReLU and threshold are at their kinks, where torch takes the derivative from the left."""

    def forward(m: Any, x: Tensor) -> Tensor:
        return torch.relu(x * m.w) + F.threshold(x * m.w, 0.0, 0.0) * m.w

    module = Own(forward, w=(3,))
    with torch.no_grad():
        module.w[1] = 0.0
    return mse(module, 2, 3)


@case
def affine_post_norm_block() -> dict[str, Any]:
    return {
        "block_or_module": hessiankit.TransformerBlock(4, 5, d_k=2, affine=True, bias=True, causal=True),
        "loss": "cross_entropy",
    }


@case
def formulas_in_fractions() -> dict[str, Any]:
    block = hessiankit.TransformerBlock(4, 3, 2, rotary=True, n_kv_heads=1, attention_bias=True, bias=True)
    return {"block_or_module": block, "exact": True}


CHAPTERS = tuple(f"exact: {chapter}" for chapter in chapters() if chapter != "placements")
"""What ``check_exact`` compares chapter by chapter, whole blocks of every placement aside, which take minutes."""


def failures(names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield the cases that ``check`` does not pass, each with the reason."""
    torch.set_default_dtype(torch.float64)
    for name in names:
        if name in CHAPTERS:
            for row in check_exact(name.removeprefix("exact: ")):
                if not row.passed:
                    yield name, str(row)
            continue
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                report = hessiankit.check(rtol=RTOL, **CASES[name]())
        except Exception as error:  # a mutant that makes the call fail is seen too
            yield name, f"{type(error).__name__}: {error}".splitlines()[0][:100]
            continue
        if not report:
            yield name, report.verdict


def seen(names: Collection[str] = ()) -> bool:
    """Tell whether some check fails, of all cases or of those named, and print which."""
    for name, why in failures(names or (*CASES, *CHAPTERS)):
        print(f"FAILED {name} - {why}")
        return True
    return False


if __name__ == "__main__":
    for case_name in sys.argv[1:] or (*CASES, *CHAPTERS):
        start = time.perf_counter()
        verdict = [why for _, why in failures([case_name])] or ["passed"]
        print(f"{case_name:<30} {time.perf_counter() - start:5.1f} s  {verdict[0]}")
