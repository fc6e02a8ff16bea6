"""Plain functions of parameters and data as modules, which every call takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree

from hessiankit.support.arguments import checked
from hessiankit.support.errors import InputError

CALLER = "from_function"


class Function(nn.Module):
    """A function f(params, *data) -> scalar as a module; made by :func:`from_function`.

    Attributes:
        returns_loss: Mark for :func:`~hessiankit.request.data.read_data`: what the module returns is the loss.
    """

    returns_loss = True

    def __init__(self, function: Callable[..., Tensor], names: list[str], leaves: list[nn.Parameter], structure: Any) -> None:
        super().__init__()
        self._parameters.update(zip(names, leaves, strict=True))  # register_parameter takes no dots
        self._names, self._function, self._structure = names, function, structure

    def forward(self, *data: Any) -> Tensor:
        """Call the function with its parameters as they are now."""
        leaves = [self._parameters[name] for name in self._names]
        return self._function(_pytree.tree_unflatten(leaves, self._structure), *data)


@checked(CALLER, leave=("f", "params"))
def from_function(f: Callable[..., Tensor], params: Any) -> nn.Module:
    """Return a plain function as a module, for every call: Hessians with respect to inputs, positions, activations, ...

    The module is called with the data of ``f`` and returns its value, which is the loss: ``hessian(module, x, y)``
    differentiates ``f(params, x, y)``, and ``hessian(module, ())`` a function without data.

    Args:
        f: Function (params, *data) -> scalar.
        params: Tensors to differentiate with respect to: one, or a dict, list or tuple of them, nested too. Names are the keys,
            joined by dots, ``"params"`` for a single tensor. A parameter of a module stays the same object; any other tensor
            shares its memory with the parameter, so that later writes take effect.

    Raises:
        InputError: ``f`` is not callable, or ``params`` holds anything but floating-point tensors.

    The energy of a spring between two points, in their positions:

    >>> import torch, hessiankit
    >>> x = torch.tensor([0.0, 3.0], dtype=torch.float64)
    >>> hessiankit.hessian(from_function(lambda x: 0.5 * (x[1] - x[0]) ** 2, x), ()).matrix.tolist()
    [[1.0, -1.0], [-1.0, 1.0]]
    """
    if isinstance(f, nn.Module) or not callable(f):
        raise InputError(
            f"{CALLER}: f is a {type(f).__name__}; pass a function (params, *data) -> scalar (a module needs no wrapper)"
        )
    paths, structure = _pytree.tree_flatten_with_path(params)
    strange = next((x for _, x in paths if not (isinstance(x, Tensor) and x.is_floating_point())), None)
    if strange is not None or not paths:
        kind = strange.dtype if isinstance(strange, Tensor) else type(params if strange is None else strange).__name__
        raise InputError(f"{CALLER}: params holds {kind}; pass floating-point tensors, or a dict, list or tuple of them")
    names = [".".join(str(_key(part)) for part in path) or "params" for path, _ in paths]
    leaves = [x if isinstance(x, nn.Parameter) else nn.Parameter(x.detach()) for _, x in paths]
    return Function(f, names, leaves, structure)


def _key(part: Any) -> Any:
    return next(getattr(part, name) for name in ("key", "idx", "name") if hasattr(part, name))
