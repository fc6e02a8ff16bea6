"""The package itself: its version and its public names."""

from __future__ import annotations

import ast
from pathlib import Path

__version__ = "0.1.0"


def names_for_type_checkers(path: str) -> dict[str, str]:
    """Return name -> module for the imports that a file makes under ``if TYPE_CHECKING``, so that a lazy package lists them once.

    >>> import hessiankit
    >>> names_for_type_checkers(hessiankit.__file__)["hessian"]
    'hessiankit.curvature.dense'
    """
    tree = ast.parse(Path(path).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.name: str(node.module) for node in imports for alias in node.names}
