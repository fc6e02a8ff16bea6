"""``python -m papers placements``: the exact Hessian of every norm placement, in every combination of options.

Each case is a language model with hundreds of parameters, of one block or three; :func:`hessiankit.check` compares its
Hessian, block pair by block pair, with automatic differentiation by two routes that share nothing, and with the exact identities
of its structure. Finished cases are lines of a file, so that an interrupted run goes on where it was.

The page and the file are docs/placement_grid.md and docs/placement_grid.json.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hessiankit.blocks import PLACEMENTS, FeedForward, GroupNorm, Transformer
from hessiankit.blocks.placements import placement_of
from hessiankit.request.loss import FUNCTIONS
from hessiankit.support.environment import code_version, environment
from hessiankit.support.errors import InputError
from hessiankit.support.files import write_text
from hessiankit.support.progress import Tell, progress_bar, silent
from hessiankit.support.tables import as_markdown, say, table
from hessiankit.verify.check import check
from papers.experiments.resumable import Resumable

OPTIONS: dict[str, tuple[Any, ...]] = {
    "norm": ("layernorm", "rmsnorm"),
    "activation": ("relu", "gelu", "swiglu"),
    "heads": ("1", "4", "4/2"),
    "mask": ("none", "causal"),
    "blocks": (1, 3),
    "loss": ("mse", "cross_entropy"),
}
"""What every placement is combined with; heads ``4/2`` are four heads on two of keys and values."""

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
class PlacementCase:
    """One combination: a placement and one value of each of ``OPTIONS``.

    >>> print(PlacementCase("hybridnorm", "rmsnorm", "swiglu", "4/2", "causal", 3, "mse"))
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


def cases(placements: Iterable[str] | None = None, *, sample: int | None = None, seed: int = 0) -> list[PlacementCase]:
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
    for name in names:
        placement_of(name, caller="placement_grid")
    own = [[PlacementCase(name, *values) for values in product(*OPTIONS.values())] for name in names]
    if sample is None:
        return [case for group in own for case in group]
    if sample < 1:
        raise InputError(f"placement_grid: a sample of {sample} cases; pass 1 or more")
    rng = random.Random(seed)
    turns = zip(*(rng.sample(group, len(group)) for group in own), strict=True)
    return [case for turn in turns for case in turn][:sample]


def build(case: PlacementCase) -> tuple[Transformer, Tensor, Tensor]:
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
    scalar = FUNCTIONS[loss](outputs, target)
    sizes = [float(g.abs().max()) for g in torch.autograd.grad(scalar, parameters)]
    zero = ("attention.b_K", "attention.norm_k.bias")
    return min(s for s, n in zip(sizes, names, strict=True) if not n.endswith(zero)) > SMALL * max(sizes)


AGAINST = ("reverse-over-reverse", "jvp(grad)")
"""Two routes without a common path, both right for every operation of these models (docs/routes.md)."""

CODE = ("papers/experiments/placement_grid.py", "hessiankit", "derivations")
"""What the result of a case depends on."""

RTOL = 1e-10
"""Of each block pair's largest entry, in float64."""


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

    case: PlacementCase
    error: float
    identities: int
    identity_error: float
    passed: bool
    verdict: str
    kinds: tuple[str, ...]
    size: int
    seconds: float
    version: str


def run_case(case: PlacementCase) -> Finished:
    """Check one case: all block pairs, along one generic direction a parameter."""
    start = time.perf_counter()
    model, ids, target = build(case)
    report = check(model, ids, target, loss=case.loss, against=AGAINST, rtol=RTOL, directions=1, progress=silent)
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
        version=code_version(*CODE),
    )


def _kind(name: str) -> str:
    """Return a parameter's name without the index of its block.

    >>> _kind("blocks.2.attention.W_Q")
    'blocks.attention.W_Q'
    """
    return ".".join(part for part in name.split(".") if not part.isdigit())


def run_grid(todo: list[PlacementCase], lines: Path, *, jobs: int = 1, tell: Tell | None = None) -> list[Finished]:
    """Run the cases that ``lines`` does not hold yet, append each when it is finished, and return all of ``todo`` in its order.

    Lines of other code or another torch do not count: their cases are done anew.
    """
    with Resumable(
        "placement_grid", lines, run_case, attrgetter("case"), asdict, lambda r: _current(finished_case(r)), jobs=jobs
    ) as runs:
        done = len(todo) - len(runs.missing(todo))
        for k, finished in enumerate(runs.finish(todo), start=done + 1):
            if tell is not None:
                tell(finished.case.placement, k, len(todo))
    return [runs.known[case] for case in todo]


def finished_case(record: Any) -> Finished:
    """Return the finished case of a record of the file."""
    return Finished(**{**record, "case": PlacementCase(**record["case"]), "kinds": tuple(record["kinds"])})


def _current(finished: Finished) -> Finished | None:
    return finished if finished.version == code_version(*CODE) else None


NAMES = {
    "none": "no mask",
    "1": "1 head",
    "4": "4 heads",
    "4/2": "heads 4/2",
    1: "1 block",
    3: "3 blocks",
    "cross_entropy": "c. e.",
}
KEPT = ("date", "python", "torch", "processor", "cores", "system")


def worst(finished: Sequence[Finished]) -> float:
    """Return the largest error; NaN where one could not be compared."""
    errors = [f.error for f in finished]
    return math.nan if any(map(math.isnan, errors)) else max(errors, default=0.0)


def summary(finished: Sequence[Finished], command: str) -> dict[str, Any]:
    """Return counts, the worst error of every placement and option, what failed, and where the numbers come from."""
    placements: dict[str, list[Finished]] = {}
    for one in finished:
        placements.setdefault(one.case.placement, []).append(one)

    def by_option(own: Sequence[Finished]) -> dict[str, dict[str, float | None]]:
        split = {o: {str(v): [f for f in own if getattr(f.case, o) == v] for v in values} for o, values in OPTIONS.items()}
        return {o: {v: _number(worst(part)) if part else None for v, part in of.items()} for o, of in split.items()}

    return {
        "command": command,
        "environment": environment(*KEPT),
        "code": sorted({f.version for f in finished}),
        "references": list(AGAINST),
        "tolerance": RTOL,
        "options": {option: list(values) for option, values in OPTIONS.items()},
        "cases": len(finished),
        "failed": [f"{f.case}: {f.verdict}" for f in finished if not f.passed],
        "max_rel_error": _number(worst(finished)),
        "identities": sum(f.identities for f in finished),
        "identity_error": max((f.identity_error for f in finished), default=0.0),
        "seconds": round(sum(f.seconds for f in finished), 1),
        "parameters": sorted({kind for f in finished for kind in f.kinds}),
        "placements": {
            name: {
                "cases": len(own),
                "failed": sum(not f.passed for f in own),
                "max_rel_error": _number(worst(own)),
                "identities": sum(f.identities for f in own),
                "identity_error": max(f.identity_error for f in own),
                "by": by_option(own),
            }
            for name, own in placements.items()
        },
    }


def _number(error: float) -> float | None:
    return None if math.isnan(error) else float(f"{error:.2e}")


def rows(found: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return the headers and one row a placement: cases, failures, worst error, worst error by option, identities."""
    values = [(option, str(value), NAMES.get(value, str(value))) for option, of in found["options"].items() for value in of]
    headers = ["placement", "cases", "failed", "worst", *(name for _, _, name in values), "identities", "worst"]

    def cells(name: str, own: dict[str, Any]) -> list[str]:
        errors = [_shown(own["by"][option][value]) for option, value, _ in values]
        counts = [str(own["cases"]), str(own["failed"]), _shown(own["max_rel_error"])]
        return [name, *counts, *errors, str(own["identities"]), _shown(own["identity_error"])]

    return headers, [cells(name, own) for name, own in found["placements"].items()]


def _shown(error: float | None) -> str:
    return "-" if error is None else f"{error:.0e}".replace("e-0", "e-")


def verdict(found: dict[str, Any]) -> str:
    """Return one line that says what was found."""
    failed = len(found["failed"])
    what = f"{failed} of {found['cases']} cases FAILED" if failed else f"PASSED: {found['cases']} cases"
    largest = "not known" if found["max_rel_error"] is None else f"{found['max_rel_error']:.1e}"
    return (
        f"{what} of {len(found['placements'])} placements; largest error {largest} of a block pair's largest entry (tolerance "
        f"{found['tolerance']:.0e}); {found['identities']} identities to {found['identity_error']:.1e}; "
        f"{found['seconds']:.0f} s"
    )


def markdown(found: dict[str, Any]) -> str:
    """Return the page."""
    headers, body = rows(found)
    place = found["environment"]
    origin = ", ".join([place["date"], *(f"{k} {place[k]}" for k in KEPT if k not in ("date", "torch")), *found["code"]])
    whole = len(cases())
    part = "" if found["cases"] == whole else f" These are {found['cases']} of the {whole} cases of the whole grid."
    lines = [
        "# Every norm placement, in every combination of options",
        "",
        "```bash",
        found["command"],
        "```",
        "",
        f"{verdict(found)}.{part}",
        "",
        f"{origin}.",
        "",
        "Each case is a language model (vocabulary 5, two sequences of three tokens, d_model 6, d_ff 5, heads three wide, eps "
        "0.1) with generic parameters, including gains, biases and scales. No ReLU is near its kink, no row under a norm is "
        "nearly constant, and no gradient is below 1/1000 of the largest. One block has biases everywhere and learned "
        "positions, three have neither; the "
        "head is tied to the embedding in half of the cases. `hessiankit.check` compares the exact Hessian with respect to all "
        f"parameters, block pair by block pair, along one generic direction per parameter, with "
        f"{' and '.join(found['references'])}. "
        "Each number is the largest difference, relative to the largest entry of its own block pair, over the placement's "
        "cases with that option. The last two columns have the number of exact identities of the model's structure that were "
        "tested as well, and their largest error. All cases and options, by number, are in "
        "[placement_grid.json](placement_grid.json).",
        "",
        "Parameters: " + ", ".join(f"`{kind}`" for kind in found["parameters"]) + ".",
        "",
        as_markdown(headers, body),
    ]
    if found["failed"]:
        lines += ["", "Failed:", "", *(f"- {line}" for line in found["failed"])]
    return "\n".join(lines) + "\n"


def as_json(found: dict[str, Any]) -> str:
    """Return the summary as JSON, one line an entry and one a placement."""
    places = [f"  {json.dumps(name)}: {json.dumps(own)}" for name, own in found["placements"].items()]
    entries = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in found.items() if key != "placements"]
    return "{\n" + ",\n".join([*entries, ' "placements": {\n' + ",\n".join(places) + "\n }"]) + "\n}\n"


def run_placements(
    placements: list[str] | None, *, sample: int | None, seed: int, jobs: int, out: Path, command: str
) -> dict[str, Any]:
    """Run the grid or a part of it, print the table, write ``cases.jsonl``, ``placement_grid.md`` and
    ``placement_grid.json`` into ``out``, and return the summary that the last one holds. ``command`` is what the page says
    it was made by.
    """
    todo = cases(placements, sample=sample, seed=seed)
    with progress_bar() as tell:
        found = summary(run_grid(todo, out / "cases.jsonl", jobs=jobs, tell=tell), command)
    headers, body = rows(found)
    shown = table([*headers[:4], *headers[-2:]], [[*row[:4], *row[-2:]] for row in body], drop=("identities",))
    say(shown, *(f"FAILED {line}" for line in found["failed"]), verdict(found))
    write_text("placements", out / "placement_grid.md", markdown(found))
    write_text("placements", out / "placement_grid.json", as_json(found))
    return found
