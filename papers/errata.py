r"""The most consequential corrections of each paper as pages: docs/errata/<paper>.md, made from the rows and a run of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from papers.claim import PAPERS, Claim
from papers.ledger_report import LedgerRow
from papers.pages import evidence_text, markdown_text, without_rounding


class Errata(NamedTuple):
    """What holds of a paper, and the rows to correct: the row's name and what is wrong, in one sentence."""

    holds: str
    wrong: tuple[tuple[str, str], ...]


ERRATA: dict[str, Errata] = {
    "curvature-gap": Errata(
        "The row-wise calculus of App. B, the Jacobian of LayerNorm (Theorem 2), the form of the block's Jacobians "
        "(Theorem 4) and of "
        "its Hessian (Eq. 6), and the two-factor bounds of Eqs. 8 and 9 hold as printed. With the corrections below all "
        "25 blocks of "
        "the transformer's Hessian agree with automatic differentiation to rounding.",
        (
            (
                "thm1",
                "The maximum runs over four of the nine blocks: nothing in the bound grows with the square of the query matrix.",
            ),
            (
                "thm6",
                "With the smallest row norm that Lemma 4 states, the closed form of the bound is exceeded at a global minimum.",
            ),
            ("thm7", "The Hessian at the minimum does not bound the loss elsewhere: the bound has to hold on the segment."),
            ("eq7", "The functional part lacks the factor of the loss; Lemma 2 has it in its second derivatives instead."),
            (
                "eq6-printed",
                "Nine of the fourteen blocks with a printed formula differ from the derivative; eleven have no formula.",
            ),
            (
                "phi_qk",
                "A factor of the loss is inside the second derivative of the attention, and an identity has the wrong size.",
            ),
            ("phi_kq", "Row softmax does not commute with transposition, so exchanging the two weights is not enough."),
            ("thm3-full", "Two factors and one identity's size in the pieces make the assembled Hessian of LayerNorm wrong."),
            ("xi_12", "What is printed is the derivative in the other order: the two have different shapes in general."),
            ("unif-vq-vk", "At uniform attention the softmax still has slopes: the two blocks do not vanish."),
        ),
    ),
    "sharpness-disparity": Errata(
        "The estimator of Eq. 3 is unbiased for the Fisher diagonal, the gradients of the queries, values and output "
        "weights hold as "
        "printed, and so do the final bounds of Theorems 4.1 and 4.2 on each gradient.",
        (
            ("thm4.1-support", "The order of two upper bounds says nothing about the order of what they bound."),
            ("thm4.2-support", "The order of two upper bounds says nothing about the order of what they bound."),
            ("thm4.3-s-we", "The constant lacks the norm of the loss's gradient: scaling the loss breaks the bound."),
            (
                "thm4.1-w2",
                "The Hadamard product is of two matrices of different sizes, and the identity has the vocabulary's size.",
            ),
            ("b2-wk", "What is printed is the derivative of the transposed logits."),
            ("b2-estimate-gamma", "Twice the first of two terms replaces their sum."),
            ("norm", "The deviation from the mean is divided by the variance instead of its root."),
            ("row-variance", "The mean over the row is missing: every normalised entry would be plus or minus one."),
            ("table3-llama-2b", "The printed sizes give 1.68 billion parameters."),
            ("contribution", "The rates of Eq. 5 fall as sharpness grows."),
        ),
    ),
    "curse-of-depth": Errata(
        "These statements hold: the recurrence behind Lemma 3.2 with constants 1; the lower bound on the variance for "
        "branches that are not anticorrelated with the stream; the chain-rule bounds on one block; and that LayerNorm Scaling "
        "slows the growth of the variance. The numbers of the tables and most conclusions from them are right, too.",
        (
            ("headline", "Uncorrelated branches of one size add up linearly; exponential growth needs branches that grow too."),
            ("eq9", "The product lacks a factor: for one block it is empty, but the Jacobian's norm is above 1."),
            ("eq11", "The product of Eq. 9 grows like the exponential of a root, not linearly."),
            ("eq14-lower", "With LayerNorm Scaling uncorrelated branches have variances whose sum is logarithmic."),
            ("eq15", "The chain rule divides a branch's Jacobian by the root of the depth, not by the depth."),
            ("eq16", "The sums converge: the bound is a constant."),
            ("weierstrass", "Products of rotations are bounded and no factor is near the identity."),
            ("eq41", "The factor of Eq. 40 is inverted: the bound is exceeded by a random network."),
            ("eq47", "A square of the weights' standard deviation in Eq. 36 is missing."),
            ("eq18", "Its constants are defined nowhere, and the derivative with respect to the weight is missing."),
        ),
    ),
    "hybridnorm": Errata(
        "Both lemmas on the gradients hold as printed, also under a causal mask. The bounds of Theorem A.3 for Pre-Norm hold "
        "and have the right form. The averages and gains of the tables are right.",
        (
            ("eq31", "The smallest singular value of the product depends on the scale of the tokens; the gradient does not."),
            ("eq32", "The smallest singular value of the product depends on the scale of the tokens; the gradient does not."),
            ("eq33", "The smallest singular value of the product depends on the scale of the tokens; the gradient does not."),
            ("eq34", "The proof replaces a Frobenius norm by a spectral norm."),
            ("theorem-a3-proof-step", "The proof takes the Frobenius norm of a projector to be 1."),
            ("text-qkv-itself-and-output", "The gradient depends on the directions of all other weights, not on their scales."),
            (
                "text-pre-not-by-themselves",
                "The bounds do not depend on the weight, but the gradient does, through the attention weights.",
            ),
            ("post-norm-in-ffn", "Eq. 9 normalises before the network, for branch and residual; Post-Norm (Eq. 4) behind it."),
            ("table4-surpass", "Three entries of Table 4 are better than HybridNorm's; the starred variant is never behind."),
            ("table5-consistently", "One entry of Table 5 is behind: PIQA at 16 layers, the starred variant against Post-Norm."),
        ),
    ),
}
"""By paper, the most consequential first."""


def errata_page(paper: str, rows: Mapping[str, Claim], ran: Mapping[str, LedgerRow]) -> str:
    """Return a paper's page: what holds, then the corrections with a counterexample each.

    Args:
        paper: A key of ``ERRATA``.
        rows: The paper's rows by id.
        ran: What a run of them found, by id.
    """
    title, errata = PAPERS[paper].title, ERRATA[paper]
    lines = [f"# {title}: corrections", "", "## What holds", "", errata.holds, "", "## Corrections", ""]
    lines += [
        "The statements whose correction matters most, as printed and corrected, each with a counterexample that runs.",
        f"All statements are in [the ledger](../claims.md#{paper}). If a reading of the paper is unfair, please open an issue",
        "with the row's name. A violation ratio is the left side of an inequality over its right side; where something does not",
        "conform, the shapes of its factors do not match.",
    ]
    for k, (name, wrong) in enumerate(errata.wrong, 1):
        row, found = rows[f"{paper}/{name}"], ran[f"{paper}/{name}"]
        lines += ["", f"### {k}. {markdown_text(row.place)}", "", f"Printed: {markdown_text(row.statement)}.", "", wrong, ""]
        lines += [f"Correct: {markdown_text(row.corrected or '')}.", "", f"Counterexample: {counterexample(found)}.", ""]
        lines += ["```bash", f"python -m papers show {row.id}", "```"]
    return "\n".join(lines) + "\n"


def counterexample(found: LedgerRow) -> str:
    """Return what was found, and how another route confirms it."""
    if found.evidence is None or not found.reproduced:
        return markdown_text(evidence_text(found))
    text = f"{found.evidence.unit} {found.evidence.detail}. By a second route: {found.evidence.second}"
    return markdown_text(without_rounding(text))


def without_counterexamples(page: str) -> str:
    """Return a page without its numbers, whose digits vary from machine to machine."""
    return "\n".join(line for line in page.splitlines() if not line.startswith("Counterexample"))
