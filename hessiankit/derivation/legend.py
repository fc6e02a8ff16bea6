"""What the symbols of a derivation stand for: one line for each that occurs in it."""

from __future__ import annotations

import re

SIZES = {
    "L": "tokens",
    "d": "features of a token",
    "d_K": "features of a query and a key (of one head)",
    "d_v": "features of a value (of one head)",
    r"d_{ff}": "hidden features of the feed-forward network",
    "H": "heads of queries",
    r"H_{KV}": "heads of keys and values",
    "r": "queries for each head of keys and values",
    "g": "groups of features in a norm",
    "d_g": "features of a group",
}
_SWAP = r"(?<![A-Za-z\\])K_\{(?:[^{},]|\{[^{}]*\})*,"
_DERIVED = r"(?<![A-Za-z\\_{])(?:\\(?:hat|tilde|check|bar)\{[A-Z]\}|[AFMOPQRSTUXYZ])_\{"
_SYMBOLS = [  # (pattern of its LaTeX, symbol, what it is)
    (r"\\operatorname\{vec\}_r", r"\operatorname{vec}_r(M)", "the rows of $M$ one after the other, as a column"),
    (r"\\otimes", r"M\otimes N", "the Kronecker product"),
    (r"\\odot", r"M\odot N", "the product entry by entry"),
    (r"(?<![A-Za-z\\}])I_", "I_n", "the identity of size $n$"),
    (r"\\mathbf\{1\}", r"\mathbf{1}_n", "the column of $n$ ones"),
    (_SWAP, "K_{m,n}", r"the permutation $x\otimes y\mapsto y\otimes x$ for $n$ entries of $x$ and $m$ of $y$"),
    (r"(?<![A-Za-z\\])E_", "E_n", r"the matrix with $E_n v = \operatorname{vec}_r(\operatorname{diag}(v))$"),
    (r"(?<![A-Za-z\\])C_\{?d", "C_d", r"$I_d - \frac{1}{d}\mathbf{1}_d\mathbf{1}_d^\top$, which takes the mean off a row"),
    (r"\\operatorname\{blockdiag\}", r"\operatorname{blockdiag}_i(M_i)", "the matrix of the blocks $M_i$ on its diagonal"),
    (r"\\operatorname\{diag\}", r"\operatorname{diag}(v)", "the diagonal matrix of $v$"),
    (r"\\rho_", r"\rho_N", r"what the norm $N$ divides by: $\sqrt{\mathrm{var}+\varepsilon}$, for RMSNorm of the mean square"),
    (r"(?<![A-Za-z\\])V_[\\{A-Z]", "V_N", r"the rows $\mathring{n}_i$ of the norm $N$, block diagonal"),
    (r"\\mathring", r"\mathring{N}", r"$N$, rows $\mathring{n}_i$ centred (LayerNorm) and divided, without gain and shift"),
    (r"\\Pi", r"\Pi", r"the probabilities: by rows $\pi_i$ the softmax of $Z$"),
    (r"\\sigma", r"\sigma,\ \sigma',\ \sigma''", "the activation and its derivatives, entry by entry"),
    (r"R_l\b", "R_l", "the rotation of the features of token $l$"),
    (r"\ba_i\b", "a_i", "row $i$ of the attention weights $A$, as a column"),
    (r"(?<![A-Za-z\\])A(?![A-Za-z_'])", "A", "the attention weights, by rows the softmax of the logits"),
    (r"J_", r"J_{N M}", "the first derivative of $N$ in $M$; $J_N$ for a norm $N$ in its input"),
    (r"(?<![A-Za-z\\])H_", r"H_{N,M M'}", "the second derivative of $N$ in $M$ and $M'$; $H_N$ for a norm $N$ in its input"),
    (_DERIVED, r"N_i,\ N_{i,j}", r"the derivatives $\partial N/\partial W_i$ and $\partial N_i/\partial W_j$ of a value $N$"),
    (r"\\xi_", r"\xi_{i,j}", r"$\partial B_i/\partial W_j$"),
    (r"B_\{", "B_i", r"$\partial S/\partial W_i$"),
    (r"G_\{", "G_k", r"$\partial F/\partial W_k$"),
    (r"\\Phi", r"\Phi_{k,l}", r"$\partial G_k/\partial W_l$"),
    (r"\\mathcal\{L\}", r"\mathcal{L}", "the loss of the output $Z$"),
    (r"Target|Labels", r"\mathrm{Target},\ \mathrm{Labels}", "what the output is compared with"),
    (r"\\mathcal\{T\}", r"\mathcal{T}_k[M]", "each of the $k$ slices of the stack $M$ transposed"),
]  # fmt: skip


def legend(text: str, sizes: set[str]) -> list[tuple[str, str]]:
    """Return (symbol, meaning), in LaTeX and in words with LaTeX between dollars, of what occurs in a derivation.

    Args:
        text: the LaTeX of all its formulas.
        sizes: the letters of the sizes in it.

    >>> [symbol for symbol, _ in legend(r"(J_Z I_{Ld}) K_{L,d}", {"L", "d"})]
    ['I_n', 'K_{m,n}', 'J_{N M}', 'L', 'd']
    """
    found = [(symbol, meaning) for pattern, symbol, meaning in _SYMBOLS if re.search(pattern, text)]
    return found + [(symbol, meaning) for symbol, meaning in SIZES.items() if symbol in sizes]
