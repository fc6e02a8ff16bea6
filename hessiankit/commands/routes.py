"""``hessiankit routes`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import Commands, add_command, add_json, add_table

EXAMPLES = (
    ("hessiankit routes", "all operations by all routes, about ten seconds"),
    ("hessiankit routes --operation layer_norm --json -", "one operation, every number as JSON"),
)


def add_routes(commands: Commands) -> None:
    """Add the command to the parser."""
    routes = add_command(
        commands,
        "routes",
        runner="hessiankit.verify.command:run_routes",
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
