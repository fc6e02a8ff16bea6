"""Inputs of a module: positional and keyword arguments, tensors in nested containers, and their layout."""

from __future__ import annotations

import copy
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import has_memory, is_wrapper


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
    else:  # torch may have been taught to take an object apart
        for number, leaf in enumerate(_pytree.tree_leaves(inputs)):
            if leaf is not inputs:
                yield from named_tensors(leaf, f"{name}.{number}")


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Return nested containers with ``function`` applied to their tensors; a tensor that occurs twice is mapped once.

    A ``UserDict`` is a container whether torch has been taught so or not, which depends on what else has been imported.
    """
    return _mapped(function, {}, tree)


def _mapped(function: Callable[[Tensor], Tensor], results: dict[int, Tensor], x: Any) -> Any:
    """Map the tensors in ``x``, those that occurred before by their results."""
    if isinstance(x, Tensor):
        if id(x) not in results:
            results[id(x)] = function(x)
        return results[id(x)]
    if isinstance(x, UserDict):
        copy_of_x = copy.copy(x)
        copy_of_x.data = {key: _mapped(function, results, value) for key, value in x.data.items()}
        return copy_of_x
    kind = _pytree.SUPPORTED_NODES.get(_pytree._get_node_type(x))
    if kind is None:
        return {key: _mapped(function, results, value) for key, value in x.items()} if isinstance(x, Mapping) else x
    parts, context = kind.flatten_fn(x)
    return kind.unflatten_fn([_mapped(function, results, part) for part in parts], context)


def samples(tree: Any, rows: slice | Tensor, count: int) -> Any:
    """Return nested containers with these rows of every tensor that has ``count`` rows; other tensors are kept whole.

    >>> samples((torch.arange(3), torch.zeros(2)), slice(0, 1), 3)
    (tensor([0]), tensor([0., 0.]))
    """
    return map_tensors(lambda x: x[rows] if x.ndim and x.shape[0] == count else x, tree)


def check_dense(caller: str, name: str, x: Tensor, *, constant: bool = False) -> None:
    """Raise InputError for a tensor whose entries are not laid out in memory one by one; a constant may be sparse."""
    if x.is_nested:
        raise InputError(
            f"{caller}: {name} is a nested tensor (rows of several lengths), which is not supported; pass a dense one with a "
            f"mask for the padding, e.g. torch.nested.to_padded_tensor({name}, 0.0), or one sequence at a time as a list of "
            "batches"
        )
    sparse = str(x.layout).startswith("torch.sparse")
    if x.layout != torch.strided and not (sparse and constant):
        kind = str(x.layout).removeprefix("torch.")
        raise InputError(f"{caller}: {name} has the layout {kind}; pass a dense tensor, e.g. {name}.to_dense()")


def check_values(caller: str, name: str, x: Tensor, *, constant: bool = False, wrapper: bool = False) -> None:
    """Raise InputError for a tensor that :func:`check_dense` refuses, or one that keeps its numbers in other tensors.

    The latter may do so with ``wrapper``, if it tells in which.
    """
    check_dense(caller, name, x, constant=constant)
    if has_memory(x) and not _is_readable(x):
        raise InputError(
            f"{caller}: {name} is a {type(x).__name__}, a tensor that keeps its numbers in others and has no __tensor_flatten__ "
            "that tells in which, so changes of it cannot be seen; put a plain tensor in its place, e.g. the dequantised weights"
        )
    if is_wrapper(x) and not wrapper:
        raise InputError(
            f"{caller}: {name} is a {type(x).__name__}, a tensor that keeps its numbers in others (quantised weights): only "
            "constants of a module may be that: call requires_grad_(False) on it or leave it out of params; pass plain data"
        )


def address(x: Tensor) -> int:
    """Return an identifier of a tensor's memory: that of its storage, or its own id if it has none or no entries.

    It stays when the memory of a storage is freed and filled again. Empty tensors share no memory, and a sparse tensor or a
    wrapper has no storage.

    >>> x, empty, other = torch.zeros(3), torch.zeros(0), torch.zeros(0)
    >>> address(x) == address(x[1:]), address(empty) == address(other)
    (True, False)
    """
    return x.untyped_storage()._cdata if has_memory(x) and x.numel() else id(x)


def _is_readable(x: Tensor) -> bool:
    try:
        x.untyped_storage().data_ptr()
    except RuntimeError:
        return False
    return True
