"""The ledger: the statements of four papers and our own, each with its verdict and the computation that finds it again.

Each paper is a package, each chapter of it a module that reads from top to bottom like the paper. A row is a function under
``@claim`` that takes a seed and returns what it found, in one of the forms of ``evidence.py``; its docstring is the statement:

    @claim("eq14", "App. A.1, Eq. 14", "HOLDS", uses=[sandwich])
    def eq14(seed: int) -> Evidence:
        r\"\"\"$\\partial(AWB)/\\partial W = A\\otimes B^\\top$\"\"\"
        ...
        return agrees(closed_form, reference, "against autograd")

Closed forms are imported (``uses``); a formula that is wrong in print is written next to its row, and nowhere else: its row gives
the printed value, a reference and the corrected value. References share nothing with what they judge (``autodiff.py``) and are
confirmed by differences, and a verdict has to be found again from any seed.

>>> import papers
>>> print(papers.claims(id="hybridnorm/eq19")[0].verdict)
HOLDS
"""

from papers.claim import PAPERS, VERDICTS, Claim, Evidence, Paper, Verdict
from papers.ledger import Ledger, claims
from papers.ledger_report import LedgerReport, LedgerRow
from papers.registry import claim

__all__ = [
    "PAPERS",
    "VERDICTS",
    "Claim",
    "Evidence",
    "Ledger",
    "LedgerReport",
    "LedgerRow",
    "Paper",
    "Verdict",
    "claim",
    "claims",
]
