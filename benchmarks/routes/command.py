"""Show which of torch's routes to second derivatives are right, wrong or missing, operation by operation.

Differentiate every operation of a transformer twice by every route of the installed torch, on tiny float64 problems, and compare
with the closed form and with central differences. Prints a table. The exit code is 0 whatever the table says: it is about torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.routes.table import routes, write
from hessiankit.cli.main import answer
from hessiankit.cli.parsing import Help, Parser, add_command, add_output, finish
from hessiankit.support.errors import InputError
from hessiankit.support.files import fill, write_text

EXAMPLES = (
    ("python -m benchmarks routes", "all operations by all routes, about half a minute"),
    ("python -m benchmarks routes --operation layer_norm --json -", "one operation, every number as JSON"),
)


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--operation", action="append", metavar="NAME", help="only this operation, e.g. layer_norm (may be repeated)")
    add_output(add)
    add("--markdown", type=Path, metavar="PATH", help="also write the table as Markdown (docs/routes.md is made so)")
    add("--page", type=Path, metavar="PATH", help="also write the wrong routes into this page, between its marks 'wrong modes'")
    add(
        "--write",
        action="store_true",
        help="also write the table that hessiankit.check reads (route_table.json)",
    )


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.write and args.operation:
        raise InputError("routes: --write takes all operations, --operation some of them; drop one of the two")
    found = routes(args.operation)
    finish(args, found)
    write_text("routes", args.markdown, found.markdown)
    if args.page is not None:
        page = args.page.read_text(encoding="utf-8")
        write_text("routes", args.page, fill(page, {"wrong modes": f"\n{found.wrong_markdown()}\n"}))
    if args.write:
        write(found)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    top = Parser(prog="python -m benchmarks", formatter_class=Help)
    add_command(top.add_subparsers(dest="command"), "routes", sys.modules[__name__])
    return answer(top, ["routes", *arguments])
