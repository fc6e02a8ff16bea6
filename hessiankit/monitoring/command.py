"""``hessiankit monitor`` on the command line."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from hessiankit.monitoring.lines import to_line
from hessiankit.monitoring.log import read_monitor
from hessiankit.monitoring.plots import plot_monitor


def add_monitor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "monitor",
        help="print and draw what a monitor wrote while a model was trained",
        description="Read the file of a hessiankit.monitoring.Monitor, also while training goes on, and print for each step the "
        "block types from flat to sharp, loss, norm of the parameters and top eigenvalue. Exit code 0: done; 2: the file or an "
        "option cannot be used; 130: interrupted.",
    )
    add = command.add_argument
    add("file", type=Path, metavar="FILE", help="the monitor's file")
    add("--plot", type=Path, metavar="OUT", help="also draw it, as .png, .svg or .pdf")
    add("--json", action="store_true", help="print everything as one JSON object instead of the table")


def run_monitor(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If the file cannot be read, or the picture not be drawn.
    """
    log = read_monitor(args.file)
    print(json.dumps(json.loads(to_line(log.to_dict())), indent=1) if args.json else log)
    if args.plot is not None:
        plot_monitor(log, args.plot)
    return 0
