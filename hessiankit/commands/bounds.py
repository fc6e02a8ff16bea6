"""``hessiankit bounds`` on the command line."""

from __future__ import annotations

from hessiankit.commands.parsing import (
    Commands,
    add_block_options,
    add_command,
    add_json,
    add_table,
    positive,
    positive_number,
    seed,
)

EXAMPLES = (
    ("hessiankit bounds --placement pre --heads 2 --loss cross_entropy", "every bound beside the norm that it bounds"),
    ("hessiankit bounds --no-affine --scale 0.1 --json bounds.json", "the paper's norms, small weights; all numbers in a file"),
    ("hessiankit bounds --attack 100 --seed 7", "try to violate the bounds"),
)


def add_bounds(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "bounds",
        runner="hessiankit.bounding.command:run_bounds",
        help="print the norms of a block's Hessian beside every bound on them",
        description="Draw a block, an input and a target, compute the exact Hessian and print the norm of each of its "
        "blocks beside the bounds: certified from the matrix, structured from the intermediate values, a priori from norms, and "
        "as printed in Closing the Curvature Gap where that is defined. With --attack N, try to violate the valid bounds on N "
        "random problems instead.",
        examples=EXAMPLES,
        failed="a valid bound is exceeded",
    )
    add = command.add_argument
    add_block_options(add)
    add("--d-model", type=positive, default=4, help="width of a token (default 4)")
    add("--d-ff", type=positive, default=6, help="hidden width of the feed-forward network (default 6)")
    add("--tokens", type=positive, default=4, help="tokens of the sequence (default 4)")
    add("--loss", default="mse", help="mse (default) or cross_entropy")
    add("--scale", type=positive_number, default=1.0, help="factor on the initial weights, above 0 (default 1)")
    add("--seed", type=seed, default=0, help="of everything that is drawn (default 0)")
    add(
        "--attack",
        type=positive,
        metavar="N",
        help="try to violate every valid bound on N problems of all placements and scales, problem k drawn from --seed + k; of "
        "the other options only --json may be given; an interrupt keeps what is found",
    )
    add_json(add)
    add_table(add)
