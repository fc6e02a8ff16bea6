"""Options that several commands share: types with their limits, and groups as frozen dataclasses whose text is their help.

This file imports no torch: what can be refused without it is refused before it is loaded.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from cyclopts import Group, Parameter, Token
from cyclopts.validators import Number

from hessiankit.cli.program import OK
from hessiankit.support.errors import InputError, check_heads, not_known
from hessiankit.support.files import check_writable, write_json
from hessiankit.support.tables import Printed, show

SEEDS = 2**32 - 1
"""The largest seed that Python, NumPy, scikit-learn and torch all take."""
SOURCES = "'tiny', a folder that save_pretrained wrote, a config.json, or 'module:function'"
"""Sources that ``--model`` takes."""


def writable(_: object, path: Path | None) -> None:
    """Refuse a file that cannot be written."""
    check_writable("path", path)


def sizes(_: object, tokens: Sequence[Token]) -> tuple[int, ...]:
    """Return positive integers between commas or spaces."""
    words = [word for token in tokens for word in token.value.split(",")]
    for word in words:
        if not word.isdecimal() or int(word) < 1:
            raise ValueError(f"{word!r} is not a positive whole number")
    return tuple(map(int, words))


def listing(registry: str) -> Any:
    """Return the type of a flag that prints every entry of a registry, ``"module:NAME"``, and ends the program."""

    def entries(_: object, flag: bool) -> None:
        module, name = registry.split(":")
        if flag:
            print(*getattr(importlib.import_module(module), name).values(), sep="\n")
            sys.exit(OK)

    return Parameter(validator=entries, show_default=False)


Flag: TypeAlias = Annotated[bool, Parameter(show_default=False)]
Positive: TypeAlias = Annotated[int, Parameter(validator=Number(gte=1))]
PositiveNumber: TypeAlias = Annotated[float, Parameter(validator=Number(gt=0, lt=math.inf))]
NonNegative: TypeAlias = Annotated[float, Parameter(validator=Number(gte=0))]
Probability: TypeAlias = Annotated[float, Parameter(validator=Number(gt=0, lt=1))]
Seed: TypeAlias = Annotated[int, Parameter(validator=Number(gte=0, lte=SEEDS), help="Random seed.")]
Device: TypeAlias = Annotated[str, Parameter(help="Where to compute, e.g. cuda.")]
Dtype: TypeAlias = Annotated[Literal["float64", "float32"], Parameter(help="Arithmetic.")]
File: TypeAlias = Annotated[Path, Parameter(validator=writable)]
Names: TypeAlias = Annotated[list[str], Parameter(consume_multiple=1)]
# Names in choices are written out, since their own modules import torch
Loss: TypeAlias = Literal["mse", "cross_entropy"]
Norm: TypeAlias = Literal["layernorm", "rmsnorm"]
Activation: TypeAlias = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh", "leaky_relu", "identity", "swiglu"]


def refuse(options: object, names: Collection[str] | None, why: str) -> None:
    """Refuse the first option of a group, or of some names in it, that is given; ``why`` follows its name in the message."""
    for field in fields(options):  # type: ignore[arg-type]
        if (names is None or field.name in names) and getattr(options, field.name) != field.default:
            raise InputError(f"--{field.name.replace('_', '-')} {why}")


def check_sources(model: str, text: str | None) -> None:
    """Refuse a model or a text that does not exist."""
    path = Path(model).expanduser()
    function = ":" in model and not path.exists()
    package = model.partition(":")[0].partition(".")[0]  # the rest is not looked up, which would import the package, and torch
    if function and not (package.isidentifier() and (PathFinder.find_spec(package, [str(Path.cwd())]) or find_spec(package))):
        raise InputError(f"--model {model!r}: there is no module {package!r} in this folder or installed; expected {SOURCES}")
    if not function and model != "tiny" and not ((path.is_file() and path.suffix == ".json") or (path / "config.json").exists()):
        problem = "is no model" if path.exists() else "is not an existing path"
        raise InputError(f"--model {model!r} {problem}; expected {SOURCES} (nothing is downloaded)")
    if text not in (None, "stdlib") and not Path(text).expanduser().exists():
        raise InputError(f"--text {text!r} is neither 'stdlib' nor an existing path (nothing is downloaded)")


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Json:
    """The option of every command.

    Attributes:
        json: Also write all numbers as JSON to this file; with - or no path to standard output, the rest to standard error.
    """

    json: File | None = None


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Output(Json):
    """Options of every command that prints a result.

    Attributes:
        table: Print all rows and columns (by default, a terminal gets one screen).
    """

    table: Flag = False

    def finish(self, result: Printed, numbers: Any = None) -> None:
        """Print a command's result, and write it, or other numbers, to --json."""
        show(result, self.table)
        write_json("json", self.json, result if numbers is None else numbers)


@Parameter(name="*", group=Group("Transformer block", sort_key=1))
@dataclass(frozen=True, kw_only=True)
class BlockOptions:
    """A transformer block.

    Attributes:
        placement: Norm placement: post (default), pre, hybridnorm, deepnorm, ...
        list_placements: Print all norm placements with their sources and exit.
        norm: Kind of the norms.
        no_affine: Norms without gain and bias.
        activation: Activation of the network.
        heads: Heads of queries.
        kv_heads: Heads of keys and values (default: as many).
        bias: Biases in the attention and the network.
        causal: A token attends to itself and earlier tokens.
        rotary: Rotary positions.
        layer: Number of the block in its stack, from 1.
        layers: Blocks in the stack (default: as many as --layer).
    """

    placement: str | None = None
    list_placements: Annotated[bool, listing("hessiankit.blocks.placements:PLACEMENTS")] = False
    norm: Norm = "layernorm"
    no_affine: Flag = False
    activation: Activation = "relu"
    heads: Positive = 1
    kv_heads: Positive | None = None
    bias: Flag = False
    causal: Flag = False
    rotary: Flag = False
    layer: Positive = 1
    layers: Positive | None = None

    def check(self, d_model: int) -> None:
        """Refuse a placement that is not known, a layer outside the stack, and heads that do not fit the width."""
        from hessiankit.blocks.placements import PLACEMENTS  # without torch

        if self.placement is not None and self.placement not in PLACEMENTS:
            raise InputError(f"--placement {self.placement!r} {not_known(self.placement, PLACEMENTS, '--list-placements')}")
        if self.layers is not None and self.layer > self.layers:
            raise InputError(f"--layer {self.layer} of --layers {self.layers}; expected 1 to {self.layers}")
        check_heads("Attention", d_model, self.heads, self.kv_heads, self.rotary)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A drawn problem for a block.

    Attributes:
        d_model: Width of a token.
        d_ff: Hidden width of the feed-forward network.
        tokens: Tokens of the sequence.
        scale: Factor on the initial weights, above 0.
    """

    d_model: Positive = 4
    d_ff: Positive = 6
    tokens: Positive = 4
    scale: PositiveNumber = 1.0
    seed: Seed = 0


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """A model or a block, and its inputs.

    Attributes:
        model: tiny: 3 blocks, bytes; a folder of save_pretrained; a config.json; module:function.
        text: With --model: stdlib (default), Python's standard library; or a text file or folder.
        shape: With --model: standard normal inputs of this shape instead of text, e.g. 4,16,32; the first counts the samples.
        tokens: Tokens of each sequence (default 4; of text 16).
        params: Only these parameters; names, or patterns such as `'*.attention.*'`.
        batch: Sequences (default 1; of text 2).
        loss: Default: mse; of text cross_entropy, of the next token.
        d_model: Without --model: width of a token (default 4).
        d_ff: Without --model: hidden width of the feed-forward network (default 6).
    """

    model: str | None = None
    text: str | None = None
    shape: Annotated[tuple[int, ...], Parameter(converter=sizes, consume_multiple=1)] | None = None
    tokens: Positive | None = None
    params: Names | None = None
    batch: Positive | None = None
    loss: Loss | None = None
    dtype: Dtype = "float64"
    device: Device = "cpu"
    seed: Seed = 0
    d_model: Positive | None = None
    d_ff: Positive | None = None
    block: BlockOptions = BlockOptions()

    def check(self) -> None:
        """Refuse options that do not go together, before torch is imported."""
        if self.model is None:
            refuse(self, ("text", "shape"), "is of a model; add --model")
            self.block.check(self.d_model or 4)
            return
        refuse(self.block, None, "describes a block; drop it, or --model")
        refuse(self, ("d_model", "d_ff"), "describes a block; drop it, or --model")
        check_sources(self.model, self.text)
        if self.shape is not None:
            refuse(self, ("text", "batch", "tokens"), "does not go with --shape, which says how large the inputs are; drop one")
        elif self.loss == "mse":
            raise InputError("--loss mse of a text; the next token is a label: take cross_entropy, or drawn inputs: --shape")
