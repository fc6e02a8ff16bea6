"""Products by two sweeps against hessian(), reverse-over-reverse autograd and the definition of the Fisher information."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from curvature_reference import Formula, draw, mse, reverse_over_reverse
from meter import PeakBytes
from operator_cases import EXACT, T, X, block, error, tokens
from torch import Tensor, nn

from hessiankit.curvature.dense import hessian
from hessiankit.curvature.operator import hessian_operator
from hessiankit.request.loss_trace import loss_trace
from hessiankit.support.errors import InputError, TraceError
from hessiankit.tracing.trace import ancestors_of_output


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0, norm_first=k > 0) for k in range(3)]
    return nn.Sequential(nn.Embedding(5, 4), *layers, nn.Linear(4, 3)).double()


MODULES = {
    "post-norm": block,
    "operation without a closed form": lambda: Formula(lambda m, x: torch.sinc(m.lin(x)), lin=nn.Linear(4, 4)),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_block_in_parts_equals_the_block(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operator = hessian_operator(MODULES[name](), X, T)
    V = draw(operator.shape[0], 5, seed=6)
    expected = torch.stack([operator @ v for v in V.T], 1)
    (batch,) = operator._linearised
    for vectors in (1, 2):
        monkeypatch.setattr(batch, "vectors_together", vectors)
        found = operator @ V
        assert error(found, expected) <= EXACT
    weights = torch.ones(5, dtype=V.dtype, requires_grad=True)
    (found @ weights).sum().backward()  # what comes back is an ordinary tensor
    assert weights.grad is not None


@pytest.mark.parametrize(
    "options",
    [
        {"recompute": "layers"},
        {"micro_batch": 3},
        {"micro_batch": 2, "recompute": "layers"},
        {"micro_batch": 2, "recompute": "layers", "kind": "ggn"},
        {"snapshot": False},
    ],
    ids=str,
)
def test_less_memory_gives_the_same_products(options: dict[str, Any]) -> None:
    kind = options.get("kind", "hessian")
    module, ids = stack(), tokens(4, 3, top=5)
    labels = torch.tensor([[-100, -100, -100], [1, -100, 2], [0, 2, 1], [2, 2, 0]])
    whole = hessian_operator(module, ids, labels, loss="cross_entropy", kind=kind)
    lean = hessian_operator(module, ids, labels, loss="cross_entropy", **options)
    V = draw(whole.shape[0], 5, seed=1)
    assert error(lean @ V, whole @ V) <= EXACT
    assert error(lean.gradient, whole.gradient) <= EXACT
    assert lean.loss == pytest.approx(whole.loss, rel=1e-14)
    if options.get("recompute"):
        assert len(getattr(lean._linearised[0], "_parts", lean._linearised)[0]._segments) > 4


def test_a_product_with_other_parameters_is_refused_without_copies() -> None:
    module, ids, labels = stack(), tokens(2, 3, top=5), tokens(2, 3, top=3)
    shared = hessian_operator(module, ids, labels, loss="cross_entropy", snapshot=False)
    copied = hessian_operator(module, ids, labels, loss="cross_entropy")
    v = draw(shared.shape[0], seed=1)
    before = copied @ v
    assert error(shared @ v, before) <= EXACT
    module[0].weight.data[0, 0] += 1e-12  # which no version counter sees
    with pytest.raises(InputError, match=r"'0.weight' has been given other values since; make it anew .* snapshot=True"):
        shared @ v
    assert torch.equal(copied @ v, before)


def swap_layers(module: nn.Sequential) -> None:
    first, second = module[0].weight.data, module[2].weight.data
    values = first.clone()
    first.copy_(second)
    second.copy_(values)


def exchange_storage(module: nn.Sequential) -> None:
    module[0].weight.data, module[2].weight.data = module[2].weight.data, module[0].weight.data


CHANGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "rows in another order": lambda m: m[0].weight.data.copy_(m[0].weight[torch.tensor([1, 0, 3, 2])].detach()),
    "columns in another order": lambda m: m[0].weight.data.copy_(m[0].weight.flip(1).detach()),
    "two entries exchanged": lambda m: m[0].weight.data.view(-1)[:2].copy_(m[0].weight.data.view(-1)[:2].flip(0)),
    "two signs": lambda m: m[0].weight.data.view(-1)[:2].neg_(),
    "all signs": lambda m: m[0].weight.data.neg_(),
    "all signs, no_grad": lambda m: m[0].weight.copy_(-m[0].weight),
    "halves of two entries": lambda m: m[0].weight.data.view(torch.int32).view(-1)[:3:2].copy_(torch.tensor([3, 5])),
    "one bit": lambda m: m[2].bias.data.view(torch.int32).view(-1)[:1].add_(1),
    "values of two layers": swap_layers,
    "memory of two layers": exchange_storage,
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{"snapshot": False}, {"recompute": "layers"}, {"micro_batch": 2}, {"offload": "cpu"}], ids=str
)
def test_every_change_of_a_shared_parameter_is_seen(options: dict[str, Any], dtype: torch.dtype) -> None:
    for change in CHANGES.values():
        module = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype)
        operator = hessian_operator(module, draw(4, 4).to(dtype), draw(4, 4, seed=1).to(dtype), **options)
        v = torch.ones(40, dtype=operator.torch_dtype)
        operator @ v
        with torch.no_grad():
            change(module)
        with pytest.raises(InputError, match="has been given other values since"):
            operator @ v


def test_an_exchange_of_distant_parts_of_a_large_parameter_is_seen() -> None:
    """Parts of 2^16 words are hashed one after the other."""
    module = nn.Linear(2**9, 2**9, bias=False).double()
    operator = hessian_operator(module, draw(2, 2**9), draw(2, 2**9, seed=1), snapshot=False)
    v = torch.ones(operator.shape[0], dtype=torch.float64)
    operator @ v
    halves = module.weight.data.view(-1).split(2**16)
    kept = halves[0].clone()
    halves[0].copy_(halves[2])
    halves[2].copy_(kept)
    with pytest.raises(InputError, match="'weight' has been given other values since"):
        operator @ v


def test_parts_that_depend_on_each_other_are_refused() -> None:
    module = Formula(lambda m, x: torch.tanh((z := m.lin(x)) - z.mean(0)), lin=nn.Linear(4, 3))
    x, t = draw(6, 4), draw(6, 3, seed=2)
    for handshake in (True, False):
        with pytest.raises(TraceError, match="the parts of the batch do not add up to the whole"):
            hessian_operator(module, x, t, micro_batch=2, handshake=handshake)
    with pytest.raises(InputError, match="micro_batch needs a loss whose sum over samples is known"):
        hessian_operator(nn.Linear(4, 3).double(), x, t, loss=mse, micro_batch=2)
    with pytest.raises(InputError, match="micro_batch=0 leaves no sample"):
        hessian_operator(module, x, t, micro_batch=0)
    with pytest.raises(InputError, match="recompute='all' is not known"):
        hessian_operator(module, x, t, recompute="all")


SAMPLES_ELSEWHERE: dict[str, Callable[[Tensor], Tensor]] = {
    "second axis": lambda z: z.transpose(0, 1),
    "last axis": lambda z: z.movedim(0, -1),
    "among tokens": lambda z: z.flatten(0, 1),
    "no axis": lambda z: z.sum((0, 1)),
}


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("name", SAMPLES_ELSEWHERE)
def test_outputs_whose_first_axis_is_not_that_of_samples(name: str, batches: int) -> None:
    module = Formula(lambda m, x: SAMPLES_ELSEWHERE[name](torch.tanh(m.lin(x))), lin=nn.Linear(4, 3))
    data = [(x, module(x).detach() + 1) for x in draw(batches, 4, 5, 4)]
    expected = sum(reverse_over_reverse(module, x, t, mse) for x, t in data) / batches
    assert error(hessian_operator(module, data).to_matrix(), expected) <= EXACT
    with pytest.raises(
        (InputError, TraceError),
        match=r"micro_batch=2, of 4 samples: .* first axis.* leave micro_batch out|parts .* do not add up",
    ):
        hessian_operator(module, data, micro_batch=2)


def written_out(m: Any, x: Tensor) -> Tensor:
    """An activation in single operations, with a value that is read elsewhere too, and a gate by another value."""
    h = m.lin(x)
    tanh = torch.tanh(0.8 * (h + 0.04 * h**3))
    return 0.5 * h * (1 + tanh) * torch.sigmoid(m.gate(x)) + (h / 3).exp() + x.mean() * tanh.sum()


def test_runs_of_entrywise_operations_are_one_step() -> None:
    module = Formula(written_out, lin=nn.Linear(4, 4), gate=nn.Linear(4, 4))
    operator = hessian_operator(module, X, T)
    assert error(operator.to_matrix(), reverse_over_reverse(module, X, T, mse)) <= EXACT
    (batch,) = operator._linearised
    assert len(batch._steps(0)) < len(ancestors_of_output(loss_trace(batch._batch).trace)) - 6


@pytest.mark.parametrize("options", [{}, {"recompute": "layers"}, {"offload": "cpu"}], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_has_no_wide_copy(dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Bytes of the set-up and those kept; products against double backward in float64 at the same parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.Tanh()))).to(dtype)
    x, t = torch.randn(2, 512).to(dtype), torch.randn(2, 512).to(dtype)
    layer, before = 4 * 512**2, held_bytes()  # bytes of a matrix in float32
    with PeakBytes(*model.parameters()) as alive:
        A = hessian_operator(model, x, t, handshake=False, **({"snapshot": False} | options))
    assert alive.marked < 2 * layer + 2.5 * layer + 2**20  # four matrices in half precision, one that is read, and hashes
    assert held_bytes() - before < 1.5 * layer  # hashes
    v = torch.randn(A.shape[0])
    exact = copy.deepcopy(model).double()
    parameters = list(exact.parameters())
    G = torch.autograd.grad((exact(x.double()) - t.double()).square().mean(), parameters, create_graph=True)
    pieces = [
        part.reshape(p.shape) for part, p in zip(v.double().split([p.numel() for p in parameters]), parameters, strict=True)
    ]
    expected = torch.cat([h.reshape(-1) for h in torch.autograd.grad(G, parameters, pieces)])
    assert float(((A @ v) - expected).norm() / expected.norm()) < 4 * torch.finfo(dtype).eps


def held_bytes() -> int:
    gc.collect()
    tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.layout is torch.strided]
    return sum({x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors}.values())


PARTS = {
    "steps": lambda h: [h[:, 0], h[:, 1], h[:, 3]],
    "parts that overlap": lambda h: [h[:, :3], h[:, 1:], h[:, ::2], h[:, -1:]],
    "parts and the whole": lambda h: [h[:, 0], h, h[:, 2:], torch.sin(h)],
    "a part of a part": lambda h: [h[:, 1:][:, 0], h[:, 1:], h],
    "one part": lambda h: [h[:, 1:3]],
}


@pytest.mark.parametrize("name", list(PARTS))
def test_a_value_that_is_read_in_parts(name: str) -> None:
    """Products with one vector and with several, the gradient, and the matrix by sweeps."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x @ m.W
        return sum(torch.tanh(k * part * m.v).sum((1, 2) if part.ndim == 3 else 1) for k, part in enumerate(PARTS[name](h), 1))

    module, x, t = Formula(forward, W=(3, 2), v=(2,)), draw(2, 4, 3), draw(2, seed=2)
    expected = reverse_over_reverse(module, x, t, mse)
    operator, V = hessian_operator(module, x, t), draw(len(expected), 5, seed=3)
    for product, reference in ((operator @ V, expected @ V), (operator @ V[:, 0], expected @ V[:, 0])):
        assert (product - reference).abs().max() <= 1e-10 * reference.abs().max()
    assert (hessian(module, x, t).matrix - expected).abs().max() <= 1e-10 * expected.abs().max()
