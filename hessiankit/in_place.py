"""Operations that write into their input, such as ``relu_`` or ``+=``, as ones that do not.

A trace keeps every value, so none may change after it was made. An operation that writes is replaced by its twin that
returns a new tensor, where nothing that comes later reads the overwritten memory in another way; otherwise it is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from hessiankit.errors import TraceError


def without_writing(
    node: Node, known: Mapping[Node, Any], moving: Collection[Node], *, differentiable: bool = True
) -> Callable[..., Any]:
    """Return what to run for a node: its operation, or the operation's twin that writes into nothing.

    Args:
        node: The next node to run.
        known: The values of the nodes run so far.
        moving: The nodes whose values the parameters reach.
        differentiable: Whether gradients are on; where they are off, autograd does not see a value being overwritten.

    Raises:
        TraceError: If the operation overwrites an input, a parameter or a buffer, or memory that is read again.
    """
    operation: Any = node.target
    written = _written(node)
    if not written:
        return operation
    memory = {known[n].untyped_storage().data_ptr() for n in written}
    shared = [n for n, value in known.items() if _reads(value, memory)]
    if any(n.op in ("placeholder", "get_attr") for n in shared):
        raise _refusal(operation, "an input, a parameter or a buffer of the module, which would change from call to call")
    if differentiable and not any(user is not node and user not in known for n in shared for user in n.users):
        twin = _twin(operation)
        if twin is not None:
            return twin
    if any(n in moving for n in [*shared, *node.all_input_nodes]) or any(user in moving for n in shared for user in n.users):
        raise _refusal(operation, "memory that other values of the computation read as well")
    return operation  # a constant, such as a mask, on its way to being built


def check_kind(node: Node, value: Tensor, known: Mapping[Node, Any]) -> None:
    """Raise TraceError if the twin of a node's operation promoted the dtype, which the operation itself would have kept."""
    before = known[_written(node)[0]]
    if value.dtype != before.dtype:
        raise _refusal(node.target, f"a tensor of {before.dtype} what is {value.dtype}")


def _written(node: Node) -> list[Node]:
    """Return the nodes whose memory an operation writes into."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    given = dict(zip((argument.name for argument in schema.arguments), node.args, strict=False)) | node.kwargs
    names = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    leaves = torch.utils._pytree.tree_leaves([given.get(name) for name in names])
    return [leaf for leaf in leaves if isinstance(leaf, Node)]


def _reads(value: Any, memory: Collection[int]) -> bool:
    leaves = torch.utils._pytree.tree_leaves(value)
    return any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in memory for leaf in leaves)


def _twin(operation: Any) -> Callable[..., Any] | None:
    """Return ``aten.relu.default`` for ``aten.relu_.default``, or None."""
    packet, _, overload = str(operation).removeprefix("aten.").partition(".")
    if not packet.endswith("_") or packet == "copy_":  # torch has no derivative of aten.copy
        return None
    return getattr(getattr(torch.ops.aten, packet[:-1], None), overload, None)


def _refusal(operation: Any, what: str) -> TraceError:
    return TraceError(
        f"trace: {operation} writes into {what}. Write the operation so that it returns a new tensor: y = y + x in place of "
        "y += x, torch.relu in place of torch.relu_ or ReLU(inplace=True), torch.cat or torch.where in place of y[i] = x"
    )
