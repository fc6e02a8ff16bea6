"""Programs of torch inside the context against eager attention, torch's math path, logits and written-out norms."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from operator_cases import error
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from twice_differentiable_cases import agree, product

import hessiankit as hk
from hessiankit.support.errors import InputError

Loss = Callable[..., Tensor]


N, D, C = (2, 4), 3, 7
HIDDEN, WEIGHT, BIAS = draw(*N, D), draw(C, D, seed=1), draw(C, seed=2)
LABELS = torch.tensor([[3, 0, -100, 6], [2, 2, 5, -100]])
FLAT = LABELS.flatten()
JOINED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "rows": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).view(-1, C), FLAT),
    "a sum of smoothed losses": lambda h, W, b: F.cross_entropy(
        F.linear(h, W, b).flatten(0, 1), FLAT, reduction="sum", label_smoothing=0.2
    ),
    "losses": lambda h, W, b: F.cross_entropy(
        F.linear(h, W, b).flatten(0, 1), FLAT.clamp(0), reduction="none", ignore_index=2
    ).square().sum(),
    "classes along the second axis": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).transpose(1, 2), LABELS),
    "classes along the second axis, losses": lambda h, W, b: F.cross_entropy(
        F.linear(h, W, b).permute(0, 2, 1), LABELS, reduction="none"
    ).square().sum(),
    "shifted": lambda h, W, b: F.cross_entropy(
        F.linear(h, W, b)[..., :-1, :].contiguous().view(-1, C), LABELS[:, 1:].flatten()
    ),
    "one sample": lambda h, W, b: F.cross_entropy(F.linear(h, W, b)[1], LABELS[1]) + h.square().sum() ** 2,
    "scaled": lambda h, W, b: F.cross_entropy((F.linear(h, W, b) * 0.3 / 2).reshape(-1, C), FLAT),
    "a bias added": lambda h, W, b: F.cross_entropy((F.linear(h, W) + b).reshape(-1, C), FLAT),
    "two biases": lambda h, W, b: F.cross_entropy((F.linear(h, W, b) + b[None]).reshape(-1, C), FLAT),
    "a product with the transpose": lambda h, W, b: F.cross_entropy((h @ W.T + b).flatten(0, 1), FLAT),
    "a copy": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).clone().float().view(-1, C), FLAT).double(),
    "torch's own": lambda h, W, b: F.linear_cross_entropy(h.flatten(0, 1), W, FLAT, linear_bias=b),
}  # fmt: skip


def _written(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(h, W, b)
    logits[..., 0].mul_(2)
    return F.cross_entropy(logits.view(-1, C), FLAT)


def _assigned(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(h, W, b)
    logits[..., 0] = 0.5
    return F.cross_entropy(logits.view(-1, C), FLAT)


def _hooked(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(h, W, b)
    logits.register_hook(lambda g: 2 * g)
    return F.cross_entropy(logits.view(-1, C), FLAT)


def _read(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(h, W, b)
    logits.data.mul_(2)
    return F.cross_entropy(logits.view(-1, C), FLAT)


def _output(h: Tensor, W: Tensor, b: Tensor) -> Tensor:
    logits = F.linear(h, W, b)
    with torch.no_grad():
        torch.mul(BIAS, 2, out=logits[0, 0])
    return F.cross_entropy(logits.view(-1, C), FLAT)


APART: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "written in place": _written,
    "assigned": _assigned,
    "hooked": _hooked,
    "its data written": _read,
    "the output of another call": _output,
    "weighted classes": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).view(-1, C), FLAT, weight=BIAS.abs()),
    "probabilities": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).view(-1, C), draw(8, C).softmax(1)),
    "capped": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).view(-1, C).tanh(), FLAT),
    "fewer classes": lambda h, W, b: F.cross_entropy(F.linear(h, W, b).view(-1, C)[:, :-1], FLAT.clamp(max=5)),
    "rows by a mask": lambda h, W, b: F.cross_entropy(F.linear(h, W, b)[LABELS >= 0], LABELS[LABELS >= 0]),
    "a bias of rows": lambda h, W, b: F.cross_entropy((F.linear(h, W, b) + draw(4, 1)).view(-1, C), FLAT) + h.square().sum() ** 2,
    "a wider type": lambda h, W, b: F.cross_entropy(F.linear(h.float(), W.float(), b.float()).double().view(-1, C), FLAT),
}


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", [*JOINED, *APART])
def test_a_head_and_its_loss(name: str) -> None:
    """Joined wherever the loss reads rows of logits as the head made them, and nowhere else."""
    if name == "torch's own" and not hasattr(F, "linear_cross_entropy"):
        pytest.skip("torch 2.12 has none")
    x = [t.clone().requires_grad_() for t in (HIDDEN, WEIGHT, BIAS)]
    loss = {**JOINED, **APART}[name]
    with hk.twice_differentiable() as context:
        found = product(lambda: loss(*x), x)  # type: ignore[arg-type]
    assert context.calls["cross_entropy_loss"] == (name in JOINED)
    narrow = name in ("a copy", "a wider type")
    assert error(found, product(lambda: loss(*x), x)) <= (1e-5 if narrow else 1e-10)  # type: ignore[arg-type]


@pytest.mark.usefixtures("small_heads")
def test_the_graph_of_a_loss_keeps_nothing_of_tokens_times_classes() -> None:
    sizes: list[int] = []
    x = [t.clone().requires_grad_() for t in (HIDDEN, WEIGHT, BIAS)]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        for context, largest in ((nullcontext(), LABELS.numel() * C), (hk.twice_differentiable(), HIDDEN.numel())):
            sizes.clear()
            with context:
                torch.autograd.grad(JOINED["rows"](*x), x, create_graph=True)  # type: ignore[call-arg]
            assert max(sizes) == largest


TRANSFORMS: dict[str, Callable[[Loss, tuple[Tensor, ...], tuple[Tensor, ...]], Any]] = {
    "jvp of grad": lambda f, x, v: torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2)), x, v)[1],
    "grad of jvp": lambda f, x, v: torch.func.grad(lambda *y: torch.func.jvp(f, y, v)[1], argnums=(0, 1, 2))(*x),
    "gradients of samples": lambda f, x, v: torch.vmap(
        torch.func.grad(lambda h, W, b: F.cross_entropy(F.linear(h, W, b), LABELS[0]), argnums=(0, 1, 2)), (0, None, None)
    )(*x),
}


@pytest.mark.usefixtures("small_heads")
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_head(name: str) -> None:
    x, v = (HIDDEN, WEIGHT, BIAS), tuple(draw(*t.shape, seed=9) for t in (HIDDEN, WEIGHT, BIAS))
    with hk.twice_differentiable() as context:
        found = TRANSFORMS[name](JOINED["rows"], x, v)
    assert context.calls["cross_entropy_loss"] == 1
    for a, b in zip(found, TRANSFORMS[name](JOINED["rows"], x, v), strict=True):
        assert error(a, b) <= 1e-10


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_torchs_cross_entropy_of_a_head_in_chunks(reduction: str, weighted: bool) -> None:
    """Torch's own double backward through it is off by 0.8, without a warning. The tracer takes both forms too."""
    options = pytest.importorskip("torch.nn.modules.linear_cross_entropy") and nn.LinearCrossEntropyOptions(batch_chunk_size=3)
    weight = BIAS.abs() if weighted else None

    def head(s: Any, chunks: Any) -> Tensor:
        kwargs = {"linear_bias": s.b, "weight": weight, "reduction": reduction, "ignore_index": 5, "options": chunks}
        return F.linear_cross_entropy(s.h.tanh(), s.W, FLAT.clamp(0), **kwargs).square().sum()

    chunked, whole = (
        Formula(lambda s, _, o=o: head(s, o), h=(8, D), W=(C, D), b=(C,))  # type: ignore[misc]
        for o in (options, None)
    )
    parameters = list(chunked.parameters())
    with hk.twice_differentiable() as context:
        found = product(lambda: chunked(None), parameters)
    assert context.calls["linear_cross_entropy"] == 1
    assert error(found, product(lambda: whole(None), list(whole.parameters()))) <= 1e-10
    H = hk.hessian(chunked, BIAS, loss=None)
    assert not H.fallbacks
    assert error(H.matrix, reverse_over_reverse(whole, BIAS, None, None)) <= 1e-10


TOKENS = draw(2, 5, 4)


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


def summed(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: f(x).sin().square().sum()


def by_math(f: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """A product with the Hessian in TOKENS, by torch's math path."""
    with sdpa_kernel(SDPBackend.MATH):
        return torch.autograd.functional.vhp(summed(f), TOKENS, v)[1]


PRODUCTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "vhp": lambda f, v: torch.autograd.functional.vhp(f, TOKENS, v)[1],
    "jvp of grad": lambda f, v: torch.func.jvp(torch.func.grad(f), (TOKENS,), (v,))[1],
    "grad of jvp": lambda f, v: torch.func.grad(lambda x: torch.func.jvp(f, (x,), (v,))[1])(TOKENS),
    "checkpointed": lambda f, v: torch.autograd.functional.vhp(lambda x: checkpoint(f, x, use_reentrant=False), TOKENS, v)[1],
}


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", layers())
def test_products(name: str, product: str) -> None:
    f, v = layers()[name], draw(2, 5, 4, seed=1)
    with hk.twice_differentiable():
        found = PRODUCTS[product](summed(f), v)
    agree(found, by_math(f, v))


def flash(x: Tensor) -> str:
    return type(F.scaled_dot_product_attention(x, x, x).grad_fn).__name__


def test_the_block_is_the_threads_and_ends_where_it_does() -> None:
    """Nested, after errors, and in another thread."""
    x = draw(1, 1, 5, 4).requires_grad_()
    torchs, function, names = flash(x), F.scaled_dot_product_attention, dict[str, str]()
    with hk.twice_differentiable() as outer:
        with hk.twice_differentiable() as inner:
            assert flash(x) != torchs
        with pytest.raises(KeyError), hk.twice_differentiable():
            raise KeyError
        assert flash(x) != torchs
        thread = threading.Thread(target=lambda: names.setdefault("elsewhere", flash(x)))
        thread.start()
        thread.join()
    assert names == {"elsewhere": torchs}
    assert flash(x) == torchs
    assert F.scaled_dot_product_attention is function
    assert repr(inner) == "twice_differentiable: calls replaced: scaled_dot_product_attention 1"
    assert repr(outer) == repr(inner)  # the call within the inner block is the inner one's


def test_a_name_imported_before() -> None:
    from torch.nn.functional import scaled_dot_product_attention as attend

    f, x = (lambda x: attend(x, x, x).sin().sum()), draw(1, 1, 5, 4)
    with hk.twice_differentiable():
        found = torch.autograd.functional.hessian(f, x)
    with sdpa_kernel(SDPBackend.MATH):
        assert error(found, torch.autograd.functional.hessian(f, x)) <= 1e-10


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("when", ["before", "within", "around"])
def test_compiled_code_runs_as_it_was_before(backend: str, when: str) -> None:
    """What torch compiles has no double backward: some of it returns zeros."""
    torch._dynamo.reset()
    model, v = Attend().double(), draw(2, 5, 4, seed=1)
    f = summed(model)
    if when == "around":
        f = torch.compile(hk.twice_differentiable(f), backend=backend)
    if when == "before":
        f = torch.compile(f, backend=backend)
        f(TOKENS)
    with hk.twice_differentiable() if when != "around" else nullcontext():
        f = torch.compile(f, backend=backend) if when == "within" else f
        found = torch.autograd.functional.vhp(f, TOKENS, v)[1]
    agree(found, by_math(model, v))


def test_dropout_of_attention() -> None:
    """Derivatives at the entries that are drawn, as by torch's math path."""
    f, v = (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.4).sin().sum()), draw(2, 5, 4, seed=1)
    results = []
    for context in (hk.twice_differentiable(), sdpa_kernel(SDPBackend.MATH)):
        torch.manual_seed(3)
        with context:
            results.append(torch.autograd.functional.vhp(f, TOKENS, v)[1])
    agree(*results)


def test_a_module_is_called_within_and_is_otherwise_itself() -> None:
    """So is a copy of it; the module that was passed stays as it was."""
    plain, v = Attend().double(), draw(2, 5, 4, seed=1)
    model = hk.twice_differentiable(plain)
    agree(torch.autograd.functional.vhp(summed(copy.deepcopy(model)), TOKENS, v)[1], by_math(plain, v))
    assert "calls replaced: none" in repr(model)
    agree(torch.autograd.functional.vhp(summed(model), TOKENS, v)[1], by_math(plain, v))
    assert repr(model) == f"{plain!r}\ntwice_differentiable: calls replaced: scaled_dot_product_attention 1"
    assert isinstance(model, Attend)
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert all(p is q for p, q in zip(model.parameters(), plain.parameters(), strict=True))
    elsewhere: list[Tensor] = []
    thread = threading.Thread(target=lambda: elsewhere.append(torch.autograd.functional.vhp(summed(model), TOKENS, v)[1]))
    thread.start()
    thread.join()
    agree(elsewhere[0], by_math(plain, v))
    target = draw(2, 5, 3)
    assert error(hk.hessian(model, TOKENS, target).matrix, hk.hessian(plain, TOKENS, target).matrix) <= 1e-10
    with pytest.raises(RuntimeError, match="flash_attention"):
        torch.autograd.functional.vhp(summed(plain), TOKENS, v)


def test_what_cannot_be_called() -> None:
    with pytest.raises(InputError, match="function is a Tensor; pass a function"):
        hk.twice_differentiable(TOKENS)


WITHIN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sin().sum())(x),
    "vmap": lambda f, x: torch.vmap(f)(x),
    "autograd.grad": lambda f, x: torch.autograd.grad(f(y := x.clone().requires_grad_()).sin().sum(), y, create_graph=True)[0],
}


@pytest.mark.parametrize("transform", WITHIN)
def test_a_module_that_opens_the_block_around_a_transform(transform: str) -> None:
    """The Hessian of the traced module is that of torch's double backward through this package's function."""

    def program(s: Any, x: Tensor) -> Tensor:
        with hk.twice_differentiable():
            return WITHIN[transform](lambda x: F.scaled_dot_product_attention(x @ s.Q, x @ s.K, x @ s.V), x)

    module, x = Formula(program, Q=(3, 3), K=(3, 3), V=(3, 3)), draw(2, 1, 4, 3)
    agree(hk.hessian(module, x, x).matrix, reverse_over_reverse(module, x, x, mse))


def test_derivatives_after_the_block() -> None:
    f, v, x = Attend().double(), draw(2, 5, 4, seed=1), TOKENS.clone().requires_grad_()
    with hk.twice_differentiable():
        value = summed(f)(x)
    (slope,) = torch.autograd.grad(value, x, create_graph=True)
    agree(torch.autograd.grad(slope, x, v)[0], by_math(f, v))
    with pytest.raises(RuntimeError, match="derivative for aten::_scaled_dot_product_flash_attention_for_cpu_backward"):
        torch.autograd.functional.vhp(summed(f), TOKENS, v)


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "n_positions": 6, "n_embd": 4, "n_layer": 2, "n_head": 2, "use_cache": False}
    model = hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, attn_implementation="sdpa")).eval()
    return model.double(), {"input_ids": torch.randint(7, (2, 6), generator=torch.Generator().manual_seed(0))}


def next_token(out: Any, labels: Tensor) -> Tensor:
    return F.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def test_inner_loop_of_meta_learning() -> None:
    """The gradient of what a step of gradient descent reaches."""
    model = Attend().double()
    names, start = zip(*model.named_parameters(), strict=True)

    def after_a_step(*parameters: Tensor) -> Tensor:
        def inner(*p: Tensor) -> Tensor:
            return torch.func.functional_call(model, dict(zip(names, p, strict=True)), (TOKENS,)).square().sum()

        slopes = torch.autograd.grad(inner(*parameters), parameters, create_graph=True)
        return inner(*(p - 0.1 * g for p, g in zip(parameters, slopes, strict=True)))

    with hk.twice_differentiable():
        found = torch.autograd.grad(after_a_step(*start), start)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.autograd.grad(after_a_step(*start), start)
    for a, b in zip(found, right, strict=True):
        agree(a, b)


def test_gradient_penalty() -> None:
    """Wasserstein GAN: the norm of the critic's gradient with respect to its input, differentiated with respect to its parameters."""
    critic = Attend().double()

    def penalty() -> Tensor:
        x = TOKENS.clone().requires_grad_()
        (slope,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    parameters = [critic.mix.weight, critic.mix.bias, critic.head.weight]
    with hk.twice_differentiable():
        found = torch.autograd.grad(penalty(), parameters)
    with sdpa_kernel(SDPBackend.MATH):
        right = torch.autograd.grad(penalty(), parameters)
    for a, b in zip(found, right, strict=True):
        agree(a, b)


def test_curvlinops() -> None:
    """The mode of curvlinops, jvp of jacrev, is wrong through torch's layer_norm."""
    curvlinops = pytest.importorskip("curvlinops")
    model, batch = gpt2()

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: Tensor) -> Tensor:
            return self.model(input_ids=ids).logits[:, :-1].flatten(0, 1)

    logits, ids = Logits(), batch["input_ids"]
    operator = hk.hessian_operator(model, batch, ids, loss=next_token)
    v, data = draw(operator.shape[1], seed=3), [(ids, ids[:, 1:].flatten())]
    with hk.twice_differentiable():
        loss, options = nn.CrossEntropyLoss(), {"check_deterministic": False}
        agree(curvlinops.HessianLinearOperator(logits, loss, [*model.parameters()], data, **options) @ v, operator @ v)
