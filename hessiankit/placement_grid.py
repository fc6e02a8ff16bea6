"""``hessiankit check --placements``: the exact Hessian of every norm placement, in every combination of options.

Each case is a language model with hundreds of parameters, of one block or three; :func:`hessiankit.check` compares its
Hessian, block pair by block pair, with automatic differentiation by two routes that share nothing, and with the exact identities
of its structure. Finished cases are lines of a file, so that an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import PLACEMENTS, FeedForward, GroupNorm, Transformer
from hessiankit.errors import InputError
from hessiankit.progress import Tell
from hessiankit.verify.check import check
from hessiankit.verify.problem import labelled_cross_entropy, mean_square

OPTIONS: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("relu", "gelu", "swiglu"),
    "heads": ("1", "4", "4/2"),
    "mask": ("none", "causal"),
    "blocks": (1, 3),
    "loss": ("mse", "cross_entropy"),
}
"""What every placement is combined with; heads ``4/2`` are four heads on two of keys and values."""

AGAINST = ("reverse-over-reverse", "jvp(grad)")
"""Two routes without a common path, both right for every operation of these models (docs/routes.md)."""

RTOL = 1e-10
"""Of each block pair's largest entry, in float64."""

VOCABULARY, LENGTH, D_MODEL, D_FF, HEAD = 5, 3, 6, 5, 3
"""Head and half a row are three wide: LayerNorm of two numbers is a sign, without curvature but for eps."""

EPS = 0.1
"""Large enough that a formula without it, or with it outside the root, would be far off."""

KINK = 1e-3
"""A pre-activation of a ReLU has to be this far from zero."""

FLAT = 1e-3
"""The mean square (LayerNorm: variance) of a row under a norm has to be above this."""

SMALL = 1e-3
"""No gradient is smaller than this share of the largest: one part in 1e10 of its blocks is then above rounding."""


@dataclass(frozen=True)
class Case:
    """One combination: a placement and one value of each of ``OPTIONS``.

    >>> print(Case("hybridnorm", "rmsnorm", "swiglu", "4/2", "causal", 3, "mse"))
    hybridnorm, rmsnorm, swiglu, heads 4/2, mask causal, 3 blocks, mse
    """

    placement: str
    norm: str
    activation: str
    heads: str
    mask: str
    blocks: int
    loss: str

    def __str__(self) -> str:
        blocks = f"{self.blocks} block{'s' if self.blocks > 1 else ''}"
        return f"{self.placement}, {self.norm}, {self.activation}, heads {self.heads}, mask {self.mask}, {blocks}, {self.loss}"


@dataclass(frozen=True)
class Finished:
    """What :func:`hessiankit.check` said of a case.

    Attributes:
        case: The case.
        error: Largest difference from either reference, relative to the largest entry of its block pair.
        identities: Number of exact identities that were confirmed and tested.
        identity_error: The largest error of these.
        passed: Whether all agrees, and no operation had to be left to automatic differentiation.
        verdict: The report's own line.
        kinds: The kinds of parameters, such as ``attention.W_Q``, without the index of the block.
        size: Number of parameters.
        seconds: Time taken.
        version: Digest of the code and torch's version.
    """

    case: Case
    error: float
    identities: int
    identity_error: float
    passed: bool
    verdict: str
    kinds: tuple[str, ...]
    size: int
    seconds: float
    version: str


def cases(placements: Iterable[str] | None = None, *, sample: int | None = None, seed: int = 0) -> list[Case]:
    """Return the cases of the grid: all, those of some placements, or a sample that goes round the placements.

    Args:
        placements: Names in ``hessiankit.blocks.PLACEMENTS``; all by default.
        sample: How many cases to draw; the placements take turns, so that each occurs where there are enough.
        seed: Of the sample.

    Raises:
        InputError: If a placement is not known, or the sample is not positive.

    >>> len(cases(["post"])), len(cases(sample=5))
    (144, 5)
    """
    names = list(PLACEMENTS) if placements is None else list(dict.fromkeys(placements))
    unknown = [name for name in names if name not in PLACEMENTS]
    if unknown:
        raise InputError(f"placement_grid: no placement is called {', '.join(unknown)}; there are: {', '.join(PLACEMENTS)}")
    own = [[Case(name, *values) for values in product(*OPTIONS.values())] for name in names]
    if sample is None:
        return [case for group in own for case in group]
    if sample < 1:
        raise InputError(f"placement_grid: a sample of {sample} cases; pass 1 or more")
    rng = random.Random(seed)
    turns = zip(*(rng.sample(group, len(group)) for group in own), strict=True)
    return [case for turn in turns for case in turn][:sample]


def build(case: Case) -> tuple[Transformer, Tensor, Tensor]:
    """Return the model of a case with generic parameters, token ids and a target, the same ones every time.

    One block has biases everywhere and learned positions; three have neither, so that they stay cheap. The head is tied to the
    embedding in half of the cases. Parameters are drawn until no ReLU is near its kink, each network has units on and off, and
    no norm meets a row that is nearly constant (see ``KINK``, ``FLAT``).
    """
    alone = case.blocks == 1
    model = Transformer(
        VOCABULARY, D_MODEL, D_FF, case.blocks, int(case.heads[0]), case.placement,
        norm=case.norm, activation=case.activation, n_kv_heads=int(case.heads[-1]), d_k=HEAD, d_v=HEAD, output_projection=True,
        causal=case.mask == "causal", tied=(case.mask == "causal") == alone, eps=EPS, alpha=0.5,
        bias=alone, attention_bias=alone, max_len=LENGTH if alone else None, initialisation=None,
    ).double()  # fmt: skip
    generator = torch.Generator().manual_seed(int(hashlib.sha256(str(case).encode()).hexdigest()[:8], 16))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids = torch.tensor([[3, 0, 1], [2, 4, 3]])
    target = draw((2, LENGTH, VOCABULARY)) if case.loss == "mse" else torch.tensor([[1, 4, 0], [3, 2, 2]])
    for _ in range(100):
        for name, p in model.named_parameters():  # gains and scales around .8, all others around 0
            is_gain = p.ndim < 2 and "bias" not in name and ".b_" not in name
            p.data = 0.8 + 0.3 * draw(tuple(p.shape)) if is_gain else 0.5 * draw(tuple(p.shape))
        if is_generic(model, ids) and is_balanced(model, ids, target, case.loss):
            return model, ids, target
    raise InputError(f"placement_grid: 100 draws of parameters, none of them generic, for {case}; see KINK and FLAT")


@torch.no_grad()
def is_generic(model: nn.Module, ids: Tensor) -> bool:
    """Say whether the point is away from every kink of a ReLU and from every row that a norm cannot resolve."""
    seen: list[bool] = []

    def network(module: FeedForward, args: tuple[Tensor, ...]) -> None:
        before = args[0] @ module.W_1 + (0 if module.b_1 is None else module.b_1)
        both = bool((before > 0).any()) and bool((before < 0).any())
        seen.append(module.activation != "relu" or (both and bool(before.abs().min() > KINK)))

    def norm(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows = args[0].unflatten(-1, (module.groups, module.size)) if isinstance(module, GroupNorm) else args[0]
        centred = isinstance(module, nn.LayerNorm) or (isinstance(module, GroupNorm) and module.kind == "layernorm")
        seen.append(bool((rows.var(-1, correction=0) if centred else rows.square().mean(-1)).min() > FLAT))

    hooks = [m.register_forward_pre_hook(norm) for m in model.modules() if isinstance(m, (nn.LayerNorm, nn.RMSNorm, GroupNorm))]
    hooks += [m.register_forward_pre_hook(network) for m in model.modules() if isinstance(m, FeedForward)]
    try:
        model(ids)
    finally:
        for hook in hooks:
            hook.remove()
    return all(seen)


def is_balanced(model: nn.Module, ids: Tensor, target: Tensor, loss: str) -> bool:
    """Say whether no parameter's gradient is so small that float64 could not resolve its blocks; a key's bias has none."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    outputs = model(ids)
    scalar = mean_square(outputs, target) if loss == "mse" else labelled_cross_entropy(outputs, target)
    sizes = [float(g.abs().max()) for g in torch.autograd.grad(scalar, parameters)]
    zero = ("attention.b_K", "attention.norm_k.bias")
    return min(s for s, n in zip(sizes, names, strict=True) if not n.endswith(zero)) > SMALL * max(sizes)


def run_case(case: Case) -> Finished:
    """Check one case: all block pairs, along one generic direction a parameter."""
    start = time.perf_counter()
    model, ids, target = build(case)
    report = check(model, ids, target, loss=case.loss, against=AGAINST, rtol=RTOL, directions=1)
    found = report.hessian
    verdict = report.verdict
    if found.fallbacks:
        verdict = f"FAILED: left to automatic differentiation: {', '.join(found.fallbacks)}"
    return Finished(
        case=case,
        error=report.max_rel_error,
        identities=len(report.identities.rows),
        identity_error=report.identities.max_rel_error if report.identities.rows else 0.0,
        passed=report.passed and not found.fallbacks,
        verdict=verdict,
        kinds=tuple(sorted({_kind(name) for name in found.names})),
        size=len(found.matrix),
        seconds=time.perf_counter() - start,
        version=version(),
    )


def _kind(name: str) -> str:
    """Return a parameter's name without the index of its block.

    >>> _kind("blocks.2.attention.W_Q")
    'blocks.attention.W_Q'
    """
    return ".".join(part for part in name.split(".") if not part.isdigit())


def run_grid(todo: list[Case], lines: Path, *, jobs: int = 1, tell: Tell | None = None) -> list[Finished]:
    """Run the cases that ``lines`` does not hold yet, append each when it is finished, and return all of ``todo`` in its order.

    Lines of other code or another torch do not count: their cases are done anew.

    Args:
        todo: The cases.
        lines: The file of finished cases, made where it is missing.
        jobs: How many processes share the work, each with one thread.
        tell: Called with (placement, cases finished, cases in all).

    Raises:
        InputError: If the file cannot be read or written.
    """
    try:
        done = {finished.case: finished for finished in read_lines(lines) if finished.version == version()}
        left = [case for case in todo if case not in done]
        lines.parent.mkdir(parents=True, exist_ok=True)
        with lines.open("a", encoding="utf-8") as file, _runner(jobs) as run:
            for k, finished in enumerate(run(left)):
                done[finished.case] = finished
                file.write(json.dumps(asdict(finished)) + "\n")
                file.flush()
                if tell is not None:
                    tell(finished.case.placement, len(todo) - len(left) + k + 1, len(todo))
    except OSError as error:
        raise InputError(f"placement_grid: {lines} cannot be used: {error.strerror}; pass another folder with --out") from error
    return [done[case] for case in todo]


@contextmanager
def _runner(jobs: int) -> Iterator[Callable[[list[Case]], Iterable[Finished]]]:
    """Yield a function that runs cases in this process, or spread over several."""
    if jobs == 1:
        yield lambda left: map(run_case, left)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, _prepare_worker) as pool:  # whose exit ends the processes at once
        yield lambda left: pool.imap_unordered(run_case, left)


def _prepare_worker() -> None:
    """Take one thread, and leave Ctrl-C to the process that shares out the work."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def read_lines(path: Path) -> Iterator[Finished]:
    """Yield the finished cases of a file; a last line that was cut off by an interrupt is skipped."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            entry = json.loads(line)
            yield Finished(**{**entry, "case": Case(**entry["case"]), "kinds": tuple(entry["kinds"])})
        except (ValueError, TypeError, KeyError):
            continue


@cache
def version() -> str:
    """Return torch's version and a digest of the code of ``hessiankit`` and ``derivations``."""
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted([*root.rglob("*.py"), *(root.parent / "derivations").rglob("*.py")]):
        digest.update(path.read_bytes())
    return f"torch {torch.__version__}, code {digest.hexdigest()[:12]}"
