"""What is compared: tuned AdamW, blockwise learning rates, and controls that have a part of what these change."""

from __future__ import annotations

from dataclasses import dataclass

from hessiankit.tuning.ratios import PAPER, Ratios, ratios_of, weighted_ratio
from hessiankit.tuning.sweep import rounded

BASELINE = "AdamW"


@dataclass(frozen=True)
class Arm:
    """One way to set the learning rates.

    Attributes:
        name: As the tables print it.
        lr: Learning rate of the norms, and of all block types without a ratio.
        ratios: Factors by block type.
        why: What it is there for.
    """

    name: str
    lr: float
    ratios: Ratios = ()
    why: str = ""

    def __str__(self) -> str:
        factors = ", ".join(f"{kind} x{factor:.3g}" for kind, factor in self.ratios)
        return f"{self.name}: lr {self.lr:.3g}{f' ({factors})' if factors else ''}"


def baseline(lr: float) -> Arm:
    """Return AdamW at its tuned learning rate."""
    return Arm(BASELINE, lr, (), "the baseline, tuned first")


def at_baseline_lr(lr: float, entries: dict[str, int], measured: Ratios) -> tuple[Arm, ...]:
    """Return the arms that take the baseline's learning rate over, as the paper does, and its missing controls.

    Args:
        lr: Of the tuned baseline.
        entries: Entries of each block type, by which the uniform factor is weighted.
        measured: Ratios that follow from the measured sharpness.

    >>> [arm.name for arm in at_baseline_lr(0.004, {"Emb": 1, "Norm": 1}, ())][2:]
    ['Norm x 2', 'Emb x 10 only', 'all x 2', 'all x 5.5']
    """
    uniform = float(f"{weighted_ratio(PAPER, entries):.2g}")
    return (
        Arm("Blockwise eq (5) at AdamW's lr", lr, PAPER, "the paper's protocol"),
        Arm("Blockwise measured at AdamW's lr", lr, measured, "the same with measured ratios"),
        Arm("Norm x 2", lr, ratios_of({"Norm": 2.0}), "the paper's Table 2: the sharpest type faster"),
        Arm("Emb x 10 only", lr, ratios_of({"Emb": dict(PAPER)["Emb"]}), "the paper's Table 2: the first type alone"),
        Arm("all x 2", rounded(2 * lr), (), "control: a larger learning rate for all"),
        Arm(f"all x {uniform:g}", rounded(uniform * lr), (), "control: the integrated learning rate of eq (5), without blocks"),
    )


def at_own_lr(name: str, lr: float, ratios: Ratios) -> Arm:
    """Return an arm whose learning rate was searched for as the baseline's was."""
    return Arm(f"{name} at its own lr", lr, ratios, "tuned like the baseline")
