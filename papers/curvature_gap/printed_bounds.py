"""Theorems 1 and 6 of Closing the Curvature Gap as printed, beside the norms that they are to bound and the valid bounds.

The printed theorems do not hold in general: ``BoundsReport.violated`` of :func:`printed_bounds` says where they fail.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hessiankit.blocks import Attention, TransformerBlock
from hessiankit.support.arguments import checked
from hessiankit.support.torch_state import one_at_a_time
from hessiankit.theory.bounding.a_priori import in_float64
from hessiankit.theory.bounding.bounds import BOUNDS, Bound, BoundsReport, LossAt, Norms, UndefinedBound, loss_at, report
from hessiankit.theory.bounding.closed_forms import Pairs, has_bare_layernorms
from hessiankit.theory.formulas.block_at import is_the_papers
from papers.curvature_gap.attention_printed import theorem_1_appendix_printed, theorem_1_printed
from papers.curvature_gap.block_printed import phi_printed, sigma_min_printed, theorem_6_factors_printed, theorem_6_printed


@checked("printed_bounds")
@one_at_a_time
def printed_bounds(block: nn.Module, inputs: Tensor, target: Tensor, *, loss: str = "mse") -> BoundsReport:
    """Return the report of ``hessiankit.bounds`` with the columns of ``PRINTED`` behind those of the valid bounds.

    Args:
        block: as in ``hessiankit.bounds``. Theorem 1 is for an ``Attention`` of one head, Theorem 6 for a post-norm block with
            ReLU and LayerNorms without gain and shift; for others a note of the report says why they are not defined.
        inputs, target, loss: as in ``hessiankit.bounds``. The theorems are for one sequence and the squared error.

    Raises:
        InputError: as ``hessiankit.bounds``.

    Two tokens at a global minimum with uniform attention: the norm is 2 q^2, and Theorem 1 gives 24 for every q.

    >>> part = Attention(1).double()
    >>> for p, value in zip(part.parameters(), (10.0, 0.0, 1.0)):  # W_Q, W_K, W_V
    ...     _ = nn.init.constant_(p, value)
    >>> x = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    >>> found = printed_bounds(part, x, torch.zeros_like(x))
    >>> round(found.values["whole"]["true"], 9), round(found.values["whole"]["printed_theorem_1"], 9)
    (200.0, 24.0)
    """
    return report(loss_at(block, inputs, target, loss), {**BOUNDS, **PRINTED})


def theorem_1_of_the_text(at: LossAt) -> Norms:
    """Theorem 1 of Closing the Curvature Gap, for an attention."""
    return theorem_1(*_sample(at, Attention), appendix=False)  # type: ignore[arg-type]


def theorem_1_of_the_appendix(at: LossAt) -> Norms:
    """Theorem 1 as the paper's appendix has it."""
    return theorem_1(*_sample(at, Attention), appendix=True)  # type: ignore[arg-type]


def theorem_6_as_stated(at: LossAt) -> Norms:
    """Theorem 6 of Closing the Curvature Gap, for a post-norm block, with sigma_min as stated."""
    return theorem_6(*_sample(at, TransformerBlock), reading="stated")  # type: ignore[arg-type]


def theorem_6_as_proved(at: LossAt) -> Norms:
    """Theorem 6 with sigma_min as its proof uses it."""
    return theorem_6(*_sample(at, TransformerBlock), reading="proof")  # type: ignore[arg-type]


def _sample(at: LossAt, kind: type[nn.Module]) -> tuple[nn.Module, Tensor, Tensor]:
    """Return the module and the one sample of a loss that a theorem covers, or raise ``UndefinedBound``."""
    reason = undefined(at.module, at.x, at.loss)
    if reason:
        raise UndefinedBound(f"printed: not defined here, {reason}")
    if not isinstance(at.module, kind):
        raise UndefinedBound
    return at.module, at.x[0].detach().double(), at.t[0].detach().double()


PRINTED = {
    one.name: one
    for one in (
        Bound(
            "printed_theorem_1",
            theorem_1_of_the_text,
            caveat="leaves out (W_K, W_K) and (W_V, W_K), and takes ||dA/dT|| <= 1/L, true at uniform attention",
        ),
        Bound("printed_theorem_1_appendix", theorem_1_of_the_appendix),
        Bound(
            "printed_theorem_6",
            theorem_6_as_stated,
            caveat="its steps (17), (21) and Phi fail; with the stated sigma_min it is exceeded from d = 5 on",
        ),
        Bound("printed_theorem_6_proof", theorem_6_as_proved),
    )
}
"""The printed bounds by name; they may be exceeded."""


def undefined(module: nn.Module, x: Tensor, loss: str) -> str:
    """Return why the printed bounds are not defined for a problem; nothing if they are."""
    if loss != "mse":
        return "the paper's loss is the squared error"
    if x.shape[0] > 1:
        return "the paper bounds the Hessian of one sample; pass one"
    part = module.attention if isinstance(module, TransformerBlock) else module
    if not isinstance(part, Attention) or not is_the_papers(part) or part.W_O is not None or part.causal:
        return "the paper has one head, without mask, biases, norms inside and output projection"
    if isinstance(module, TransformerBlock):
        plain = module.placement == "post" and module.feedforward.activation == "relu" and module.feedforward.b_1 is None
        if not plain or not has_bare_layernorms(module):
            return "the paper's block is post-norm with ReLU, and its norms have neither gain nor shift"
    return ""


def _norm(A: Tensor) -> float:
    return float(torch.linalg.matrix_norm(A.detach().double(), 2))


def theorem_1(part: Attention, X: Tensor, T: Tensor, *, appendix: bool) -> tuple[float, Pairs]:
    """Return Theorem 1 as printed, in the text or in the appendix, on the whole and on the four blocks that it names."""
    (length, d), sizes = X.shape, [_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V, T)]
    blocks = (theorem_1_appendix_printed if appendix else theorem_1_printed)(length, d, part.d_k, *sizes)
    pairs = {(f"W_{i}", f"W_{j}"): float(getattr(blocks, f"{i}{j}")) for i, j in ("VV", "QQ", "VQ", "QK")}
    return blocks.M, pairs


_ORDER = ("feedforward.W_1", "feedforward.W_2", "attention.W_K", "attention.W_Q", "attention.W_V")


def theorem_6(block: TransformerBlock, X: Tensor, T: Tensor, *, reading: str) -> tuple[float, Pairs]:
    """Return Theorem 6 as printed, on the whole and on each block.

    Args:
        block: The paper's post-norm block.
        X: L x d.
        T: L x d.
        reading: Of sigma_min: ``"stated"`` in the theorem or used in its ``"proof"``.
    """
    block = in_float64(block)
    part, network = block.attention, block.feedforward
    with torch.no_grad():
        before = X + part(X)
        Y = block.norm_1(before)  # type: ignore[misc]
        S = Y + network(Y)
        residual = float((block.norm_2(S) - T).norm())  # type: ignore[misc]
    (length, d), d_ff = X.shape, network.W_1.shape[1]
    x, w_Q, w_K, w_V = (_norm(A) for A in (X, part.W_Q, part.W_K, part.W_V))
    w_1, w_2 = _norm(network.W_1), _norm(network.W_2)
    scales = {"sigma": sigma_min_printed(before, reading=reading), "sigma_prime": sigma_min_printed(S, reading=reading)}
    factors = theorem_6_factors_printed(length, d, part.d_k, d_ff, x, w_Q, w_K, w_V, w_1, w_2, **scales)
    phi = phi_printed(length, d, part.d_k, x, w_Q, w_K, w_V)
    terms = theorem_6_printed(length, d, d_ff, factors, phi, w_1, w_2, residual)
    norms = 2 / (length * d) * factors.J_Z**2 * torch.outer(terms.B, terms.B) + residual * terms.H_tr
    return terms.whole, {(i, j): float(norms[a, b]) for a, i in enumerate(_ORDER) for b, j in enumerate(_ORDER)}
