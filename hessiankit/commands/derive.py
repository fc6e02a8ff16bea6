"""``hessiankit derive`` on the command line."""

from __future__ import annotations

from pathlib import Path

from hessiankit.commands.parsing import Commands, add_block_options, add_command, add_json

EXAMPLES = (
    ("hessiankit derive --placement hybridnorm --wrt query value", "a mixed second derivative of the block's output"),
    ("hessiankit derive --wrt down --format explain", "a Jacobian, with the rules that give it and a legend"),
    ("hessiankit derive --placement pre --loss cross_entropy --format latex --out query_value.tex", "a LaTeX file"),
)


def add_derive(commands: Commands) -> None:
    """Add the command to the parser."""
    command = add_command(
        commands,
        "derive",
        runner="hessiankit.derivation.command:run_derive",
        help="print the Jacobian or second derivative of a transformer block as a formula",
        description="Derive the Jacobian of a block's output (one name in --wrt) or its second derivative (two), or those of a "
        "loss, for any placement of the norms. Sizes print by their letters.",
        examples=EXAMPLES,
    )
    add = command.add_argument
    add_block_options(add)
    add("--wrt", nargs="+", default=["query", "value"], metavar="NAME", help="one or two parameters (default: query value)")
    add("--loss", help="mse or cross_entropy; without it, derivatives of the output")
    formats = ("text", "explain", "latex", "json")
    add("--format", choices=formats, default="text", help="text (default), explain (with the rules), latex (a file), json")
    add("--out", type=Path, metavar="PATH", help="write to this file in place of printing")
    add_json(add)
