"""The papers' statements on derivatives, by number: which chapter gives the corrected formula.

``derive("curvature-gap/thm3")`` reads this table. An id of the ledger (``papers.claims()``) works in place of a number
where the statement of that row is a derivative.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hessiankit.support.errors import unknown

POST, QKV = "post-norm block", "attention with QKV-Norm"
BLOCKS: dict[str, dict[str, Any]] = {
    POST: {},
    QKV: {"placement": "hybridnorm", "norm": "rmsnorm", "output_projection": True},
}
"""The block of Closing the Curvature Gap (LayerNorm after each residual sum, one head, ReLU, no biases, no gain) and that of
HybridNorm, of which the attention is taken, by options of ``hessiankit.TransformerBlock``."""


@dataclass(frozen=True)
class Theorem:
    """A numbered statement on a derivative."""

    place: str  # as the paper numbers it
    chapter: str  # name of a chapter, or of a block in ``BLOCKS``
    wrt: tuple[str, ...]  # what is differentiated
    claims: tuple[str, ...]  # names of the rows of the ledger that judge it, without the paper; the first judges the whole
    loss: str | None = None  # the loss whose derivative it is, or None
    given: tuple[str, ...] = ()  # optional arguments of the chapter that the paper has, such as W_O
    branch: bool = False  # whether it is of the block's attention alone

    def ids(self, paper: str) -> tuple[str, ...]:
        """Return the ids of the rows."""
        return tuple(f"{paper}/{name}" for name in self.claims)


PAPERS = {
    "curvature-gap": "Closing the Curvature Gap",
    "sharpness-disparity": "The Sharpness Disparity Principle",
    "hybridnorm": "HybridNorm",
}
"""Papers by the first part of the ids of their statements, as in the ledger."""

THEOREMS: dict[str, dict[str, Theorem]] = {
    "curvature-gap": {
        "thm2": Theorem("Theorem 2", "layernorm-paper", ("X",), ("thm2", "thm8-dp", "thm8-tau")),
        "thm3": Theorem(
            "Theorem 3", "layernorm-paper", ("X", "X"),
            ("thm3-full", "thm3-full2", "thm3-skel", "thm3-dpkron", "thm3-dd", "thm3-d2p", "thm3-da2", "thm3-da3"),
        ),
        "thm4": Theorem("Theorem 4", POST, ("W_Q",), ("thm4", "g_k", "thm9-b1", "thm9-b1line", "thm9-jsy")),
        "thm5": Theorem(
            "Theorem 5", POST, ("W_Q", "W_V"),
            ("eq6", "eq6-printed", "eq6-closed", "xi_1k", "xi_2k", "xi_k1", "xi_k2", "xi_kl", "xi_12", "xi_21"),
        ),
        "thm8": Theorem("Theorem 8", "layernorm-paper", ("X",), ("thm8-dp", "thm8-tau", "thm2")),
        "thm9": Theorem("Theorem 9", POST, ("W_1",), ("thm4", "thm9-b1", "thm9-b1line", "thm9-jsy", "g_k")),
        "thm10": Theorem("Theorem 10", POST, ("W_1", "W_2"), ("eq6", "xi_12", "xi_21", "xi_kl", "eq6-printed")),
        "lemma2": Theorem("Lemma 2", "attention", ("W_Q", "W_K"), ("phi_qk", "phi_kq", "phi_qq", "phi_vq", "s-dim")),
        "eq7": Theorem("Eq. 7", POST, ("W_Q", "W_V"), ("eq7", "eq7-l"), "mse"),
        **{
            f"phi_{i}{j}": Theorem("Lemma 2", "attention", (f"W_{i.upper()}", f"W_{j.upper()}"), (f"phi_{i}{j}",))
            for i, j in ("qq", "qk", "kq", "kk", "vq", "vk", "qv", "kv", "vv")
        },
        "g_k": Theorem("Theorem 9", "attention", ("W_K",), ("g_k",)),
        "xi_12": Theorem("Theorem 10", "feedforward", ("W_1", "W_2"), ("xi_12",)),
        "xi_21": Theorem("Theorem 10", "feedforward", ("W_2", "W_1"), ("xi_21", "xi_21-step2")),
    },
    "sharpness-disparity": {
        "thm4.1": Theorem("Theorem 4.1", "feedforward", ("W_1",), ("thm4.1-w1", "thm4.1-w2", "thm4.1-gamma", "b1-w2")),
        "thm4.2": Theorem("Theorem 4.2", "attention", ("W_Q",), ("b2-wq", "b2-wk", "b2-gamma"), given=("W_O",)),
        "b1-w1": Theorem("App. B.1", "feedforward", ("W_1",), ("thm4.1-w1",)),
        "b1-w2": Theorem("App. B.1", "feedforward", ("W_2",), ("b1-w2", "thm4.1-w2")),
        "b2-wq": Theorem("App. B.2", "attention", ("W_Q",), ("b2-wq",), given=("W_O",)),
        "b2-wk": Theorem("App. B.2", "attention", ("W_K",), ("b2-wk",), given=("W_O",)),
    },
    "hybridnorm": {
        "lemma-a1": Theorem("Lemma A.1", "attention", ("W_Q",), ("eq17", "eq18", "eq19", "eq20"), given=("W_O",)),
        "lemma-a2": Theorem("Lemma A.2", QKV, ("W_Q",), ("eq24", "eq22", "eq23", "eq25"), branch=True),
        "eq17": Theorem("Eq. 17", "attention", ("W_Q",), ("eq17",), given=("W_O",)),
        "eq18": Theorem("Eq. 18", "attention", ("W_K",), ("eq18",), given=("W_O",)),
        "eq19": Theorem("Eq. 19", "softmax", ("T",), ("eq19",)),
        "eq20": Theorem("Eq. 20", "rmsnorm", ("X",), ("eq20", "eq21", "eq20-eps")),
        "eq22": Theorem("Eq. 22", QKV, ("W_O",), ("eq22",), branch=True),
        "eq23": Theorem("Eq. 23", QKV, ("W_V",), ("eq23",), branch=True),
        "eq24": Theorem("Eq. 24", QKV, ("W_Q",), ("eq24",), branch=True),
        "eq25": Theorem("Eq. 25", QKV, ("W_K",), ("eq25",), branch=True),
    },
}  # fmt: skip
"""Paper -> number -> statement."""

ALIASES = {"eq6": "thm5", "eq12": "thm10"}
"""Equations of Closing the Curvature Gap that state a theorem."""
CHAPTER_NAMES = (
    "linear", "layernorm", "rmsnorm", "groupnorm", "layernorm-paper", "softmax", "attention", "feedforward", "activation", "gain",
    "hadamard", "mse", "cross_entropy", "embedding", "mean-pool-head",
)  # fmt: skip
"""Keys of :data:`hessiankit.theory.formulas.chapters.CHAPTERS`, listed here since that module imports torch."""


def statement(name: str) -> tuple[str, Theorem]:
    """Return the result of :func:`find`; if there is none, raise an InputError with the nearest chapters and statements."""
    result = find(name)
    if result is None:
        hint = "`hessiankit derive --list`; a statement that is no derivative: papers.claims(id=...)"
        raise unknown("derive", "what", name, [*CHAPTER_NAMES, *ids()], hint)
    return result


def find(name: str) -> tuple[str, Theorem] | None:
    """Return the paper and the statement of an id such as "curvature-gap/thm3", of a row of the ledger or in words.

    >>> [find(asked)[1].place for asked in ("curvature-gap/thm3", "curvature-gap/Theorem 3", "curvature-gap/thm3-dd")]
    ['Theorem 3', 'Theorem 3', 'Theorem 3']
    """
    paper, _, number = name.lower().partition("/")
    rows = THEOREMS.get(paper, {})
    key = number.replace(" ", "").replace("theorem", "thm").replace("equation", "eq")
    row = rows.get(key) or rows.get(ALIASES.get(key, key)) or next((row for row in rows.values() if number in row.claims), None)
    return None if row is None else (paper, row)


def ids() -> list[str]:
    """Return every id that ``derive`` takes."""
    return [f"{paper}/{number}" for paper, rows in THEOREMS.items() for number in rows]
