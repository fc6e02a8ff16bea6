"""``python -m papers``: list the papers' statements with their verdicts, recompute the verdicts, run two experiments."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cyclopts import App, Parameter

from hessiankit.cli.options import File, Json, Output, Seed
from hessiankit.cli.program import FAILED, OK, answer, program
from hessiankit.support.errors import InputError
from hessiankit.support.files import make_folder, write_json, write_text
from papers.block_diagonal import rare_words, study
from papers.commands import attack, bounds
from papers.experiments import evaluate, placements, train, tune_lr

if TYPE_CHECKING:
    from papers.ledger import Ledger

EXAMPLES = (
    ("python -m papers list --paper hybridnorm", "one paper's statements with their verdicts"),
    ("python -m papers show hybridnorm/eq19", "all of one statement, and what its computation returned"),
    ("python -m papers run --seed 1 --json verdicts.json", "find every verdict again"),
    ("python -m papers errata --out docs/errata", "each paper's page of corrections"),
    ("python -m papers tune-lr --quick", "learning rates by block type against tuned AdamW"),
    ("python -m papers train curse-of-depth/table8 --preset tiny", "an experiment of a paper, from tiny to the paper's size"),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Statements of the ledger, and pages of them.

    Attributes:
        paper: Only this paper.
        verdict: Only this verdict, e.g. "WRONG AS PRINTED".
        id: Only ids like this, e.g. `"hybridnorm/eq3*"`.
        html: Also write an HTML page.
        markdown: Also write the rows as Markdown (docs/claims.md: with run).
    """

    paper: Literal["curvature-gap", "sharpness-disparity", "curse-of-depth", "hybridnorm", "block-diagonal", "ours"] | None = None
    verdict: str | None = None
    id: str | None = None
    html: File | None = None
    markdown: File | None = None

    def ledger(self) -> Ledger:
        """Return the statements."""
        from papers.ledger import claims

        return claims(paper=self.paper, verdict=self.verdict, id=self.id)


def app() -> App:
    """Return the program with its commands."""
    fails = "a verdict is not reproduced, or a valid bound is exceeded"
    commands = {"bounds": bounds.app, "attack": attack.app, "tune-lr": tune_lr.app, "placements": placements.app}
    commands |= {"train": train.app, "evaluate": evaluate.app}
    commands |= {"block-diagonal": study.app, "rare-words": rare_words.app}
    top = program("python -m papers", "The papers' statements, and experiments.", commands, EXAMPLES, fails)
    top.command(list_rows, name="list")
    top.command(show_row, name="show")
    top.command(run_rows, name="run")
    top.command(write_errata, name="errata")
    return top


def list_rows(*, chosen: Chosen = Chosen(), output: Output = Output()) -> None:
    """List the statements with their verdicts."""
    ledger = chosen.ledger()
    output.finish(ledger, [row.to_dict() for row in ledger])
    write_text("list", chosen.html, ledger.html)
    write_text("list", chosen.markdown, ledger.markdown)


def run_rows(*, chosen: Chosen = Chosen(), seed: Seed = 0, output: Output = Output()) -> int:
    """Find the verdicts again."""
    from hessiankit.support.progress import progress_bar

    ledger = chosen.ledger()
    with progress_bar() as tell:
        report = ledger.run(seed=seed, progress=tell)
    output.finish(report, report.to_dict()["rows"])
    write_text("run", chosen.html, lambda: ledger.html(report))
    write_text("run", chosen.markdown, lambda: ledger.markdown(report))
    return OK if report else FAILED


def show_row(id: str, /, *, seed: Seed = 0, output: Json = Json()) -> int:
    """Run one statement and print all of it.

    Args:
        id: Id of the statement, e.g. hybridnorm/eq19.
    """
    from hessiankit.support.tables import say
    from papers.ledger import claims

    try:
        ledger = claims(id=id)
    except InputError as error:
        raise InputError(str(error).replace("claims: id=", "show: ", 1)) from None
    if len(ledger) > 1:
        raise InputError(f"show: {len(ledger)} statements have an id like {id!r}; show takes one of them, run --id all")
    report = ledger.run(seed=seed)
    row = report.rows[0]
    reproduced = f"{'reproduced':<12}{'yes' if row.reproduced else 'NO'} (seed {seed}, {row.seconds:.2f} s)"
    say(str(ledger[0]), reproduced, f"{'evidence':<12}{row.error or row.evidence}")
    if row.evidence is not None and row.evidence.second:
        say(f"{'confirmed':<12}{row.evidence.second}")
    if row.evidence is not None and row.evidence.arrays:
        say("", row.evidence.printed_arrays())
    write_json("show", output.json, report.to_dict()["rows"])
    return OK if report else FAILED


def write_errata(*, out: Path | None = None) -> None:
    """Print each paper's page of corrections.

    Args:
        out: Write the pages to this folder instead (docs/errata).
    """
    from hessiankit.support.tables import say
    from papers.ledger import claims

    if out is not None:
        make_folder("errata", out)
    for paper, page in claims().errata().items():
        if out is None:
            say(page)
        else:
            write_text("errata", out / f"{paper}.md", page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return answer(app(), arguments)


if __name__ == "__main__":
    sys.exit(main())
