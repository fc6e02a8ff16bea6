"""How torch's operations are read: which multiply by a weight, normalise, look up, only reshape."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hessiankit.tracing.graph import Node


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


RESHAPING = _words(
    "view reshape _unsafe_view _reshape_alias view_as reshape_as transpose permute t swapaxes swapdims movedim moveaxis numpy_T "
    "mT expand expand_as broadcast_to repeat repeat_interleave tile slice select narrow squeeze unsqueeze contiguous clone "
    "_to_copy to type_as alias detach flatten unflatten split split_with_sizes chunk unbind tensor_split dropout getitem roll "
    "lift_fresh float double half bfloat16 unfold flip tril triu _conj"
)
LOOKUPS = _words("embedding embedding_bag")
CHOICES = _words("index index_select gather take")
SUMS = _words("add sub rsub __iadd__")
SCALINGS = _words("mul div multiply divide addcmul")
JOINS = _words("cat concat concatenate stack hstack vstack where index_put masked_scatter copy index_copy slice_scatter")
EMPTY = _words("new_empty new_zeros new_ones new_full empty_like zeros_like ones_like full_like rand_like size sym_size")
SOFTMAX = _words("softmax _softmax _safe_softmax")
ROUTING = _words("topk")
NORMS = {  # position of gain and bias
    "layer_norm": (2, 3),
    "native_layer_norm": (2, 3),
    "rms_norm": (2, None),
    "_fused_rms_norm": (2, None),
    "group_norm": (2, 3),
    "native_group_norm": (1, 2),
    "batch_norm": (1, 2),
    "native_batch_norm": (1, 2),
    "cudnn_batch_norm": (1, 2),
    "instance_norm": (1, 2),
}
_CONVOLUTIONS = _words("conv1d conv2d conv3d convolution _convolution")
_SIMPLE = _words("matmul mm bmm mv dot _grouped_mm linear_backward inner tensordot")


def name_of(node: Node) -> tuple[str, bool]:
    """Return an operation's name without the overload, and whether it writes into its first input.

    ``aten.add_.Tensor`` is ``("add", True)``.
    """
    name: str = getattr(node.target, "_opname", "") or getattr(node.target, "__name__", str(node.target))
    writes = name.endswith("_") and not name.endswith("__")
    return (name[:-1] if writes else name), writes


def factors(name: str, args: tuple[Any, ...]) -> tuple[list[Any], Any, bool] | None:
    """Return the factors of a product, what is added to it, and whether the second is a weight by the operation's meaning.

    Args:
        name: The operation's name.
        args: Its arguments, as nodes.
    """
    if name == "linear" or name in _CONVOLUTIONS:
        return [args[0], args[1]], args[2] if len(args) > 2 else None, True
    if name in ("addmm", "baddbmm", "addmv", "addbmm"):
        return [args[1], args[2]], args[0], False
    if name in _SIMPLE:
        return list(args[:2]), None, False
    if name == "einsum":
        operands = list(args[1])
        return (operands, None, False) if len(operands) == 2 else None
    return None


def attention_of(name: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return the queries, keys and values of an operation that is the whole of attention, or None."""
    return args[:3] if "scaled_dot_product" in name and "attention" in name else None


def storage(x: Any) -> int | None:
    """Return where a tensor's memory starts, or None."""
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) and x.numel() else None
