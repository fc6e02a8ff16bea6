"""Models that call torch's attention, unchanged, in what other libraries do with derivatives."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import draw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import hessiankit as hk

X = draw(2, 5, 4)


class Attend(nn.Module):
    """One layer of causal attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mix, self.head = nn.Linear(4, 12), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 2)).transpose(1, 2) for part in self.mix(x).chunk(3, -1))
        return self.head(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def layers() -> dict[str, Callable[[Tensor], Tensor]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True).eval().double()
    heads = nn.MultiheadAttention(4, 2, batch_first=True).eval().double()
    return {"Attend": Attend().double(), "layer": layer, "heads": lambda x: heads(x, x, x, need_weights=False)[0]}


def loss(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sin().square().sum()


def expected(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """A product with the Hessian in X, by torch's math path."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.vhp(loss(f), X, v)[1]


def close(found: Tensor, right: Tensor) -> None:
    assert float((found - right).detach().abs().max()) <= 1e-10 * float(right.detach().abs().max())


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vhp": lambda f, v: torch.autograd.functional.vhp(f, X, v)[1],
    "hvp": lambda f, v: torch.autograd.functional.hvp(f, X, v)[1],
    "jvp of grad": lambda f, v: torch.func.jvp(torch.func.grad(f), (X,), (v,))[1],
    "grad of jvp": lambda f, v: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (v,))[1])(X),
    "checkpointed": lambda f, v: torch.autograd.functional.vhp(lambda x: checkpoint(f, x, use_reentrant=False), X, v)[1],
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", layers())
def test_products(name: str, product: str) -> None:
    if (name, product) == ("layer", "grad of jvp"):
        pytest.skip("torch 2.13 differentiates the jvp of its layer_norm wrongly")
    f, v = layers()[name], draw(2, 5, 4, seed=1)
    with hk.twice_differentiable_attention():
        found = PRODUCTS[product](loss(f), v)
    close(found, expected(f, v))


def test_the_block_ends_where_the_last_one_does() -> None:
    """Also in other threads, and after an error."""
    before, opened, done = F.scaled_dot_product_attention, threading.Event(), threading.Event()

    def elsewhere() -> None:
        with hk.twice_differentiable_attention():
            opened.set()
            done.wait()

    thread = threading.Thread(target=elsewhere)
    with hk.twice_differentiable_attention(), hk.twice_differentiable_attention():
        thread.start()
        opened.wait()
    with pytest.raises(KeyError), hk.twice_differentiable_attention():
        raise KeyError
    assert F.scaled_dot_product_attention is hk.scaled_dot_product_attention
    assert not torch.backends.mha.get_fastpath_enabled()
    done.set()
    thread.join()
    assert F.scaled_dot_product_attention is before
    assert torch.backends.mha.get_fastpath_enabled()


def test_derivatives_after_the_block() -> None:
    f, v, x = Attend().double(), draw(2, 5, 4, seed=1), X.clone().requires_grad_()
    with hk.twice_differentiable_attention():
        value = loss(f)(x)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    close(torch.autograd.grad(slope, x, v)[0], expected(f, v))
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward"):
        torch.autograd.functional.vhp(loss(f), X, v)


def test_inner_loop_of_meta_learning() -> None:
    """The gradient of what a step of gradient descent reaches."""
    model = Attend().double()
    names, start = zip(*model.named_parameters(), strict=True)

    def after_a_step(*parameters: Tensor) -> Tensor:
        def inner(*p: Tensor) -> Tensor:
            return torch.func.functional_call(model, dict(zip(names, p, strict=True)), (X,)).square().sum()

        slopes = torch.autograd.grad(inner(*parameters), parameters, create_graph=True)
        return inner(*(p - 0.1 * g for p, g in zip(parameters, slopes, strict=True)))

    with hk.twice_differentiable_attention():
        found = torch.autograd.grad(after_a_step(*start), start)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.autograd.grad(after_a_step(*start), start)
    for a, b in zip(found, right, strict=True):
        close(a, b)


def test_gradient_penalty() -> None:
    """Wasserstein GAN: the norm of the critic's gradient in its input, differentiated in its parameters."""
    critic = Attend().double()

    def penalty() -> Tensor:
        x = X.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    parameters = [critic.mix.weight, critic.mix.bias, critic.head.weight]
    with hk.twice_differentiable_attention():
        found = torch.autograd.grad(penalty(), parameters)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.autograd.grad(penalty(), parameters)
    for a, b in zip(found, right, strict=True):
        close(a, b)


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 4, "n_layer": 2, "n_head": 2, "use_cache": False}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")).eval()
    return model.double(), {"input_ids": torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))}


def next_token(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_hugging_face() -> None:
    model, batch = gpt2()
    names, point = zip(*((name, p.detach()) for name, p in model.named_parameters()), strict=True)
    v = tuple(draw(*p.shape, seed=k) for k, p in enumerate(point))

    def f(*p: Tensor) -> Tensor:
        return next_token(torch.func.functional_call(model, dict(zip(names, p, strict=True)), (), batch), batch["input_ids"])

    operator = hk.hessian_operator(model, batch, batch["input_ids"], loss=next_token)
    right = operator @ torch.cat([x.reshape(-1) for x in v])
    with hk.twice_differentiable_attention():
        every = tuple(range(len(v)))
        products = torch.autograd.functional.vhp(f, point, v)[1], torch.func.jvp(torch.func.grad(f, every), point, v)[1]
        inside = hk.hessian_operator(model, batch, batch["input_ids"], loss=next_token)
        assert not inside._batches[0].fallbacks
        close(inside @ torch.cat([x.reshape(-1) for x in v]), right)
    for product in products:
        close(torch.cat([x.reshape(-1) for x in product]), right)


def test_curvlinops() -> None:
    """In the matrices: torch 2.13 differentiates the gain of its layer_norm wrongly in jvp of jacrev."""
    curvlinops = pytest.importorskip("curvlinops")
    model, batch = gpt2()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)

    logits, ids = Logits(), batch["input_ids"]
    matrices = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    operator = hk.hessian_operator(model, batch, ids, loss=next_token, params=list(matrices))
    v, data = draw(operator.shape[1], seed=3), [(ids, ids[:, 1:].flatten())]
    with hk.twice_differentiable_attention():
        loss, options = nn.CrossEntropyLoss(), {"check_deterministic": False}
        close(curvlinops.HessianLinearOperator(logits, loss, [*matrices.values()], data, **options) @ v, operator @ v)
