"""How often the 95 % intervals of the library hold the truth: ``python -m benchmarks.coverage [--seeds 300] [--markdown FILE]``.

Small matrices whose numbers are known: spectra that are flat, that fall like powers or geometrically, of either sign, few large
entries, and Hessians and Gauss-Newton matrices of small models. Each row of the table is one interval at one setting, each
number the share of seeds of which the interval holds the truth. With 300 seeds a coverage of 95 % is known to +- 2.5 % (two
standard errors).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from scipy.sparse.linalg import aslinearoperator
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.curvature.estimators import Estimate
from hessiankit.curvature.operator import HessianOperator
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.support.tables import as_markdown
from hessiankit.training.sharpness import replicates, sharpness
from hessiankit.training.sharpness.replicate import joined
from hessiankit.training.sharpness.sharpness_report import report_of

SIZE = 120
Shares: TypeAlias = "dict[str, float]"
"""Problem -> share of the seeds of which the interval holds."""


class Quadratic(nn.Module):
    """theta^T A theta / 2, whose Hessian is A, with theta in four parameters."""

    def __init__(self, A: Tensor) -> None:
        super().__init__()
        self.register_buffer("A", A)
        self.parts = nn.ParameterList(torch.zeros(len(A) // 4, dtype=A.dtype) for _ in range(4))

    def forward(self, scale: Tensor) -> Tensor:
        """Return the value times a number."""
        theta = torch.cat(list(self.parts))
        return scale * (theta @ self.A @ theta) / 2


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def spectra(size: int = SIZE) -> dict[str, Tensor]:
    """Return eigenvalues by name."""
    j = torch.arange(1, size + 1, dtype=torch.float64)
    signs = torch.where(j % 2 == 0, 1.0, -1.0).double()
    few = torch.cat([torch.full((3,), 20.0), torch.full((size - 3,), 0.1)]).double()
    powers = {"1/sqrt(j)": j**-0.5, "1/j": 1 / j, "1/j^2": j**-2, "+-1/j": signs / j}
    return {"3": torch.full_like(j, 3.0), "+-1": signs, **powers, "0.9^j": 0.9**j, "0.7^j": 0.7**j, "three large": few}


def operators() -> dict[str, HessianOperator]:
    """Return operators of P about 120 by name: of every spectrum in a random basis, of diagonal matrices, and of models."""
    made = {}
    one = torch.ones((), dtype=torch.float64)
    for k, (name, values) in enumerate(spectra().items()):
        Q, _ = torch.linalg.qr(normal(SIZE, SIZE, seed=k))
        made[name] = hk.hessian_operator(Quadratic((Q * values) @ Q.T), one, loss=None)
    for name in ("1/j", "three large"):
        made[f"{name}, diagonal"] = hk.hessian_operator(Quadratic(torch.diag(spectra()[name])), one, loss=None)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    block = hk.TransformerBlock(4, 6, placement="pre").double()
    x, labels = normal(12, 6, seed=20), torch.arange(12) % 4
    batch = normal(2, 4, 4, seed=21), normal(2, 4, 4, seed=22)
    for kind in ("hessian", "ggn"):
        made[f"classifier, {kind}"] = hk.hessian_operator(network, x, labels, loss="cross_entropy", kind=kind)
        made[f"block, {kind}"] = hk.hessian_operator(block, *batch, kind=kind)
    return made


def holds(estimate: Estimate, truth: float) -> bool:
    """Return whether an interval holds a number."""
    return abs(estimate.value - truth) <= estimate.half_width


def scalars(products: int, seeds: int) -> dict[str, Shares]:
    """Return the coverage of ``scalar_estimates``."""
    found: dict[str, Shares] = {}
    for name, operator in operators().items():
        H = operator.to_matrix()
        D, counts = H.diagonal(), dict.fromkeys(("trace", "sum of squares", "trace of a parameter", "entry of the diagonal"), 0.0)
        for seed in range(seeds):
            one = hk.scalar_estimates(operator, products=products, seed=seed)
            blocks = [holds(one.traces[n], float(D[rows].sum())) for n, rows in operator.slices.items()]
            inside = ((one.diagonal - D).abs() <= one.half_widths).double().mean()
            counts["trace"] += holds(one.trace, float(H.trace()))
            counts["sum of squares"] += holds(one.frobenius_squared, float(H.square().sum()))
            counts["trace of a parameter"] += sum(blocks) / len(blocks)
            counts["entry of the diagonal"] += float(inside)
        for what, count in counts.items():
            found.setdefault(what, {})[name] = count / seeds
    return found


def of_diagonal(seeds: int) -> dict[str, Shares]:
    """Return the coverage of ``hessian_diagonal(method="estimate")``, of models with more parameters than it takes products."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 8)).double()
    block = hk.TransformerBlock(8, 12, placement="pre").double()
    labels = torch.arange(12) % 8
    labels[3] = -100
    classified = network, normal(12, 6, seed=20), labels, "cross_entropy"
    regressed = block, normal(2, 4, 8, seed=21), normal(2, 4, 8, seed=22), "mse"
    found: dict[str, Shares] = {}
    for name, (module, x, target, loss) in (("classifier", classified), ("block", regressed)):
        for kind in ("hessian", "ggn"):
            exact = hk.hessian_diagonal(module, x, target, loss=loss, kind=kind)
            counts = dict.fromkeys(("trace", "trace of a parameter", "entry of the diagonal"), 0.0)
            for seed in range(seeds):
                one = hk.hessian_diagonal(module, x, target, loss=loss, kind=kind, method="estimate", seed=seed).estimate
                assert one is not None
                counts["trace"] += holds(one.trace, exact.trace)
                counts["trace of a parameter"] += sum(holds(one.traces[n], t) for n, t in exact.traces.items()) / len(one.traces)
                counts["entry of the diagonal"] += float(((one.diagonal - exact.flat).abs() <= one.half_widths).double().mean())
            for what, count in counts.items():
                found.setdefault(what, {})[f"{name}, {kind}"] = count / seeds
    return found


def of_spectrum(k: int, directions: int, seeds: int) -> dict[str, Shares]:
    """Return the coverage of the sums of ``spectrum``, of operators whose k largest eigenvalues are located."""
    found: dict[str, Shares] = {}
    for name, values in spectra().items():
        operator = aslinearoperator(torch.diag(values).numpy())
        size, square = float(values.abs().sum()), float(values.square().sum())
        truth = {"trace": float(values.sum()), "frobenius_squared": square, "effective_rank": size**2 / square}
        truth["stable_rank"] = square / float(values.abs().max()) ** 2
        counts = dict.fromkeys(truth, 0)
        for seed in range(seeds):
            one = hk.spectrum(operator, k=k, method="lanczos", directions=directions, steps=40, seed=seed)
            for what, value in truth.items():
                estimate = getattr(one, what)
                counts[what] += abs(estimate.value - value) <= estimate.half_width + 1e-9 * abs(value)  # of the residuals
        for what, count in counts.items():
            found.setdefault(what.replace("_", " "), {})[name] = count / seeds
    return found


def models() -> Iterator[tuple[str, nn.Module, Tensor, Tensor]]:
    """Yield models with few samples: three padded sequences, few masked positions, a classifier of six; and a confident one."""
    sizes: dict[str, Any] = {"d_model": 8, "d_ff": 16, "n_layers": 2, "n_heads": 2, "placement": "pre", "max_len": 9, "seed": 0}
    ids = torch.randint(13, (6, 9), generator=torch.Generator().manual_seed(3))
    padded = ids[:3, 1:].clone()
    for row, length in zip(padded, (8, 5, 2), strict=True):
        row[length:] = -100
    for name, factor in (("causal, padded", 1.0), ("causal, padded, confident", 12.0)):
        model = hk.Transformer(13, **sizes, causal=True).double()
        with torch.no_grad():
            model.final_norm.weight.mul_(factor)  # of all logits
        yield name, model, ids[:3, :-1], padded
    masked = torch.where(normal(4, 8, seed=4) > 0.8, ids[:4, :8], -100)
    yield "masked", hk.Transformer(13, **sizes).double(), ids[:4, :8], masked
    yield "classifier", hk.Transformer(13, **sizes, head="mean", n_classes=3).double(), ids[:, :8], torch.arange(6) % 3


def of_sharpness(draws: int, micro_batch: int | None, seeds: int, ranks: int = 1) -> dict[str, Shares]:
    """Return the coverage of the types of ``sharpness``; a confident model's apart. All ranks but the first hold one sample."""
    found: dict[str, Shares] = {}
    for name, model, x, labels in models():
        exact = sharpness(model, x, labels, exact=True)
        first, options = len(x) + 1 - ranks, {"draws": draws * seeds, "micro_batch": micro_batch}
        held = [range(first), *(range(k, k + 1) for k in range(first, len(x)))]
        every = joined([replicates(model, x[list(own)], labels[list(own)], numbers=own, **options) for own in held])
        what = "sharpness, labels nearly certain" if "confident" in name else "sharpness"
        counts = dict.fromkeys(exact.types, 0)
        for part in every.values.split(draws, 1):
            one = report_of(replace(every, values=part, rows={}))
            for kind, value in exact.types.items():
                counts[kind] += one.types[kind].low <= value.value <= one.types[kind].high
        for kind, count in counts.items():
            found.setdefault(what, {})[f"{name}, {kind}"] = count / seeds
    return found


def of_approximations(products: int, seeds: int) -> dict[str, Shares]:
    """Return the coverage of the Frobenius norms of ``approximations(method="products")``: of the matrix and of two errors."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 4)).double()
    data = network, normal(12, 6, seed=20), torch.arange(12) % 4
    options: dict[str, Any] = {"loss": "cross_entropy", "against": "ggn", "of": ("diagonal", "kfac")}
    exact = hk.approximations(*data, **options, method="dense")
    shares = dict.fromkeys(exact.found, 0.0)
    for seed in range(seeds):
        one = hk.approximations(*data, **options, method="products", products=products, seed=seed)
        for name, row in exact.found.items():
            shares[name] += holds(one.found[name].measures.frobenius, row.measures.frobenius.value) / seeds
    return {"Frobenius error of an approximation": shares}


@dataclass(frozen=True)
class Row:
    """Coverage of one interval at one setting: lowest, mean and highest over the problems, and which is covered least."""

    what: str
    setting: str
    shares: Shares

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table."""
        worst = min(self.shares, key=lambda name: self.shares[name])
        low, high, mean = self.shares[worst], max(self.shares.values()), sum(self.shares.values()) / len(self.shares)
        return self.what, self.setting, f"{low:.0%}", f"{mean:.0%}", f"{high:.0%}", worst


HEADERS = ("interval of", "setting", "lowest", "mean", "highest", "lowest for")
Job: TypeAlias = "tuple[str, Callable[[int], dict[str, Shares]]]"


def jobs() -> list[Job]:
    """Return every setting with what measures it."""
    found: list[Job] = [(f"{n} products", partial(scalars, n)) for n in (10, 20, 40, 100)]
    found += [(f"k = {k}, {s} directions", partial(of_spectrum, k, s)) for k, s in ((10, 10), (10, 3), (1, 10))]
    for batches, size in (("one micro-batch", None), ("micro-batches of 1", 1)):
        found += [(f"{draws} draws, {batches}", partial(of_sharpness, draws, size)) for draws in (2, 4, 8)]
    found += [(f"{draws} draws, 2 ranks", partial(of_sharpness, draws, None, ranks=2)) for draws in (2, 4, 8)]
    found += [("hessian_diagonal", of_diagonal)]
    return found + [(f"{n} products, of a classifier", partial(of_approximations, n)) for n in (20, 60)]


def measure(seeds: int, tell: Tell, chosen: Sequence[Job] | None = None) -> list[Row]:
    """Return the rows of the table, sorted by what they are intervals of."""
    rows, every = [], jobs() if chosen is None else chosen
    for k, (setting, job) in enumerate(every):
        tell(setting, k, len(every))
        rows += [Row(what, setting, shares) for what, shares in job(seeds).items()]
    order = list(dict.fromkeys(row.what for row in rows))
    return sorted(rows, key=lambda row: order.index(row.what))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the table and write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.coverage", description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=300, help="of each interval (default 300)")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    with progress_bar() as tell:
        rows = measure(args.seeds, tell)
    text = as_markdown(list(HEADERS), [list(row.cells) for row in rows]) + "\n"
    print(text)
    if args.markdown:
        args.markdown.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
