"""List the papers' statements with their verdicts, or find every verdict again.

The statements of four papers, each with a verdict and a computation. Lists them; with --run, finds every verdict again.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.cli.parsing import Parser, add_output, finish, seed
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_json, write_text

PAPERS = ("curvature-gap", "sharpness-disparity", "curse-of-depth", "hybridnorm", "ours")
EXAMPLES = (
    ("hessiankit claims --paper hybridnorm", "one paper's statements with their verdicts"),
    ('hessiankit claims --run --id "hybridnorm/eq2*"', "find the verdicts of some rows again"),
    ("hessiankit claims --show hybridnorm/eq19", "all of one row, and what its computation found"),
)
FAILS = "a verdict is not reproduced"


def options(command: Parser) -> None:
    """Add the options."""
    add = command.add_argument
    add("--paper", choices=PAPERS, help="only this paper")
    add("--verdict", metavar="VERDICT", help='only this verdict, e.g. "WRONG AS PRINTED"')
    add("--id", metavar="GLOB", help='only ids like this, e.g. "hybridnorm/eq3*"')
    add("--run", action="store_true", help="find the verdicts again")
    add("--show", metavar="ID", help="run one row and print all of it")
    add("--seed", type=seed, default=0, help="random seed (default 0)")
    add_output(add)
    add("--html", type=Path, metavar="FILE", help="also write an HTML page")
    add("--markdown", type=Path, metavar="FILE", help="also write the rows as Markdown (docs/claims.md: with --run)")
    add("--errata", type=Path, metavar="DIR", help="also write each paper's page of corrections (docs/errata)")


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code."""
    from hessiankit.ledger.ledger import claims
    from hessiankit.support.progress import progress_bar

    if args.show is not None:
        return _show(args)
    ledger = claims(paper=args.paper, verdict=args.verdict, id=args.id)
    report = None
    if args.run:
        with progress_bar() as tell:
            report = ledger.run(seed=args.seed, progress=tell)
    finish(args, ledger if report is None else report)
    write_text("claims", args.html, lambda: ledger.html(report))
    write_text("claims", args.markdown, lambda: ledger.markdown(report))
    if args.errata is not None:
        args.errata.mkdir(parents=True, exist_ok=True)
        for paper, page in ledger.errata().items():
            write_text("claims", args.errata / f"{paper}.md", page)
    return int(report is not None and not report)


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
    return int(not report)
