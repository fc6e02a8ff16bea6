"""The package itself: its version, its public names, and former import paths.

>>> import warnings
>>> with warnings.catch_warnings():
...     warnings.simplefilter("ignore")
...     from hessiankit.parts import block_types
>>> block_types.__module__
'hessiankit.partition.types'
"""

from __future__ import annotations

import ast
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"


MOVED = {
    "approximating.kronecker": "curvature.kronecker",
    "approximating.structures": "curvature.structures",
    "data": "studies.images",
    "depth": "diagnostics.depth",
    "derivation": "formulas",
    "diagonal": "curvature.diagonal",
    "disk": "curvature",
    "distributed": "diagnostics.distributed",
    "drawing": "curvature",
    "errors": "support.errors",
    "estimation": "diagnostics.sharpness",
    "estimators": "curvature.estimators",
    "frobenius": "curvature.frobenius",
    "fused": "partition.fused",
    "lanczos": "support.lanczos",
    "loading": "cli.loading",
    "monitoring": "diagnostics.monitoring",
    "operator": "curvature.operator",
    "parts": "partition",
    "request": "engine.problem",
    "study": "studies.classifier",
    "testing": "verify.testing",
    "text": "studies.text",
    "training": "studies.training",
    "tuning": "studies.tuning",
}
"""Old name under ``hessiankit`` -> new one; what lies in it has moved along."""


class MovedFinder(MetaPathFinder, Loader):
    """Finds a module under the name that it had."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return a spec for an old name, None for any other."""
        return ModuleSpec(fullname, self) if _new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        """Put the module of the new name in place of ``module``."""
        new = _new_name(module.__name__)
        warnings.warn(f"{module.__name__} is now {new}; the old name goes with 1.0", DeprecationWarning, stacklevel=2)
        sys.modules[module.__name__] = import_module(new)


def _new_name(name: str) -> str:
    package, _, rest = name.partition(".")
    old = next((old for old in MOVED if f"{rest}.".startswith(f"{old}.")), None)
    return f"{package}.{MOVED[old]}{rest[len(old) :]}" if package == "hessiankit" and old else ""


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
