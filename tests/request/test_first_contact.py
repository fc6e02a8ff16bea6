"""Mistakes of a first contact, each with the whole message that it meets: what was seen, and what to do."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft_cases import gpt2
from torch import nn

import hessiankit as hk

X, T, Y = torch.ones(7, 3), torch.ones(7, 2), torch.arange(7) % 2
IDS = torch.tensor([[1, 4, 2, 6, 5], [3, 2, 5, 5, 1]])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))


def with_nan() -> nn.Module:
    module = mlp()
    with torch.no_grad():
        module[0].weight[0, 0] = float("nan")
    return module


def loader(target: torch.Tensor = Y) -> Any:
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, target), batch_size=3)


def operator() -> Any:
    return hk.hessian_operator(mlp(), X, T)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "training mode": (
        lambda: hk.hessian(nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)), X, T),
        "call model.eval() first: '1' is a dropout layer (p=0.1) in training mode, so the loss is random",
    ),
    "labels without a loss": (
        lambda: hk.hessian(mlp(), X, Y),
        "target is torch.int64, and the loss is 'mse', which needs torch.float32; pass loss='cross_entropy' for labels",
    ),
    "a loader of labels without a loss": (lambda: hk.spectrum(mlp(), loader()), "pass loss='cross_entropy' for labels"),
    "a class for a loss": (
        lambda: hk.hessian(mlp(), X, Y, loss=nn.CrossEntropyLoss),
        "loss is the class CrossEntropyLoss; pass an instance, such as CrossEntropyLoss()",
    ),
    "another name of a loss": (
        lambda: hk.hessian(mlp(), X, Y, loss="ce"),
        "loss='ce' is not known; pass one of 'mse', 'cross_entropy', a callable (outputs, target) -> scalar, or None",
    ),
    "no target": (lambda: hk.hessian(mlp(), X), "loss='mse' needs a target; pass target=..., or loss=None if the module"),
    "tokens without labels": (
        lambda: hk.spectrum(gpt2(), {"input_ids": IDS}, k=1),
        "loss='mse' needs a target; pass labels=... in the batch, a mapping, or loss=None if the module returns its loss",
    ),
    "labels as floats": (
        lambda: hk.hessian(mlp(), X, Y.float(), loss="cross_entropy"),
        "target is torch.float32; cross entropy needs integer class labels",
    ),
    "a label too large": (
        lambda: hk.hessian(mlp(), X, Y + 1, loss="cross_entropy"),
        "labels lie in [1, 2], expected 0 to 1 for 2 classes (or -100 to ignore a position)",
    ),
    "inputs of another width": (
        lambda: hk.hessian(mlp(), torch.ones(7, 4), T),
        "the module, called on inputs of shape (7, 4), raised RuntimeError: mat1 and mat2 shapes cannot be multiplied",
    ),
    "a target of another shape": (
        lambda: hk.hessian(nn.Linear(3, 1), X, torch.ones(7)),
        "target has shape (7,), the module's output has (7, 1); squared error needs equal shapes (nothing is broadcast)",
    ),
    "another dtype": (
        lambda: hk.hessian(mlp(), X.double(), T),
        "inputs is torch.float64, the parameters are torch.float32; convert one of them, e.g. inputs.to(torch.float32)",
    ),
    "another device": (
        lambda: hk.hessian(mlp(), X.to("meta"), T),
        "inputs is on meta, the parameters are on cpu; move one of them",
    ),
    "NumPy": (
        lambda: hk.hessian(mlp(), X.numpy(), T.numpy()),
        "target is a ndarray; loss='mse' compares with one tensor: pass torch.from_numpy(target)",
    ),
    "a name misspelt": (
        lambda: hk.hessian(mlp(), X, T, params=["0.wieght"]),
        "params=['0.wieght']: this Sequential has no such parameter; did you mean '0.weight' or '2.weight'?",
    ),
    "a module for parameters": (
        lambda: hk.hessian(mlp(), X, T, params=mlp()[0]),
        "params is of type Linear; expected names, patterns or parameters of the module",
    ),
    "frozen": (
        lambda: hk.hessian(mlp().requires_grad_(False), X, T),
        "the module has no parameters that require grad; call requires_grad_(True) on those of interest",
    ),
    "the value of the loss": (
        lambda: hk.hessian(nn.functional.mse_loss(mlp()(X), T), X, T),
        "expected a torch.nn.Module, got Tensor; pass the model itself as module",
    ),
    "a function for a module": (
        lambda: hk.hessian(lambda p: p.square().sum(), X, T),
        "expected a torch.nn.Module, got function; pass hessiankit.from_function(f, params) as module",
    ),
    "a class for a module": (
        lambda: hk.hessian(nn.Flatten, X, T),
        "expected a torch.nn.Module, got type; pass an instance of it as module",
    ),
    "the loss by position": (
        lambda: hk.hessian(mlp(), X, Y, nn.CrossEntropyLoss()),
        "too many positional arguments; in this order it takes module, inputs, target, all others by name",
    ),
    "an option misspelt": (
        lambda: hk.spectrum(mlp(), X, T, precondtioner=X),
        "got an unexpected keyword argument 'precondtioner'; did you mean 'preconditioner'?",
    ),
    "an argument by another library's name": (
        lambda: hk.spectrum(mlp(), X, Y, criterion=nn.CrossEntropyLoss()),
        "got an unexpected keyword argument 'criterion'; did you mean 'loss'?",
    ),
    "an optimizer for a metric": (
        lambda: hk.spectrum(mlp(), X, T, optimizer=torch.optim.SGD(mlp().parameters(), lr=0.1)),
        "got an unexpected keyword argument 'optimizer'; did you mean 'preconditioner'?",
    ),
    "a target beside a loader": (
        lambda: hk.spectrum(mlp(), loader(), Y, loss="cross_entropy"),
        "inputs is a DataLoader, whose batches have their targets; leave target=... out",
    ),
    "no data": (
        lambda: hk.spectrum(mlp(), [], loss="cross_entropy"),
        "the data hold no batch that counts; pass at least one pair",
    ),
    "a matrix too large": (
        lambda: hk.hessian(nn.Linear(3000, 3000), torch.ones(2, 3000), torch.ones(2, 3000)),
        "select parameters with params=[...], let hessian write it to disk with out=..., or use a smaller model",
    ),
    "a vector too short": (
        lambda: operator() @ torch.ones(3),
        "cannot multiply with shape (3,); expected a vector (32,) or a matrix (32, k), with entries in the order of named_parameters",
    ),
    "a vector of another dtype": (
        lambda: operator() @ torch.ones(32).double(),
        "the vectors are torch.float64; expected torch.float32: convert them",
    ),
    "NaN": (
        lambda: hk.hessian(with_nan(), X, T),
        "'0.weight' contains NaN or infinity; a Hessian at such a point is not defined",
    ),
    "another word for a kind": (
        lambda: hk.hessian_operator(mlp(), X, T, kind="gauss-newton"),
        "kind='gauss-newton' is not known; choose one of hessian, ggn, fisher, fisher-mc, fisher-empirical",
    ),
    "a block misspelt": (
        lambda: hk.hessian(mlp(), X, T)["0.weigth", "0.bias"],
        "no parameter '0.weigth'; did you mean '0.weight' or '2.weight'?",
    ),
    "an approximation misspelt": (
        lambda: operator().approximation("k-fac"),
        "approximation='k-fac' is not known; did you mean 'kfac'? Choose one of diagonal, kfac, ekfac",
    ),
    "a loss for each sample": (
        lambda: hk.hessian(mlp(), X, T, loss=lambda z, t: (z - t).square()),
        "the loss returned shape (7, 2), expected a scalar tensor; reduce it, e.g. with .mean() or .sum()",
    ),
    "complex parameters": (
        lambda: hk.hessian(copy.deepcopy(mlp()).to(torch.complex64), X, T),
        "the parameters are torch.complex64; expected real ones",
    ),
    "what is called otherwise": (lambda: hk.hvp, "module 'hessiankit' has no attribute 'hvp'; it is hessian_operator(...) @ v"),
}


@pytest.mark.filterwarnings("ignore:Complex modules")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_its_remedy(name: str) -> None:
    call, message = MISTAKES[name]
    with pytest.raises((hk.HessiankitError, TypeError, AttributeError), match=re.escape(message)) as seen:
        call()
    assert "\n" not in str(seen.value)


def test_a_copy_of_the_inputs_as_labels_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="the target is a copy of the inputs, and no label of a pair is shifted"):
        hk.spectrum(gpt2(), IDS, IDS, loss="cross_entropy", k=1)


def test_trained_parameters_of_a_loss_are_warned_of() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.scale * z, y)

    with pytest.warns(UserWarning, match="trained parameters of the loss are constants here: scale; a module that returns"):
        hk.hessian(mlp(), X, Y, loss=Scaled())
