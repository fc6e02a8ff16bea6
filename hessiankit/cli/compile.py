"""``hessiankit compile``."""

from __future__ import annotations

from hessiankit.cli.options import Flag, Json
from hessiankit.cli.program import command
from hessiankit.support.files import write_json

EXAMPLES = (
    ("hessiankit compile", "once; every dense Hessian on a processor is faster from then on"),
    ("hessiankit compile --verbose", "with what the compiler says"),
)
app = command("compile", EXAMPLES)


@app.default
def run(*, verbose: Flag = False, output: Json = Json()) -> None:
    """Build the kernels that make dense Hessians on a processor faster; optional.

    Compile the toolkit's kernels for this machine, which takes a few seconds, and keep them in the user's cache
    (TORCH_EXTENSIONS_DIR, or ~/.cache/torch_extensions). Needs g++ or clang++, ninja and setuptools. Without them plain torch
    computes the same, to rounding; the environment variable HESSIANKIT_COMPILED=0 turns them off.

    Args:
        verbose: Print what the compiler says.
    """
    from hessiankit.support.kernels import build, built, kernels

    existed = built().exists()
    path, in_use = build(verbose=verbose), kernels() is not None
    print(f"{'compiled before' if existed else 'compiled'}: {path}{'' if in_use else ' (turned off by HESSIANKIT_COMPILED=0)'}")
    write_json("compile", output.json, {"path": str(path), "used": in_use, "compiled_before": existed})
