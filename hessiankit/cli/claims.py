"""``hessiankit claims`` on the command line."""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import FAILED, OK, Commands, add_command, add_json, add_table, seed
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json, write_text

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
        run_claims,
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
    add("--seed", type=seed, default=0, help="random seed (default 0)")
    add_json(add)
    add_table(add)
    add("--html", type=Path, metavar="FILE", help="also write an HTML page")
    add("--markdown", type=Path, metavar="FILE", help="also write the rows as Markdown (docs/claims.md: with --run)")
    add("--errata", type=Path, metavar="DIR", help="also write each paper's page of corrections (docs/errata)")


def run_claims(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from hessiankit.ledger.ledger import claims
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.tables import show

    if args.show is not None:
        return _show(args)
    ledger = claims(paper=args.paper, verdict=args.verdict, id=args.id)
    report = None
    if args.run:
        with progress_bar() as tell:
            report = ledger.run(seed=args.seed, progress=tell)
    show(ledger if report is None else report, args.table)
    write_json("claims", args.json, (ledger if report is None else report).to_dict())
    write_text("claims", args.html, lambda: ledger.html(report))
    write_text("claims", args.markdown, lambda: ledger.markdown(report))
    if args.errata is not None:
        args.errata.mkdir(parents=True, exist_ok=True)
        for paper, page in ledger.errata().items():
            write_text("claims", args.errata / f"{paper}.md", page)
    return FAILED if report is not None and not report else OK


def _show(args: argparse.Namespace) -> int:
    from hessiankit.ledger.ledger import claims
    from hessiankit.support.tables import say

    try:
        ledger = claims(id=args.show)
    except InputError as error:
        raise InputError(str(error).replace("id=", "show=", 1)) from None
    if len(ledger) > 1:
        raise InputError(f"claims: {len(ledger)} rows have an id like {args.show!r}; --show takes one of them, --id --run all.")
    report = ledger.run(seed=args.seed)
    row = report.rows[0]
    reproduced = f"{'reproduced':<12}{'yes' if row.reproduced else 'NO'} (seed {args.seed}, {row.seconds:.2f} s)"
    say(str(ledger[0]), reproduced, f"{'evidence':<12}{row.error or row.evidence}")
    if row.evidence is not None and row.evidence.second:
        say(f"{'confirmed':<12}{row.evidence.second}")
    if row.evidence is not None and row.evidence.arrays:
        say("", row.evidence.printed_arrays())
    write_json("claims", args.json, report.to_dict())
    return OK if report else FAILED
