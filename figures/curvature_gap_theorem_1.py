"""Theorem 1 of Closing the Curvature Gap: where the Hessian's norm crosses the printed bound, and bounds that hold beside it.

Theorem 1 bounds the spectral norm of the Hessian of self-attention with the squared error by M, in the text and, with other
constants, in the appendix. Its largest is taken over four of the six blocks: (K, K) and (V, K) are missing, so that nothing
grows with ||W_Q||.

Left, two tokens of width 1, X = (1, -1), W_K = 0, W_V = 1 and W_Q = q, target 0: attention is uniform, the loss is at its
minimum 0, the Hessian's norm is 2 q^2 and M is 24 whatever q is, so that they cross at q = sqrt(12). Right, random problems (L =
4, d = d_K = 3, weights N(0, 1/d), input and target N(0, 1)), W_Q times q and W_K over q, which leaves the function as it is:
medians over the problems, bands from the smallest to the largest. The valid bounds are ``hessiankit.bounds``'s: a priori from
norms alone, as the theorem's, and structured from the values at the point.

What came out: the norm crosses both printed bounds, on the right at q of some hundreds in every problem, and exceeds them by any
factor beyond; both valid bounds stay above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

import hessiankit as hk
from figures._kit import DASHES, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_rows, write_verdicts
from figures._verdicts import Verdict, in_every
from hessiankit.blocks import Attention
from hessiankit.request.read import read_request
from hessiankit.theory.bounding.a_priori import a_priori
from hessiankit.theory.bounding.structured import structured
from papers.curvature_gap.printed_bounds import theorem_1

NAME = Path(__file__).stem
LINES = {"norm": "exact norm", "text": "Theorem 1, text", "appendix": "Theorem 1, appendix", "a priori": "a priori, valid",
         "structured": "structured, valid"}  # fmt: skip
FACTORS = np.geomspace(0.1, 1000, 33)


def attention(W_Q: Tensor, W_K: Tensor, W_V: Tensor) -> Attention:
    """Return the paper's self-attention with these weights."""
    part = Attention(W_Q.shape[0], d_k=W_Q.shape[1]).double()
    with torch.no_grad():
        for parameter, value in ((part.W_Q, W_Q), (part.W_K, W_K), (part.W_V, W_V)):
            parameter.copy_(value)
    return part


def counterexample(q: float) -> tuple[Attention, Tensor, Tensor]:
    """Return attention, input and target of the left panel."""
    W = torch.zeros(1, 1, dtype=torch.float64)
    X = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    return attention(W + q, W, W + 1.0), X, torch.zeros(2, 1, dtype=torch.float64)


def random_problem(q: float, seed: int) -> tuple[Attention, Tensor, Tensor]:
    """Return attention, input and target of a random problem, its W_Q times q."""
    generator = torch.Generator().manual_seed(seed)
    W = [torch.randn(3, 3, generator=generator, dtype=torch.float64) / 3**0.5 for _ in range(3)]
    X, T = (torch.randn(4, 3, generator=generator, dtype=torch.float64) for _ in range(2))
    return attention(q * W[0], W[1] / q, W[2]), X, T


def row(part: Attention, X: Tensor, T: Tensor) -> dict[str, float]:
    """Return the exact spectral norm of the Hessian and the bounds on it."""
    H = hk.hessian(part, X[None], T[None], loss="mse").matrix
    found = {"norm": float(torch.linalg.eigvalsh(H).abs().max())}
    found |= {name: theorem_1(part, X, T, appendix=name == "appendix")[0] for name in ("text", "appendix")}
    found["a priori"] = float(a_priori(part, X, T).whole)
    found["structured"] = float(structured(read_request(part, X[None], T[None]).only()).whole)
    return found


def measure(seeds: int, factors: Sequence[float]) -> list[dict[str, Any]]:
    """Return rows: problem (``"minimum"``, or a seed), q, the norm and the bounds."""
    rows = []
    for q in factors:
        rows.append({"problem": "minimum", "q": float(q), **row(*counterexample(float(q)))})
        rows += [{"problem": str(seed), "q": float(q), **row(*random_problem(float(q), seed))} for seed in range(seeds)]
    return rows


def crossing(rows: Sequence[dict[str, Any]], problem: str, bound: str) -> float | None:
    """Return the smallest drawn q from which on a problem's norm is above a bound; None where it is not at the largest.

    >>> rows = [{"problem": "a", "q": q, "norm": q, "text": 2.0} for q in (1.0, 3.0, 4.0)]
    >>> crossing(rows, "a", "text"), crossing([{**row, "text": 9.0} for row in rows], "a", "text")
    (3.0, None)
    """
    found = None
    for one in (one for one in rows if one["problem"] == problem):
        found = None if one["norm"] <= one[bound] * (1 + 1e-9) else found or one["q"]
    return found


def verdict(rows: Sequence[dict[str, Any]]) -> Verdict:
    """Return whether the norm exceeds the printed bounds, problem by problem."""
    problems = list(dict.fromkeys(one["problem"] for one in rows))
    parts = []
    for bound in ("text", "appendix"):
        at = [crossing(rows, problem, bound) for problem in problems]
        worst = max(one["norm"] / one[bound] for one in rows)
        passed = sorted(x for x in at if x is not None)
        seen = (
            f"exceeded from q = {passed[0]:.3g} to {passed[-1]:.3g} on, at most {worst:.3g} times" if passed else "never exceeded"
        )
        criterion = f"the norm exceeds M of the {bound} from some q on"
        parts.append(in_every(criterion, (x is not None for x in at), f"{seen} ({len(passed)} of {len(problems)} problems)"))
    scale = f"{len(problems)} problems of 2 or 4 tokens of width 1 or 3; float64, the Hessian whole and exact"
    return Verdict("curvature-gap/thm1", "the Hessian's norm exceeds M, in the text and in the appendix", scale, tuple(parts))


def panel(axes: Axes, rows: Sequence[dict[str, Any]], problems: Sequence[str]) -> None:
    """Draw the norm and its bounds against q, medians over the problems with their range."""
    factors = sorted({one["q"] for one in rows})
    for k, (name, label) in enumerate(LINES.items()):
        values = np.array([[one[name] for one in rows if one["q"] == q and one["problem"] in problems] for q in factors])
        look: Any = {"linewidth": 3.5, "alpha": 0.35} if k == 0 else {"linestyle": DASHES[k], "marker": METHOD_MARKS[k]}
        axes.loglog(factors, np.median(values, 1), color=METHOD_COLOURS[k], label=label, markevery=4, markersize=4, **look)
        if len(problems) > 1 and name in ("norm", "text"):
            axes.fill_between(factors, values.min(1), values.max(1), color=METHOD_COLOURS[k], alpha=0.12, linewidth=0)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure and draw (about 10 s of one core); ``quick`` takes one random problem and seven values of q."""
    seeds, factors = (1, FACTORS[::6]) if quick else (8, FACTORS)
    rows = measure(seeds, factors.tolist())
    said = [verdict(rows)]
    with style():
        figure = page(8.2, 3.7)
        left, right = (figure.add_subplot(1, 2, k + 1) for k in range(2))
        panel(left, rows, ["minimum"])
        panel(right, rows, [str(seed) for seed in range(seeds)])
        heading(left, "At a minimum, uniform attention: $W_Q = q$", "$q$", r"$\|H\|_2$ and bounds on it")
        heading(right, r"One function: $q\,W_Q$ and $W_K / q$, random problems", "$q$")
        figure.legend(*left.get_legend_handles_labels(), loc="lower center", bbox_to_anchor=(0.5, 0.0), ncols=5)
        figure.subplots_adjust(left=0.08, right=0.985, top=0.92, bottom=0.2, wspace=0.18)
        picture = save(figure, out / f"{NAME}{suffix}", said)
    return [picture, write_rows(out / f"{NAME}.csv", rows), write_verdicts(out, NAME, said)]
