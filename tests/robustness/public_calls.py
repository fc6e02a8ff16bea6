"""What the fuzz calls: every public function with arguments that are right, and how its messages name it."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import hessiankit as hk
from hessiankit.training import depth, monitoring, optim
from hessiankit.training import partition as parts
from hessiankit.training.monitoring import MonitorLog
from hessiankit.verify import testing


@dataclass(frozen=True)
class Call:
    """A public callable, arguments it takes, and what its messages begin with.

    Attributes:
        function: The callable.
        chosen: Makes arguments that it accepts, new ones each time; a module among them is compared before and after.
        names: What a message may begin with.
        spared: Argument -> values that are right but slow, or that another test has.
        whole: Whether its other options take part, at their defaults; False where another call has them.
    """

    function: Callable[..., Any]
    chosen: Callable[[], dict[str, Any]]
    names: tuple[str, ...]
    spared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    whole: bool = True

    def right(self) -> dict[str, Any]:
        """Return arguments that the function accepts: all of its options, those that are not chosen at their defaults."""
        parameters = inspect.signature(self.function).parameters.values() if self.whole else ()
        return {p.name: p.default for p in parameters if p.default is not p.empty} | self.chosen()


def block() -> nn.Module:
    torch.manual_seed(0)
    return hk.TransformerBlock(4, 5, d_k=2).double()


def language_model() -> nn.Module:
    return hk.Transformer(7, 4, 5, 2, max_len=6, seed=0).double()


class PreNorm(nn.Module):
    """A block with a linear layer in the attention's place."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm_1, self.norm_2 = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.attention(self.norm_1(x))
        return y + self.mlp(self.norm_2(y))


def pre_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(PreNorm(), PreNorm()).double()


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def tokens(*shape: int, below: int = 7) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(1))


def on_block(module: str = "module", inputs: str = "inputs", **more: Any) -> Callable[[], dict[str, Any]]:
    """A block and its data, under the names that a function gives them."""
    return lambda: {module: block(), inputs: numbers(2, 3, 4), "target": numbers(2, 3, 4), **more}


def on_language(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": language_model(), "data": tokens(2, 4), "target": tokens(2, 4), **more}


def of_language(**more: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {"model": language_model(), **more}


def _influenced() -> dict[str, Any]:
    data = (numbers(4, 3, 4), numbers(4, 3, 4))
    return {"model": block(), "train": data, "test": data, "method": "ggn", "damping": 0.1, "loss": "mse"}


def _recorded() -> dict[str, Any]:
    model = block()
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def _scheduled() -> dict[str, Any]:
    groups = optim.blockwise_lr(language_model(), 1e-3)
    return {"optimizer": torch.optim.AdamW(groups), "warmup": 2, "steps": 10}


FOLDER = tempfile.TemporaryDirectory()  # gone at the end of the process


def _path() -> Path:
    """A file in a folder of its own, which is not there yet."""
    return Path(tempfile.mkdtemp(dir=FOLDER.name)) / "run.jsonl"


def _written() -> Path:
    """A file of a monitor, with one measurement."""
    path = _path()
    hk.Monitor(**_monitored(path)).step(0)
    return path


def _loss_of(self: MonitorLog) -> Any:
    return self.series("loss")


def _monitored(path: Path | None = None) -> dict[str, Any]:
    data = (tokens(2, 4), tokens(2, 4))
    measured: dict[str, Any] = {"every": 1, "log_spaced": False, "what": {"norms": {}, "sharpness": {"draws": 2}}, "seed": 0}
    return {"model": language_model(), "data": data, "path": path or _path(), **measured}


def _stepped() -> dict[str, Any]:
    arguments = on_block(passes=3)()
    return {**arguments, "optimizer": torch.optim.SGD(arguments["module"].parameters(), lr=0.1)}


PATIENT = ("progress", "weights", "function")
"""Arguments that are functions of the user's own."""
PARTS_OF_MODELS = (
    *("TransformerBlock", "Attention", "FeedForward", "TokenEmbedding", "PatchEmbedding"),
    *("ClassHead", "MeanPoolHead", "TokenHead", "initialise"),
)
"""A constructor's message may begin with the part that it could not build."""
COUNTS = ("huge",)
"""Values that ask for more work, not for something impossible."""

SIZE = sum(p.numel() for p in block().parameters())
TWO = ("reverse-over-reverse", "jvp(grad)")
OF_MODEL = {"activation": "gelu", "bias": True, "causal": True}

CALLS = {
    "hessian": Call(hk.hessian, on_block(), ("hessian",), {"out": ("text", "number", "huge")}),
    "hessian(dry_run)": Call(hk.hessian, on_block(dry_run=True, loss="mse", batch_size=None), ("hessian",), whole=False),
    "from_function": Call(hk.from_function, lambda: {"f": torch.sum, "params": numbers(3)}, ("from_function",)),
    "hessian_function": Call(hk.hessian_function, on_block(), ("hessian_function",)),
    "hessian_operator": Call(hk.hessian_operator, on_block(inputs="data"), ("hessian_operator",)),
    "hessian_diagonal": Call(hk.hessian_diagonal, on_block(max_products=None), ("hessian_diagonal",)),
    "scalar_estimates": Call(
        hk.scalar_estimates,
        lambda: {"operator": hk.hessian_operator(block(), numbers(2, 3, 4), numbers(2, 3, 4)), "products": 10, "level": 0.9},
        ("scalar_estimates",),
    ),
    "frobenius_norms": Call(hk.frobenius_norms, on_block(), ("frobenius_norms",)),
    "influence": Call(hk.influence, _influenced, ("influence",)),
    "RecordedRun": Call(hk.RecordedRun, _recorded, ("RecordedRun",)),
    "scaled_dot_product_attention": Call(
        hk.scaled_dot_product_attention,
        lambda: {"query": numbers(2, 3, 4), "key": numbers(2, 5, 4), "value": numbers(2, 5, 4)},
        ("scaled_dot_product_attention",),
        {"query": ("NaN",), "key": ("NaN",), "value": ("NaN", "no entries")},  # as torch computes them
    ),
    "linear_cross_entropy": Call(
        hk.linear_cross_entropy,
        lambda: {"hidden": numbers(2, 3, 4), "weight": numbers(7, 4), "labels": tokens(2, 3)},
        ("linear_cross_entropy",),
        {"hidden": ("NaN",), "weight": ("NaN",)},
    ),
    "twice_differentiable": Call(
        hk.twice_differentiable, lambda: {"function": block()}, ("twice_differentiable",), {"function": ("NaN weight",)}
    ),
    "check": Call(
        hk.check, on_block("block_or_module", against=TWO, directions=1, formulas=False, params=("attention.W_Q",)), ("check",)
    ),
    "check_jacobian": Call(
        hk.check_jacobian,
        lambda: {"f": torch.sin, "x": numbers(2), "analytic": torch.diag(numbers(2).cos()), "against": TWO},
        ("check_jacobian", "check"),
        {"analytic": ("NaN",)},  # a report that fails
    ),
    "assert_hessian_matches": Call(
        testing.assert_hessian_matches,
        on_block(loss="mse", against=TWO, directions=1, formulas=False, params=("attention.W_Q",)),
        ("check", "assert_hessian_matches"),
        {"against": ("list",)},  # an AssertionError, as documented: fewer than two references
    ),
    "bounds": Call(hk.bounds, on_block("block"), ("bounds",)),
    "derive": Call(hk.derive, lambda: {"what": block(), "wrt": ("query",), "length": 2}, ("derive",), {"length": COUNTS}),
    "identical": Call(hk.identical, lambda: dict.fromkeys("ab", hk.derive("gain", wrt="X", length=1)), ("identical",)),
    "spectrum": Call(
        hk.spectrum,
        on_block(k=2, bottom=1, kind="ggn", directions=2, steps=4, method="lanczos", tol=1e-3, max_products=40),
        ("spectrum",),
        {"directions": COUNTS, "steps": COUNTS, "max_products": COUNTS},
    ),
    "critical_sharpness": Call(hk.critical_sharpness, _stepped, ("critical_sharpness", "spectrum"), {"passes": COUNTS}),
    "loss_slices": Call(
        hk.loss_slices, on_block(along=numbers(SIZE, 1), span=(-0.1, 0.1), points=3), ("loss_slices",), {"points": COUNTS}
    ),
    "approximations": Call(
        hk.approximations,
        on_block(against="ggn", of=("diagonal", "kfac"), damping=0.1, rank=2, method="dense", products=6),
        ("approximations",),
        {"products": COUNTS, "draws": COUNTS, "rank": COUNTS, "minibatch": COUNTS},
    ),
    "jacobian_operator": Call(
        hk.jacobian_operator, lambda: {"module": block(), "inputs": numbers(2, 3, 4)}, ("jacobian_operator",)
    ),
    "trace_module": Call(
        hk.trace_module,
        lambda: {"function": lambda p, x: (x @ p["W"]).sum(), "parameters": {"W": numbers(2, 2)}, "inputs": (numbers(3, 2),)},
        ("trace", "trace_module"),
    ),
    "block_types": Call(hk.block_types, of_language(), ("block_types", "model_parts")),
    "model_parts": Call(parts.model_parts, of_language(inputs=None), ("model_parts",), whole=False),
    "named_slices": Call(hk.named_slices, lambda: {"module": language_model(), "heads": True}, ("named_slices",)),
    "sharpness": Call(hk.sharpness, on_language(draws=2), ("sharpness",), {"draws": COUNTS}),
    "replace_norms": Call(
        hk.replace_norms,
        lambda: {"model": pre_norm(), "placement": "lns", "inputs": numbers(2, 3, 4)},
        ("replace_norms", "depth_diagnostics"),
    ),
    "depth_diagnostics": Call(
        hk.depth_diagnostics,
        on_language(what=("variance", "angles", "drop", "gradient"), draws=2, tol=1e-2, products=4),
        ("depth_diagnostics",),
        {"draws": COUNTS, "products": COUNTS},
    ),
    "depth_diagnostics(curvature)": Call(
        hk.depth_diagnostics,
        on_language(what=("jacobian", "hessian"), curvature="auto", draws=2, exact_below=4, tol=1e-1, products=3, seed=0),
        ("depth_diagnostics",),
        {"draws": COUNTS, "products": COUNTS},
        whole=False,
    ),
    "angular_distance": Call(depth.angular_distance, lambda: {"x": numbers(3, 4), "y": numbers(3, 4)}, ("angular_distance",)),
    "blockwise_lr": Call(hk.blockwise_lr, of_language(lr=1e-3), ("blockwise_lr",)),
    "blockwise_schedule": Call(hk.blockwise_schedule, _scheduled, ("blockwise_schedule",)),
    "check_groups": Call(optim.check_groups, lambda: {"optimizer": _scheduled()["optimizer"]}, ("check_groups",)),
    "measured_ratios": Call(
        optim.measured_ratios, lambda: {"sharpness": hk.sharpness(**on_language(draws=2)())}, ("measured_ratios",)
    ),
    "Ratio": Call(optim.Ratio, lambda: {"value": 2.0, "low": 1.0, "high": 3.0}, ("Ratio",)),
    "growth_laws": Call(depth.growth_laws, lambda: {"variance": (1.0, 2.0, 3.0, 4.0)}, ("growth_laws",), {"theory": ("text",)}),
    "Monitor": Call(
        hk.Monitor, _monitored, ("monitor", "Monitor", "sharpness", "depth_diagnostics", "model_parts"), {"path": ("text",)}
    ),
    "MonitorLog.read": Call(monitoring.MonitorLog.read, lambda: {"path": _written()}, ("monitor",)),
    "MonitorLog.plot": Call(
        lambda **options: monitoring.MonitorLog.read(_written()).plot(**options),
        lambda: {"path": None, "title": None},
        ("MonitorLog.plot",),
        {"path": ("text",)},
    ),
    "MonitorLog.series": Call(
        _loss_of, lambda: {"self": monitoring.MonitorLog.read(_written())}, ("MonitorLog",), {"self": ("*",)}
    ),
    "Transformer": Call(
        hk.Transformer,
        lambda: {
            **{"vocab_size": 7, "d_model": 4, "d_ff": 5, "n_layers": 1, "n_heads": 2, "placement": "pre", "max_len": 3},
            **{"tied": True, "seed": 0, "norm": "layernorm", "rotary": False, "eps": 1e-5, "affine": True, **OF_MODEL},
        },
        ("Transformer", *PARTS_OF_MODELS),
        {"n_layers": COUNTS},
    ),
    "TransformerBlock": Call(
        hk.TransformerBlock,
        lambda: {
            **{
                "d_model": 4,
                "d_ff": 5,
                "n_heads": 2,
                "n_kv_heads": 1,
                "d_k": 2,
                "d_v": 2,
                "output_projection": True,
                "groups": 2,
            },
            **OF_MODEL,
        },
        PARTS_OF_MODELS,
    ),
    "VisionTransformer": Call(
        hk.VisionTransformer,
        lambda: {
            **{"patch_dim": 4, "seq_len": 3, "n_classes": 3, "d_model": 4, "d_ff": 5, "final_norm": True},
            **{"norm": "layernorm", "rotary": False, "eps": 1e-5, "affine": True, **OF_MODEL},
        },
        ("VisionTransformer", *PARTS_OF_MODELS),
        {"n_blocks": COUNTS},
    ),
}
