"""The metric of an optimizer: against differences of its own steps, and against runs on quadratic models that converge or not.

At a gradient of 0 an optimizer's second moments do not move to first order. So the slope of its step in the gradient there is
lr (what m takes of the gradient at once) / P, with the P that its state holds after the step.
"""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, Adamax, AdamW, Optimizer, RMSprop

import hessiankit as hk
from hessiankit.landscape import Preconditioner
from hessiankit.landscape import spectrum as called
from hessiankit.landscape.preconditioner import optimizer_preconditioner

DOUBLE = {"dtype": torch.float64}
OPTIMIZERS = {
    "descent": (SGD, {"lr": 0.1}, 1.0),
    "heavy ball": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}, 0.75),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}, 1.8),
    "Adam": (Adam, {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4}, 0.2),
    "amsgrad": (Adam, {"lr": 1e-2, "amsgrad": True}, 0.1),
    "AdamW": (AdamW, {"lr": 1e-2, "weight_decay": 0.0, "foreach": True}, 0.1),
    "Adamax": (Adamax, {"lr": 1e-2}, 0.1),
    "RMSprop": (RMSprop, {"lr": 1e-3, "momentum": 0.5}, 1.0),
    "centered": (RMSprop, {"lr": 1e-3, "centered": True}, 1.0),
    "Adagrad": (Adagrad, {"lr": 1e-2, "lr_decay": 0.1}, 1.0),
    "Adafactor": (Adafactor, {"lr": 0.5}, 1.0),
}
"""Name -> class, options, and what the direction of a step takes of the gradient at once."""


def trained(kind: type[Optimizer], options: dict, steps: int = 20, groups=None) -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    torch.manual_seed(0)
    model = hk.Transformer(5, 4, 4, 1, n_heads=2, placement="pre", max_len=4).double()
    draw = torch.Generator().manual_seed(1)
    x, y = (torch.randint(5, (4, 4), generator=draw) for _ in range(2))
    optimizer = kind(model.parameters() if groups is None else groups(model), **options)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer, x, y


def after(model: nn.Module, optimizer: Optimizer, gradient: float) -> tuple[Tensor, nn.Module, Optimizer]:
    """One more step of a copy, with every entry of the gradient the same; from 0, where it does not depend on the parameters."""
    model, optimizer = copy.deepcopy((model, optimizer))
    for p in model.parameters():
        p.grad = torch.full_like(p, gradient)
        if gradient and not isinstance(optimizer, Adafactor):
            p.data.zero_()
    before = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]) - before, model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_eigenvalues_are_those_of_the_steps_that_the_optimizer_takes(name: str) -> None:
    kind, options, at_once = OPTIMIZERS[name]
    model, optimizer, x, y = trained(kind, options)
    h = 1e-7
    slope = (after(model, optimizer, h)[0] - after(model, optimizer, -h)[0]) / (2 * h)
    _, model, optimizer = after(model, optimizer, 0.0)
    optimizer.zero_grad()
    P = -options["lr"] * at_once / slope
    assert float(P.min()) > 0
    H = hk.hessian(model, x, y, loss="cross_entropy")
    matrix = H.matrix / P.outer(P).sqrt()
    every = torch.linalg.eigvalsh(matrix).flip(0)
    scale = float(every.abs().max())
    found = hk.spectrum(model, x, y, loss="cross_entropy", k=3, bottom=3, preconditioner=optimizer, by="type")
    assert float((found.eigenvalues - every[[0, 1, 2, -3, -2, -1]]).abs().max()) < 1e-8 * scale
    types = hk.block_types(model)
    assert found.groups.keys() == types.entries.keys()
    for kind_of_block, one in found.groups.items():
        rows = torch.cat([torch.arange(len(P))[H.slices[p.parameter]] for p in types.parts if p.type == kind_of_block])
        top = torch.linalg.eigvalsh(matrix[rows][:, rows])[-1]
        assert float(one.eigenvalues[0]) == pytest.approx(float(top), rel=1e-8)
        assert one.threshold_ratio == float(one.eigenvalues[0]) / found.preconditioner.threshold
        assert float(one.residuals.max()) < 1e-10 * scale


def runs_away(optimizer: Optimizer, parameters: list[nn.Parameter], H: Tensor, steps: int = 300) -> bool:
    """Whether steps on the quadratic model grow, from a point so near to 0 that the second moments do not notice."""
    for k, p in enumerate(parameters):
        p.data.fill_(1e-30 * (k + 1))
    sizes = []
    for _ in range(steps):
        g = H @ torch.cat([p.detach() for p in parameters])
        for p, slope in zip(parameters, g.split([len(p) for p in parameters]), strict=True):
            p.grad = slope.clone()
        optimizer.step()
        sizes.append(float(torch.cat([p.detach() for p in parameters]).norm()))
    return max(sizes[-10:]) > max(sizes[steps // 2 : steps // 2 + 10])


FROZEN = {
    "descent": (SGD, {"lr": 0.1}),
    "heavy ball": (SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.25}),
    "Nesterov": (SGD, {"lr": 0.1, "momentum": 0.8, "nesterov": True}),
    "Adam": (Adam, {"lr": 1e-2, "betas": (0.8, 1 - 1e-14), "eps": 1e-4}),
    "RMSprop": (RMSprop, {"lr": 1e-3, "momentum": 0.5, "alpha": 1 - 1e-14}),
    "Adagrad": (Adagrad, {"lr": 1e-2, "initial_accumulator_value": 2.0}),
}


def metric(optimizer: Optimizer, parameters: dict[str, nn.Parameter]) -> Preconditioner:
    return optimizer_preconditioner("test", optimizer, parameters, **DOUBLE, device=torch.device("cpu"))


def entries(P: Preconditioner) -> torch.Tensor:
    """The diagonal of P^(-1/2)."""
    return P.root.to_matrix().diagonal()


def outer(P: Preconditioner) -> torch.Tensor:
    return entries(P).outer(entries(P))


@pytest.mark.parametrize("name", FROZEN)
def test_steps_run_away_above_the_threshold_and_not_below(name: str) -> None:
    kind, options = FROZEN[name]
    p = nn.Parameter(torch.ones(2, **DOUBLE))
    optimizer = kind([p], **options)
    p.grad = torch.tensor([0.3, 2.0], **DOUBLE)
    optimizer.step()
    if kind is Adam:
        optimizer.state[p]["step"] += 1e6  # no bias is left
        optimizer.state[p]["exp_avg_sq"].copy_(torch.tensor([0.2, 3.0]) * 1e-8)
    H = torch.tensor([[2.0, 1.0], [1.0, 4.0]], **DOUBLE)
    found = metric(optimizer, {"p": p})
    top = float(torch.linalg.eigvalsh(outer(found) * H)[-1])
    for factor, away in ((0.97, False), (1.03, True)):
        again = copy.deepcopy((optimizer, p))
        for state in again[0].state.values():
            for key in ("exp_avg", "momentum_buffer"):
                state.get(key, torch.zeros(0)).zero_()
        assert runs_away(again[0], [again[1]], factor * found.threshold / top * H) is away


def test_groups_of_different_rates_and_momenta_have_one_threshold_together() -> None:
    parameters = [nn.Parameter(torch.zeros(n, **DOUBLE)) for n in (1, 2)]
    groups = [{"params": parameters[:1], "lr": 0.2, "momentum": 0.9}, {"params": parameters[1:], "lr": 0.5, "momentum": 0.3}]
    H = torch.tensor([[2.0, 1.0, 0.5], [1.0, 4.0, -0.3], [0.5, -0.3, 1.0]], **DOUBLE)
    optimizer = SGD(groups, lr=1.0)
    found = metric(optimizer, dict(zip("ab", parameters, strict=True)))
    assert found.threshold == pytest.approx(2 * 1.3 / 0.5)
    assert entries(found).tolist() == pytest.approx([(2 * 1.3 / 0.5 / (2 * 1.9 / 0.2)) ** 0.5, 1, 1])
    top = float(torch.linalg.eigvalsh(outer(found) * H)[-1])
    for factor, away in ((0.97, False), (1.03, True)):
        again, own = copy.deepcopy((optimizer, parameters))
        assert runs_away(again, own, factor * found.threshold / top * H) is away


def test_slices_of_a_fused_parameter_have_their_own_rates() -> None:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 4, dropout=0.0, batch_first=True), 1).double()
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0), **DOUBLE)
    optimizer = SGD(hk.blockwise_lr(model, 1e-3, {"QK": 4.0, "VO": 2.0}, optimizer="sgd"))
    P = hk.spectrum(model, x, x, k=1, preconditioner=optimizer).preconditioner
    scale = P.root.structures[0].values[: 12 * 4].square()  # of query, key and value in one tensor
    assert scale.tolist() == pytest.approx([1.0] * 32 + [0.5] * 16)
    assert (P.lr, P.threshold) == (pytest.approx(4e-3), pytest.approx(2 / 4e-3))


def diagonal_forms(H: hk.HessianOperator) -> dict[str, object]:
    values = torch.linspace(0.5, 3, H.shape[0], **DOUBLE)
    named = {name: values[rows].reshape(H.shapes[name]) for name, rows in H.slices.items()}
    return {
        "one tensor": values, "an array": values.numpy(), "by name": named, "a matrix": torch.diag(values),
        "an operator": aslinearoperator(np.diag(values.numpy())),
    }  # fmt: skip


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    draw = torch.Generator().manual_seed(1)
    return module, torch.randn(5, 3, generator=draw, **DOUBLE), torch.randn(5, 2, generator=draw, **DOUBLE)


@pytest.mark.parametrize("form", ["one tensor", "an array", "by name", "a matrix", "an operator"])
def test_forms_of_a_diagonal(form: str) -> None:
    H = hk.hessian_operator(*problem())
    values = torch.linspace(0.5, 3, H.shape[0], **DOUBLE)
    expected = torch.linalg.eigvalsh(H.to_matrix() / values.outer(values).sqrt()).flip(0)
    found = hk.spectrum(H, k=2, bottom=0, preconditioner=diagonal_forms(H)[form], by="parameter")
    assert found.eigenvalues.tolist() == pytest.approx(expected[:2].tolist(), rel=1e-10)
    assert np.isnan(found.threshold_ratio)
    rows = H.slices["2.weight"]
    block = H.to_matrix()[rows, rows] / values[rows].outer(values[rows]).sqrt()
    assert float(found.groups["2.weight"].eigenvalues[0]) == pytest.approx(float(torch.linalg.eigvalsh(block)[-1]), rel=1e-10)


def test_an_operator_with_entries_off_the_diagonal() -> None:
    """Eigenvalues of P^-1 H, and for steps in some entries alone of (P^-1)_SS H_SS."""
    module, x, y = problem()
    H = hk.hessian_operator(module, x, y)
    A = torch.randn(H.shape[0], H.shape[0], generator=torch.Generator().manual_seed(2), **DOUBLE)
    P = A @ A.T + torch.eye(len(A), **DOUBLE)
    found = hk.spectrum(module, x, y, k=2, preconditioner=P, by={"first": "0.*"}, method="lanczos", steps=2, directions=2)
    matrix, inverse = H.to_matrix(), torch.linalg.inv(P)
    expected = torch.linalg.eigvals(inverse @ matrix).real.sort(descending=True).values
    assert found.eigenvalues[:2].tolist() == pytest.approx(expected[:2].tolist(), rel=1e-8)
    expected = torch.linalg.eigvals(inverse[:16, :16] @ matrix[:16, :16]).real.max()
    assert float(found.groups["first"].eigenvalues[0]) == pytest.approx(float(expected), rel=1e-8)
    V = found.directions
    assert torch.allclose(matrix @ V, P @ V * found.eigenvalues, atol=1e-5)
    structured = H.approximation("kfac").mapped(lambda values: values.abs() + 0.1)
    matrix_of = hk.spectrum(H, k=2, preconditioner=structured.to_matrix())
    assert hk.spectrum(H, k=2, preconditioner=structured).eigenvalues.tolist() == pytest.approx(matrix_of.eigenvalues.tolist())


def test_a_slice_along_a_direction_is_along_the_step_and_not_the_eigenvector() -> None:
    module, x, y = problem()
    found = hk.spectrum(module, x, y, k=1, bottom=0, preconditioner=torch.full((26,), 4.0, **DOUBLE))
    slices = hk.loss_slices(module, x, y, along=found, points=3)
    assert slices[0].length == pytest.approx(0.5)
    assert slices[0].curvature == pytest.approx(float(found.eigenvalues[0]))


def test_prints_the_threshold(tmp_path) -> None:
    model, optimizer, x, y = trained(AdamW, {"lr": 1e-2, "weight_decay": 0.1}, 2)
    found = hk.spectrum(model, x, y, loss="cross_entropy", k=2, preconditioner=optimizer, by="type")
    text = found.table()
    assert "in the metric of AdamW, steps diverge above 3800 = (2 + 2 beta1) / ((1 - beta1) lr), lr 0.01" in text
    assert "without the weight decay: every step also shrinks parameters by 0.1 lr" in text
    assert f"largest eigenvalue over the threshold: {found.threshold_ratio:.4g}" in text
    assert re.search(r"effective rank +over the threshold", text)
    assert "threshold" in [line.get_label() for line in found.plot(tmp_path / "a.png").axes[0].lines]
    plain = Adam(model.parameters(), weight_decay=0.2)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    plain.step()
    notes = metric(plain, dict(model.named_parameters())).notes
    assert notes == ("without the weight decay, which adds 0.2 to the Hessian's diagonal",)


class OwnStep(Adam):
    def step(self, closure=None):
        return None


class Renamed(Adam):
    """Adam by another name."""


def test_a_class_that_derives_from_a_known_one_without_a_step_of_its_own_is_known() -> None:
    model, optimizer, *_ = trained(Renamed, {"lr": 1e-2}, 2)
    same = trained(Adam, {"lr": 1e-2}, 2)[1]
    named = dict(model.named_parameters())
    found = metric(optimizer, named)
    other = dict(zip(named, same.param_groups[0]["params"], strict=True))
    assert torch.equal(entries(found), entries(metric(same, other)))


def ascent(p: list[nn.Parameter]) -> Optimizer:
    return SGD(p, lr=0.1, maximize=True)


BAD = {
    "Muon": (lambda m: torch.optim.Muon([m[0].weight]), "no metric is known for Muon: its state holds no positive P"),
    "a step of its own": (lambda m: OwnStep(m.parameters()), "no metric is known for OwnStep"),
    "no step": (lambda m: Adam(m.parameters()), "Adam has moved '0.weight' by no step"),
    "climbing": (lambda m: ascent(list(m.parameters())), "SGD has maximize=True and climbs"),
    "no rate": (lambda m: SGD(m.parameters(), lr=0.0), "the learning rate of SGD is 0, and nothing moves"),
    "size": (lambda m: torch.ones(3, **DOUBLE), r"preconditioner has shape \(3,\); expected a diagonal \(26,\)"),
    "not all": (lambda m: SGD([m[0].weight], lr=0.1), "SGD does not hold the parameter '0.bias'; pass params"),
    "in two": (
        lambda m: [SGD(m.parameters(), lr=0.1), SGD([m[0].bias], lr=0.1)],
        "2 optimizers hold the parameter '0.bias'; pass",
    ),
    "in none of two": (
        lambda m: [SGD([m[0].weight], lr=0.1), SGD(m[2].parameters(), lr=0.1)],
        "does not hold the parameter '0.bias'",
    ),
    "no optimizer": (lambda m: [], "preconditioner is a list; expected a torch optimizer"),
    "no number": (lambda m: 3, "preconditioner is a int; expected a torch optimizer or a list of them, a diagonal"),
    "size of a matrix": (lambda m: torch.eye(3, **DOUBLE), r"preconditioner is \(3, 3\); expected \(26, 26\)"),
    "zero": (lambda m: torch.zeros(26, **DOUBLE), "has an entry that is not a positive number"),
    "negative": (lambda m: -torch.eye(26, **DOUBLE), "has an eigenvalue of -1; pass a positive one"),
    "not symmetric": (lambda m: torch.ones(26, 26, **DOUBLE).triu(), "the preconditioner and its transpose differ"),
    "a function that fails": (
        lambda m: lambda p: p["nothing"],
        r"called with a dict of the parameters, raised KeyError: 'nothing'",
    ),
    "a function of nothing": (lambda m: lambda p: None, "preconditioner is a NoneType; expected a torch optimizer"),
    "a name": (lambda m: {"0.weight": torch.ones(4, 3)}, "preconditioner has nothing for '0.bias'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_requests(name: str) -> None:
    make, message = BAD[name]
    module, x, y = problem()
    with pytest.raises(hk.InputError, match=f"^spectrum: .*{message}"):
        called(module, x, y, k=1, preconditioner=make(module))


def test_two_optimizers_are_one_of_two_groups() -> None:
    """Their metric and threshold are those of one optimizer with a group for the parameters of each."""
    model, _, x, y = trained(SGD, {"lr": 0.1}, 0)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) is flag] for flag in (True, False))
    groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3}]
    pair, one = [AdamW(**groups[0]), AdamW(**groups[1])], AdamW(groups)
    for _ in range(3):
        model.zero_grad()
        nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
        before = [p.detach().clone() for p in model.parameters()]
        one.step()
        for p, value in zip(model.parameters(), before, strict=True):
            p.data.copy_(value)
        for optimizer in pair:
            optimizer.step()
    model.zero_grad()
    found, expected = (hk.spectrum(model, x, y, loss="cross_entropy", k=3, preconditioner=P) for P in (pair, one))
    assert torch.equal(torch.as_tensor(found.eigenvalues), torch.as_tensor(expected.eigenvalues))
    assert found.preconditioner.to_dict() == expected.preconditioner.to_dict()
    mixed = hk.spectrum(model, x, y, loss="cross_entropy", k=3, preconditioner=[pair[0], SGD(vectors, lr=0.1)])
    assert mixed.preconditioner.name == "AdamW and SGD"


def test_a_function_reads_any_optimizers_state() -> None:
    """NAdam has no metric of its own here: its second moments, read by hand, and those of Adam agree as diagonals."""
    model, optimizer, x, y = trained(torch.optim.NAdam, {"lr": 1e-2}, 3)

    def second_moments(parameters: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: optimizer.state[p]["exp_avg_sq"].sqrt() + 1e-8 for name, p in parameters.items()}

    weights = [name for name, p in model.named_parameters() if p.ndim > 1]
    options = {"loss": "cross_entropy", "k": 3, "params": weights}
    found = hk.spectrum(model, x, y, preconditioner=second_moments, **options)
    parameters = {name: model.get_parameter(name) for name in weights}
    flat = torch.cat([second_moments(parameters)[name].flatten() for name in weights])
    H = hk.hessian(model, x, y, loss="cross_entropy", params=weights).matrix
    expected = torch.linalg.eigvalsh(H / (flat.sqrt() * flat.sqrt()[:, None]))
    assert np.asarray(found.eigenvalues) == pytest.approx(expected[-3:].flip(0).numpy(), rel=1e-6)


def test_an_optimizer_needs_the_module() -> None:
    module, x, y = problem()
    with pytest.raises(hk.InputError, match="an optimizer's parameters are those of a module"):
        called(hk.hessian_operator(module, x, y), k=1, preconditioner=SGD(module.parameters(), lr=0.1))
    with pytest.raises(hk.InputError, match="a function is called with the parameters of a module"):
        called(hk.hessian_operator(module, x, y), k=1, preconditioner=lambda parameters: parameters)
    optimizer = AdamW(module.parameters(), eps=0.0)
    optimizer.state.update({p: {"step": torch.ones(()), "exp_avg_sq": torch.zeros_like(p)} for p in module.parameters()})
    with pytest.raises(hk.InputError, match="AdamW divides by 0"):
        called(module, x, y, k=1, preconditioner=optimizer)
