"""``assert_hessian_matches`` for test suites: an AssertionError with the table unless the closed form agrees."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hessiankit.verify.check_report import CheckReport


COMPARED: list[tuple[str, CheckReport]] = []
"""Every comparison of this process, in order: the test ("" outside pytest) and the report; ``pytest --hessian`` prints them."""


def assert_hessian_matches(module: Any, inputs: Any = None, target: Any = None, **options: Any) -> CheckReport:
    """Return the report, or raise an AssertionError with the whole table if the exact Hessian and its references disagree.

    Args:
        module: Module as in :func:`hessiankit.check`, like the other arguments.
        inputs: The inputs; drawn where they are left out.
        target: Target of the loss.
        options: Any option of :func:`hessiankit.check`.

    Raises:
        AssertionError: If an entry differs, or fewer than two healthy references are left.
        InputError: If an argument cannot be used.

    >>> import hessiankit as hk
    >>> assert_hessian_matches(hk.TransformerBlock(d_model=4, d_ff=5)).passed
    True
    """
    from hessiankit.verify.check import check

    report = check(module, inputs, target, **options)
    COMPARED.append((os.environ.get("PYTEST_CURRENT_TEST", "").partition(" ")[0], report))
    if not report:
        raise AssertionError(f"{report.verdict}\n{report.table()}")
    return report
