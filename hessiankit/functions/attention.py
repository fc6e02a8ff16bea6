"""``scaled_dot_product_attention`` with all derivatives."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from hessiankit.functions.primitive_function import call, opaque
from hessiankit.primitives.fused_attention import ScaledDotProductAttention
from hessiankit.support.arguments import checked
from hessiankit.support.containers import check_dense
from hessiankit.support.errors import InputError
from hessiankit.support.torch_state import recording

NAME = "scaled_dot_product_attention"


@opaque
@checked(NAME)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    r"""Return softmax(c Q K^T + mask) V, differentiable any number of times in reverse and forward.

    The signature and the values are those of ``torch.nn.functional.scaled_dot_product_attention``, whose fused kernels have
    neither a second derivative nor a forward mode. From 512 queries times 512 keys on, values, gradients and second
    derivatives are read a strip of queries at a time (:mod:`hessiankit.primitives.attention_strips`), in memory linear in
    the length:

    ```math
    M = A\circ(WV^\top - D), \qquad D = \textstyle\sum W\circ N, \qquad
    dM = M\circ\tau + A\circ(Wv^\top + bV^\top - dD)
    ```

    Third derivatives, ``jvp`` of ``jvp`` and derivatives of an additive mask keep the weights, as torch's math path does.
    Rows without a visible key are zero, and so are their derivatives. Numbers of 16 bits are differentiated in single
    precision.

    Args:
        query: (..., L, E).
        key: (..., S, E); leading axes broadcast.
        value: (..., S, E_v).
        attn_mask: Broadcasts to (..., L, S): boolean, True where a key takes part, or additive.
        dropout_p: Zero.
        is_causal: Query i sees the keys up to i only. Not together with a mask.
        scale: c; 1/sqrt(E) if None.
        enable_gqa: The heads, axis -3, of key and value are fewer than query's, and each serves as many consecutive ones.

    Returns:
        (..., L, E_v).

    Raises:
        InputError: If ``dropout_p`` is not zero, or shapes, types or options do not go together.
        ValueError: If a derivative meets weights that are not numbers.

    >>> q, k, v = torch.zeros(1, 1, requires_grad=True), torch.tensor([[1.0], [-1.0]]), torch.tensor([[2.0], [0.0]])
    >>> (slope,) = torch.autograd.grad(scaled_dot_product_attention(q, k, v), q, create_graph=True)
    >>> slope.item(), torch.autograd.grad(slope, q)[0].item()  # 2 / (1 + exp(-2 q)) at zero
    (1.0, 0.0)
    """
    _check(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    primitive = ScaledDotProductAttention(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    arguments = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    if (stands_for := recording()) is None:
        return _differentiable(primitive, *arguments)
    if torch._C._functorch.maybe_current_level() is not None or torch.autograd.forward_ad._current_level >= 0:
        # derivatives that the module takes itself are those of torch's kernel, and only one of its kernels has them
        with sdpa_kernel(SDPBackend.MATH):
            return primitive.value(*arguments)
    parts = primitive.value(*arguments)
    with torch._C._DisablePythonDispatcher(), torch._C._DisableTorchDispatch():  # with the graph that autograd needs
        out = _differentiable(primitive, *arguments)
    stands_for(out, parts)
    return out


def _differentiable(primitive: ScaledDotProductAttention, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor) -> Tensor:
    device = query.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and query.dtype != torch.float64:
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
    tensors = [query, key, value]
    tensors += [x if x.dtype == torch.bool else x.to(query.dtype) for x in mask]
    ndim = max(query.ndim, key.ndim, value.ndim)
    return call(primitive, *(x[(None,) * (ndim - x.ndim)] for x in tensors), stacks=True)


def _check(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, enable_gqa: bool
) -> None:
    """Raise an InputError unless the arguments go together."""
    for name, x in (("query", query), ("key", key), ("value", value), ("attn_mask", mask)):
        if x is not None:
            check_dense(NAME, name, x)

    def error(problem: str, remedy: str) -> InputError:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("query", query), ("key", key), ("value", value)))
        return InputError(f"{NAME}: {problem} (got {shapes}); {remedy}")

    if dropout_p:
        raise InputError(
            f"{NAME}: dropout_p={dropout_p:g}, expected 0: a function that draws has no second derivative to speak of; "
            "call model.eval(), or set the attention dropout of the model to zero"
        )
    if is_causal and mask is not None:
        raise InputError(f"{NAME}: is_causal=True and attn_mask are both given; pass one of them")
    if len({x.dtype for x in (query, key, value)}) > 1 or not query.is_floating_point():
        types = ", ".join(str(x.dtype).removeprefix("torch.") for x in (query, key, value))
        raise InputError(f"{NAME}: query, key and value are of {types}, expected one floating-point type; convert them")
    if min(query.ndim, key.ndim, value.ndim) < 2 or query.shape[-1] != key.shape[-1] or key.shape[-2] != value.shape[-2]:
        raise error("the shapes do not go together", "expected (..., L, E), (..., S, E) and (..., S, E_v)")
    lead = [list(x.shape[:-2]) for x in (query, key, value)]
    if enable_gqa:
        if not all(lead) or lead[1][-1] != lead[2][-1] or lead[0][-1] % lead[1][-1]:
            raise error("the heads do not go together", "with enable_gqa the heads of key and value, axis -3, divide query's")
        lead[1][-1] = lead[2][-1] = lead[0][-1]
    try:
        joint = torch.broadcast_shapes(*lead)
        if mask is not None:
            torch.broadcast_to(mask, (*joint, query.shape[-2], key.shape[-2]))
    except RuntimeError:
        mask_note = "" if mask is None else f", nor with a mask of shape {tuple(mask.shape)}"
        raise error(
            f"the leading axes do not broadcast{mask_note}", "expected (..., L, S) for a mask, and equal leading axes or 1"
        ) from None
