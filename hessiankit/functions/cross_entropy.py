"""The cross entropy of a linear head with all derivatives, without the logits of all tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hessiankit.functions.primitive_function import call, opaque
from hessiankit.primitives.linear_cross_entropy import LinearCrossEntropy
from hessiankit.support.arguments import checked
from hessiankit.support.containers import check_dense
from hessiankit.support.errors import InputError, check_name
from hessiankit.support.torch_state import recording

NAME = "linear_cross_entropy"


@opaque
@checked(NAME)
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: str = "mean",
    shift: bool = False,
) -> Tensor:
    r"""Return the cross entropy of the logits hidden W^T + b, differentiable any number of times in reverse and forward.

    ```math
    \ell_i = \log\sum_c e^{z_{ic}} - z_{i,\text{label}_i}, \qquad z_i = W h_i + b
    ```

    Logits are computed for some tokens at a time, in the value, the gradient and second derivatives, and never kept: the
    memory does not grow with tokens times vocabulary. Third derivatives and ``jvp`` of ``jvp`` keep them. The formulas are in
    :mod:`hessiankit.primitives.linear_cross_entropy`; numbers of 16 bits are taken in single precision, and so is the loss.

    Args:
        hidden: (..., d), input of the head.
        weight: (C, d), as in ``nn.Linear``; tied embeddings included.
        labels: (...), integers from 0 to C - 1, or ``ignore_index``.
        bias: (C,).
        ignore_index: The label of tokens that do not count.
        label_smoothing: Share of the target distribution that is spread evenly over all classes, from 0 to 1.
        reduction: "mean" over the tokens that count (NaN where none does, as in torch), "sum" or "none".
        shift: Whether each token's label is the next one's, as in causal language models: the last hidden state (axis before
            d) and the first label (last axis) are dropped.

    Returns:
        A scalar, or the loss of every token, zero where it does not count; (...), one shorter if shifted.

    Raises:
        InputError: If shapes, types or options do not go together, or a label is out of range.

    >>> h, W = torch.zeros(1, 2, 1, requires_grad=True), torch.tensor([[1.0], [-1.0]])
    >>> loss = linear_cross_entropy(h, W, torch.tensor([[1, 0]]), shift=True)
    >>> (slope,) = torch.autograd.grad(loss, h, create_graph=True)
    >>> slope.flatten().tolist(), torch.autograd.grad(slope.sum(), h)[0].flatten().tolist()
    ([-1.0, 0.0], [1.0, 0.0])
    """
    for name, x in (("hidden", hidden), ("weight", weight), ("bias", bias), ("labels", labels)):
        if x is not None:
            check_dense(NAME, name, x)
    check_name(NAME, "reduction", reduction, ("mean", "sum", "none"))
    if hidden.ndim < 1 + shift or weight.ndim != 2 or hidden.shape[-1] != weight.shape[1] or hidden.shape[:-1] != labels.shape:
        raise InputError(
            f"{NAME}: got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)}, expected "
            "(..., d), (C, d) and (...); pass the head's weight as nn.Linear has it, and a label for each hidden state"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise InputError(
            f"{NAME}: bias of shape {tuple(bias.shape)}, expected {tuple(weight.shape[:1])}, one number per row of weight"
        )
    if labels.dtype not in (torch.int64, torch.int32) or not 0 <= label_smoothing <= 1:
        raise InputError(
            f"{NAME}: labels of {labels.dtype} and label_smoothing={label_smoothing:g}, expected integers (labels.long()) and "
            "a number from 0 to 1"
        )
    device = hidden.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and hidden.dtype != torch.float64:
        narrow = torch.get_autocast_dtype(device)
        hidden, weight, bias = hidden.to(narrow), weight.to(narrow), None if bias is None else bias.to(narrow)
    if len({x.dtype for x in (hidden, weight, bias) if x is not None}) > 1 or not hidden.is_floating_point():
        raise InputError(
            f"{NAME}: hidden of {hidden.dtype} and weight of {weight.dtype}, expected one floating-point type; convert them"
        )
    if shift:
        hidden, labels = hidden[..., :-1, :], labels[..., 1:]
    if recording():
        logits = F.linear(hidden, weight, bias).reshape(-1, len(weight))
        logits = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
        options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        loss = F.cross_entropy(logits, labels.reshape(-1), **options)  # type: ignore[arg-type]
        return loss.reshape(labels.shape) if reduction == "none" else loss
    try:
        losses = call(LinearCrossEntropy(ignore_index, label_smoothing), hidden, weight, bias, labels)
    except ValueError as error:  # a label out of range
        raise InputError(str(error)) from error
    return reduced(losses, labels, ignore_index, reduction)


def reduced(losses: Tensor, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
    """Return the losses of tokens, their sum, or their mean over the tokens that count."""
    if reduction == "none":
        return losses
    return losses.sum() if reduction == "sum" else losses.sum() / (labels != ignore_index).sum()
