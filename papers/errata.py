r"""The most consequential corrections of each paper as pages: docs/errata/<paper>.md, made from the rows and a run of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from papers.claim import PAPERS, Claim
from papers.ledger_report import LedgerRow
from papers.pages import evidence_text, in_words, markdown_text, without_rounding


class Errata(NamedTuple):
    """What holds of a paper, and the rows to correct: the row's name and what is wrong, in one sentence."""

    holds: str
    wrong: tuple[tuple[str, str], ...]


ERRATA: dict[str, Errata] = {
    "curvature-gap": Errata(
        "The row-wise calculus of App. B, the Jacobian of LayerNorm (Theorem 2), the form of the block's Jacobians "
        "(Theorem 4) and of its Hessian (Eq. 6), and the two-factor bounds of Eqs. 8 and 9 hold as printed. Theorem 7 "
        "holds to second order, as it is meant, with a bound on the Hessian that holds. With the corrections below all 25 "
        "blocks of the transformer's Hessian agree with automatic differentiation to rounding.",
        (
            (
                "thm1",
                "The maximum runs over four of the nine blocks: nothing in the bound grows with the square of the query matrix.",
            ),
            ("thm7", "With the bound of Theorem 1 the inequality fails, also to second order."),
            (
                "thm6",
                "With the smallest row norm that Lemma 4 states, the closed form of the bound is exceeded at a global minimum.",
            ),
            (
                "eq6-printed",
                "Nine of the fourteen blocks with a printed formula differ from the derivative; eleven have no formula.",
            ),
            ("phi_qq", "A factor of the loss is inside the second derivatives of the attention; six other places inherit it."),
            ("eq7", "The functional part lacks the factor of the loss; Lemma 2 has it in its second derivatives instead."),
            ("xi_21", "The product's sizes do not match; the derivative is the formula printed for the other order."),
            ("thm3-full", "Two factors and one identity's size in the pieces make the assembled Hessian of LayerNorm wrong."),
            ("lemma4-28", "The statement takes the norm of a row for its deviation, as the proof has it: a root of the width."),
            ("fig6-evidence", "The slope is one of running means, whatever is averaged."),
        ),
    ),
    "sharpness-disparity": Errata(
        "The estimator of Eq. 3 is unbiased for the Fisher diagonal, the gradients of the queries, values and output "
        "weights hold as printed, and so do the final bounds of Theorems 4.1 and 4.2 on each gradient.",
        (
            ("thm4.1-support", "The order of two upper bounds says nothing about the order of what they bound."),
            ("thm4.2-support", "The order of two upper bounds says nothing about the order of what they bound."),
            ("b2-wk", "What is printed is the derivative of the transposed logits."),
            ("b2-estimate-gamma", "Twice the first of two terms replaces their sum."),
            (
                "b1-w2-estimate-kronecker",
                "The norm of a Kronecker product with an identity; three other steps have it. The end holds.",
            ),
            ("ffn-majority", "They are the largest type, with less than half of the parameters."),
            ("contribution", "The rates of Eq. 5 fall as sharpness grows."),
            ("table3-llama-2b", "The printed sizes give 1.68 billion parameters."),
            ("row-variance", "The mean over the row is missing: every normalised entry would be plus or minus one."),
            (
                "thm4.1-w2",
                "The Hadamard product is of two matrices of different sizes, and the identity has the vocabulary's size.",
            ),
        ),
    ),
    "curse-of-depth": Errata(
        "These statements hold: the recurrence behind Lemma 3.2 with constants 1; the lower bounds on the variance where "
        "branches are not anticorrelated with the stream (Pre-LN), or correlated with it (LayerNorm Scaling); the "
        "chain-rule bounds on one block; and that LayerNorm Scaling slows the growth of the variance. The numbers of the tables "
        "and most conclusions from them are right, too. Whether the variance of trained models grows exponentially with "
        "depth, as the abstract says and Lemma 3.2 does not, is open here; at initialisation it does not.",
        (
            ("eq11", "The product of Eq. 9, from which it is derived, grows like the exponential of a root, not linearly."),
            ("eq16", "The sums converge: the bound is a constant."),
            ("weierstrass", "Products of rotations are bounded and no factor is near the identity."),
            ("eq15", "The chain rule divides a branch's Jacobian by the root of the depth, not by the depth."),
            ("eq66", "The weights do not act through the block's input, and the norm has no inverse."),
            ("eq6", "Under the product each step has a constant of its own, and they multiply."),
            ("eq47", "A square of the weights' standard deviation in Eq. 36 is missing."),
            ("eq41", "The factor of Eq. 40 is inverted: the bound is exceeded by a random network."),
            ("lemma-a1", "A finite variance of the logits is not enough."),
            ("eq21", "The covariance of a sum enters twice."),
        ),
    ),
    "hybridnorm": Errata(
        "Both lemmas on the gradients hold as printed, also under a causal mask. The bounds of Theorem A.3 for Pre-Norm "
        "hold and have the right form. The averages and gains of the tables are right.",
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
            ("table4-surpass", "Three entries of Table 4 are better than HybridNorm's; the starred variant is never behind."),
            ("table4-first-block", "QKC-Post has the lower loss."),
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
        "The statements whose correction matters most, as printed and corrected, each with its severity and a counterexample",
        f"that runs. The wrong prints have {in_words([row for row in rows.values() if row.paper == paper])}.",
        f"All statements are in [the ledger](../claims.md#{paper}). If a reading of the paper is unfair, please open an issue",
        "with the row's name. A violation ratio is the left side of an inequality over its right side; where something does not",
        "conform, the shapes of its factors do not match.",
    ]
    for k, (name, wrong) in enumerate(errata.wrong, 1):
        row, found = rows[f"{paper}/{name}"], ran[f"{paper}/{name}"]
        kind = row.severity or row.verdict
        lines += ["", f"### {k}. {markdown_text(row.place)} ({kind.lower()})", ""]
        lines += [f"Printed: {markdown_text(row.statement)}.", "", wrong, ""]
        lines += [f"Correct: {markdown_text(row.corrected or '')}.", "", f"Counterexample: {counterexample(found)}.", ""]
        lines += ["```bash", f"python -m papers show {row.id}", "```"]
    return "\n".join(lines) + "\n"


def counterexample(found: LedgerRow) -> str:
    """Return what was found, and how another route confirms it."""
    if found.evidence is None or not found.reproduced:
        return markdown_text(evidence_text(found))
    is_one_number = found.evidence.shows == "measurement"
    text = str(found.evidence) if is_one_number else f"{found.evidence.unit} {found.evidence.detail}"
    text += f". By a second route: {found.evidence.second}" if found.evidence.second else ""
    return markdown_text(without_rounding(text))


def without_counterexamples(page: str) -> str:
    """Return a page without its numbers, whose digits vary from machine to machine."""
    return "\n".join(line for line in page.splitlines() if not line.startswith("Counterexample"))
