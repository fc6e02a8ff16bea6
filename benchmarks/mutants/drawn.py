"""Mutants at random positions: errors that no list names.

A position is drawn uniformly among those where one of five kinds of error can be made: an operator of arithmetic or logic, a
comparison, an index, a constant, a statement. Annotations, docstrings and messages of errors are left alone.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from benchmarks.mutants.listing import Mutant, every

ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Pow: ("**", "*"),
    ast.Mod: ("%", "//"),
}
COMPARISON: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.In: ("in", "not in"),
}

Edit = tuple[int, int, str]
"""Start and end of a piece of text, and what takes its place."""


def drawn(root: Path, files: Iterable[str], count: int, seed: int) -> list[Mutant]:
    """Return mutants at random positions of some files, each with the tests of its file.

    Args:
        root: The tree.
        files: Paths in it; files without tests are left out.
        count: How many.
        seed: Of the draw.
    """
    tests = known_tests(root)
    positions = [
        (name, edit) for name in sorted(files) if tests.get(name) for edit in edits((root / name).read_text(encoding="utf-8"))
    ]
    chosen = random.Random(seed).sample(positions, min(count, len(positions)))
    return [_mutant(root, name, edit, tests[name]) for name, edit in chosen]


@cache
def known_tests(root: Path) -> Mapping[str, tuple[str, ...]]:
    """Return the tests by file: those that a list names for it or that import it, and its doctests.

    A file that no test names has the tests of the files that import it; where none does, for it is read as one of a folder, those
    of its neighbours in the folder.
    """
    sources = {
        path.relative_to(root).as_posix(): path
        for top in ("hessiankit", "derivations", "papers")
        for path in (root / top).rglob("*.py")
    }
    tests: dict[str, set[str]] = {name: set() for name in sources}
    for mutant in every():
        if mutant.file in tests:
            tests[mutant.file].update(test.partition("::")[0] for test in mutant.tests)
    for path in (root / "tests").rglob("test_*.py"):
        for name in _imported(path) & sources.keys():
            tests[name].add(path.relative_to(root).as_posix())
    importers: dict[str, set[str]] = {name: set() for name in sources}
    for name, path in sources.items():
        for other in _imported(path) & sources.keys():
            importers[other].add(name)
    for name, path in sources.items():
        if ">>>" in path.read_text(encoding="utf-8"):
            tests[name].add(name)
    for _ in range(4):  # through as many floors
        for name in [name for name, ones in tests.items() if not ones - {name}]:
            tests[name] |= set().union(*(tests[other] for other in importers[name]))
    rows = "tests/papers/test_rows.py"  # which runs every row of the papers' packages, found by name; experiments have no rows
    for name in tests if (root / rows).is_file() else ():
        tests[name].update({rows} if name.startswith("papers/") and not name.startswith("papers/experiments/") else ())
    for name in [name for name, ones in tests.items() if not ones - {name}]:
        folder = Path(name).parent
        tests[name] |= set().union(*(ones for other, ones in tests.items() if Path(other).parent in (folder, folder.parent)))
    return {name: tuple(sorted(ones)) for name, ones in tests.items()}


def _imported(path: Path) -> set[str]:
    """Return the files that a source imports from, as paths in the tree."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.replace(".", "/") + ".py" for name in names}


def edits(text: str) -> Iterator[Edit]:
    """Yield every edit of a source.

    >>> sorted(text for _, _, text in edits("y = x[0] + 2 if x < 4 else -x"))
    ['', '-', '1', '3', '5', '<=']
    """
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))

    def span(node: ast.AST) -> tuple[int, int]:
        return starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]

    def between(left: ast.AST, right: ast.AST, old: str, new: str) -> Iterator[Edit]:
        start, stop = span(left)[1], span(right)[0]
        at = re.search(rf"(?<![\w*/<>=!]){re.escape(old)}(?![\w*/<>=])", text[start:stop])
        if at is not None:
            yield start + at.start(), start + at.end(), new

    def visit(node: ast.AST) -> Iterator[Edit]:
        if isinstance(node, (ast.Raise, ast.Import, ast.ImportFrom, ast.JoinedStr)):
            return
        if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node.left):
            yield from between(node.left, node.right, *ARITHMETIC[type(node.op)])
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISON:
            yield from between(node.left, node.comparators[0], *COMPARISON[type(node.ops[0])])
        if isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from between(node.values[0], node.values[1], old, new)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.Not, ast.USub)):
            start = span(node)[0]
            yield start, start + (3 if isinstance(node.op, ast.Not) else 1), ""
        if isinstance(node, ast.Constant) and type(node.value) in (int, float, bool):
            changed = {bool: lambda x: not x, int: lambda x: x + 1, float: lambda x: 2 * x if x else 1.0}[type(node.value)]
            yield *span(node), repr(changed(node.value))
        if isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield *span(node), "pass"
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from visit(child)

    yield from visit(ast.parse(text)) if text.isascii() else ()


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _mutant(root: Path, name: str, edit: Edit, tests: tuple[str, ...]) -> Mutant:
    """Return the edit as a mutant: whole lines, with as many before them as make the old text unique."""
    text = (root / name).read_text(encoding="utf-8")
    start, stop, new = edit
    first, last = text.rfind("\n", 0, start) + 1, text.find("\n", stop)
    last = len(text) if last < 0 else last
    while text.count(text[first:last]) > 1 and first:
        first = text.rfind("\n", 0, first - 1) + 1
    return Mutant(name, text[first:last], text[first:start] + new + text[stop:last], tests)
