"""The scale of a figure in words: seeds, model, budget."""

from __future__ import annotations

from figures._digits import ImageSpec
from figures._runs import ByteSpec, model_of
from papers.experiments.tuning import experiment
from papers.experiments.tuning.experiment import Setting


def scale(seeds: int, blocks: int, width: int, parameters: int, data: str) -> str:
    """Return a scale in words.

    >>> scale(2, 1, 8, 2960, "60 digits")
    '2 seeds; 1 block of width 8, 3 thousand parameters; 60 digits'
    """
    count = f"{parameters / 1e6:.2g} million" if parameters >= 1e5 else f"{parameters / 1e3:.2g} thousand"
    models, runs = (f"{n} {word}{'s' * (n != 1)}" for n, word in ((blocks, "block"), (seeds, "seed")))
    return f"{runs}; {models} of width {width}, {count} parameters; {data}"


def scale_of(run: ByteSpec | Setting, seeds: int) -> str:
    """Return the size of byte-level runs in words.

    >>> scale_of(ByteSpec("x", layers=1, d_model=8, heads=2, length=16, steps=30), 2)
    '2 seeds; 1 block of width 8, 3 thousand parameters; 30 steps of 256 bytes of the standard library'
    """
    text = "the standard library" if run.text == "stdlib" else run.text
    data = f"{run.steps} steps of {run.batch_size * run.length} bytes of {text}"
    model = experiment.model_of(run, 0) if isinstance(run, Setting) else model_of(run)
    return scale(seeds, run.layers, run.d_model, sum(p.numel() for p in model.parameters()), data)


def scale_of_images(spec: ImageSpec, seeds: int, steps: int, size: int) -> str:
    """Return the size of image classifiers in words, measured on a batch of ``size`` images after ``steps`` updates."""
    count = sum(p.numel() for p in spec.model().parameters())
    trained = f"{steps} steps of AdamW" if steps else "initial weights"
    return scale(seeds, spec.n_blocks, spec.d_model, count, f"{trained}; measured on {spec.shown(size)}")
