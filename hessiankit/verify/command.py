"""``hessiankit routes``: print the route table of the installed torch."""

from __future__ import annotations

import argparse

from hessiankit.commands.exit_codes import OK
from hessiankit.files import write_json, write_text
from hessiankit.tables import show
from hessiankit.verify.routes import routes


def run_routes(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If an option or a file cannot be used.
    """
    found = routes(args.operation)
    show(found, args.table)
    write_json("routes", args.json, found.to_dict())
    write_text("routes", args.markdown, found.markdown)
    return OK
