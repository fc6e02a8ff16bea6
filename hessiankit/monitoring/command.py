"""``hessiankit monitor``: print and draw what a monitor wrote."""

from __future__ import annotations

import argparse

from hessiankit.commands.exit_codes import OK
from hessiankit.files import write_json
from hessiankit.monitoring.log import read_monitor
from hessiankit.monitoring.plots import plot_monitor
from hessiankit.tables import show


def run_monitor(args: argparse.Namespace) -> int:
    """Run the command and return its exit code.

    Raises:
        InputError: If the file cannot be read, or the picture not be drawn.
    """
    log = read_monitor(args.file)
    show(log, args.table)
    write_json("monitor", args.json, log.to_dict())
    if args.plot is not None:
        plot_monitor(log, args.plot)
    return OK
