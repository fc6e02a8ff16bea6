"""Docstrings as the reference shows them: doctests in fences, roles such as ``:func:`` as links where their object is shown."""

from __future__ import annotations

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|mod|data|attr|exc|obj):`(~?)([\w.]+)(?:\(\))?`")
DOCTEST = re.compile(r"(?:^|(?<=\n))(?P<indent> *)>>> .*(?:\n(?P=indent)\S.*)*")


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


class Docstrings(griffe.Extension):
    """Rewrite the docstrings of a package once all of it has been read."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Rewrite every docstring below a package."""
        self._rewrite(pkg)

    def _rewrite(self, obj: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(linked(escaped(obj.docstring.value), obj))
        for member in obj.members.values():
            if not member.is_alias:
                self._rewrite(member)
