"""``hessiankit hessian`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import (
    Commands,
    add_block_options,
    add_command,
    add_json,
    add_own_model,
    add_table,
    positive,
    seed,
)

EXAMPLES = (
    ("hessiankit hessian --placement pre --heads 2 --plot hessian.png", "a pre-norm block of two heads, and its heat map"),
    (
        'hessiankit hessian --model tiny --params "blocks.0.attention.W_[QK]" --dry-run',
        "what a part of a language model's Hessian would take",
    ),
    (
        "hessiankit hessian --model my_models:make --shape 10 6 --loss mse --out hessian.npy",
        "your own model on ten drawn inputs of width 6; the matrix in a file",
    ),
)


def add_hessian(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "hessian",
        runner="hessiankit.hessian_command:run_hessian",
        help="compute the exact Hessian of a transformer block, or of your own model",
        description="Compute the exact Hessian of a loss with respect to a model's parameters and print the norms of its "
        "diagonal blocks, parameter by parameter. The model is a transformer block that the options describe, on drawn "
        "inputs and targets; or, with --model, a language model on windows of a text, or any model on drawn inputs of a given "
        "--shape. Nothing is downloaded. Rows and columns of the matrix are in the table's order, each parameter row by row.",
        examples=EXAMPLES,
        failed="--dry-run, and it does not fit",
    )
    add = command.add_argument
    add_own_model(add)
    add("--batch", type=positive, help="sequences (default 1; of text 2)")
    add("--loss", choices=("mse", "cross_entropy"), help="default: mse; of text cross_entropy, of the next token")
    add("--dry-run", action="store_true", help="compute nothing; print what it would take in memory, disk and time")
    add("--out", type=Path, metavar="PATH", help="write the matrix to this .npy file, a part at a time is in memory")
    add("--overwrite", action="store_true", help="start again, whatever there is at --out")
    add("--plot", type=Path, metavar="PATH", help="draw the entries as a heat map, as .png, .svg or .pdf; the numbers beside it")
    add("--dtype", choices=("float64", "float32"), default="float64", help="arithmetic (default float64)")
    add("--device", default="cpu", help="where to compute, e.g. cuda (default cpu)")
    add("--seed", type=seed, default=0, help="of everything that is drawn (default 0)")
    add_json(add)
    add_table(add)
    block = command.add_argument_group("the transformer block, without --model").add_argument
    block("--d-model", type=positive, help="width of a token (default 4)")
    block("--d-ff", type=positive, help="hidden width of the feed-forward network (default 6)")
    add_block_options(block)
