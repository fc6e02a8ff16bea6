"""``hessiankit hessian``."""

from __future__ import annotations

import sys
from typing import Any

from hessiankit.cli.options import File, Flag, ModelOptions, Output
from hessiankit.cli.program import INTERRUPTED, command
from hessiankit.support.errors import InputError, OutOfMemoryError
from hessiankit.support.tables import say

EXAMPLES = (
    ("hessiankit hessian --placement pre --heads 2 --plot hessian.png", "a pre-norm block of two heads, and its heat map"),
    (
        'hessiankit hessian --model tiny --params "blocks.0.attention.W_[QK]" --dry-run',
        "what a part of a language model's Hessian would take",
    ),
    (
        "hessiankit hessian --model my_models:make --shape 10 6 --loss mse --out hessian.npy",
        "your own model on ten drawn inputs of width 6; the matrix in a file",
    ),
)
SUFFIXES = (".png", ".svg", ".pdf", ".csv")
app = command("hessian", EXAMPLES, "--dry-run, and it does not fit")


@app.default
def run(
    *,
    settings: ModelOptions = ModelOptions(),
    dry_run: Flag = False,
    out: File | None = None,
    overwrite: Flag = False,
    resume: Flag = False,
    plot: File | None = None,
    output: Output = Output(),
) -> int:
    """Compute the exact Hessian of a transformer block, or of your own model.

    Compute the exact Hessian of a loss with respect to a model's parameters and print the norms of its diagonal blocks,
    parameter by parameter. The model is a transformer block that the options describe, on drawn inputs and targets; or, with
    --model, a language model on windows of a text, or any model on drawn inputs of a given --shape. Nothing is downloaded. Rows
    and columns of the matrix are in the table's order, each parameter row by row.

    Args:
        dry_run: Compute nothing; print what it would take in memory, disk and time.
        out: Write the matrix to this .npy file, a part at a time.
        overwrite: Replace the file at --out.
        resume: Keep the finished rows of the file at --out, if they are those of this Hessian.
        plot: Draw the entries as a heat map, as .png, .svg or .pdf; .csv for the norms of its blocks.
    """
    if plot is not None and plot.suffix not in SUFFIXES:
        raise InputError(f"cannot draw {plot}; name a file that ends in {', '.join(SUFFIXES)}")
    if plot is not None and dry_run:
        raise InputError("--plot needs the matrix, which --dry-run does not compute; drop one of them")
    if out is None and (overwrite or resume):
        raise InputError(f"--{'overwrite' if overwrite else 'resume'} is of a file; add --out")
    if out is not None and out.exists() and not (overwrite or resume or dry_run):
        raise InputError(f"{out} exists; --resume continues it, --overwrite replaces it")
    settings.check()

    from hessiankit.cli.loss_problem import loss_problem
    from hessiankit.curvature.dense import Hessian, hessian
    from hessiankit.curvature.forecast import Forecast
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar

    problem = loss_problem(settings)
    say(str(problem))
    options: dict[str, Any] = {
        "loss": problem.loss,
        "params": settings.params,
        "out": out,
        "overwrite": overwrite,
        "resume": resume,
    }
    try:
        with progress_bar() as tell:
            options |= {"dry_run": True} if dry_run else {"progress": lambda count, total: tell("hessian", count, total)}
            result = hessian(problem.model, problem.inputs, problem.target, **options)
    except KeyboardInterrupt:
        resumable = f"; --resume continues {out}" if out is not None and out.exists() else ""
        print(f"hessiankit: interrupted{resumable}", file=sys.stderr)
        return INTERRUPTED
    except OutOfMemoryError as error:
        raise OutOfMemoryError(f"{str(error).rstrip('.')}; --dry-run says what it takes") from error
    kind = "forecast" if isinstance(result, Forecast) else "hessian"
    numbers = {"seed": settings.seed, "out": out, kind: result, "environment": environment()}
    output.finish(result, {**problem.to_dict(), **numbers})
    if out is not None and not dry_run:
        say(f"wrote {out}")
    if plot is not None and isinstance(result, Hessian):
        picture = result.plot(plot, title=f"Hessian of {problem.name.partition(',')[0]}")
        say(f"wrote {plot}: {picture.caption}")
    return int(isinstance(result, Forecast) and not result.fits)
