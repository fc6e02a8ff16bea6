"""Docstrings as the reference shows them: doctests in fences, roles such as ``:func:`` and ledger rows as links.

The class of a chapter of ``hessiankit.derive`` gets its formulas typeset: values, Jacobians, second derivatives.
"""

from __future__ import annotations

import inspect
import itertools
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parent))

from formula_page import as_math, chapter_lines

from hessiankit.theory.formulas.chapters import CHAPTERS
from papers import PAPERS

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc|obj):`(~?)([\w.]+)(?:\(\))?`")
DOCTEST = re.compile(r"(?:^|(?<=\n))(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*")


ROW = re.compile(rf"(?<![\w/`\"'.-])({'|'.join(PAPERS)})/([a-z0-9][\w.-]*\w)(?![\w*/])")
FORMULAS = {
    "AffineAt": "linear", "LayerNormAt": "layernorm", "RMSNormAt": "rmsnorm", "GroupNormRowsAt": "groupnorm",
    "SoftmaxAt": "softmax", "LayerNormTheorems": "layernorm-paper", "AttentionAt": "attention", "FeedForwardAt": "feedforward",
    "ActivationAt": "activation", "ColumnScaleAt": "gain", "HadamardAt": "hadamard", "MeanSquaredErrorAt": "mse",
    "CrossEntropyAt": "cross_entropy", "TokenEmbeddingAt": "embedding", "MeanPoolHeadAt": "mean-pool-head",
}  # fmt: skip
"""Class of derivations -> the chapter that ``derive`` prints."""


def typeset(chapter: str) -> str:
    """Return a chapter's values, Jacobians and second derivatives as a fence named math."""
    arguments = list(CHAPTERS[chapter].shapes)
    wanted = [*((argument,) for argument in arguments), *itertools.product(arguments, repeat=2)]
    call = f'hessiankit.derive("{chapter}", wrt=...)'
    lines = as_math(list(chapter_lines(chapter, wanted, {}).items()))
    return f"\n\nAs `{call}` prints it; second derivatives that are left out vanish:\n\n{lines}\n"


def to_rows(text: str) -> str:
    """Return a text whose rows of the ledger are links to their cards; pages of the reference lie one folder down."""
    return ROW.sub(lambda m: f'<a href="../claims/{m[1]}.html#{m[1]}-{m[2]}">{m[0]}</a>', text)


def linked(text: str, owner: Any) -> str:
    """Return a docstring with its roles as links; a name that the reference does not show stays code."""

    def one(match: re.Match[str]) -> str:
        name = match[2]
        shown = name.rpartition(".")[2] if match[1] else name
        return f'<autoref optional identifier="{_path(name, owner)}"><code>{shown}</code></autoref>'

    return ROLE.sub(one, text)


def _path(name: str, owner: Any) -> str:
    """Return where a name is defined, which the reference knows whatever path it shows the object under."""
    try:
        path = name if name.startswith(("hessiankit.", "derivations.")) else owner.resolve(name)
        return str(owner.modules_collection[path].canonical_path)
    except (griffe.NameResolutionError, griffe.AliasResolutionError, KeyError):
        return f"{owner.parent.path}.{name}" if owner.parent else name


def escaped(text: str) -> str:
    r"""Return a docstring in whose text ``x[i][j]`` is no link; code is left as it is.

    >>> escaped("x[i][j]")
    'x[i]\\[j]'
    """
    lines = (
        line if line.startswith("    ") or "`" in line else re.sub(r"\]( ?)\[", r"]\1\\[", line) for line in text.split("\n")
    )
    return "\n".join(lines)


def fenced(text: str) -> str:
    r"""Return a docstring with its doctests in fences.

    >>> fenced("A sum.\n\n>>> 1 + 1\n2")
    'A sum.\n\n```pycon\n>>> 1 + 1\n2\n```'
    """
    return DOCTEST.sub(lambda m: f"{m['indent']}```pycon\n{m[0]}\n{m['indent']}```", text)


def spell_out(function: griffe.Function) -> None:
    """Give a function that takes ``**asked: Unpack[...]`` the parameters and the docstring that it has at run time."""
    runtime = getattr(import_module(function.module.path), function.name)
    written = {p.name: p for p in function.parameters}

    def parameter(p: inspect.Parameter) -> griffe.Parameter:
        annotation, default = inspect.formatannotation(p.annotation).strip("'"), repr(p.default)
        return griffe.Parameter(p.name, annotation=annotation, kind=griffe.ParameterKind.keyword_only, default=default)

    every = inspect.signature(runtime).parameters.values()
    function.parameters = griffe.Parameters(*(written.get(p.name) or parameter(p) for p in every))
    function.docstring.value = inspect.getdoc(runtime)


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of a package once all of it has been read, and hide private fields of classes."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring below a package."""
        self._rewrite(pkg)

    def _rewrite(self, obj: Any) -> None:
        if obj.is_class:  # a dataclass's signature is made of its fields afterwards
            for name in [name for name, member in obj.members.items() if member.is_attribute and member.is_private]:
                obj.del_member(name)
        if obj.is_function and any("Unpack" in str(p.annotation) for p in obj.parameters):
            spell_out(obj)
        if obj.docstring is not None:
            formulas = typeset(FORMULAS[obj.name]) if obj.is_class and obj.name in FORMULAS else ""
            obj.docstring.value = fenced(to_rows(linked(escaped(obj.docstring.value), obj))) + formulas
        for member in obj.members.values():
            if not member.is_alias:
                self._rewrite(member)
