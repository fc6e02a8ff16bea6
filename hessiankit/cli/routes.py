"""``hessiankit routes`` on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import OK, Commands, add_command, add_json, add_table
from hessiankit.support.files import write_json, write_text

EXAMPLES = (
    ("hessiankit routes", "all operations by all routes, about ten seconds"),
    ("hessiankit routes --operation layer_norm --json -", "one operation, every number as JSON"),
)


def add_routes(commands: Commands) -> None:
    """Add the command to the parser."""
    routes = add_command(
        commands,
        "routes",
        run_routes,
        help="show which of torch's routes to second derivatives are right, wrong or missing, operation by operation",
        description="Differentiate every operation of a transformer twice by every route of the installed torch, on tiny "
        "float64 problems, and compare with the closed form and with central differences. Prints a table. The exit code is 0 "
        "whatever the table says: it is about torch.",
        examples=EXAMPLES,
    )
    add = routes.add_argument
    add("--operation", action="append", metavar="NAME", help="only this operation, e.g. layer_norm (may be repeated)")
    add_json(add)
    add_table(add)
    add("--markdown", type=Path, metavar="PATH", help="also write the table as Markdown (docs/routes.md is made so)")


def run_routes(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    from hessiankit.support.tables import show
    from hessiankit.verify.route_table import routes

    found = routes(args.operation)
    show(found, args.table)
    write_json("routes", args.json, found.to_dict())
    write_text("routes", args.markdown, found.markdown)
    return OK
