"""The LaTeX of derivations, read by pylatexenc: as text, as lines that fit a page, and as the set of its symbols."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from pylatexenc.latexwalker import LatexCharsNode, LatexGroupNode, LatexMacroNode, LatexNode, LatexWalker
from pylatexenc.macrospec import LatexContextDb, std_macro
from sympy.printing.pretty.pretty_symbology import greek_unicode

_ACCENTS = {r"\hat": "\u0302", r"\tilde": "\u0303", r"\bar": "\u0304", r"\check": "\u030c", r"\mathring": "\u030a"}
_FONTS = (r"\operatorname", r"\mathrm", r"\text", r"\mathit", r"\mathcal", r"\mathbf")
_FRACTIONS = (r"\frac", r"\tfrac")
_STYLED = {(r"\mathcal", "L"): "ℒ", (r"\mathbf", "1"): "𝟏"}
_LAYOUT = (r"\left", r"\right", r"\bigl", r"\bigr", r"\displaystyle")
_SPACES = (r"\,", r"\ ", r"\quad")
_SIGNS = {
    **{rf"\{name}": letter for name, letter in greek_unicode.items()},
    **dict.fromkeys(_LAYOUT, ""),
    **dict.fromkeys(_SPACES, " "),
    "=": " = ", ",": ", ", r"\varepsilon": "ε", r"\otimes": " ⊗ ", r"\odot": " ⊙ ", r"\partial": "∂", r"\cdot": "·",
    r"\bullet": "•", r"\circ": "∘", r"\ell": "ℓ", r"\mapsto": " ↦ ", r"\times": "×", r"\|": "‖", r"\max": "max",
    r"\log": "log ",
}  # fmt: skip
_RAISED = {"-1": "⁻¹", "-2": "⁻²", "2": "²", "3": "³", "∘2": "∘²"}
WIDTH = 92
"""Signs in a line: what fits a landscape page at ten points."""
_MACROS = {**dict.fromkeys((*_ACCENTS, *_FONTS, r"\sqrt"), "{"), **dict.fromkeys(_FRACTIONS, "{{")}
_CONTEXT = LatexContextDb()
_CONTEXT.add_context_category("formulas", macros=[std_macro(name[1:], arguments) for name, arguments in _MACROS.items()])


@dataclass(frozen=True)
class Atom:
    """A sign, a command or a group of a formula, with its index and exponent."""

    name: str  # the sign, or the command with its backslash; "" for a group
    arguments: tuple[tuple[Atom, ...], ...]  # the formulas in braces: of a command, or the content of a group
    scripts: tuple[tuple[str, tuple[Atom, ...]], ...]  # ("_" or "^", the formula there), in the order of the source
    start: int  # its position in the source


def read(latex: str) -> tuple[Atom, ...]:
    r"""Return a formula as atoms.

    >>> [(atom.name, len(atom.scripts)) for atom in read(r"\rho_{N}^2\,A")]
    [('\\rho', 2), ('\\,', 0), ('A', 0)]
    """
    nodes, _, _ = LatexWalker(latex, latex_context=_CONTEXT, tolerant_parsing=False).get_latex_nodes()
    return _atoms(nodes)


def _atoms(nodes: Sequence[LatexNode]) -> tuple[Atom, ...]:
    atoms: list[Atom] = []
    mark = ""
    for name, arguments, start in (part for node in nodes for part in _parts(node)):
        if name in ("_", "^"):
            mark = name
        elif mark:
            script = arguments[0] if name == "" else (Atom(name, arguments, (), start),)
            last = atoms.pop()
            atoms.append(Atom(last.name, last.arguments, (*last.scripts, (mark, script)), last.start))
            mark = ""
        else:
            atoms.append(Atom(name, arguments, (), start))
    return tuple(atoms)


def _parts(node: LatexNode) -> Iterator[tuple[str, tuple[tuple[Atom, ...], ...], int]]:
    """(name, arguments, position) of a node: one for each sign of a run of characters."""
    if isinstance(node, LatexCharsNode):
        yield from ((sign, (), node.pos + k) for k, sign in enumerate(node.chars))
    elif isinstance(node, LatexGroupNode):
        yield "", (_atoms(node.nodelist),), node.pos
    elif isinstance(node, LatexMacroNode):
        arguments = node.nodeargd.argnlist if node.nodeargd else []
        formulas = (_atoms(a.nodelist if isinstance(a, LatexGroupNode) else [a]) for a in arguments)
        yield f"\\{node.macroname}", tuple(formulas), node.pos
    else:
        raise TypeError(f"a formula holds {type(node).__name__}, which no derivation prints")


def plain(latex: str) -> str:
    r"""Return LaTeX as text.

    >>> plain(r"\left(J_Z\otimes I_{Ld}\right)\,\xi_{Q,V}^\top"), plain(r"\frac{2}{Ld}\,\hat{Y}")
    ('(J_Z ⊗ I_Ld) ξ_{Q,V}ᵀ', '2/(Ld) Ŷ')
    """
    return _text(read(latex))


def words(text: str) -> str:
    r"""Return words with LaTeX between dollars as text.

    >>> words("feed-forward $J_Z$")
    'feed-forward J_Z'
    """
    return "".join(piece if k % 2 == 0 else plain(piece) for k, piece in enumerate(text.split("$")))


def _text(atoms: Iterable[Atom]) -> str:
    text = ""
    for atom in atoms:
        sign = _sign(atom)
        last_letter = text.rstrip()[-1:]
        if sign in ("+", "-") and last_letter not in ("", *"([{,=+-·"):  # between two summands, not before the first
            sign = f" {sign} "
        elif last_letter == "ᵀ" and sign[:1].isalnum():
            sign = f" {sign}"
        elif sign == " " and text.endswith(("∂", "∂²")):
            sign = ""
        text += sign + "".join(_script(mark, content) for mark, content in atom.scripts)
    return " ".join(text.split())


def _sign(atom: Atom) -> str:
    name, arguments = atom.name, atom.arguments
    if name in _ACCENTS:
        text = _text(arguments[0])
        end = next((k for k, sign in enumerate(text) if k and not unicodedata.combining(sign)), len(text))
        return unicodedata.normalize("NFC", text[:end] + _ACCENTS[name]) + text[end:]
    if name in _FONTS:
        inner = "".join(one.name + "".join(_script(*script) for script in one.scripts) for one in arguments[0])
        return _STYLED.get((name, inner), inner)  # with its spaces
    if name == r"\sqrt":
        return f"√({_text(arguments[0])})"
    if name in _FRACTIONS:
        return f"{_text(arguments[0])}/{_whole(arguments[1])}"
    if name == "":
        return _text(arguments[0])
    return _SIGNS.get(name, name)


def _script(mark: str, content: tuple[Atom, ...]) -> str:
    if [atom.name for atom in content] == [r"\top"]:
        return "ᵀ"
    text = _text(content).replace(" ", "")
    if mark == "^" and text in _RAISED:
        return _RAISED[text]
    letters = [sign for sign in text.removeprefix("-") if not unicodedata.combining(sign)]
    short = len(letters) <= 2 and all(sign.isalpha() or sign.isdecimal() for sign in letters)
    return mark + (text if short else f"{{{text}}}")


def _whole(atoms: tuple[Atom, ...]) -> str:
    """A denominator: in brackets unless it is one sign, a derivative with respect to one sign, or a root."""
    text, bases = _text(atoms), [atom for atom in atoms if atom.name not in (r"\partial", " ", *_SPACES)]
    return text if len(bases) == 1 and all(len(script) == 1 for _, script in bases[0].scripts) else f"({text})"


def width(atoms: Iterable[Atom]) -> float:
    """Return about how many signs wide a formula is; an index counts two thirds, a fraction as its numerator."""
    return sum(map(_width, atoms))


def _width(atom: Atom) -> float:
    atom_width = width(atom.arguments[0]) if atom.arguments else float(atom.name not in (*_LAYOUT, *_SPACES, " "))
    return atom_width + sum(2 / 3 * width(content) for _, content in atom.scripts)


def broken(formula: str, limit: float = WIDTH) -> list[str]:
    r"""Return a formula in pieces of at most ``limit`` signs where it has places to break.

    >>> broken(r"A\,B+C\,D", 4)
    ['A\\,B', '{}+C\\,D']
    """
    atoms = read(formula)
    offsets = dict(zip([*(atom.start for atom in atoms), len(formula)], [0.0, *accumulate(map(_width, atoms))], strict=True))
    places = list(_places(atoms))
    pieces, start, inner = [], 0, False
    while offsets[len(formula)] - offsets[start] > limit:
        lengths = {place: offsets[place[-1]] - offsets[start] for place in places if place[-1] > start}
        if not lengths:
            break
        candidates = [place for place, length in lengths.items() if limit / 3 <= length <= limit]
        fitting = [place for place, length in lengths.items() if length <= limit] or list(lengths)[:1]
        depth, _, at = max(candidates, default=fitting[-1])
        pieces.append(formula[start:at])
        start, inner = at, inner or depth < 0
    pieces.append(formula[start:])
    if inner:  # brackets of one size: those of \left and \right cannot be in different lines
        pieces = [piece.replace(r"\left", r"\bigl").replace(r"\right", r"\bigr") for piece in pieces]
    return [pieces[0], *("{}" + _continued(piece) for piece in pieces[1:])]


def _places(atoms: Sequence[Atom]) -> Iterator[tuple[int, bool, int]]:
    """Yield places where a formula can be broken, the best one largest: minus the depth of brackets, at a sum, the position."""
    depth, name = 0, ""
    for atom in atoms:
        if atom.name in ("+", "-", r"\,") and (atom.name == r"\," or name not in ("", "(", "[")):
            yield -depth, atom.name != r"\,", atom.start
        depth += (atom.name in ("(", "[")) - (atom.name in (")", "]"))
        name = atom.name


def _continued(piece: str) -> str:
    return piece if piece[0] in "+-" else r"\cdot " + piece.removeprefix(r"\,")


def symbols(atoms: Iterable[Atom]) -> Iterator[str]:
    r"""Yield the symbols of a formula and of its indices as text, each with its index.

    >>> list(symbols(read(r"\operatorname{diag}(v)\,I_{Ld}")))
    ['diag', '(', 'v', ')', 'I_Ld', 'L', 'd']
    """
    for atom in atoms:
        if atom.arguments and atom.name not in (*_ACCENTS, *_FONTS):
            for argument in atom.arguments:
                yield from symbols(argument)
        elif _sign(atom).strip():
            yield _sign(atom).strip() + "".join(_script(mark, content) for mark, content in atom.scripts if mark == "_")
        for _, content in atom.scripts:
            yield from symbols(content)
