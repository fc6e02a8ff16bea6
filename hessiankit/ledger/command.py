"""``hessiankit claims``: list the ledger, show a row, or find the verdicts again."""

from __future__ import annotations

import argparse

from hessiankit.commands.exit_codes import FAILED, OK
from hessiankit.errors import InputError
from hessiankit.files import write_json, write_text
from hessiankit.ledger.ledger import claims
from hessiankit.progress import progress_bar
from hessiankit.tables import say, show


def run_claims(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code."""
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
    write_text("claims", args.markdown, ledger.markdown)
    return FAILED if report is not None and not report else OK


def _show(args: argparse.Namespace) -> int:
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
    write_json("claims", args.json, report.to_dict())
    return OK if report else FAILED
