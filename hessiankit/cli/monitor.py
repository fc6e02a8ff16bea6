"""``hessiankit monitor``."""

from __future__ import annotations

from pathlib import Path

from hessiankit.cli.options import File, Output
from hessiankit.cli.program import command
from hessiankit.support.errors import InputError

EXAMPLES = (
    ("hessiankit monitor run.jsonl", "the table, also while training goes on"),
    ("hessiankit monitor run.jsonl --plot run.svg", "the table, and the curves as a picture"),
    ("hessiankit monitor run.jsonl --json", "everything as JSON"),
)
app = command("monitor", EXAMPLES)


@app.default
def run(file: Path, /, *, plot: File | None = None, output: Output = Output()) -> None:
    """Print and draw what a monitor wrote while a model was trained.

    Read the file of a hessiankit.Monitor, also while training goes on, and print for each step the block types from flat to
    sharp, loss, norm of the parameters and top eigenvalue.

    Args:
        file: The monitor's file.
        plot: Also draw it, as .png, .svg or .pdf.
    """
    if not file.is_file():
        why = "it is a folder" if file.is_dir() else "No such file"
        raise InputError(f"cannot read {file}: {why}; name a file that a Monitor wrote")

    from hessiankit.training.monitoring.log import MonitorLog

    log = MonitorLog.read(file)
    output.finish(log)
    if plot is not None:
        log.plot(plot)
