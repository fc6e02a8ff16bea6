"""Print and draw what a monitor wrote while a model was trained.

Read the file of a hessiankit.Monitor, also while training goes on, and print for each step the block types from flat to sharp,
loss, norm of the parameters and top eigenvalue.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import Parser, add_output, finish
from hessiankit.support.errors import InputError

EXAMPLES = (
    ("hessiankit monitor run.jsonl", "the table, also while training goes on"),
    ("hessiankit monitor run.jsonl --plot run.svg", "the table, and the curves as a picture"),
    ("hessiankit monitor run.jsonl --json", "everything as JSON"),
)


def options(command: Parser) -> None:
    """Add the options."""
    command.add_argument("file", type=Path, metavar="FILE", help="the monitor's file")
    command.add_argument("--plot", type=Path, metavar="OUT", help="also draw it, as .png, .svg or .pdf")
    add_output(command.add_argument)


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if not args.file.is_file():
        why = "it is a folder" if args.file.is_dir() else "No such file"
        raise InputError(f"monitor: cannot read {args.file}: {why}; name a file that a Monitor wrote")

    from hessiankit.diagnostics.monitoring.log import MonitorLog

    log = MonitorLog.read(args.file)
    finish(args, log)
    if args.plot is not None:
        log.plot(args.plot)
