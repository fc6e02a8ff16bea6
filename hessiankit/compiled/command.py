"""``hessiankit compile``: build the kernels for this machine."""

from __future__ import annotations

import argparse

from hessiankit.commands.exit_codes import OK
from hessiankit.compiled.library import build, built, kernels
from hessiankit.files import write_json


def run_compile(args: argparse.Namespace) -> int:
    """Carry out the command and return the exit code.

    Raises:
        InputError: If there is no compiler, or it fails.
    """
    before = built().exists()
    path, used = build(verbose=args.verbose), kernels() is not None
    print(f"{'compiled before' if before else 'compiled'}: {path}{'' if used else ' (turned off by HESSIANKIT_COMPILED=0)'}")
    write_json("compile", args.json, {"path": str(path), "used": used, "compiled_before": before})
    return OK
