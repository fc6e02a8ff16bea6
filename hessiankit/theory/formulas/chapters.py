r"""The chapters that ``derive`` takes by name or as a ``torch.nn`` module: arguments with their sizes, value, letters.

A row of ``CHAPTERS`` is one operation. Its formula is that of ``derivations``; here are the letters it is printed in: the
arguments with the letters of their axes, the symbol and the formula of the value, and the values on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from derivations.activation import ActivationAt
from derivations.affine import AffineAt
from derivations.arrays import Array, is_exact
from derivations.attention import AttentionAt
from derivations.embedding import TokenEmbeddingAt
from derivations.feedforward import FeedForwardAt
from derivations.gains import ColumnScaleAt, HadamardAt
from derivations.group_normalization import GroupNormRowsAt
from derivations.layernorm_theorems import LayerNormTheorems
from derivations.loss import CrossEntropyAt, MeanSquaredErrorAt
from derivations.normalization import LayerNormAt, RMSNormAt
from derivations.operation import Operation, Renamed, shape_of
from derivations.pooling import MeanPoolHeadAt
from derivations.softmax import SoftmaxAt
from derivations.stage import Stage
from hessiankit.blocks.norms import GroupNorm, norm_of
from hessiankit.request.checks import check_tensors
from hessiankit.support.errors import InputError
from hessiankit.theory.formulas.subject import LOSS, LOSSES, Subject, sequence, target_of
from hessiankit.theory.formulas.symbols import EPSILON, SCALE, SLOPE, SizeName, index_of
from hessiankit.theory.formulas.traced import of_trace

PRIMES = {
    "L": 17, "S": 13, "d": 5, "d_V": 5, "d_K": 7, "d_v": 11, r"d_{ff}": 19, r"d_o": 23, "g": 29, "d_g": 31, "C": 37, "V": 41,
}  # fmt: skip
"""Sizes of the printed copy, by their letters; a formula holds two of one number only where they are one size."""
SMALL = {"S": 4, "d": 4, "d_V": 4, "d_K": 2, "d_v": 3, r"d_{ff}": 5, r"d_o": 6, "g": 2, "d_g": 3, "C": 5, "V": 7}
"""Sizes of a chapter that is asked for by its name."""

LETTERED = {"eps": EPSILON, "scale": SCALE, "negative_slope": SLOPE}
"""Options of operations that are letters where the arguments are."""

Make = Callable[..., Operation]


@dataclass(frozen=True)
class Chapter:
    """An operation of ``derivations`` with the letters it is printed in."""

    symbol: str  # LaTeX of the value
    rule: str  # LaTeX of the value's formula
    # argument -> the letters of its axes; a product such as "g d_g" is one axis. The first is the input
    shapes: Mapping[str, tuple[str, ...]]
    make: Make  # arrays by argument, and ``options`` -> the operation at that point
    wrt: tuple[str, ...]  # what is differentiated by default
    letters: Mapping[str, str] = field(default_factory=dict)  # symbol of an argument where it is not its name
    # arguments that are there only where they are asked for, with their axes
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    values: tuple[tuple[str, str], ...] = ()  # (symbol, formula) of the values on the way
    words: Mapping[str, str] = field(default_factory=dict)  # other names of arguments, such as those of the ``torch.nn`` module
    options: Mapping[str, Any] = field(default_factory=dict)  # what ``make`` takes besides arrays

    def subject(self, title: str, point: Mapping[str, Array], seed: int) -> Subject:
        """Return the operation at a point as a subject of ``derive``."""
        shapes = {name: axes for name, axes in {**self.shapes, **self.extra}.items() if name in point}
        symbols = {name: self.letters.get(name, name) for name in shapes}
        stage, printed = partial(self._stage, symbols), partial(self._printed, symbols, shapes, seed)
        numbers = {LETTERED[name]: value for name, value in self.options.items() if name in LETTERED}
        if SCALE in numbers:
            numbers[SCALE] = shape_of(point["W_Q"])[1] ** -0.5
        return Subject(
            point, symbols, self.wrt, stage, printed, values=self.values, title=title, words=self.words, numbers=numbers,
            sizes=_sizes(shapes, point, self.options), frozen=self.options.get("frozen"),
        )  # fmt: skip

    def _stage(self, symbols: Mapping[str, str], arrays: Mapping[str, Array], options: Mapping[str, Any] | None = None) -> Stage:
        options = dict(self.options) if options is None else options
        if is_exact(next(iter(arrays.values()))):
            options = {name: LETTERED.get(name, value) for name, value in options.items()}
        operation = Renamed(self.make(**arrays, **options), symbols)
        return Stage(self.symbol, operation, {}, symbols, self.rule, index=index_of)

    def _printed(self, symbols: Mapping[str, str], shapes: Mapping[str, tuple[str, ...]], seed: int) -> tuple[Stage, SizeName]:
        options = {name: value for name, value in self.options.items() if name not in ("tokens", "target")}
        options |= {"groups": PRIMES["g"]} if "groups" in options else {}
        sizes = {letter: PRIMES[letter] for letter in ["L", *" ".join(sum(shapes.values(), ())).split()]}
        return self._stage(symbols, drawn(shapes, PRIMES, seed), options), SizeName(sizes)


def _sizes(shapes: Mapping[str, tuple[str, ...]], point: Mapping[str, Array], options: Mapping[str, Any]) -> dict[str, int]:
    """Return the sizes of a point by their letters; those of an axis such as "g d_g" from the number of groups."""
    sizes = {axis: n for name, axes in shapes.items() for axis, n in zip(axes, shape_of(point[name]), strict=True)}
    if "groups" in options:
        sizes |= {"g": options["groups"], "d_g": sizes.pop("g d_g") // options["groups"]}
    return {"L": len(options.get("tokens") or ()), **sizes}


def drawn(shapes: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], seed: int) -> dict[str, Tensor]:
    """Return a standard normal array for each argument."""
    generator = torch.Generator().manual_seed(seed)
    numbers = {name: [prod(sizes[letter] for letter in axis.split()) for axis in axes] for name, axes in shapes.items()}
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu") for name, shape in numbers.items()}


def _mean_squared_error(Z: Array, target: Any = None) -> Operation:
    if is_exact(Z) and isinstance(target, Tensor):
        target = np.vectorize(Fraction, otypes=[object])(target.double().numpy())
    return MeanSquaredErrorAt(Z, 0 * Z if target is None else target)


def _cross_entropy(Z: Array, target: Any = None) -> Operation:
    labels = [i % int(Z.shape[1]) for i in range(int(Z.shape[0]))] if target is None else target
    return Renamed(CrossEntropyAt(Z, labels), {"logits": "Z"})


def _embedding(E: Array, tokens: Any = None, frozen: int | None = None) -> Operation:
    return TokenEmbeddingAt([i % int(E.shape[0]) for i in range(PRIMES["L"])] if tokens is None else tokens, E, frozen)


_GAINS = {"X": ("L", "d"), "gamma": ("d",), "beta": ("d",)}
_GREEK = {"gamma": r"\gamma", "beta": r"\beta"}
_ATTENTION = {"X": ("L", "d_V"), "W_Q": ("d_V", "d_K"), "W_K": ("d_V", "d_K"), "W_V": ("d_V", "d_v")}
_SHIFT = r"\hat X\operatorname{diag}(\gamma) + \mathbf{1}\,\beta^\top"

CHAPTERS: dict[str, Chapter] = {
    "linear": Chapter(
        "Y", r"X\,W + \mathbf{1}\,b^\top", {"X": ("L", "d"), "W": ("d", r"d_o"), "b": (r"d_o",)},
        AffineAt, ("X", "W"), words={"weight": "W", "bias": "b"},
    ),
    "layernorm": Chapter(
        "Y", _SHIFT, _GAINS, LayerNormAt, ("X", "X"), _GREEK,
        values=(
            ("s_i", r"\sqrt{\tfrac{1}{d}\|C_{d}\,x_i\|^2 + \varepsilon}"),
            (r"\hat X", r"\operatorname{diag}(s^{-1})\,X\,C_{d}"),
        ),
        options={"eps": 1e-5},
    ),
    "rmsnorm": Chapter(
        "Y", r"\hat X\operatorname{diag}(\gamma)", {"X": ("L", "d"), "gamma": ("d",)},
        RMSNormAt, ("X", "X"), _GREEK,
        values=(
            ("s_i", r"\sqrt{\tfrac{1}{d}\|x_i\|^2 + \varepsilon}"),
            (r"\hat X", r"\operatorname{diag}(s^{-1})\,X"),
        ),
        options={"eps": 1e-5},
    ),
    "groupnorm": Chapter(
        "Y", r"\hat X\operatorname{diag}(\gamma) + \mathbf{1}\,\beta^\top,\quad \hat X = X\text{ normalised in groups of }d_g",
        {"X": ("L", "g d_g"), "gamma": ("g d_g",), "beta": ("g d_g",)}, GroupNormRowsAt, ("X", "X"), _GREEK,
        values=(("s_i", r"\sqrt{\tfrac{1}{d_g}\|C_{d_g}\,x_i\|^2 + \varepsilon}\text{ for each group }x_i"),),
        options={"groups": 2, "kind": "layernorm", "eps": 1e-5},
    ),
    "layernorm-paper": Chapter(
        r"\mathrm{LN}", r"P\,M", {"X": ("L", "d_V")}, LayerNormTheorems, ("X", "X"),
        values=(
            ("M", r"X - \tfrac{1}{d_V}X\,\mathbf{1}\,\mathbf{1}^\top"),
            (r"\sigma", r"\tfrac{1}{\sqrt{d_V}}(M^{\circ 2}\,\mathbf{1})^{\circ 1/2}"),
        ),
    ),
    "softmax": Chapter("A", r"\mathrm{softmax}(T)\text{ by rows}", {"T": ("L", "S")}, SoftmaxAt, ("T", "T")),
    "attention": Chapter(
        "F", r"A\,X\,W_V", _ATTENTION, AttentionAt, ("W_Q", "W_V"), extra={"W_O": ("d_v", r"d_o")},
        values=(
            ("T", r"X\,W_Q\,W_K^\top X^\top/\sqrt{d_K}"),
            ("A", r"\mathrm{softmax}(T)\text{ by rows}"),
        ),
        options={"scale": None},
    ),
    "feedforward": Chapter(
        "M", r"\sigma(U)\,W_2", {"Y": ("L", "d_V"), "W_1": ("d_V", r"d_{ff}"), "W_2": (r"d_{ff}", r"d_o")},
        partial(FeedForwardAt, residual=False), ("W_1", "W_2"), words={"input": "Y"},
        extra={"b_1": (r"d_{ff}",), "b_2": (r"d_o",)}, values=(("U", r"Y\,W_1"),), options={"activation": "gelu"},
    ),
    "activation": Chapter(
        "N", r"\sigma(X)", {"X": ("L", "d")}, ActivationAt, ("X", "X"),
        options={"kind": "gelu"},
    ),
    "gain": Chapter(
        "N", r"X\operatorname{diag}(v)", {"X": ("L", "d"), "v": ("d",)}, ColumnScaleAt, ("X", "v"), words={"weight": "v"},
    ),
    "hadamard": Chapter("N", r"X\odot Y", {"X": ("L", "d"), "Y": ("L", "d")}, HadamardAt, ("X", "Y")),
    "mse": Chapter(
        LOSS, r"\tfrac{1}{L d}\|Z - \text{Target}\|_F^2", {"Z": ("L", "d")}, _mean_squared_error, ("Z", "Z"),
        words={"input": "Z"},
    ),
    "cross_entropy": Chapter(
        LOSS, r"-\tfrac{1}{L}\text{ sum of }Y\odot\log P", {"Z": ("L", "C")}, _cross_entropy, ("Z", "Z"),
        values=(("P", r"\mathrm{softmax}(Z)\text{ by rows},\quad Y\text{ the labels, one-hot}"),), words={"input": "Z"},
    ),
    "embedding": Chapter(
        "N", r"P\,E", {"E": ("V", "d")}, _embedding, ("E",), words={"weight": "E"},
        values=(("P", r"\text{one-hot rows of the }L\text{ tokens}"),),
    ),
    "mean-pool-head": Chapter(
        "o", r"\tfrac{1}{L}\mathbf{1}^\top Z\,W_c + b_c^\top", {"Z": ("L", "d"), "W_c": ("d", "C"), "b_c": ("C",)},
        MeanPoolHeadAt, ("W_c", "Z"), words={"input": "Z"},
    ),
}  # fmt: skip

ACTIVATIONS: dict[type[nn.Module], str] = {
    nn.Identity: "identity", nn.ReLU: "relu", nn.LeakyReLU: "leaky_relu", nn.SiLU: "silu", nn.Tanh: "tanh",
    nn.GELU: "gelu",
}  # fmt: skip


def of_chapter(name: str, wrt: object, inputs: Tensor | None, target: Tensor | None, length: int, seed: int) -> Subject:
    """Return a chapter as a subject, at parameters that are drawn at small unequal sizes.

    An optional argument such as W_O is there if ``wrt``, what is differentiated, names it.
    """
    chapter = CHAPTERS[name]
    requests = {wrt} if isinstance(wrt, str) else set(wrt) if isinstance(wrt, (list, tuple)) else set()
    requests |= {"W_O"} if requests & {"output", "O"} else set()
    shapes = {**chapter.shapes, **{name: axes for name, axes in chapter.extra.items() if name in requests}}
    first = next(iter(shapes))
    sizes = {**SMALL, "L": max(length, 1)}
    if isinstance(inputs, Tensor) and inputs.ndim >= 2 and " " not in shapes[first][1]:
        sizes[shapes[first][1]] = int(inputs.shape[-1])
    point = drawn(shapes, sizes, seed)
    return _at(name, chapter, point, point[first].shape[1], inputs, target, length, seed, f"of the chapter {name}")


def of_module(module: nn.Module, inputs: Any, target: Tensor | None, length: int, seed: int) -> Subject:
    """Return a module of ``torch.nn`` as a subject, at its own parameters."""
    row = _chapter_of(module)
    if row is None:
        return of_trace(module, inputs)
    name, chapter, arrays, options, width = row
    if parameters := dict(module.named_parameters()):
        check_tensors(module, parameters, one_dtype=True)
    if width is None:
        width = 4 if not isinstance(inputs, Tensor) or inputs.ndim < 2 else int(inputs.shape[-1])
    chapter = replace(chapter, options={**chapter.options, **options})
    point = {key: p.detach() for key, p in arrays.items() if p is not None}
    return _at(name, chapter, point, width, inputs, target, length, seed, f"of {type(module).__name__}")


def _at(
    name: str, chapter: Chapter, point: dict[str, Tensor], width: int, inputs: Tensor | None, target: Tensor | None, length: int,
    seed: int, title: str,
) -> Subject:  # fmt: skip
    """Return a chapter at parameters, on an input of this width and with a target."""
    options, like = dict(chapter.options), next(iter(point.values()), torch.zeros(0, dtype=torch.float64, device="cpu"))
    if name == "embedding":
        options["tokens"] = _tokens(inputs, length, like.shape[0])
    else:
        first = next(iter(chapter.shapes))
        X = sequence(inputs, length, width, seed, like)
        point = {first: X, **{key: value for key, value in point.items() if key != first}}
        if name in LOSSES and target is not None:
            options["target"] = target_of(name, target, X, seed)
    return replace(chapter, options=options).subject(title, point, seed)


def _tokens(inputs: object, length: int, vocabulary: int) -> list[int]:
    """Return the tokens of an embedding, the first ones of the vocabulary by default."""
    if length < 1:
        raise InputError(f"derive: length={length}, expected at least 1")
    if inputs is None:
        return [(2 * i + 1) % vocabulary for i in range(length)]
    if not isinstance(inputs, Tensor) or inputs.is_floating_point() or inputs.dtype == torch.bool or not inputs.numel():
        got = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise InputError(f"derive: inputs are {got}; an embedding takes integer tokens, (L,)")
    low, high = int(inputs.min()), int(inputs.max())
    if low < 0 or high >= vocabulary:
        raise InputError(f"derive: tokens run from {low} to {high}; this embedding has rows 0 to {vocabulary - 1}")
    return [int(token) for token in inputs.reshape(-1)]


def _chapter_of(module: nn.Module) -> tuple[str, Chapter, dict[str, Any], dict[str, Any], int | None] | None:
    """Return the chapter's name and row, parameters by argument, options, and the width of its input where it has one.

    None for a module that is no chapter by itself.
    """
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm, GroupNorm)):
        kind, groups, eps = norm_of(module, torch.float64 if module.weight is None else module.weight.dtype)
        shape = (groups * module.size,) if isinstance(module, GroupNorm) else tuple(module.normalized_shape)
        if len(shape) != 1:
            raise InputError(f"derive: {type(module).__name__} over {len(shape)} axes; the chapter is of rows, so pass one size")
        arrays = {"gamma": module.weight, "beta": getattr(module, "bias", None)}
        options: dict[str, Any] = {"eps": eps}
        if isinstance(module, GroupNorm):
            return "groupnorm", CHAPTERS["groupnorm"], arrays, {**options, "groups": groups, "kind": kind}, shape[0]
        rule = r"\hat X" + (r"\operatorname{diag}(\gamma)" if arrays["gamma"] is not None else "")
        rule += r" + \mathbf{1}\,\beta^\top" if arrays["beta"] is not None else ""
        return kind, replace(CHAPTERS[kind], rule=rule), arrays, options, shape[0]
    if isinstance(module, nn.Linear):
        chapter = CHAPTERS["linear"]
        rule = chapter.rule if module.bias is not None else r"X\,W"
        return "linear", replace(chapter, rule=rule), {"W": module.weight.T, "b": module.bias}, {}, module.in_features
    if isinstance(module, nn.Embedding) and module.max_norm is None:
        chapter, frozen_row = CHAPTERS["embedding"], module.padding_idx
        if frozen_row is not None:
            note = ("k", rf"0\text{{ at row }}{frozen_row}\text{{, which has no gradient, }}1\text{{ elsewhere}}")
            chapter = replace(chapter, values=(*chapter.values, note))
        return "embedding", chapter, {"E": module.weight}, {"frozen": frozen_row}, None
    if kind := ACTIVATIONS.get(type(module), ""):
        kind += "_tanh" * (getattr(module, "approximate", "none") == "tanh")
        slope = {"negative_slope": module.negative_slope} if isinstance(module, nn.LeakyReLU) else {}
        return "activation", CHAPTERS["activation"], {}, {"kind": kind, **slope}, None
    plain = {
        "softmax": isinstance(module, nn.Softmax) and module.dim in (-1, 1),
        "mse": isinstance(module, nn.MSELoss) and module.reduction == "mean",
        "cross_entropy": isinstance(module, nn.CrossEntropyLoss)
        and (module.weight, module.reduction, module.label_smoothing) == (None, "mean", 0)
        and module.ignore_index < 0,
    }
    return next(((name, CHAPTERS[name], {}, {}, None) for name, is_one in plain.items() if is_one), None)
