"""LayerNorm and RMSNorm, over a whole row or over groups of its features.

``eps = 0`` is allowed, since the papers' formulas have it. A row without variance (LayerNorm) or of zeros (RMSNorm) then
gives NaN, as in torch; the forward pass does not look for such rows, ``hessiankit.hessian`` names the module and the row.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hessiankit.support.errors import InputError, check_sizes, unknown

NORMS = ("layernorm", "rmsnorm")


class GroupNorm(nn.Module):
    """Each token's features normalised in groups of ``width / groups``, then one gain (and bias) over the whole row.

    Group-LN of The Curse of Depth, Table 7. That paper gives no formula; this is the group normalisation of Wu and He (2018)
    over the channels of one token, without statistics over positions.

    Args:
        width: Number of features of a row.
        groups: Number of groups, each of the same size.
        kind: ``"layernorm"`` or ``"rmsnorm"``.
        eps: Added to the variance, inside the root.
        affine: Whether there is a gain (and, for LayerNorm, a bias).

    >>> GroupNorm(4, 2, kind="rmsnorm", eps=0.0)(torch.tensor([[3.0, 3.0, -7.0, 7.0]]))  # each pair divided by its own rms
    tensor([[ 1.,  1., -1.,  1.]], grad_fn=<MulBackward0>)
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, width: int, groups: int, *, kind: str = "layernorm", eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__()
        self.groups, self.kind, self.eps, self.size = groups, kind, eps, width // groups
        self.register_parameter("weight", nn.Parameter(torch.ones(width)) if affine else None)
        self.register_parameter("bias", nn.Parameter(torch.zeros(width)) if affine and kind == "layernorm" else None)

    def forward(self, x: Tensor) -> Tensor:
        """Map rows ``(..., width)`` to the same shape."""
        rows = x.unflatten(-1, (self.groups, self.size))  # (..., groups, width / groups)
        layernorm = self.kind == "layernorm"
        y = F.layer_norm(rows, (self.size,), eps=self.eps) if layernorm else F.rms_norm(rows, (self.size,), eps=self.eps)
        y = y.flatten(-2)  # (..., width)
        y = y if self.weight is None else y * self.weight
        return y if self.bias is None else y + self.bias

    def extra_repr(self) -> str:
        """Return the options shown by ``print(norm)``."""
        return f"{self.groups} x {self.size}, {self.kind}, eps={self.eps}"


def make_norm(caller: str, kind: str, width: int, *, eps: float, affine: bool, groups: int | None = None) -> nn.Module:
    """Return the norm of rows of ``width`` features, or with ``groups`` of each group of features separately.

    Raises:
        InputError: If the kind is not known, eps is negative, or the groups do not divide the width.
    """
    if kind not in NORMS:
        raise unknown(caller, "norm", kind, NORMS)
    if not isinstance(eps, (int, float)) or not eps >= 0:
        raise InputError(f"{caller}: eps={eps}, expected 0 or more; it is added to a variance, under the root")
    if groups is not None:
        check_sizes(caller, groups=groups)
        if width % groups:
            raise InputError(f"{caller}: d_model={width} does not split into groups={groups} equal groups; pass a divisor")
        return GroupNorm(width, groups, kind=kind, eps=eps, affine=affine)
    if kind == "layernorm":
        return nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    return nn.RMSNorm(width, eps=eps, elementwise_affine=affine)


def norm_of(part: nn.Module, dtype: torch.dtype | None = None) -> tuple[str, int, float]:
    """Return a norm's kind, number of groups and eps; a norm without eps has torch's default for ``dtype``, or 0 without a dtype.

    >>> norm_of(nn.RMSNorm(4, eps=0.5), torch.float64), norm_of(GroupNorm(4, 2), torch.float64)
    (('rmsnorm', 1, 0.5), ('layernorm', 2, 1e-05))
    """
    kind = part.kind if isinstance(part, GroupNorm) else "layernorm" if isinstance(part, nn.LayerNorm) else "rmsnorm"
    groups, eps = part.groups if isinstance(part, GroupNorm) else 1, getattr(part, "eps", None)
    if eps is None:
        eps = torch.finfo(torch.promote_types(dtype, torch.float32)).eps if isinstance(dtype, torch.dtype) else 0.0
    return kind, groups, float(eps)
