"""Coverage of the intervals of ``hessiankit.sharpness``: how often they contain the exact value.

Four models small enough for exact values: a GPT-2-like and a Llama-like language model of 3 blocks, each at initialisation and
after training on a periodic text with noise; a classifier of one position a sample; and a stack of blocks under squared
error. Each trial draws labels anew and makes the interval of every block type, layer and tensor, and of S_Norm / S for every
type. A trial covers if the exact value lies inside; with 1000 trials, a coverage of 95% is known to +-1.4% (two standard errors).

The scores of all classes are computed once, as the Jacobian of the logits; a draw is then a product with it, which is the
estimator's arithmetic in another order. One setting is repeated with the estimator itself, forward and backward passes
included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from matplotlib.lines import Line2D
from torch import Tensor, nn

from figures._kit import FAINT, INK, MACHINE, METHOD_COLOURS, METHOD_MARKS, heading, page, save, style, write_json
from hessiankit.blocks import Transformer, TransformerBlock
from hessiankit.support.environment import environment
from hessiankit.support.progress import Tell, progress_bar
from hessiankit.support.tables import as_markdown, as_text, table
from hessiankit.training.partition import Part, model_parts
from hessiankit.training.sharpness import SharpnessEstimate, sharpness
from hessiankit.training.sharpness.estimate import as_weights, estimate, ratio
from papers.experiments.store import put
from papers.experiments.training import updates
from papers.experiments.tuning.experiment import cross_entropy

NAME = Path(__file__).stem
GROUPS = ("types", "layers", "tensors", "ratios")
CONFIDENCE = 0.95
CHUNK = 2000


@dataclass(frozen=True)
class Settings:
    """How much is measured."""

    trials: int = 1000
    draws: tuple[int, ...] = (2, 4, 8, 16)
    repeated: int = 400
    models: tuple[str, ...] = ("gpt", "gpt trained", "llama", "llama trained", "classifier", "squared error")


FULL = Settings()
QUICK = Settings(40, (2, 8), 10, ("gpt", "squared error"))


@dataclass(frozen=True)
class Problem:
    """A model, data, and what draws do to it.

    Attributes:
        model: The model.
        data: Inputs and target.
        loss: ``"cross_entropy"`` or ``"mse"``.
        jacobian: (sequences, outputs of a sequence, parameters).
        probabilities: (sequences, positions, classes), or None for squared error.
        parts: The parts, in the order of the parameters.
    """

    model: nn.Module
    data: tuple[Tensor, Tensor]
    loss: str
    jacobian: Tensor
    probabilities: Tensor | None
    parts: tuple[Part, ...]


def make(name: str) -> Problem:
    """Return one of the problems of :class:`Settings`."""
    generator = torch.Generator().manual_seed(5)
    kind, _, trained = name.partition(" ")
    sizes: dict[str, Any] = {"d_model": 8, "d_ff": 16, "n_layers": 3, "n_heads": 2, "placement": "pre", "seed": 0}
    model: nn.Module
    if name == "squared error":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = nn.Sequential(*(TransformerBlock(6, 10, n_heads=2, placement="pre", activation="gelu") for _ in range(3)))
        x = torch.randn(4, 5, 6, generator=generator)
        y = torch.randn(4, 5, 6, generator=generator)
        return _prepared(model.double(), x.double(), y.double(), "mse")
    if kind == "classifier":
        model = Transformer(13, **sizes, head="mean", n_classes=5, max_len=8)
        x, y = torch.randint(13, (24, 6), generator=generator), torch.randint(5, (24,), generator=generator)
        return _prepared(model.double(), x, y, "cross_entropy")
    own: dict[str, Any] = {"max_len": 9, "activation": "gelu"}
    if kind == "llama":
        own = {"norm": "rmsnorm", "activation": "swiglu", "rotary": True, "tied": False}
    model = Transformer(13, **sizes, causal=True, **own).double()
    if trained:
        _train(model, generator)
    text = _text(4, generator)
    return _prepared(model, text[:, :-1], text[:, 1:], "cross_entropy")


def _text(sequences: int, generator: torch.Generator) -> Tensor:
    """Return tokens that count upwards, with one in five replaced."""
    start = torch.randint(13, (sequences, 1), generator=generator)
    text = (start + torch.arange(9)) % 13
    noise = torch.randint(13, text.shape, generator=generator)
    return torch.where(torch.rand(text.shape, generator=generator) < 0.2, noise, text)


def _train(model: nn.Module, generator: torch.Generator) -> None:
    def batch() -> tuple[Tensor, Tensor]:
        text = _text(16, generator)
        return text[:, :-1], text[:, 1:]

    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in updates(model, adam, batch, cross_entropy, range(200)):
        pass
    adam.zero_grad()


def _prepared(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> Problem:
    parts = model_parts(model)
    output = model(x)
    eye = torch.eye(output.numel(), dtype=output.dtype).reshape(-1, *output.shape)
    columns = torch.autograd.grad(output, list(model.parameters()), eye, is_grads_batched=True)
    named = dict(zip((name for name, _ in model.named_parameters()), columns, strict=True))
    jacobian = torch.cat([_flat(part, named[part.parameter]) for part in parts], 1)
    B = x.shape[0]
    jacobian = jacobian.reshape(B, -1, jacobian.shape[1])
    output = output.detach().reshape(B, -1, output.shape[-1])
    return Problem(model, (x, y), loss, jacobian, None if loss == "mse" else torch.softmax(output, -1), parts)


def _flat(part: Part, rows: Tensor) -> Tensor:
    """Return (rows, entries of a part) of a tensor (rows, *parameter)."""
    return torch.stack([torch.cat([view.reshape(-1) for view in part.of(row)]) for row in rows])


def exact(problem: Problem) -> Tensor:
    """Return the trace of each part, (parts,): the mean over terms of J^T (diag p - p p^T) J, or (2 / N) J^T J."""
    J = problem.jacobian
    if problem.probabilities is None:
        whole = 2.0 * J.square().sum((0, 1)) / (J.shape[0] * J.shape[1])
    else:
        p = problem.probabilities
        J = J.reshape(*p.shape, -1)
        mean = torch.einsum("btc,btcp->btp", p, J)
        whole = (torch.einsum("btc,btcp->p", p, J.square()) - mean.square().sum((0, 1))) / (p.shape[0] * p.shape[1])
    return _by_part(whole, problem.parts)


def _by_part(values: Tensor, parts: tuple[Part, ...]) -> Tensor:
    return torch.stack([part.sum(-1) for part in values.split([part.size for part in parts], -1)], -1)


def draw_replicates(problem: Problem, count: int, micro_batches: int, generator: torch.Generator) -> Tensor:
    """Return replicates (count, micro-batches, parts) of independent draws: N_k g (.) g, summed over each part."""
    J = problem.jacobian
    found = []
    for first in range(0, count, CHUNK):
        n = min(CHUNK, count - first)
        each = []
        for chunk in torch.arange(J.shape[0]).chunk(micro_batches):
            own = J[chunk].flatten(0, 1)
            deltas, terms = _deltas(problem, chunk, n, generator)
            each.append(_by_part((deltas @ own).square() / terms, problem.parts))
        found.append(torch.stack(each, 1))
    return torch.cat(found)


def _deltas(problem: Problem, chunk: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Return gradients (n, outputs) of the sum of the terms in the outputs, and the number of terms."""
    if problem.probabilities is None:
        outputs = len(chunk) * problem.jacobian.shape[1]
        return 2.0**0.5 * torch.randn(n, outputs, generator=generator, dtype=torch.float64), outputs
    p = problem.probabilities[chunk].flatten(0, 1)
    labels = torch.multinomial(p, n, replacement=True, generator=generator).T  # (n, terms)
    deltas = p.expand(n, *p.shape).clone()
    deltas.scatter_add_(2, labels.unsqueeze(2), torch.full((*labels.shape, 1), -1.0, dtype=p.dtype))
    return deltas.flatten(1), len(p)


Outcome: TypeAlias = dict[str, dict[str, list[bool]]]
"""Group -> member -> whether each trial covered."""


def _groups(parts: tuple[Part, ...]) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {"types": {}, "layers": {}, "tensors": {}}
    for k, part in enumerate(parts):
        found["types"].setdefault(part.type, []).append(k)
        if part.layer is not None:
            found["layers"].setdefault(str(part.layer), []).append(k)
        found["tensors"].setdefault(part.name, []).append(k)
    return found


def trials(problem: Problem, draws: int, micro_batches: int, count: int, seed: int = 0) -> Outcome:
    """Return what ``count`` trials found."""
    generator = torch.Generator().manual_seed(seed)
    truth = exact(problem)
    values = draw_replicates(problem, count * draws, micro_batches, generator)
    values = values.reshape(count, draws, micro_batches, -1).transpose(1, 2)
    sizes = torch.tensor([float(len(chunk)) for chunk in torch.arange(problem.jacobian.shape[0]).chunk(micro_batches)])
    weights = as_weights(sizes)
    found: Outcome = {}
    groups = _groups(problem.parts)
    for group, members in groups.items():
        for name, picked in members.items():
            one = values[..., picked].sum(-1)
            wanted = float(truth[picked].sum())
            inside = [_inside(estimate(x, weights, entries=1, confidence=CONFIDENCE), wanted) for x in one]
            found.setdefault(group, {})[name] = inside
    norm = groups["types"]["Norm"]
    for name, picked in groups["types"].items():
        if name != "Norm":
            top, bottom = values[..., norm].sum(-1), values[..., picked].sum(-1)
            wanted = float(truth[norm].sum() / truth[picked].sum())
            pairs = zip(top, bottom, strict=True)
            inside = [_inside(ratio(a, b, weights, entries=1, confidence=CONFIDENCE), wanted) for a, b in pairs]
            found.setdefault("ratios", {})[name] = inside
    return found


def _inside(found: SharpnessEstimate, wanted: float) -> bool:
    return found.low <= wanted <= found.high


def repeated(problem: Problem, draws: int, micro_batch: int | None, count: int) -> Outcome:
    """Return the same for the estimator itself, whose seeds are 0, 1, 2, ..."""
    x, y = problem.data
    wanted = sharpness(problem.model, x, y, loss=problem.loss, exact=True)
    found: Outcome = {"types": {}, "tensors": {}, "ratios": {}}
    for seed in range(count):
        report = sharpness(problem.model, x, y, loss=problem.loss, draws=draws, seed=seed, micro_batch=micro_batch)
        for group in ("types", "tensors"):
            for name, one in getattr(report, group).items():
                found[group].setdefault(name, []).append(_inside(one, getattr(wanted, group)[name].value))
        for name in report.types:
            if name != "Norm":
                found["ratios"].setdefault(name, []).append(_inside(report.ratio(name), wanted.ratio(name).value))
    return found


@dataclass(frozen=True)
class Row:
    """The coverage of one setting.

    Attributes:
        model: The problem's name.
        micro_batches: How many.
        draws: Draws.
        estimator: Whether the estimator itself was run.
        trials: How many.
        coverage: Group -> (mean over members, lowest, highest).
        lowest: Group -> which member is covered least.
    """

    model: str
    micro_batches: int
    draws: int
    estimator: bool
    trials: int
    coverage: dict[str, tuple[float, float, float]]
    lowest: dict[str, str]


def summary(outcome: Outcome) -> tuple[dict[str, tuple[float, float, float]], dict[str, str]]:
    """Return coverage by group, and which member is covered least.

    >>> summary({"types": {"QK": [True, True], "VO": [True, False]}})
    ({'types': (0.75, 0.5, 1.0)}, {'types': 'VO'})
    """
    coverage, lowest = {}, {}
    for group, members in outcome.items():
        rates = {name: sum(inside) / len(inside) for name, inside in members.items()}
        coverage[group] = (sum(rates.values()) / len(rates), min(rates.values()), max(rates.values()))
        lowest[group] = min(rates, key=lambda name: rates[name])
    return coverage, lowest


def measure(settings: Settings, tell: Tell) -> list[Row]:
    """Return the coverage of every setting."""
    found = []
    problems = {name: make(name) for name in settings.models}
    jobs = list(_jobs(settings, problems))
    for k, (name, micro_batches, draws, estimator, count, run) in enumerate(jobs):
        tell(f"{name}, {micro_batches} micro-batches, {draws} draws", k, len(jobs))
        found.append(Row(name, micro_batches, draws, estimator, count, *summary(run())))
    return found


def _jobs(settings: Settings, problems: dict[str, Problem]) -> Iterator[tuple[str, int, int, bool, int, Callable[[], Outcome]]]:
    for name, problem in problems.items():
        for parts in (1, 4):
            for draws in settings.draws:
                yield name, parts, draws, False, settings.trials, partial(trials, problem, draws, parts, settings.trials)
    name = settings.models[0]
    yield name, 1, 8, True, settings.repeated, partial(repeated, problems[name], 8, None, settings.repeated)


def rows_of(found: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells: mean coverage of each group, and the lowest and highest of its members."""
    headers = ["model", "micro-batches", "draws", "trials", *GROUPS]
    cells = []
    for row in found:
        name = f"{row.model}, the estimator itself" if row.estimator else row.model
        own = [row.coverage.get(group) for group in GROUPS]
        shown = ["" if c is None else f"{c[0]:.1%} ({c[1]:.1%} to {c[2]:.1%})" for c in own]
        cells.append([name, str(row.micro_batches), str(row.draws), str(row.trials), *shown])
    return headers, cells


def over_models(found: list[Row]) -> tuple[list[str], list[list[str]]]:
    """Return headers and cells of the table of docs/sharpness.md: mean over all members of all models, lowest and highest."""
    headers = ["micro-batches", "draws", *GROUPS]
    cells = []
    for key in sorted({(row.micro_batches, row.draws) for row in found if not row.estimator}):
        own = [row for row in found if (row.micro_batches, row.draws) == key and not row.estimator]
        shown = []
        for group in GROUPS:
            rates = [row.coverage[group] for row in own]
            mean = sum(c[0] for c in rates) / len(rates)
            shown.append(f"{mean:.1%} ({min(c[1] for c in rates):.1%} to {max(c[2] for c in rates):.1%})")
        cells.append([*map(str, key), *shown])
    return headers, cells


PANELS = {"types": "block types", "tensors": "tensors", "ratios": r"quotients $S_{\rm Norm} / S$"}


def draw_chart(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Draw mean coverage against draws, whole line for one micro-batch and dotted for four, and return the path."""
    rows = [row for row in rows if not row["estimator"]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    draws = sorted({row["draws"] for row in rows})
    with style():
        figure = page(8.6, 3.5)
        grid = figure.add_gridspec(1, 3, left=0.065, right=0.985, top=0.76, bottom=0.13, wspace=0.16)
        figure.text(0.065, 0.93, "How often the 95 % interval holds the exact value", fontsize=10.5, color=INK)
        looks: dict[str, Any] = {
            model: {"color": colour, "marker": mark, "linewidth": 1.0}
            for model, colour, mark in zip(models, METHOD_COLOURS, METHOD_MARKS, strict=False)
        }
        handles = [Line2D([], [], label=model, **look) for model, look in looks.items()]
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.055, 0.915), ncols=len(models), columnspacing=1.2)
        note = "mean over the members; whole line: one micro-batch, dotted: four"
        figure.text(0.985, 0.937, note, fontsize=7.5, color=FAINT, ha="right")
        for k, (group, title) in enumerate(PANELS.items()):
            axes = figure.add_subplot(grid[0, k])
            axes.axhspan(92, 98, color="#eeeeee", linewidth=0)
            axes.axhline(95, color=INK, linewidth=0.6)
            for model, look in looks.items():
                for micro_batches, line in ((1, "-"), (4, ":")):
                    own = {r["draws"]: r["coverage"] for r in rows if (r["model"], r["micro_batches"]) == (model, micro_batches)}
                    points = [(draws.index(d), 100 * c[group][0]) for d, c in own.items() if group in c]
                    axes.plot(*zip(*points, strict=True), linestyle=line, **look)
            axes.set_xticks(range(len(draws)), [str(d) for d in draws])
            axes.set_ylim(min(89, axes.get_ylim()[0]), 100)
            heading(axes, title, "draws", "" if k else "coverage, %")
        return save(figure, path)


def draw(out: Path, *, quick: bool = False, suffix: str = ".png") -> list[Path]:
    """Measure, print the table, write JSON and Markdown, and draw; ``quick`` takes two models and 40 trials."""
    settings = QUICK if quick else FULL
    with progress_bar() as tell:
        found = measure(settings, tell)
    headers, cells = rows_of(found)
    print(as_text(table(headers, cells, title="coverage of the 95% intervals: mean (lowest to highest)")))
    headers, cells = over_models(found)
    text = put(out / f"{NAME}.md", (as_markdown(headers, cells) + "\n").encode())
    data = {"environment": environment(*MACHINE), "settings": asdict(settings), "rows": [asdict(row) for row in found]}
    picture = draw_chart([asdict(row) for row in found], out / f"{NAME}{suffix}")
    return [picture, write_json(out / f"{NAME}.json", data), text]
