"""``python -m benchmarks.mutants.rows``: errors in the formulas of the ledger, and whether ``hessiankit claims --run`` sees them.

The errors are drawn from a seed: a sign, a factor of 2, an exponent one higher, a transposition left out, an index one further.
They are put into what a paper prints, into corrections, and into the closed forms that the rows import; each run takes the rows
that call the function. Exit code 0: 95 % are seen.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
DRAWN = {"printed": 50, "corrected": 25, "imported": 25}
LIMIT = 240
"""Seconds for the rows of one error."""


class Site(NamedTuple):
    """A place for an error: the function that holds it, and the text with which it is replaced."""

    kind: str
    operator: str
    file: str
    function: int
    start: int
    end: int
    text: str


def mutated(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Yield the operator and the node with the error, for each that applies."""
    other = copy.deepcopy(node)
    if isinstance(other, ast.BinOp) and isinstance(other.op, ast.Add | ast.Sub):
        other.op = ast.Sub() if isinstance(other.op, ast.Add) else ast.Add()
        yield "sign", other
    elif isinstance(other, ast.BinOp) and isinstance(other.op, ast.Pow) and isinstance(other.right, ast.Constant):
        other.right.value = other.right.value + 1  # type: ignore[operator]
        yield "exponent", other
    elif isinstance(other, ast.BinOp) and isinstance(other.op, ast.Mult | ast.Div):
        yield "factor", ast.BinOp(ast.Constant(2), ast.Mult(), other)
    elif isinstance(other, ast.Attribute) and other.attr == "T":
        yield "transpose", other.value
    elif isinstance(other, ast.Subscript) and isinstance(other.slice, ast.Constant) and isinstance(other.slice.value, int):
        other.slice.value += 1
        yield "index", other


def sites(path: Path) -> Iterator[Site]:
    """Yield the places of a file."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    raw, name = text.encode(), str(path.relative_to(ROOT))
    derivation = name.startswith("derivations")
    whole = "printed" if "printed" in path.stem else "imported" if derivation else ""

    def visit(node: ast.AST, kind: str, function: int) -> Iterator[Site]:
        if isinstance(node, ast.FunctionDef):
            function = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            kind = "printed" if node.name.startswith("printed") else whole
        elif isinstance(node, ast.Assign) and not derivation:
            targets = ast.unparse(ast.Tuple(node.targets))
            kind = next((k for k in ("printed", "corrected") if k in targets), kind)
        elif isinstance(node, ast.keyword) and node.arg == "corrected":
            kind = "corrected"
        elif isinstance(node, ast.JoinedStr):
            return
        if kind and function and hasattr(node, "end_col_offset"):
            a = starts[node.lineno - 1] + node.col_offset  # type: ignore[attr-defined]
            b = starts[node.end_lineno - 1] + node.end_col_offset  # type: ignore[attr-defined]
            for operator, other in mutated(node):
                new = f"({ast.unparse(ast.fix_missing_locations(other))})"
                yield Site(kind, operator, name, function, a, b, new)
        position = {"wrong": 0, "violated": 1, "agrees": 0}.get(getattr(getattr(node, "func", None), "id", ""))
        for field, value in ast.iter_fields(node):
            for k, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.AST) and field not in (
                    "decorator_list",
                    "returns",
                    "annotation",
                    "args" if function == 0 else "",
                ):
                    here = "printed" if field == "args" and k == position and not derivation else kind
                    yield from visit(child, here, function)

    assert raw.decode() == text
    yield from visit(ast.parse(text), "", 0)


def callers() -> dict[tuple[str, int], list[str]]:
    """Run every row and return which rows call which functions."""
    from hessiankit.ledger import claims
    from hessiankit.ledger.ledger_report import run_row

    found: dict[tuple[str, int], dict[str, float]] = {}
    for row in claims():
        if row.verdict == "NOT RUN":
            continue
        seen: set[tuple[str, int]] = set()

        def note(frame: Any, event: str, _: Any, seen: set[tuple[str, int]] = seen) -> None:
            if event == "call":
                seen.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

        sys.setprofile(note)
        seconds = run_row(row).seconds
        sys.setprofile(None)
        for file, line in seen:
            if file.startswith((str(ROOT / "hessiankit/ledger"), str(ROOT / "derivations"))):
                found.setdefault((str(Path(file).relative_to(ROOT)), line), {})[row.id] = seconds
    return {place: sorted(rows, key=rows.__getitem__) for place, rows in found.items()}


def survives(site: Site, rows: list[str], tree: Path) -> bool:
    """Run the rows in a child that imports the tree with the error, and return whether all verdicts are found again."""
    path = tree / site.file
    raw = (ROOT / site.file).read_bytes()
    path.write_bytes(raw[: site.start] + site.text.encode() + raw[site.end :])
    pid = os.fork()
    if not pid:
        code = 1
        try:
            import signal

            signal.alarm(LIMIT)
            for name in [n for n in sys.modules if n.split(".")[0] in ("hessiankit", "derivations")]:
                del sys.modules[name]
            sys.path.insert(0, str(tree))
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            from hessiankit.ledger import claims
            from hessiankit.ledger.ledger_report import run_row

            wanted = {row.id: row for row in claims()}
            code = 0 if all(run_row(wanted[id]).reproduced for id in rows) else 1
        finally:
            os._exit(code)
    status = os.waitpid(pid, 0)[1]
    path.write_bytes(raw)
    return status == 0


def main() -> int:
    """Draw the errors, run the rows and print what is not seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    called = callers()
    files = [*(ROOT / "hessiankit/ledger").glob("*/*.py"), *(ROOT / "derivations").rglob("*.py")]
    every = [site for file in sorted(files) for site in sites(file) if (site.file, site.function) in called]
    missed, drawn = [], Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        for package in ("hessiankit", "derivations"):
            os.system(f"cp -r {ROOT / package} {tree / package}")
        for kind, number in DRAWN.items():
            for site in random.Random(seed).sample([s for s in every if s.kind == kind], number):
                drawn[site.operator] += 1
                if survives(site, called[site.file, site.function], tree):
                    old = (ROOT / site.file).read_bytes()[site.start : site.end].decode()
                    missed.append(site)
                    print(f"not seen: {kind} {site.operator} {site.file}: {' '.join(old.split())} -> {site.text}", flush=True)
    total = sum(drawn.values())
    kinds = dict(Counter(site.kind for site in missed))
    print(f"{total - len(missed)} of {total} seen, not: {kinds or 'none'}; operators {dict(drawn)}; seed {seed}")
    return 0 if len(missed) <= 0.05 * total else 1


if __name__ == "__main__":
    sys.exit(main())
