"""``hessiankit tune-lr`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import Commands, add_command, add_json, add_table, positive, positive_number, probability

EXAMPLES = (
    ("hessiankit tune-lr --quick", "the tables' form in less than a minute; decides nothing"),
    ("hessiankit tune-lr --steps 200 --seeds 8 --jobs 4", "a real comparison; after Ctrl-C the same command goes on"),
    ("hessiankit tune-lr --text notes.txt --json learning_rates.json", "on a text of your own"),
)


def add_tune(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "tune-lr",
        runner="hessiankit.tuning.command:run_tune",
        help="compare learning rates by block type with tuned AdamW, at equal budget, with intervals",
        description="Train small byte-level language models on Python's standard library. First AdamW's learning rate is "
        "searched for, then those of learning rates by block type; then all of them, and controls with one change each, are "
        "trained with seeds that no search has seen, on the same batches. Prints the held-out losses, the paired "
        "differences from AdamW and the steps to equal loss with their intervals. Finished runs are kept in --out: after an "
        "interrupt the same command goes on. The exit code is 0 whatever the table says.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add("--steps", type=positive, help="updates of a run, the budget (default 400; --quick 60)")
    add("--seeds", type=positive, help="seeds of the comparison (default 5; --quick 3)")
    add("--tuning-seeds", type=positive, help="other seeds, of the searches (default 3; --quick 2)")
    add(
        "--grid",
        type=positive_number,
        nargs="+",
        metavar="LR",
        help="AdamW's learning rates, rising (default 1e-3 to 1.6e-2)",
    )
    add("--text", default="stdlib", metavar="PATH", help="'stdlib' (default), or a text file, or a folder of them")
    add("--confidence", type=probability, default=0.95, help="of each interval (default 0.95)")
    add("--jobs", type=positive, help="processes that share the work, each with one thread (default: one a core, 8 at most)")
    add("--quick", action="store_true", help="a tiny model and budget, less than a minute: shows the tables, decides nothing")
    add("--out", type=Path, default=Path("results/tune-lr"), help="folder for the runs and the picture (default results/tune-lr)")
    add_json(add)
    add_table(add)
    add("--markdown", type=Path, metavar="PATH", help="also write the tables into this page (docs/learning_rates.md is made so)")
