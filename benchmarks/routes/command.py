"""``python -m benchmarks routes``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.routes import operators as database
from benchmarks.routes import table
from hessiankit.cli.options import Flag, Output
from hessiankit.cli.program import answer, command, program
from hessiankit.support.errors import InputError
from hessiankit.support.files import fill, write_text

EXAMPLES = (
    ("python -m benchmarks routes", "all operations by all routes, about half a minute"),
    ("python -m benchmarks routes --operation layer_norm --json -", "one operation, every number as JSON"),
    ("python -m benchmarks routes --operators --page docs/routes.md", "torch's database of operators, about five minutes"),
)
app = command("routes", EXAMPLES)


@app.default
def run(
    *,
    operation: list[str] | None = None,
    operators: Flag = False,
    page: list[Path] | None = None,
    write: Flag = False,
    output: Output = Output(),
) -> None:
    """Show which of torch's routes to second derivatives are right, wrong or missing, operation by operation.

    Differentiate every operation of a transformer twice by every route of the installed torch, on tiny float64 problems, and
    compare with the closed form and with central differences. With --operators, the operations are those of the database of
    torch's own tests, and hessiankit.hessian is compared too. Prints tables. The exit code is 0 whatever they say: they are
    about torch.

    Args:
        operation: Only this operation, e.g. layer_norm (may be repeated).
        operators: The operators of torch's own tests, by four routes and by hessiankit.hessian.
        page: Also write into this page, between its marks routes, wrong modes, or with --operators operators (may be repeated).
        write: Also write the short form of the table (route_table.json).
    """
    if write and (operation or operators):
        other = "--operation some of them" if operation else "--operators other ones"
        raise InputError(f"routes: --write takes all operations, {other}; drop one of the two")
    for path in page or ():
        _read(path)  # an error now, and not after minutes
    result: database.OperatorTable | table.RouteTable
    if operators:
        result = database.operators(operation)
        sections = {"operators": result.markdown()}
    else:
        result = table.routes(operation)
        sections = {"routes": result.markdown(), "wrong modes": result.wrong_markdown()}
    output.finish(result)
    for path in page or ():
        before = _read(path)
        marked = {name: f"\n{text}\n" for name, text in sections.items() if f"<!-- {name} -->" in before}
        write_text("routes", path, fill(before, marked))
    if isinstance(result, table.RouteTable) and write:
        table.write(result)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"routes: cannot read {path}: {error.strerror}; name a page with such marks") from error


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit code."""
    return answer(program("python -m benchmarks", "Benchmarks.", {"routes": app}, EXAMPLES), ["routes", *arguments])
