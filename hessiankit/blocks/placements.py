"""The norm placements: the equation of each, and the registry with norms and source.

The names are those of HybridNorm (Zhuo et al. 2025) and The Curse of Depth (Sun et al. 2025), in lower case. In ``#-post``
and the like, ``#`` names the norms inside the attention: q (queries), k (keys), v (values), c (context).

>>> print(PLACEMENTS["hybridnorm"])
hybridnorm: attention on the bare stream with q, k, v normalised, Post-Norm network (HybridNorm, Eqs. 8-9)

``b`` is a block: ``b.attention`` (with the norms of queries, keys, values and context inside), ``b.feedforward``, ``b.norm_1``
of the attention and ``b.norm_2`` of the network, ``b.norm_3`` and ``b.norm_4`` where a sub-layer has a second norm; ``b.factor``
is a Python float, ``b.omega_1``, ``b.lambda_1``, ... are parameters. An equation uses these, ``+``, ``float * X`` and
``X * parameter``, nothing else: no shapes, no torch. So the same function also runs on symbols, with a stand-in for ``b``, and
gives the closed forms of its block.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hessiankit.support.errors import InputError, unknown

Equation = Callable[[Any, Any], Any]
"""(block, X) -> X of the next block."""


def post(b: Any, X: Any) -> Any:
    """Post-Norm (Vaswani et al. 2017)."""
    Y = b.norm_1(X + b.attention(X))
    return b.norm_2(Y + b.feedforward(Y))


def post_shifted(b: Any, X: Any) -> Any:
    """Post-Norm with the norm in front, feeding branch and residual (HybridNorm, App. E)."""
    N = b.norm_1(X)
    Y = b.norm_2(N + b.attention(N))
    return Y + b.feedforward(Y)


def pre(b: Any, X: Any) -> Any:
    """Pre-Norm."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def bare_post(b: Any, X: Any) -> Any:
    """#-Post: no norm before the attention; the network's norm feeds its residual too. HybridNorm with # = QKV."""
    Y = b.norm_2(X + b.attention(X))
    return Y + b.feedforward(Y)


def bare_pre(b: Any, X: Any) -> Any:
    """#-Pre: no norm before the attention; the network's norm feeds the branch only."""
    Y = X + b.attention(X)
    return Y + b.feedforward(b.norm_2(Y))


def pre_post(b: Any, X: Any) -> Any:
    """Pre-#-Post: the attention's norm feeds the branch only, the network's feeds its residual too."""
    Y = b.norm_2(X + b.attention(b.norm_1(X)))
    return Y + b.feedforward(Y)


def post_pre(b: Any, X: Any) -> Any:
    """Post-Pre: the attention's norm feeds its residual too, the network's feeds the branch only."""
    N = b.norm_1(X)
    Y = N + b.attention(N)
    return Y + b.feedforward(b.norm_2(Y))


def lns(b: Any, X: Any) -> Any:
    """LayerNorm Scaling: each norm's output times 1 / sqrt(l)."""
    Y = X + b.attention(b.factor * b.norm_1(X))
    return Y + b.feedforward(b.factor * b.norm_2(Y))


def lns_before_ln(b: Any, X: Any) -> Any:
    """LNS in front of the norms, which undo it up to eps."""
    Y = X + b.attention(b.norm_1(b.factor * X))
    return Y + b.feedforward(b.norm_2(b.factor * Y))


def lns_after_branch(b: Any, X: Any) -> Any:
    """LNS on the outputs of the branches."""
    Y = X + b.factor * b.attention(b.norm_1(X))
    return Y + b.factor * b.feedforward(b.norm_2(Y))


def lns_after_residual(b: Any, X: Any) -> Any:
    """LNS on the stream, after each sum."""
    Y = b.factor * (X + b.attention(b.norm_1(X)))
    return b.factor * (Y + b.feedforward(b.norm_2(Y)))


def lns_after_attention(b: Any, X: Any) -> Any:
    """LNS on the output of the attention only."""
    Y = X + b.factor * b.attention(b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def lns_after_ffn(b: Any, X: Any) -> Any:
    """LNS on the output of the network only."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.factor * b.feedforward(b.norm_2(Y))


def lns_attention_ln(b: Any, X: Any) -> Any:
    """LNS on the attention's norm only."""
    Y = X + b.attention(b.factor * b.norm_1(X))
    return Y + b.feedforward(b.norm_2(Y))


def lns_ffn_ln(b: Any, X: Any) -> Any:
    """LNS on the network's norm only."""
    Y = X + b.attention(b.norm_1(X))
    return Y + b.feedforward(b.factor * b.norm_2(Y))


def deepnorm(b: Any, X: Any) -> Any:
    """Post-Norm with the residual times DeepNet's alpha, here ``b.factor``."""
    Y = b.norm_1(b.factor * X + b.attention(X))
    return b.norm_2(b.factor * Y + b.feedforward(Y))


def admin(b: Any, X: Any) -> Any:
    """Post-Norm with the residual times a learnable vector omega."""
    Y = b.norm_1(X * b.omega_1 + b.attention(X))
    return b.norm_2(Y * b.omega_2 + b.feedforward(Y))


def sandwich(b: Any, X: Any) -> Any:
    """A norm before and after each branch."""
    Y = X + b.norm_3(b.attention(b.norm_1(X)))
    return Y + b.norm_4(b.feedforward(b.norm_2(Y)))


def branch_post(b: Any, X: Any) -> Any:
    """A norm after each branch, before the sum."""
    Y = X + b.norm_1(b.attention(X))
    return Y + b.norm_2(b.feedforward(Y))


def scaled_branches(b: Any, X: Any) -> Any:
    """Pre-Norm with each branch times a learnable lambda: a vector in LayerScale, a number in SkipInit."""
    Y = X + b.attention(b.norm_1(X)) * b.lambda_1
    return Y + b.feedforward(b.norm_2(Y)) * b.lambda_2


ALPHA = 0.25
"""Mix-LN's fraction of Post-Norm blocks (3 of 12 and 6 of 24 in its code)."""


@dataclass(frozen=True)
class Scale:
    """A learnable scale of a placement: two parameters, ``name_1`` of the attention and ``name_2`` of the network.

    Args:
        name: Name of the parameters without the number.
        vector: Whether it has an entry for each feature; otherwise it is one number.
        initial: (layer, n_layers) -> its initial value.
    """

    name: str
    vector: bool
    initial: Callable[[int, int], float]


@dataclass(frozen=True)
class Placement:
    """A norm placement: the equation of a block, and the norms, scales and factor that it uses.

    Args:
        name: Name in lower case.
        equation: The block as a function of itself and the stream; see ``hessiankit.blocks.placements``.
        description: One line.
        source: Paper and equation.
        norms: Numbers of those of norm_1 ... norm_4 that the block has.
        attention_norms: Letters of those of q, k, v, c that have a norm inside the attention.
        norm_scope: Whether these act on each head by itself or on all heads side by side.
        scales: Learnable scales of the branches or the residual.
        factor: (layer, n_layers) -> the number ``b.factor`` of the equation.
        factor_letter: The factor in formulas, as SymPy reads it: an expression in ``ell``, the layer, or a letter, with its
            value in LaTeX after it, as in ``"alpha = (2N)^{1/4}"``.
        rule: (layer, n_layers, alpha) -> the name of the placement that this layer has, where layers differ.
        grouped: Whether the norms act on groups of features.
        embedding_norm: Whether a stack normalises its embedding.
        final_norm: Whether a stack normalises once more before its head.
    """

    name: str
    equation: Equation
    description: str
    source: str
    norms: tuple[int, ...] = (1, 2)
    attention_norms: str = ""
    norm_scope: str = "head"
    scales: tuple[Scale, ...] = ()
    factor: Callable[[int, int], float] | None = None
    factor_letter: str = "c"
    rule: Callable[[int, int, float], str] | None = None
    grouped: bool = False
    embedding_norm: bool = False
    final_norm: bool = True

    def __str__(self) -> str:
        return f"{self.name}: {self.description} ({self.source})"

    @property
    def depends_on_depth(self) -> bool:
        """Whether a block's equation depends on its layer, beyond the initial values of its parameters."""
        return self.factor is not None or self.rule is not None


def post_norm_layers(alpha: float, n_layers: int) -> int:
    """Return floor(alpha L), Mix-LN's number of Post-Norm blocks, allowing for rounding of the product.

    >>> post_norm_layers(0.25, 12), post_norm_layers(0.29, 100)  # 0.29 * 100 is 28.999999999999996
    (3, 29)
    """
    return math.floor(alpha * n_layers * (1 + 1e-12))


def layerscale_initial(_layer: int, n_layers: int) -> float:
    """Return LayerScale's initial value by depth, as in CaiT: .1 to 18 blocks, 1e-5 to 24, else 1e-6. The paper gives none."""
    return 0.1 if n_layers <= 18 else 1e-5 if n_layers <= 24 else 1e-6


def _inverse_root(layer: int, _n_layers: int) -> float:
    return 1 / math.sqrt(layer)


HN, COD = "HybridNorm", "Curse of Depth"
_OMEGA = Scale("omega", True, lambda layer, n_layers: 1.0)
_LAYERSCALE = Scale("lambda", True, layerscale_initial)
_SKIPINIT = Scale("lambda", False, lambda layer, n_layers: 1 / math.sqrt(n_layers))


def _lns(name: str, equation: Equation, description: str, source: str = f"{COD}, Table 8") -> Placement:
    return Placement(name, equation, description, source, factor=_inverse_root, factor_letter="1/sqrt(ell)")


def _families() -> list[Placement]:
    """Return HybridNorm's Table 4: norms inside the attention, crossed with the norms outside."""
    placements = []
    for inner in ("qkvc", "qkv", "qkc", "qk", "kv", "kc"):
        letters = ", ".join(inner.replace("c", ""))
        words = f"{letters} {'and the context ' if 'c' in inner else ''}normalised"
        for name, equation, norms, outer, source in (
            ("{}-post", bare_post, (2,), "attention on the bare stream, Post-Norm network", "Eqs. 41-42"),
            ("{}-pre", bare_pre, (2,), "attention on the bare stream, Pre-Norm network", "Eqs. 43-44"),
            ("pre-{}-post", pre_post, (1, 2), "Pre-Norm attention, Post-Norm network", "Eqs. 45-46"),
            ("pre-{}-pre", pre, (1, 2), "Pre-Norm attention and network", "Eqs. 47-48"),
        ):
            full = f"{outer}, {words}"
            placements.append(
                Placement(name.format(inner), equation, full, f"{HN}, {source}", norms=norms, attention_norms=inner)
            )
    return placements


_LIST = [
    Placement(
        "post", post, "Post-Norm: a norm after each residual sum", f"Vaswani et al. 2017; {HN}, Eqs. 3-4", final_norm=False
    ),
    Placement("pre", pre, "Pre-Norm: a norm before each branch", f"{HN}, Eqs. 5-6; {COD}, Eqs. 2-3"),
    Placement(
        "hybridnorm", bare_post, "attention on the bare stream with q, k, v normalised, Post-Norm network",
        f"{HN}, Eqs. 8-9", norms=(2,), attention_norms="qkv",
    ),
    Placement(
        "hybridnorm*", bare_post, "hybridnorm, its first block pre-qkv-pre", f"{HN}, Eqs. 10-11", norms=(2,),
        attention_norms="qkv", rule=lambda layer, n_layers, alpha: "pre-qkv-pre" if layer == 1 else "hybridnorm",
    ),
    Placement(
        "first-qkv-pre", bare_post, "hybridnorm, its first block qkv-pre", f"{HN}, Fig. 4", norms=(2,),
        attention_norms="qkv", rule=lambda layer, n_layers, alpha: "qkv-pre" if layer == 1 else "hybridnorm",
    ),
    Placement(
        "embednorm-hybridnorm", bare_post, "hybridnorm after a norm of the embedding", f"{HN}, Fig. 4", norms=(2,),
        attention_norms="qkv", embedding_norm=True,
    ),
    *_families(),
    Placement("pre-post", pre_post, "Pre-Norm attention, Post-Norm network", f"{HN}, Eqs. 49-50"),
    Placement("post-pre", post_pre, "Post-Norm attention (norm in front), Pre-Norm network", f"{HN}, Eqs. 51-52"),
    Placement("post-shifted", post_shifted, "Post-Norm with each norm in front, feeding branch and residual", f"{HN}, App. E"),
    Placement(
        "mix-ln", pre, "post for the first alpha L blocks, pre for the others", f"{HN}, Table 4; {COD}, Table 1",
        rule=lambda layer, n_layers, alpha: "post" if layer <= post_norm_layers(alpha, n_layers) else "pre",
    ),
    _lns("lns", lns, "LayerNorm Scaling: pre, each norm's output times 1 / sqrt(l)", f"{COD}, Eq. 12"),
    _lns("lns-before-ln", lns_before_ln, "pre, each norm's input times 1 / sqrt(l): pre itself but for eps"),
    _lns("lns-after-branch", lns_after_branch, "pre, each branch times 1 / sqrt(l)", f"{COD}, Tables 5 (ViT) and 8"),
    _lns("lns-after-residual", lns_after_residual, "pre, the stream after each sum times 1 / sqrt(l)"),
    _lns("lns-only-attention", lns_after_attention, "pre, what the attention returns times 1 / sqrt(l)"),
    _lns("lns-only-ffn", lns_after_ffn, "pre, what the network returns times 1 / sqrt(l)"),
    _lns("lns-only-attention-ln", lns_attention_ln, "pre, the output of the attention's norm times 1 / sqrt(l)"),
    _lns("lns-only-ffn-ln", lns_ffn_ln, "pre, the output of the network's norm times 1 / sqrt(l)"),
    Placement(
        "deepnorm", deepnorm, "post with the residual times alpha = (2 L)^(1/4)", "Wang et al. 2022 (DeepNet)",
        factor=lambda layer, n_layers: (2 * n_layers) ** 0.25, factor_letter="alpha = (2N)^{1/4}", final_norm=False,
    ),
    Placement(
        "admin", admin, "post with the residual times a learnable vector omega", "Liu et al. 2020 (Admin)",
        scales=(_OMEGA,), final_norm=False,
    ),
    Placement(
        "sandwich", sandwich, "pre with a second norm after each branch", "Ding et al. 2021 (CogView)", norms=(1, 2, 3, 4)
    ),
    Placement("group-ln", pre, "pre with each norm in groups of features", f"{COD}, Table 7", grouped=True),
    Placement(
        "layerscale", scaled_branches, "pre with each branch times a learnable vector", f"{COD}, Table 6; Touvron et al. 2021",
        scales=(_LAYERSCALE,),
    ),
    Placement(
        "skipinit", scaled_branches, "pre with each branch times a learnable number", f"{COD}, Table 6; De and Smith 2020",
        scales=(_SKIPINIT,),
    ),
    Placement(
        "olmo2", branch_post, "a norm after each branch, q and k normalised over all heads", "OLMo 2 (2025)",
        attention_norms="qk", norm_scope="full",
    ),
]  # fmt: skip

PLACEMENTS: dict[str, Placement] = {placement.name: placement for placement in _LIST}
_BUILTIN = frozenset(PLACEMENTS)


def register(placement: Placement) -> None:
    """Register a placement under its name; your own placement may be registered again, as in a notebook.

    Raises:
        InputError: If the name is one of hessiankit's.
    """
    if placement.name in _BUILTIN:
        raise InputError(f"register: {placement.name!r} is one of hessiankit's placements; choose another name")
    PLACEMENTS[placement.name] = placement


def placement_of(name: str, *, caller: str = "TransformerBlock") -> Placement:
    """Return the placement of this name.

    Raises:
        InputError: If there is none, with the nearest names.
    """
    if name not in PLACEMENTS:
        raise unknown(caller, "placement", name, PLACEMENTS, "hessiankit.blocks.PLACEMENTS")
    return PLACEMENTS[name]


def placement_of_layer(name: str, layer: int, n_layers: int, alpha: float = ALPHA) -> Placement:
    """Return the placement that a layer has, 1-based, in a stack of ``n_layers`` with this placement.

    >>> [placement_of_layer("mix-ln", layer, 4, 0.5).name for layer in (1, 2, 3, 4)]
    ['post', 'post', 'pre', 'pre']
    """
    placement = placement_of(name)
    return placement if placement.rule is None else PLACEMENTS[placement.rule(layer, n_layers, alpha)]


def steps(equation: Equation, b: Any, X: Any) -> Iterator[tuple[str, Any]]:
    """Run an equation on stand-ins and yield (name, value) of its assignments in order, then of its result, named "".

    An equation without source, or with statements other than assignments to one name, yields its result alone.

    >>> from types import SimpleNamespace
    >>> double = SimpleNamespace(attention=lambda X: 2 * X, feedforward=lambda Y: 2 * Y, norm_1=abs, norm_2=abs)
    >>> list(steps(pre, double, -1.0))
    [('Y', 1.0), ('', 3.0)]
    """
    body = _statements(equation)
    if body is None:
        yield "", equation(b, X)
        return
    local = dict(zip(inspect.signature(equation).parameters, (b, X), strict=True))
    scope = {**getattr(equation, "__globals__", {}), **inspect.getclosurevars(equation).nonlocals}
    for statement in body:
        code = compile(ast.fix_missing_locations(ast.Expression(statement.value)), "<equation>", "eval")
        name = "" if isinstance(statement, ast.Return) else statement.targets[0].id
        local[name] = eval(code, scope, local)
        yield name, local[name]


def _statements(equation: Equation) -> list[Any] | None:
    """Return the assignments of an equation and its return, or None if it is written otherwise."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(equation))).body[0]
    except (OSError, TypeError, SyntaxError):
        return None
    if not isinstance(tree, ast.FunctionDef) or len(tree.args.args) != 2:
        return None
    body = [s for s in tree.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    plain = all(isinstance(s, ast.Assign) and len(s.targets) == 1 and isinstance(s.targets[0], ast.Name) for s in body[:-1])
    return body if plain and body and isinstance(body[-1], ast.Return) else None
