"""``Derivation``: a derivative as an expression in vec_r, with its renderings."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from sympy import Expr
from torch import Tensor

from derivations.matrix import Inequality, Matrix, inequalities
from hessiankit.support.errors import InputError
from hessiankit.support.tables import Detail, Piece, Printed
from hessiankit.theory.formulas.assignments import Assignments
from hessiankit.theory.formulas.matrix_expressions import leaves
from hessiankit.theory.formulas.typesetting import Story, align, explained, html_of, latex_file, plain, text_lines

SYMBOLIC_ENTRIES = 20_000
"""Entries beyond which ``sympy()`` refuses: those of a whole block take about 10 ms each."""


@dataclass(frozen=True, eq=False, repr=False)
class Derivation(Printed):
    r"""A derivative of a block, a layer or a loss with respect to one or two of its arguments.

    ``matrix`` is the expression at the point; its rows and columns are in the order of vec_r, which for the parameters of
    ``hessiankit`` is that of ``reshape(-1)``. One parameter: the Jacobian dZ/dW_i of shape (L d) x n_i. Two: the second
    derivative, (L d n_i) x n_j, or for a loss the n_i x n_j block of its Hessian.

    Formulas print the sizes by their letters, for any block of this structure; numbers are those of this block.

    Args:
        wrt: dotted names of the parameters, "X" for the input.
        loss: ``"mse"``, ``"cross_entropy"`` or None.
        matrix: the expression.
        sizes: numbers of the sizes that formulas print as letters.
        title: its subject in words.
        claims: for a theorem, the rows of the ledger that judge its print (``papers.claims(id=...)``).
    """

    wrt: tuple[str, ...]
    loss: str | None
    matrix: Matrix
    _make_story: Callable[[], Story]
    _make_assignments: Callable[[], Assignments]
    _make_matrix_expr: Callable[[bool], Any]
    sizes: Mapping[str, int]
    title: str = "of a transformer block"
    claims: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.matrix.shape

    def dense(self) -> Tensor:
        """Return the matrix of numbers at the point."""
        result: Tensor = self.matrix.dense()
        return result

    def norm_bound(self) -> float:
        """Return an upper bound on the spectral norm, from the norms of the factors."""
        return self.matrix.norm_bound()

    def inequalities(self) -> list[Inequality]:
        """Return the tree of inequalities behind ``norm_bound()``: the result's, then those of its objects."""
        return inequalities(self.matrix, self.story.lines[0].symbol)

    def explain_bound(self) -> str:
        """Return the tree of inequalities as text, with its numbers at this point and sizes in digits."""
        return "\n".join(f"‖{plain(line.symbol)}‖ ≤ {plain(line.rule)} = {line.bound:.6g}" for line in self.inequalities())

    def sympy(self) -> Assignments:
        """Return the derivative in SymPy: ``replacements, (matrix,) = derivation.sympy()``, in the form of ``sympy.cse``.

        Each replacement is a short assignment to a name; the matrix is in the names. The entry of W_Q in row 1 and column 2 is
        the symbol ``W_Q^{1,2}``, that of X ``X_{1,2}``, that of the target of a loss ``Target_{1,2}``. The eps of a norm, the
        factor c of attention's logits, gains and the factor of a placement are symbols too. The result has
        ``expanded(row, column)``, ``subs``, ``diff``, ``evalf``, ``count_ops`` and ``function``.

        Raises:
            InputError: If the matrix has more than ``SYMBOLIC_ENTRIES`` entries.

        >>> import hessiankit as hk
        >>> replacements, (matrix,) = hk.derive("gain", wrt=("X", "v"), length=1).sympy()
        >>> replacements, matrix.row(0)
        ([], Matrix([[1, 0, 0, 0]]))
        >>> listed = hk.derive("attention", wrt=("W_Q", "W_V")).sympy()
        >>> listed.shape, listed.parameters, listed.diff(listed.inputs["X"][0, 0]).shape
        ((72, 12), {c: 0.7071067811865476}, (72, 12))
        """
        return self._listed

    @cached_property
    def _listed(self) -> Assignments:
        rows, columns = self.shape
        if rows * columns > SYMBOLIC_ENTRIES:
            why = f"{rows} x {columns} is {rows * columns} symbolic entries, more than {SYMBOLIC_ENTRIES}"
            smaller = "derive a smaller block of the same structure, such as d_model=2 with one or two tokens"
            raise InputError(f"Derivation.sympy: {why}; {smaller}")
        return self._make_assignments()

    def expanded(self, row: int, column: int = 0) -> Expr:
        """Return one entry in the symbols of the inputs alone: long for more than one layer."""
        return self._listed.expanded(row, column)

    def function(self, lang: str = "numpy", name: str = "derivative") -> Any:
        """Return the derivative as a function of its inputs, by SymPy's printers.

        Args:
            lang: "numpy" and "torch" return a Python function of arrays or tensors, eps and other numbers by keyword with their
                values as defaults; torch differentiates it. "c" and "julia" return the source of a function.
            name: Name of the function.

        Raises:
            InputError: If there is no such language.

        >>> import torch
        >>> import hessiankit as hk
        >>> jacobian = hk.derive("gain", wrt="X", length=1).function("torch")
        >>> jacobian(v=torch.tensor([3.0, 5.0, 7.0, 9.0])).diagonal()
        tensor([3., 5., 7., 9.])
        """
        return self._listed.function(lang, name)

    def matrix_expr(self, *, named: bool = False) -> Any:
        r"""Return the formula as a SymPy ``MatrixExpr`` whose sizes are symbols, such as L and d.

        Its leaves are ``MatrixSymbol``s; :attr:`sizes` and :attr:`leaves` have their numbers at the point.

        Args:
            named: Whether to keep the names of parts: (list of pairs (symbol, expression), the result in the symbols).

        >>> import hessiankit as hk
        >>> formula = hk.derive("linear", wrt="X").matrix_expr()
        >>> formula, formula.shape
        (KroneckerProduct(I, W.T), (L*d_o, L*d))
        """
        return self._make_matrix_expr(named)

    @property
    def leaves(self) -> dict[str, Tensor]:
        """Arrays of the leaves of :meth:`matrix_expr` at the point, vectors as columns, by their letters."""
        return leaves(self.matrix)

    @cached_property
    def story(self) -> Story:
        """The block's values, the lines of the derivation with their rules, and the meaning of the symbols."""
        return self._make_story()

    def latex(self, *, document: bool = False) -> str:
        r"""Return the derivation in LaTeX: the block's values, the result, then each object that it refers to.

        Args:
            document: whether to return a file that compiles, with the meaning of the symbols, in place of an ``align*``
                environment.
        """
        return latex_file(self.story, self.title) if document else align([*self.story.values, *self.story.rows])

    def explain(self) -> str:
        """Return the derivation as text: the block's values, each line with its rule, and the symbols."""
        return explained(self.story)

    def to_dict(self) -> dict[str, Any]:
        """Return the printed content in LaTeX, with the shape and the norm bound, ready for JSON."""
        story = self.story
        return {
            "wrt": list(self.wrt),
            "loss": self.loss,
            "shape": list(self.shape),
            "norm_bound": self.norm_bound(),
            "claims": list(self.claims),
            "values": [{"symbol": symbol, "rule": rule} for symbol, rule in story.values],
            "lines": [asdict(line) for line in story.lines],
            "terms": [{"formula": formula, "meaning": meaning} for formula, meaning in story.terms],
            "legend": [{"symbol": symbol, "meaning": meaning} for symbol, meaning in story.legend],
        }

    def json(self) -> str:
        """Return ``to_dict()`` as JSON text."""
        return json.dumps(self.to_dict(), indent=2, ensure_ascii=False) + "\n"

    def _headline(self) -> str:
        rows, columns = self.shape
        return f"{text_lines(self.story.rows)[0]}      ({rows} x {columns})"

    def _parts(self) -> Iterator[Piece]:
        yield self._headline()
        yield from (Detail(f"    {line}") for line in text_lines(self.story.rows)[1:])
        if self.claims:
            yield f"{self.title}; its print is judged in the ledger: {', '.join(self.claims)}"

    def _repr_latex_(self) -> str:
        return f"$$\n{align([*self.story.values, *self.story.rows], 'aligned')}$$"

    def _repr_html_(self) -> str:
        judged = f"<p>{self.title}: {', '.join(self.claims)}</p>" if self.claims else ""
        return html_of(self.story, self.shape) + judged
