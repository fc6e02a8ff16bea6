"""LaTeX of matrix expressions as plain text, for a terminal."""

from __future__ import annotations

import re
import unicodedata
from functools import partial

_WORDS = {
    r"\otimes": "⊗",
    r"\odot": "⊙",
    r"\top": "ᵀ",
    r"\Phi": "Φ",
    r"\xi": "ξ",
    r"\Gamma": "Γ",
    r"\gamma": "γ",
    r"\beta": "β",
    r"\lambda": "λ",
    r"\omega": "ω",
    r"\alpha": "α",
    r"\sigma": "σ",
    r"\rho": "ρ",
    r"\partial": "∂",
    r"\cdot": "·",
    r"\bullet": "•",
    r"\,": " ",
    r"\left": "",
    r"\right": "",
    r"\displaystyle": "",
    r"\quad": " ",
    r"\ell": "ℓ",
    r"\varepsilon": "ε",
    r"\mapsto": "↦",
    r"\ ": " ",
    r"\times": "×",
    r"\|": "‖",
    r"\max": "max",
    r"\Pi": "Π",
    r"\pi": "π",
}
_ACCENTS = {
    r"\hat": "\u0302",
    r"\tilde": "\u0303",
    r"\bar": "\u0304",
    r"\check": "\u030c",
    r"\mathring": "\u030a",
}
_GROUP = r"\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}"


def words(text: str) -> str:
    r"""Return words with LaTeX between dollars as text.

    >>> words("feed-forward $J_Z$")
    'feed-forward J_Z'
    """
    return "".join(piece if k % 2 == 0 else plain(piece) for k, piece in enumerate(text.split("$")))


def plain(latex: str) -> str:
    r"""Return LaTeX as text.

    >>> plain(r"\left(J_Z\otimes I_{Ld}\right)\,\xi_{Q,V}^\top"), plain(r"\frac{2}{Ld}\,\hat{Y}")
    ('(J_Z ⊗ I_Ld) ξ_{Q,V}ᵀ', '2/(Ld) Ŷ')
    """
    text = latex.replace(r"^\top", "ᵀ").replace(r"\mathcal{T}", "T").replace(r"\mathcal{L}", "ℒ").replace(r"\mathbf{1}", "𝟏")
    text = re.sub(r"\{(a_i|\\pi_i)\}", r"\1", text)
    for accent, mark in _ACCENTS.items():
        text = re.sub(re.escape(accent) + r"(?:\{([^{}]*)\}|\s*(\w))", partial(_accented, mark), text)
    text = re.sub(r"\\(?:operatorname|mathrm|text|mathit)" + _GROUP, r"\1", text)
    text = re.sub(r"\\partial\s*(\^2)?\s*", lambda m: "∂²" if m[1] else "∂", text)
    text = re.sub(r"\\t?frac(\d)(\w)", r"\1/\2", text)
    for _ in range(3):
        text = re.sub(r"\\sqrt" + _GROUP, r"√(\1)", text)
        text = re.sub(r"\\frac" + _GROUP + _GROUP, lambda m: f"{m[1]}/{_whole(m[2])}", text)
    for word, sign in sorted(_WORDS.items(), key=lambda item: -len(item[0])):
        text = text.replace(word, f" {sign} " if sign in "⊗⊙" and sign else sign)
    text = re.sub(r"([_^])\{([^{}]*)\}", lambda m: f"{m[1]}{{{m[2].replace(' ', '')}}}", text)
    text = re.sub(r"([_^])\{(-?(?:[^\W_][\u0300-\u036f]?){1,2})\}", r"\1\2", text)
    text = re.sub(r"(?<=[\w)ᵀ\]}])\s*([+-])\s*(?=[\w(\[])", r" \1 ", text)
    for power, raised in (("{-1}", "⁻¹"), ("-1", "⁻¹"), ("{-2}", "⁻²"), ("-2", "⁻²"), ("2", "²"), ("3", "³")):
        text = re.sub(rf"\^{re.escape(power)}(?!\d)", raised, text)
    return re.sub(r"\s+", " ", text).replace("$", "").strip()


def _accented(mark: str, found: re.Match[str]) -> str:
    letters = found[1] or found[2]
    return unicodedata.normalize("NFC", letters[0] + mark) + letters[1:]


def _whole(text: str) -> str:
    return text if re.fullmatch(r"∂?\w(²|_\w)?|√\([^()]*\)", text) else f"({text})"
