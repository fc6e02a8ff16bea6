"""``hessiankit monitor`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import Commands, add_command, add_json, add_table

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
        runner="hessiankit.monitoring.command:run_monitor",
        help="print and draw what a monitor wrote while a model was trained",
        description="Read the file of a hessiankit.monitoring.Monitor, also while training goes on, and print for each step the "
        "block types from flat to sharp, loss, norm of the parameters and top eigenvalue.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add("file", type=Path, metavar="FILE", help="the monitor's file")
    add("--plot", type=Path, metavar="OUT", help="also draw it, as .png, .svg or .pdf")
    add_json(add)
    add_table(add)
