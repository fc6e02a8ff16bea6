"""Arguments that are wrong, and what the fuzz asks of the answer to them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from public_calls import Call
from torch import Tensor, nn

import hessiankit as hk


def pool(right: Any) -> dict[str, Callable[[], Any]]:
    """Return what makes wrong values, by name, those that can be made of a right one included."""
    values: dict[str, Any] = {
        "none": None, "text": "nonsense", "number": 3, "zero": 0, "negative": -1, "huge": 10**13, "fraction": 0.5, "nan": float("nan"),
        "inf": float("inf"), "true": True, "list": [], "dict": {}, "object": object(), "class": dict, "texts": ["nonsense"],
        "nested": [[1, 2], [3]], "mapping": {"nonsense": 1.0}, "of numbers": {1: 2}, "complex number": 1j, "bytes": b"ab",
        "tensor": torch.zeros(3, dtype=torch.float64), "empty": torch.zeros(0, dtype=torch.float64),
        "scalar": torch.tensor(1.0, dtype=torch.float64), "identity": nn.Identity(), "no parameters": nn.ReLU(),
        "tensors": (torch.ones(2), torch.ones(3)),
    }  # fmt: skip
    if isinstance(right, Tensor):
        values |= _of_tensor(right)
    makers: dict[str, Callable[[], Any]] = {what: partial(_itself, value) for what, value in values.items()}
    return makers | (_of_module(right) if isinstance(right, nn.Module) else {})


def _itself(value: Any) -> Any:
    return value


def _of_tensor(x: Tensor) -> dict[str, Any]:
    wrong: dict[str, Any] = {
        "no samples": x[:0], "no entries": x[..., :0], "one axis less": x[0], "one axis more": x[None], "cut": x[..., :-1],
        "one sample": x[:1], "float32": x.float(), "half": x.half(), "integers": x.long(), "booleans": x.bool(), "on meta": x.to("meta"),
        "complex": x.to(torch.complex128), "sparse": x.double().to_sparse(), "int32": x.int(), "array": x.numpy(), "as list": x.tolist(),
        "transposed": x.transpose(0, -1), "uint8": x.abs().to(torch.uint8), "wants gradient": x.double().clone().requires_grad_(),
    }  # fmt: skip
    if x.is_floating_point():
        return wrong | {"NaN": x * float("nan"), "one NaN": _spoiled(x, float("nan")), "one inf": _spoiled(x, float("inf"))}
    return wrong | {"out of range": x + 100, "below zero": x - 50, "ignored": torch.full_like(x, -100)}


def _spoiled(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x.view(-1)[-1] = value
    return x


def _of_module(right: nn.Module) -> dict[str, Callable[[], nn.Module]]:
    def changed(change: Callable[[nn.Module], Any]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            module = copy.deepcopy(right)
            change(module)
            return module

        return make

    def spoil(module: nn.Module) -> None:
        with torch.no_grad():
            next(module.parameters()).view(-1)[0] = float("nan")

    def first_in(dtype: torch.dtype) -> Callable[[nn.Module], None]:
        def convert(module: nn.Module) -> None:
            first = next(module.parameters())
            first.data = first.data.to(dtype)

        return convert

    return {
        "NaN weight": changed(spoil), "two dtypes": changed(first_in(torch.half)), "complex weight": changed(first_in(torch.complex128)),
        "frozen": changed(lambda module: module.requires_grad_(False)), "bfloat16 module": changed(lambda module: module.bfloat16()),
        "meta": changed(lambda module: module.to("meta")), "linear": lambda: nn.Linear(4, 4).double(),
        "convolution": lambda: nn.Conv2d(2, 2, 3).double(), "embedding": lambda: nn.Embedding(3, 4).double(),
        "drops": lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4).double()).train(), "two outputs": lambda: nn.LSTM(4, 4).double(),
        "normed": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double(), "raises": Raises,
    }  # fmt: skip


class Raises(nn.Module):
    """A module whose forward fails with a message of three lines."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("first\nsecond\nthird")


def state(module: nn.Module) -> list[Any]:
    """What a call has to leave as it is: values, modes, gradients, hooks."""
    found: list[Any] = [m.training for m in module.modules()]
    found += [(n, p.requires_grad, None if p.grad is None else p.grad.clone()) for n, p in module.named_parameters()]
    found += [len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in module.modules()]
    found += [(n, x if x.is_meta else x.detach().clone()) for n, x in module.state_dict().items()]
    return found


def same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(_equal(a, b) for a, b in zip(before, after, strict=True))


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, tuple):
        return isinstance(b, tuple) and all(map(_equal, a, b))
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and (a.is_meta or torch.equal(a.nan_to_num(), b.nan_to_num()))
    return bool(a == b)


def plainly_wrong(right: Any) -> tuple[str, ...]:
    """Return the values of the pool that cannot stand for a right one, whatever the function is."""
    if isinstance(right, bool):
        return ("text", "object")
    if isinstance(right, str):
        return ("text", "number", "object")
    if isinstance(right, (int, float)):
        return ("text", "nan", "object")
    if isinstance(right, Tensor):
        return ("text", "object", "no entries", "NaN" if right.is_floating_point() else "out of range")
    return ("text", "object", "NaN weight") if isinstance(right, nn.Module) else ("object",)


def complaint(call: Call, arguments: dict[str, Any], *, refused: bool = False) -> str | None:
    """Call, and return what is wrong with the answer.

    That is another error than ours, a message that does not help, or a changed module; with ``refused`` also that there is none.
    """
    modules = [x for x in arguments.values() if isinstance(x, nn.Module)]
    for module in modules:
        for p in module.parameters():
            if p.requires_grad and not p.is_meta:
                p.grad = torch.full_like(p, 0.25)
    before = [state(module) for module in modules]
    random = torch.get_rng_state()
    found = None
    try:
        call.function(**arguments)
        found = "it is taken" if refused else None
    except hk.HessiankitError as error:
        text = str(error)
        if "\n" in text:
            found = f"a message of several lines: {text!r}"
        elif not text.startswith(tuple(f"{name}{end}" for name in call.names for end in (":", ".", " "))):
            found = f"a message that does not name the callable: {text!r}"
    except Exception as error:
        found = f"{type(error).__name__} comes out: {str(error)[:200]!r}"
    if found is None and not all(same(b, state(m)) for b, m in zip(before, modules, strict=True)):
        found = "the module is not as it was"
    if found is None and call.names[0][0].islower() and not torch.equal(random, torch.get_rng_state()):
        found = "the random state is not as it was"
    return found
