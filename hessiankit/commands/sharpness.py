"""``hessiankit sharpness`` on the command line."""

from __future__ import annotations

from hessiankit.commands.parsing import Commands, add_command, add_json, add_model, add_table, positive, probability, seed

EXAMPLES = (
    ("hessiankit sharpness", "a tiny model on Python's standard library"),
    ("hessiankit sharpness --model my_models:make --text notes.txt --layers", "your own model and text, also layer by layer"),
    ("hessiankit sharpness --model path/to/folder --draws 16 --json sharpness.json", "what save_pretrained wrote"),
)


def add_sharpness(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "sharpness",
        runner="hessiankit.estimation.command:run_sharpness",
        help="measure how sharp each block type of a language model is, with error bars",
        description="Draw labels from the model's own predictions on windows of a text, and estimate the average sharpness S of "
        "embeddings, queries and keys, feed-forward networks, values and outputs, norms and head (The Sharpness Disparity "
        "Principle, Eqs. 3-4), with standard errors and intervals. Nothing of the paper's order is "
        "assumed. Nothing is downloaded.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add_model(add, default="tiny")
    add("--text", default="stdlib", help="stdlib (default): Python's own standard library; or a text file, or a folder of them")
    add("--batch", type=positive, default=8, help="sequences (default 8)")
    add("--length", type=positive, default=64, help="tokens of each (default 64)")
    add("--draws", type=positive, default=8, help="draws of the labels, each one backward pass (default 8)")
    add("--micro-batch", type=positive, metavar="N", help="sequences per forward pass; S is averaged over them (default: all)")
    add("--per", choices=("token", "sequence"), default="token", help="what the loss is a mean of (default token)")
    add("--confidence", type=probability, default=0.95, help="of the intervals (default 0.95)")
    add(
        "--type",
        action="append",
        metavar="REGEX=TYPE",
        help="the type of the parameters whose names a regular expression finds, e.g. 'router=Other' (may be repeated)",
    )
    add("--layers", action="store_true", help="also print S by layer and type")
    add("--tensors", action="store_true", help="also print S of every tensor")
    add("--histograms", action="store_true", help="also print the share of entries that are 0, and write histograms to --json")
    add(
        "--exact",
        action="store_true",
        help="also compute the exact values, which takes minutes, and print both",
    )
    add("--seed", type=seed, default=0, help="of the windows, the labels, and parameters that are drawn (default 0)")
    add("--device", default="cpu", help="where to compute, e.g. cuda (default cpu)")
    add("--dtype", choices=("float32", "float64"), default="float32", help="arithmetic (default float32)")
    add_json(add)
    add_table(add)
