"""Operations that write into their input, such as ``relu_``, ``+=`` or ``y[i] = x``, as ones that do not.

A trace keeps every value, so none may change after it was made. An operation that writes is replaced by its twin that
returns a new tensor; whatever reads the overwritten memory later, such as the whole of which a part was written, is
replaced by a choice between its own entries and the new ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hessiankit.support.errors import TraceError
from hessiankit.support.torch_state import strided_parts
from hessiankit.tracing.graph import Node, tensors_in


def without_writing(
    node: Node, values: Mapping[Node, Any], ids: Collection[Node], *, differentiable: bool = True
) -> Callable[..., Any]:
    """Return what to run for a node: its operation, or the variant of it that does not write in place.

    Args:
        node: The next node to run.
        values: The values of the nodes run so far.
        ids: The nodes whose values the parameters reach.
        differentiable: Whether gradients are on; where they are off, autograd does not see a value being overwritten.

    Raises:
        TraceError: If the operation overwrites an input, a parameter or a buffer, or what was detached from its gradient.
    """
    operation: Any = node.target
    targets = written(node)
    if not targets:
        return operation
    memory = {values[n].untyped_storage().data_ptr() for n in targets if values[n].untyped_storage().nbytes()}
    aliases = [n for n, value in values.items() if _reads(value, memory)]
    if any(n.op in ("placeholder", "get_attr") for n in aliases):
        raise _refusal(operation, "an input, a parameter or a buffer of the module, which would change from call to call")
    has_readers = any(user is not node and user not in values for n in aliases for user in n.users)
    twin = WRITTEN_OUT.get(operation) or functional_twin(operation)
    if differentiable and not has_readers and twin is not None:
        return twin
    inputs = node.all_input_nodes if differentiable else ()  # without gradients, nothing is passed on from them
    neighbours = [*aliases, *inputs, *(user for n in aliases for user in n.users)]
    if not any(n in ids for n in neighbours):
        return operation  # a constant, such as a mask, on its way to being built
    if not differentiable or twin is None or len(targets) > 1 or any(_is_cut_off(n, values, ids) for n in aliases):
        raise _refusal(operation, "memory that other values of the computation read as well, without a derivative")
    return twin


def readers(node: Node, values: dict[Node, Any]) -> Iterator[tuple[Node, Tensor, Tensor]]:
    """Yield what else reads the memory that a node, replaced by its twin, has written: its value after that, and its source.

    ``values`` is updated: the values that share memory still do so, in a copy with the new entries.

    Yields:
        The reading node; its old value; positions of its entries in the written value, -1 for those that stay.
    """
    target, value = values[written(node)[0]], values[node]
    if _reads(value, {target.untyped_storage().data_ptr()}):
        return  # another shape of the same memory, such as unsqueeze_
    aliases = [n for n, v in values.items() if n is not node and _reads(v, {target.untyped_storage().data_ptr()})]
    aliases = [n for n in aliases if any(user not in values for user in n.users)]
    if not aliases:
        return
    length = target.untyped_storage().nbytes() // target.element_size()
    memory = target.as_strided((length,), (1,), 0).clone()
    origin = torch.full((length,), -1, device=target.device)
    layout = (target.shape, target.stride(), target.storage_offset())
    memory.as_strided(*layout).copy_(value)
    origin.as_strided(*layout).copy_(torch.arange(value.numel(), device=target.device).reshape(value.shape))
    values[node] = memory.as_strided(*layout)
    for n in aliases:
        old_value = values[n]
        if not isinstance(old_value, Tensor) or old_value.dtype != target.dtype:
            raise _refusal(node.target, "memory that is read as another type, or in several pieces at once")
        layout = (old_value.shape, old_value.stride(), old_value.storage_offset())
        values[n] = memory.as_strided(*layout)
        yield n, old_value, origin.as_strided(*layout).clone()


def copied(into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Return the value of ``into`` after ``into.copy_(source)``."""
    return source.expand(into.shape).clone()


def filled(into: Tensor, number: Any) -> Tensor:
    """Return the value of ``into`` after ``into.fill_(number)``."""
    return number.expand(into.shape).clone() if isinstance(number, Tensor) else torch.full_like(into, number)


WRITTEN_OUT: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.copy_.default: copied,
    torch.ops.aten.fill_.Scalar: filled,
    torch.ops.aten.fill_.Tensor: filled,
    torch.ops.aten.zero_.default: torch.zeros_like,
}


def overwritten(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return those arguments of a call whose memory it writes into."""
    schema = getattr(operation, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    by_name = {**dict(zip((argument.name for argument in schema.arguments), args, strict=False)), **kwargs}
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return torch.utils._pytree.tree_leaves([by_name.get(name) for name in names])


def written(node: Node) -> list[Node]:
    """Return the nodes whose memory an operation writes into."""
    return [leaf for leaf in overwritten(node.target, node.args, node.kwargs) if isinstance(leaf, Node)]


def _reads(value: Any, memory: Collection[int]) -> bool:
    return any(part.untyped_storage().data_ptr() in memory for leaf in tensors_in(value) for part in strided_parts(leaf))


@cache
def functional_twin(operation: Any) -> Any:
    """Return ``aten.relu.default`` for ``aten.relu_.default``; None for an operation that does not write into its input.

    The twin takes arguments of the same types in the same order; its overload may have another name.

    >>> functional_twin(torch.ops.aten.pow_.Scalar)
    <OpOverload(op='aten.pow', overload='Tensor_Scalar')>
    """
    packet, _, overload = str(operation).removeprefix("aten.").partition(".")
    base = getattr(torch.ops.aten, packet[:-1], None) if packet.endswith("_") else None
    if base is None:
        return None
    names = sorted(base.overloads(), key=lambda name: name != overload)
    overloads = (getattr(base, name) for name in names)
    return next((twin for twin in overloads if _types(twin) == _types(operation)), None)


def _types(operation: Any) -> list[str]:
    return [str(argument.type) for argument in operation._schema.arguments]


def _is_cut_off(node: Node, values: Mapping[Node, Any], ids: Collection[Node]) -> bool:
    """Tell whether a node reads the memory of a value that the parameters reach, but is a constant (``detach``, ``no_grad``)."""
    if node in ids or not isinstance(values[node], Tensor):
        return False
    memory = values[node].untyped_storage().data_ptr()
    return _detaches(node, ids) or any(
        (n in ids or _detaches(n, ids)) and _reads(values[n], {memory}) for n in node.all_input_nodes
    )


def _detaches(node: Node, ids: Collection[Node]) -> bool:
    """Tell whether a node is ``detach``, and not only another name of a constant: torch detaches new memory under some modes."""
    return node.target is torch.ops.aten.detach.default and any(n in ids or len(n.users) > 1 for n in node.all_input_nodes)


def _refusal(operation: Any, memory: str) -> TraceError:
    return TraceError(
        f"trace: {operation} writes into {memory}. Write the operation so that it returns a new tensor: y = y + x in layout of "
        "y += x, torch.relu in layout of torch.relu_, torch.cat or torch.where in layout of y[i] = x"
    )
