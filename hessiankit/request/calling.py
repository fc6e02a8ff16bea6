"""How a module is called and what its loss reads: tensors, positional and keyword arguments, output objects."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch.utils import _pytree

from hessiankit.errors import InputError

Loss: TypeAlias = "str | Callable[..., Tensor] | None"


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and the keyword arguments that ``inputs`` stand for.

    A mapping (a dict, the encoding that a tokenizer returns) holds keyword arguments, a tuple or list positional ones;
    anything else is the only argument.

    >>> arguments({"x": 1, "y": 2}), arguments((1, 2)), arguments(1)
    (((), {'x': 1, 'y': 2}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs) if isinstance(inputs, (tuple, list)) else (inputs,)), {}


def named_tensors(inputs: Any, name: str = "inputs") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in ``inputs``, nested ones too, with the expression that reaches it.

    >>> [name for name, _ in named_tensors({"x": Tensor(1), "pair": (Tensor(1), None)})]
    ["inputs['x']", "inputs['pair'][0]"]
    """
    if isinstance(inputs, Tensor):
        yield name, inputs
    elif isinstance(inputs, (Mapping, tuple, list)):
        items = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
        for key, part in items:
            yield from named_tensors(part, f"{name}[{key!r}]")
    else:  # an object that torch has been taught to take apart
        for number, leaf in enumerate(_pytree.tree_leaves(inputs)):
            if leaf is not inputs:
                yield from named_tensors(leaf, f"{name}.{number}")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested containers with ``function`` applied to their tensors; a tensor that is there twice stays one.

    A ``UserDict`` is a container whether torch has been taught so or not, which depends on what else has been imported.
    """
    made: dict[int, Tensor] = {}

    def each(x: Any) -> Any:
        if isinstance(x, UserDict):
            changed = copy.copy(x)
            changed.data = {key: mapped(value) for key, value in x.data.items()}
            return changed
        if not isinstance(x, Tensor):
            return x
        if id(x) not in made:
            made[id(x)] = function(x)
        return made[id(x)]

    def mapped(tree: Any) -> Any:
        return _pytree.tree_map(each, tree, is_leaf=lambda x: isinstance(x, UserDict))

    return mapped(tree)


def ordinary(tree: Any) -> Any:
    """Return containers as they are, or with copies of the tensors made in inference mode, of which autograd takes none."""
    if any(x.is_inference() for _, x in named_tensors(tree)):
        return map_tensors(lambda x: x.clone() if x.is_inference() else x, tree)
    return tree


def read_outputs(who: str, loss: Loss, outputs: Any) -> Any:
    """Return what the loss is computed from.

    Args:
        who: What an error message starts with.
        loss: None: the module returns its loss, as a tensor, an attribute ``.loss`` or an entry ``"loss"``. A name: the
            same with ``logits``. A callable is given exactly what the module returns.
        outputs: What the module returned.

    Raises:
        InputError: If there is no such thing.

    >>> read_outputs("example", "mse", {"logits": Tensor([1.0]), "other": 2})
    tensor([1.])
    """
    if callable(loss) or isinstance(outputs, Tensor):
        return outputs
    key = "loss" if loss is None else "logits"
    found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
    if isinstance(found, Tensor):
        return found
    what = f"one tensor, or an object or dict with {key!r}"
    if loss is None:
        remedy = "pass the labels that it computes its loss from among the inputs, or loss=... and target=..."
    else:
        remedy = "pass a callable loss=f(outputs, target), which is given the whole of it, or wrap the module"
    raise InputError(f"{who}: the module returned {_describe(outputs, key)}, expected {what}; {remedy}")


def _describe(outputs: Any, key: str) -> str:
    kind = type(outputs).__name__
    if isinstance(outputs, Mapping):
        names = [str(k) for k in outputs]
    elif isinstance(outputs, (tuple, list)):
        return f"{kind} (of {', '.join(type(x).__name__ for x in outputs) or 'nothing'})"
    else:
        names = [n for n in getattr(outputs, "__dict__", {}) if not n.startswith("_")]
    if key in names:
        return f"{kind} whose {key!r} is None"
    return f"{kind} (with {', '.join(map(repr, names[:8]))})" if names else kind
