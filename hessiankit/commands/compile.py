"""``hessiankit compile`` on the command line."""

from __future__ import annotations

from hessiankit.commands.parsing import Commands, add_command, add_json

EXAMPLES = (
    ("hessiankit compile", "once; every dense Hessian on a processor is faster from then on"),
    ("hessiankit compile --verbose", "with what the compiler says"),
)


def add_compile(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "compile",
        runner="hessiankit.compiled.command:run_compile",
        help="build the kernels that make dense Hessians on a processor faster; optional",
        description="Compile the toolkit's kernels for this machine, a few seconds, and keep them in the user's cache "
        "(TORCH_EXTENSIONS_DIR, or ~/.cache/torch_extensions). Needs g++ or clang++, ninja and setuptools. Without them plain "
        "torch computes the same, to rounding; the environment variable HESSIANKIT_COMPILED=0 turns them off.",
        examples=EXAMPLES,
    )
    command.add_argument("--verbose", action="store_true", help="print what the compiler says")
    add_json(command.add_argument)
