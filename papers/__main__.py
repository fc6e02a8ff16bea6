"""``python -m papers``: list the papers' statements with their verdicts, recompute the verdicts, run two experiments."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hessiankit.cli.main import answer
from hessiankit.cli.parsing import FAILED, INTERRUPTED, OK, USAGE, Help, Parser, add_command, add_json, finish, seed
from hessiankit.support.errors import InputError
from hessiankit.support.files import make_folder, write_json, write_text
from papers.commands import attack, bounds
from papers.experiments import placements, tune_lr

PAPERS = ("curvature-gap", "sharpness-disparity", "curse-of-depth", "hybridnorm", "ours")
EXAMPLES = """\
examples:
  python -m papers list --paper hybridnorm
      one paper's statements with their verdicts
  python -m papers show hybridnorm/eq19
      all of one statement, and what its computation returned
  python -m papers run --seed 1 --json verdicts.json
      find every verdict again
  python -m papers errata --out docs/errata
      each paper's page of corrections
  python -m papers tune-lr --quick
      learning rates by block type against tuned AdamW"""
CODES = (
    f"exit codes: {OK} done; {FAILED} a verdict is not reproduced, or a valid bound is exceeded; "
    f"{USAGE} an option or a file cannot be used; {INTERRUPTED} interrupted"
)


def parser() -> Parser:
    """Return the parser of the command line."""
    top = Parser(prog="python -m papers", description="The papers' statements, and experiments.", formatter_class=Help,
                 epilog=f"{EXAMPLES}\n\n{CODES}")  # fmt: skip
    commands = top.add_subparsers(title="commands", dest="command", metavar="COMMAND", required=True)
    for name, run, about in (
        ("list", list_rows, "list the statements with their verdicts"),
        ("show", show_row, "run one statement and print all of it"),
        ("run", run_rows, "find the verdicts again"),
        ("errata", write_errata, "print each paper's page of corrections"),
    ):
        command = commands.add_parser(name, help=about, description=f"{about[:1].upper()}{about[1:]}.", epilog=CODES)
        command.set_defaults(runner=run, parser=command)
        add = command.add_argument
        if name in ("list", "run"):
            add("--paper", choices=PAPERS, help="only this paper")
            add("--verdict", metavar="VERDICT", help='only this verdict, e.g. "WRONG AS PRINTED"')
            add("--id", metavar="GLOB", help='only ids like this, e.g. "hybridnorm/eq3*"')
            add("--table", action="store_true", help="print all rows and columns (by default, one screen)")
            add("--html", type=Path, metavar="FILE", help="also write an HTML page")
            add("--markdown", type=Path, metavar="FILE", help="also write the rows as Markdown (docs/claims.md: with run)")
        if name == "show":
            add("show", metavar="ID", help="of the statement, e.g. hybridnorm/eq19")
        if name in ("show", "run"):
            add("--seed", type=seed, default=0, help="random seed (default 0)")
        if name == "errata":
            add("--out", type=Path, metavar="DIR", help="write the pages to this folder instead (docs/errata)")
        else:
            add_json(add)
    for name, file in (("bounds", bounds), ("attack", attack), ("tune-lr", tune_lr), ("placements", placements)):
        add_command(commands, name, file)
    return top


def list_rows(args: argparse.Namespace) -> None:
    """List statements."""
    from papers.ledger import claims

    ledger = claims(paper=args.paper, verdict=args.verdict, id=args.id)
    finish(args, ledger, [row.to_dict() for row in ledger])
    write_text("list", args.html, ledger.html)
    write_text("list", args.markdown, ledger.markdown)


def run_rows(args: argparse.Namespace) -> int:
    """Find verdicts again; return the exit code."""
    from hessiankit.support.progress import progress_bar
    from papers.ledger import claims

    ledger = claims(paper=args.paper, verdict=args.verdict, id=args.id)
    with progress_bar() as tell:
        report = ledger.run(seed=args.seed, progress=tell)
    finish(args, report, report.to_dict()["rows"])
    write_text("run", args.html, lambda: ledger.html(report))
    write_text("run", args.markdown, lambda: ledger.markdown(report))
    return OK if report else FAILED


def show_row(args: argparse.Namespace) -> int:
    """Run and print one statement; return the exit code."""
    from hessiankit.support.tables import say
    from papers.ledger import claims

    try:
        ledger = claims(id=args.show)
    except InputError as error:
        raise InputError(str(error).replace("claims: id=", "show: ", 1)) from None
    if len(ledger) > 1:
        raise InputError(f"show: {len(ledger)} statements have an id like {args.show!r}; show takes one of them, run --id all")
    report = ledger.run(seed=args.seed)
    row = report.rows[0]
    reproduced = f"{'reproduced':<12}{'yes' if row.reproduced else 'NO'} (seed {args.seed}, {row.seconds:.2f} s)"
    say(str(ledger[0]), reproduced, f"{'evidence':<12}{row.error or row.evidence}")
    if row.evidence is not None and row.evidence.second:
        say(f"{'confirmed':<12}{row.evidence.second}")
    if row.evidence is not None and row.evidence.arrays:
        say("", row.evidence.printed_arrays())
    write_json("show", args.json, report.to_dict()["rows"])
    return OK if report else FAILED


def write_errata(args: argparse.Namespace) -> None:
    """Print each paper's corrections, or write them to a folder."""
    from hessiankit.support.tables import say
    from papers.ledger import claims

    if args.out is not None:
        make_folder("errata", args.out)
    for paper, page in claims().errata().items():
        if args.out is None:
            say(page)
        else:
            write_text("errata", args.out / f"{paper}.md", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return answer(parser(), arguments)


if __name__ == "__main__":
    sys.exit(main())
