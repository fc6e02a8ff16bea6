"""``hessiankit check``."""

from __future__ import annotations

from typing import Any

from hessiankit.cli.options import Flag, ModelOptions, Output, Positive, refuse
from hessiankit.cli.program import command
from hessiankit.support.errors import InputError
from hessiankit.support.tables import say

EXAMPLES = (
    ("hessiankit check --model my_models:make --shape 10,6", "your own model on ten drawn inputs of width 6"),
    ("hessiankit check --placement hybridnorm --heads 2 --exact", "one transformer block, its formulas in exact arithmetic too"),
)
app = command("check", EXAMPLES, "something disagrees")


@app.default
def run(
    *, settings: ModelOptions = ModelOptions(), directions: Positive | None = None, exact: Flag = False, output: Output = Output()
) -> int:
    """Check the exact Hessian of your own model, or of a transformer block, against automatic differentiation.

    Compute the exact Hessian of the model of --model, or of the transformer block of --placement, and compare it block pair by
    block pair with references that take other routes. Prints a table. A demonstration on a classifier is hessiankit study.

    Args:
        directions: Generic directions per parameter for the comparison (default: by size).
        exact: Also check the formulas of the blocks in it in exact arithmetic.
    """
    if settings.model is None and settings.block.placement is None:
        refuse(settings, ("text", "shape"), "is of a model; add --model")
        refuse(settings, ("tokens", "params", "d_model", "d_ff"), "is of one model or block; add --model, or --placement")
        refuse(settings.block, None, "is of one model or block; add --model, or --placement")
        raise InputError("no model; add --model, or --placement for one block; hessiankit study checks a classifier")
    settings.check()

    from hessiankit.cli.loss_problem import loss_problem
    from hessiankit.support.environment import environment
    from hessiankit.verify.check import check

    problem = loss_problem(settings)
    say(str(problem))
    options: dict[str, Any] = {
        "loss": problem.loss,
        "dtype": None,
        "seed": settings.seed,
        "directions": directions,
        "exact": exact,
    }
    report = check(problem.model, problem.inputs, problem.target, params=settings.params, **options)
    numbers = {**problem.to_dict(), "seed": settings.seed, "report": report, "environment": environment()}
    output.finish(report, numbers)
    return int(not report)
