"""``hessiankit study``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hessiankit.cli.options import Device, Dtype, Flag, Output, Seed
from hessiankit.cli.program import command
from hessiankit.support.errors import InputError
from hessiankit.support.files import check_writable, make_folder, write_json
from hessiankit.support.tables import say

if TYPE_CHECKING:
    from torch import Tensor, nn

    from hessiankit.curvature.dense import Hessian
    from hessiankit.verify.check_report import CheckReport

EXAMPLES = (
    ("hessiankit study", "about a minute; report and heat maps in results/study"),
    ("hessiankit study --quick --table", "seconds; every block pair, and the health of each reference"),
)
STANDARD = {"d_model": 16, "d_ff": 64, "patch": 2, "steps": 300, "batch": 32}
QUICK = {"d_model": 8, "d_ff": 16, "patch": 4, "steps": 40, "batch": 16}
LOSS_NAMES = {"mse": "squared error", "cross_entropy": "cross entropy"}
STAGES = ("initialisation", "trained")
SHOWN = 3  # block pairs of each Hessian that are printed without ``--table``: those with the largest errors
app = command("study", EXAMPLES, "something disagrees")


@app.default
def run(
    *,
    quick: Flag = False,
    seed: Seed = 0,
    dtype: Dtype = "float64",
    device: Device = "cpu",
    out: Path = Path("results/study"),
    output: Output = Output(),
) -> int:
    """Train a classifier of digits and check its exact Hessian, before and after: a demonstration of a minute.

    Train one post-norm transformer block on scikit-learn's digits, compute the exact Hessian of a batch at initialisation and
    after training, for squared error and cross entropy, and compare it block pair by block pair with references that take other
    routes. Prints a table, writes heat maps and a JSON report.

    Args:
        quick: A smaller model and batch: a few seconds.
        out: Folder for report and heat maps.
    """
    target = out / "report.json"
    make_folder("study", out)
    check_writable("study", target)

    import torch
    import torch.nn.functional as F

    from hessiankit.blocks import VisionTransformer
    from hessiankit.cli.loading import place
    from hessiankit.curvature.plots import side_by_side
    from hessiankit.support.environment import environment
    from hessiankit.support.progress import progress_bar
    from hessiankit.support.torch_state import one_thread
    from hessiankit.verify.check import check

    start, precision = time.perf_counter(), getattr(torch, dtype)
    options: dict[str, Any] = {**(QUICK if quick else STANDARD), "seed": seed, "dtype": dtype, "device": device}
    size = options["batch"]
    place("study", torch.nn.Linear(1, 1), device, precision)  # before anything is computed
    tokens = ((patchify(images.to(precision), options["patch"]), classes) for images, classes in split(*digits(), seed))
    (x, labels), held_out = ((inputs.to(device), classes.to(device)) for inputs, classes in tokens)
    say(f"digits train: {len(x)} images, {x.shape[1]} patches of {x.shape[2]} pixels; a batch of {size} for the Hessians")
    reports: dict[tuple[str, str], CheckReport] = {}
    accuracies: dict[str, float] = {}
    for loss, words in LOSS_NAMES.items():
        torch.manual_seed(seed)
        widths = {name: options[name] for name in ("d_model", "d_ff")}
        model = VisionTransformer(x.shape[2], x.shape[1], 10, **widths, bias=True)
        model.to(device, precision)
        y = F.one_hot(labels, 10).to(precision) if loss == "mse" else labels
        for stage in STAGES:
            if stage == "trained":
                began = time.perf_counter()
                with one_thread():
                    losses = train(model, x, y, F.mse_loss if loss == "mse" else F.cross_entropy, options["steps"], seed)
                took, accuracies[loss] = time.perf_counter() - began, accuracy(model, *held_out)
                say(
                    f"trained with {words}: {len(losses)} steps in {took:.1f} s, loss {losses[0]:.4g} -> {losses[-1]:.4g}, "
                    f"training accuracy {accuracy(model, x, labels):.1%}, validation accuracy {accuracies[loss]:.1%}"
                )
            with progress_bar(f"Hessian {len(reports) + 1} of {len(LOSS_NAMES) * len(STAGES)}: ") as tell:
                settings: dict[str, Any] = {"loss": loss, "directions": 1, "dtype": None, "seed": seed}
                report = check(model, x[:size], y[:size], progress=tell, **settings)
            reports[loss, stage] = report
            norm = report.hessian.spectral_norm()
            say("", f"Hessian of the {words}, {stage}: loss {report.hessian.loss:.4g}, ||H||_2 {norm:.4g}")
            if output.table:
                print(report.table())
            else:
                say(report.pair_table().top(SHOWN), report.verdict)
    seconds, passed = time.perf_counter() - start, all(reports.values())
    say("", f"{'PASSED' if passed else 'FAILED'} in {seconds:.0f} s")
    pictures = {loss: out / f"hessian_{loss}.png" for loss in LOSS_NAMES}
    content = {
        "passed": passed,
        "options": {**options, "out": str(out)},
        "environment": environment(),
        "validation_accuracy": accuracies,
        "seconds": seconds,
        "reports": [{"loss": loss, "stage": stage, **one.to_dict()} for (loss, stage), one in reports.items()],
        "pictures": [path.name for path in pictures.values()],
    }
    write_json("study", target, content)  # before the pictures, which take more room
    for loss, path in pictures.items():
        first, last = (reports[loss, stage].hessian for stage in STAGES)
        title = f"Hessian of the {LOSS_NAMES[loss]}, with the two largest shares of its diagonal blocks' squared norm"
        titles = [f"{stage}: {largest_shares(one)}" for stage, one in zip(STAGES, (first, last), strict=True)]
        picture = side_by_side([first.matrix, last.matrix], first.names, first.slices, titles=titles, title=title, path=path)
    say(f"wrote {target} and {', '.join(map(str, pictures.values()))}: {picture.caption}")
    if not output.table:
        say(f"every row: --table; every number: {target}, or --json")
    write_json("study", output.json, content)
    return int(not passed)


def largest_shares(hessian: Hessian) -> str:
    """Return in words which two diagonal blocks have the largest shares of the diagonal blocks' squared norm.

    >>> import torch
    >>> import hessiankit as hk
    >>> largest_shares(hk.hessian(torch.nn.Linear(1, 1), torch.full((1, 1), 2.0), torch.zeros(1, 1)))  # 8 and 2
    'weight 94%, bias 6%'
    """
    from hessiankit.curvature.plot_frame import short_labels

    squares = [float(hessian[name, name].square().sum()) for name in hessian.names]
    ranked = sorted(zip(squares, short_labels(hessian.names), strict=True), reverse=True)[:2]
    return ", ".join(f"{label} {square / sum(squares):.0%}" for square, label in ranked)


def digits() -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits: images (1797, 8, 8) with entries from 0 to 1 in float64, and labels (1797,) from 0 to 9.

    Raises:
        InputError: scikit-learn is missing.
    """
    import torch

    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(f"study: the digits need scikit-learn ({error}); pip install 'hessiankit[study]'") from error
    bunch = load_digits()
    return torch.from_numpy(bunch.images) / 16, torch.from_numpy(bunch.target).long()


def split(images: Tensor, labels: Tensor, seed: int = 0) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return (images, labels) for training, and (images, labels) held out: a fifth of every class, drawn by the seed."""
    import numpy as np
    from sklearn.model_selection import train_test_split

    rows, held_out = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=seed)
    return (images[rows], labels[rows]), (images[held_out], labels[held_out])


def patchify(images: Tensor, patch: int) -> Tensor:
    """Cut images into square patches, left to right and then downwards.

    Images (N, H, W) or (N, H, W, C) become tokens (N, H W / patch^2, patch^2 C): a patch's rows, channels fastest.

    Raises:
        InputError: The patches do not tile the image.

    >>> import torch
    >>> patchify(torch.arange(16).reshape(1, 4, 4), 2)[0, 1].tolist()
    [2, 3, 6, 7]
    """
    n, height, width = images.shape[:3]
    if height % patch or width % patch:
        sides = ", ".join(str(p) for p in range(1, min(height, width) + 1) if height % p == width % p == 0)
        raise InputError(f"patchify: patches of side {patch} do not tile {height} x {width} images; choose one of {sides}")
    grid = images.reshape(n, height // patch, patch, width // patch, patch, -1)  # (N, rows, patch, columns, patch, C)
    return grid.transpose(2, 3).reshape(n, (height // patch) * (width // patch), -1)


def train(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Any, steps: int, seed: int) -> list[float]:
    """Train in place by AdamW at 3e-3, each epoch a fresh order cut into batches of 128; return the loss of every step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    generator, epoch, losses = torch.Generator().manual_seed(seed), len(inputs) // 128, []
    for step in range(steps):
        if step % epoch == 0:
            order = torch.randperm(len(inputs), generator=generator, device="cpu").to(inputs.device)
        rows = order[step % epoch * 128 :][:128]
        optimizer.zero_grad()
        scalar = loss(model(inputs[rows]), targets[rows])
        scalar.backward()
        optimizer.step()
        losses.append(float(scalar.detach()))
    optimizer.zero_grad()
    return losses


def accuracy(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the fraction of inputs whose largest logit is at the label."""
    return float((model(inputs).argmax(-1) == labels).double().mean())
