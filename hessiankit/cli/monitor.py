"""``hessiankit monitor`` on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import OK, Commands, add_command, add_json, add_table
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit monitor run.jsonl", "the table, also while training goes on"),
    ("hessiankit monitor run.jsonl --plot run.svg", "the table, and the curves as a picture"),
    ("hessiankit monitor run.jsonl --json", "everything as JSON"),
)


def add_monitor(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "monitor",
        run_monitor,
        help="print and draw what a monitor wrote while a model was trained",
        description="Read the file of a hessiankit.Monitor, also while training goes on, and print for each step the "
        "block types from flat to sharp, loss, norm of the parameters and top eigenvalue.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add("file", type=Path, metavar="FILE", help="the monitor's file")
    add("--plot", type=Path, metavar="OUT", help="also draw it, as .png, .svg or .pdf")
    add_json(add)
    add_table(add)


def run_monitor(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If the file cannot be read, or the picture not be drawn.
    """
    from hessiankit.diagnostics.monitoring.log import plot_monitor, read_monitor
    from hessiankit.support.tables import show

    log = read_monitor(args.file)
    show(log, args.table)
    write_json("monitor", args.json, log.to_dict())
    if args.plot is not None:
        plot_monitor(log, args.plot)
    return OK
