"""``hessiankit claims``: list the ledger, show a row, or find the verdicts again."""

from __future__ import annotations

import argparse
from pathlib import Path

from hessiankit.errors import InputError
from hessiankit.files import write_json, write_text
from hessiankit.ledger.claim import PAPERS
from hessiankit.ledger.ledger import claims
from hessiankit.progress import progress_bar

OK, NOT_REPRODUCED = 0, 1


def add_claims(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to a command line."""
    parser = commands.add_parser(
        "claims",
        help="list the papers' statements with their verdicts, or find every verdict again",
        description="The statements of four papers, each with a verdict and a computation. Lists them; with --run, finds every "
        "verdict again. Exit code 0: all that was run is reproduced; 1: a verdict is not reproduced; 2: an option or a file "
        "cannot be used; 130: interrupted.",
    )
    add = parser.add_argument
    add("--paper", choices=tuple(PAPERS), help="only this paper")
    add("--verdict", metavar="VERDICT", help='only this verdict, e.g. "WRONG AS PRINTED"')
    add("--id", metavar="GLOB", help='only ids like this, e.g. "hybridnorm/eq3*"')
    add("--run", action="store_true", help="find the verdicts again")
    add("--show", metavar="ID", help="run one row and print all of it")
    add("--seed", type=int, default=0, help="of all random numbers (default 0)")
    add("--json", type=Path, metavar="FILE", help="also write everything to this file")
    add("--html", type=Path, metavar="FILE", help="also write an HTML page")
    add("--markdown", type=Path, metavar="FILE", help="also write the rows as Markdown (docs/claims.md is made so)")


def run_claims(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code."""
    if args.show is not None:
        return _show(args.show, args.seed)
    ledger = claims(paper=args.paper, verdict=args.verdict, id=args.id)
    report = None
    if args.run:
        with progress_bar() as tell:
            report = ledger.run(seed=args.seed, progress=tell)
    print(ledger if report is None else report)
    write_json("claims", args.json, (ledger if report is None else report).to_dict())
    write_text("claims", args.html, lambda: ledger.html(report))
    write_text("claims", args.markdown, ledger.markdown)
    return NOT_REPRODUCED if report is not None and not report else OK


def _show(id: str, seed: int) -> int:
    ledger = claims(id=id)
    if len(ledger) > 1:
        raise InputError(f"claims: {len(ledger)} rows have an id like {id!r}; --show takes one of them, --id --run all.")
    report = ledger.run(seed=seed)
    row = report.rows[0]
    print(ledger[0])
    print(f"{'reproduced':<12}{'yes' if row.reproduced else 'NO'} (seed {seed}, {row.seconds:.2f} s)")
    print(f"{'evidence':<12}{row.error or row.evidence}")
    return OK if report else NOT_REPRODUCED
