"""Show which of torch's routes to second derivatives are right, wrong or missing, operation by operation.

Differentiate every operation of a transformer twice by every route of the installed torch, on tiny float64 problems, and compare
with the closed form and with central differences. With --operators, the operations are those of the database of torch's own
tests, and hessiankit.hessian is compared too. Prints tables. The exit code is 0 whatever they say: they are about torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.routes.operators import OperatorTable, operators
from benchmarks.routes.table import RouteTable, routes, write
from hessiankit.cli.main import answer
from hessiankit.cli.parsing import Help, Parser, add_command, add_output, finish
from hessiankit.support.errors import InputError
from hessiankit.support.files import fill, write_text

EXAMPLES = (
    ("python -m benchmarks routes", "all operations by all routes, about half a minute"),
    ("python -m benchmarks routes --operation layer_norm --json -", "one operation, every number as JSON"),
    ("python -m benchmarks routes --operators --page docs/routes.md", "torch's database of operators, about five minutes"),
)


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--operation", action="append", metavar="NAME", help="only this operation, e.g. layer_norm (may be repeated)")
    add_output(add)
    add("--operators", action="store_true", help="the operators of torch's own tests, by four routes and by hessiankit.hessian")
    marks = "'routes', 'wrong modes', or with --operators 'operators'"
    add("--page", type=Path, action="append", metavar="PATH", help=f"also write into this page, between its marks {marks}")
    add("--write", action="store_true", help="also write the short form of the table (route_table.json)")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.write and (args.operation or args.operators):
        other = "--operation some of them" if args.operation else "--operators other ones"
        raise InputError(f"routes: --write takes all operations, {other}; drop one of the two")
    for path in args.page or ():
        _read(path)  # an error now, and not after minutes
    result: OperatorTable | RouteTable
    if args.operators:
        result = operators(args.operation)
        sections = {"operators": result.markdown()}
    else:
        result = routes(args.operation)
        sections = {"routes": result.markdown(), "wrong modes": result.wrong_markdown()}
    finish(args, result)
    for path in args.page or ():
        page = _read(path)
        marked = {name: f"\n{text}\n" for name, text in sections.items() if f"<!-- {name} -->" in page}
        write_text("routes", path, fill(page, marked))
    if isinstance(result, RouteTable) and args.write:
        write(result)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"routes: cannot read {path}: {error.strerror}; name a page with such marks") from error


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    top = Parser(prog="python -m benchmarks", formatter_class=Help)
    add_command(top.add_subparsers(dest="command"), "routes", sys.modules[__name__])
    return answer(top, ["routes", *arguments])
