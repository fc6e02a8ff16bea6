"""``hessiankit claims`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import Commands, add_command, add_json, add_table, seed

PAPERS = ("curvature-gap", "sharpness-disparity", "curse-of-depth", "hybridnorm", "ours")
EXAMPLES = (
    ("hessiankit claims --paper hybridnorm", "one paper's statements with their verdicts"),
    ('hessiankit claims --run --id "hybridnorm/eq2*"', "find the verdicts of some rows again"),
    ("hessiankit claims --show hybridnorm/eq19", "all of one row, and what its computation found"),
)


def add_claims(commands: Commands) -> None:
    """Add the command to the parser."""
    parser = add_command(
        commands,
        "claims",
        runner="hessiankit.ledger.command:run_claims",
        help="list the papers' statements with their verdicts, or find every verdict again",
        description="The statements of four papers, each with a verdict and a computation. Lists them; with --run, finds every "
        "verdict again.",
        examples=EXAMPLES,
        failed="a verdict is not reproduced",
    )
    add = parser.add_argument
    add("--paper", choices=PAPERS, help="only this paper")
    add("--verdict", metavar="VERDICT", help='only this verdict, e.g. "WRONG AS PRINTED"')
    add("--id", metavar="GLOB", help='only ids like this, e.g. "hybridnorm/eq3*"')
    add("--run", action="store_true", help="find the verdicts again")
    add("--show", metavar="ID", help="run one row and print all of it")
    add("--seed", type=seed, default=0, help="of all random numbers (default 0)")
    add_json(add)
    add_table(add)
    add("--html", type=Path, metavar="FILE", help="also write an HTML page")
    add("--markdown", type=Path, metavar="FILE", help="also write the rows as Markdown (docs/claims.md is made so)")
