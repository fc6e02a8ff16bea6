"""Experiments of the four papers: every number of a preset with its place of print, and the sizes that run on one core.

A preset is put together of a recipe, which a paper's experiments share, a model and an arm, the method. ``paper`` has the
printed numbers. ``small`` and ``tiny`` have their own sizes and budgets, and the paper's methods. "Code" is the paper's released
code, where the text is silent; "ours" is a choice where both are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, NamedTuple

from hessiankit.support.errors import InputError, unknown
from papers.experiments.spec import Spec
from papers.experiments.tuning.experiment import PAPER, ratios_of
from papers.hybridnorm.tables import TABLE_6
from papers.sharpness_disparity.learning_rates import T5, TABLE_3, TABLE_4, VOCABULARY

PRESETS = ("paper", "small", "tiny")


class Printed(NamedTuple):
    """A number with its place of print."""

    value: Any
    place: str


Numbers = Mapping[str, Printed]
"""Attribute of a :class:`~papers.experiments.spec.Spec` -> its number."""


@dataclass(frozen=True)
class Recipe:
    """Numbers that the experiments of a paper share.

    Attributes:
        paper: Printed numbers.
        small: Attributes of small runs, whatever the model.
        tiny: Attributes of tiny runs, on top of ``small``.
        data: Data of the paper.
    """

    paper: Numbers
    small: Mapping[str, Any]
    tiny: Mapping[str, Any]
    data: str


@dataclass(frozen=True)
class Model:
    """A model of a paper.

    Attributes:
        paper: Printed numbers.
        parameters: Printed number of parameters, and its place; None where there is none.
        why: Reason of a count that differs, the ledger's row where there is one.
        small: Attributes of small runs.
        tiny: Attributes of tiny runs.
        within: Relative difference from the print that rounding explains.
    """

    paper: Numbers
    parameters: Printed | None = None
    why: str = ""
    small: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)
    within: float = 0.01


@dataclass(frozen=True)
class Experiment:
    """One experiment: methods on models.

    Attributes:
        shows: Figures and tables of the paper that it makes.
        recipe: Numbers that the paper's experiments share.
        models: The models by the paper's names.
        arms: Attributes of each method, by the paper's names.
        budget: Printed numbers of this experiment on top of the models'.
        small: Attributes of its small runs on top of the models'.
        figure: Figure that draws it.
        seeds: Seeds of small runs.
        measures: Measurements at the paper's steps, attributes of the monitor, for every preset.
        arms_by_size: Models whose runs are of one method only, by name.
    """

    shows: str
    recipe: Recipe
    models: Mapping[str, Model]
    arms: Mapping[str, Mapping[str, Any]]
    budget: Numbers = field(default_factory=dict)
    small: Mapping[str, Any] = field(default_factory=dict)
    figure: str = "trained_arms"
    seeds: tuple[int, ...] = (0, 1)


def _at(place: str, **numbers: Any) -> dict[str, Printed]:
    """Return numbers that are printed at one place."""
    return {name: Printed(value, place) for name, value in numbers.items()}


TINY = {"d_model": 16, "heads": 2, "length": 16, "batch_size": 4, "steps": 30, "windows": 8}
"""Sizes of all tiny language models."""
EMBEDDING_STD = sqrt(2 / 5)
"""Standard deviation of the embedding in The Curse of Depth's code when its models were trained; since 2026 it has 0.02."""

# The Curse of Depth ---------------------------------------------------------------------------------------------------
LLAMA = Recipe(
    {
        **_at("Sec. 5.1", norm="rmsnorm", activation="swiglu", optimizer="adamw"),
        **_at(
            "code", rotary=True, tied=False, vocabulary=32_000, length=256, batch_size=512, weight_decay=0.0, clip=0.0, floor=0.1,
            betas=(0.9, 0.999), std=0.02, embedding_std=EMBEDDING_STD, warm_up=0.1, precision="bfloat16", block=(("eps", 1e-6),),
        ),
        **_at("ours", initialisation="normal", windows=512, evaluations=20, log_spaced=False, every=0),
    },
    {
        "layers": 12, "d_model": 64, "heads": 4, "d_ff": 172, "length": 64, "norm": "rmsnorm", "activation": "swiglu",
        "rotary": True, "tied": False, "std": 0.02 * sqrt(768 / 64), "embedding_std": EMBEDDING_STD, "block": (("eps", 1e-6),),
        "initialisation": "normal", "lr": 2e-3, "floor": 0.1, "steps": 400, "batch_size": 8, "evaluations": 10, "windows": 64,
        "every": 20, "log_spaced": False, "measured": ("variance",), "batches": 2,
    },
    {**TINY, "layers": 4, "d_ff": 44, "std": 0.02 * sqrt(768 / 16)},
    "C4, T5-base tokens",
)  # fmt: skip
"""LLaMA as The Curse of Depth trains it. Small: a matrix multiplies norms as at the paper's width of 768."""
CURSE = {
    "Post-LN": {"placement": "post"}, "Pre-LN": {"placement": "pre"}, "LNS": {"placement": "lns"},
    "DeepNorm": {"placement": "deepnorm", "initialisation": "deepnorm"}, "Mix-LN": {"placement": "mix-ln"},
    "Pre-LN, scaled init": {"placement": "pre", "initialisation": "scaled"},
    "Pre-LN, depth-scaled init": {"placement": "pre", "initialisation": "depth-scaled"},
    "LNS, scaled init": {"placement": "lns", "initialisation": "scaled"},
    "LayerScale": {"placement": "layerscale"}, "SkipInit": {"placement": "skipinit"},
    "Admin": {"placement": "admin"}, "Group-LN": {"placement": "group-ln"}, "Sandwich-LN": {"placement": "sandwich"},
    "Before LN": {"placement": "lns-before-ln"}, "After Attn/FFN": {"placement": "lns-after-branch"},
    "After Residual": {"placement": "lns-after-residual"}, "LNS Only After Attn": {"placement": "lns-only-attention"},
    "LNS Only After FFN": {"placement": "lns-only-ffn"},
}  # fmt: skip
"""Methods of The Curse of Depth; the initialisation of the others is that of the recipe."""


def _curse(
    d: int, d_ff: int, heads: int, layers: int, steps: int, warm_up: float, lr: Printed, name: str, **options: Any
) -> Model:
    sizes = _at("code", d_model=d, d_ff=d_ff, heads=heads, layers=layers, steps=steps, warm_up=warm_up)
    return Model({**sizes, "lr": lr}, Printed(name, "Table 1"), within=0.04, **options)


CURSE_MODELS = {
    "130M": _curse(768, 2048, 12, 12, 20_000, 0.1, Printed(1e-3, "Sec. 5.1"), "130M"),
    "250M": _curse(
        768, 2560, 16, 24, 40_000, 0.1, Printed(1e-3, "Sec. 5.1"), "250M", small={"layers": 16}, tiny={"layers": 6}
    ),
    "350M": _curse(
        1024, 2736, 16, 24, 60_000, 0.1, Printed(1e-3, "Sec. 5.1; the code has 5e-4, curse-of-depth/learning-rate"), "350M",
        why="LLaMA-350M is a name: the released configuration has 368 million", small={"layers": 16, "d_model": 80, "d_ff": 216},
        tiny={"layers": 6, "d_model": 20, "d_ff": 56},
    ),
    "1B": _curse(
        2048, 5461, 32, 24, 100_000, 0.01, Printed(5e-4, "Sec. 5.1"), "1B",
        why="LLaMA-1B is a name: the released configuration has 1.34 billion", small={"layers": 16, "d_model": 96, "d_ff": 256},
        tiny={"layers": 6, "d_model": 24, "d_ff": 64},
    ),
}  # fmt: skip
"""Models by the names of Table 1; sizes and budgets are the released configurations."""
OTHERS = {
    "OLMo-1B": Model(
        {
            **_at("OLMo-1B", d_model=2048, d_ff=8192, heads=16, layers=16, vocabulary=50_304, length=2048, tied=True,
            batch_size=2048),
            **_at("Table 3: 20B tokens", steps=4768), **_at("OLMo-1B", lr=4e-4, warm_up=0.1),
        },
        Printed("1B", "Table 3"), "OLMo-1B is a name: the published configuration has 1.18 billion", small={"layers": 8},
    ),
    "Qwen2.5-0.5B": Model(
        {
            **_at("Qwen2.5-0.5B", d_model=896, d_ff=4864, heads=14, layers=24, vocabulary=151_936, tied=True, length=1024),
            **_at("Qwen2.5-0.5B", block=(("attention_bias", True), ("eps", 1e-6), ("n_kv_heads", 2), ("rotary_theta", 1e6))),
            **_at("Table 4: 6B tokens", steps=11_444), **_at("ours", lr=5e-4),
        },
        Printed("0.5B", "Table 4"), within=0.02, small={"layers": 8, "tied": True}, tiny={"tied": True},
    ),
    "7B": Model(
        {
            **_at("OLMo-7B", d_model=4096, d_ff=11_008, heads=32, layers=32, vocabulary=50_304, length=2048, batch_size=2160),
            **_at("Sec. 5.3.1: 20B tokens", steps=4521), **_at("OLMo-7B", lr=3e-4, warm_up=0.05),
        },
        Printed("7B", "Fig. 5"), within=0.02, small={"layers": 24},
    ),
}  # fmt: skip
"""Models of Tables 3 and 4 and of Figure 5: published configurations."""
VIT = Recipe(
    {
        **_at("ViT-S", image=(224, 224, 3, 16), norm="layernorm", activation="gelu", length=196),
        **_at("ImageNet-1K", vocabulary=1000), **_at("ours", initialisation="normal", std=0.02, block=(("bias", True),)),
        **_at("ours", batch_size=1024, lr=1e-3, weight_decay=0.05, windows=1024, log_spaced=False, every=1000),
        **_at("ours", measured=("variance",)),
    },
    {
        "image": (8, 8, 1, 2), "vocabulary": 10, "text": "digits", "length": 16, "layers": 12, "d_model": 32, "heads": 4,
        "d_ff": 64, "steps": 150, "batch_size": 32, "lr": 1e-3, "weight_decay": 0.05, "std": None, "initialisation": "normal",
        "every": 10, "log_spaced": False, "measured": ("variance",), "windows": 64, "evaluations": 10, "batches": 2,
    },
    {"image": (8, 8, 1, 4), "length": 4, "layers": 3, "d_model": 8, "heads": 2, "d_ff": 16, "steps": 20, "every": 5},
    "ImageNet-1K as an .npz file",
)  # fmt: skip

# HybridNorm -----------------------------------------------------------------------------------------------------------
HYBRID = Recipe(
    {
        **_at("Table 7", optimizer="adamw", lr=3e-4, floor=0.1, weight_decay=0.1, betas=(0.9, 0.95), clip=1.0, batch_size=1024),
        **_at("Table 7", activation="swiglu", std=None, initialisation="megatron"),
        **_at("Table 6", vocabulary=100_278, tied=True, length=4096), **_at("Sec. 3", norm="rmsnorm"), **_at("App. B.2",
        rotary=True),
        **_at("ours", windows=512, log_spaced=False, every=0, precision="bfloat16"),
    },
    {
        "layers": 8, "d_model": 64, "heads": 4, "d_ff": 172, "length": 64, "norm": "rmsnorm", "activation": "swiglu",
        "rotary": True, "std": None, "block": (("n_kv_heads", 1),), "lr": 3e-3, "floor": 0.1, "steps": 240, "batch_size": 8,
        "evaluations": 10, "windows": 64, "every": 0, "log_spaced": False, "measured": (), "batches": 1,
    },
    {**TINY, "layers": 4, "d_ff": 44},
    "OLMoE-mix-0924, OLMo tokens",
)  # fmt: skip


def _dense(name: str, billions: float, place: str, **options: Any) -> Model:
    d, d_ff, heads, kv, layers = TABLE_6[name]
    steps = round(billions * 1e9 / (1024 * 4096))
    numbers = _at("Table 6", d_model=d, d_ff=d_ff, heads=heads, layers=layers)
    numbers |= _at("Table 6; Table 7, RoPE theta", block=(("n_kv_heads", kv), ("rotary_theta", 5e5)))
    numbers |= _at(place, steps=steps) | _at("Table 7, warm-up tokens", warm_up=8.388608 / billions)
    return Model(numbers, Printed({"1.2B": "1.27B"}.get(name, name), "Table 6; Sec. 4.1"), **options)


MOE = Model(
    {
        **_at("Table 6", d_model=2048, d_ff=1024, heads=16, layers=16, vocabulary=50_280, tied=False, experts=(64, 8)),
        **_at("Table 7", lr=4e-4, floor=0.125, block=(("n_kv_heads", 16), ("rotary_theta", 1e4)), warm_up=10_485_760_000 / 500e9),
        **_at("Table 2: 500B tokens", steps=119_209),
    },
    Printed("6.9B", "Sec. 4.1"), small={"experts": (8, 2), "d_ff": 44, "tied": False},
    tiny={"experts": (4, 2), "d_ff": 12, "tied": False},
)  # fmt: skip
HYBRID_ARMS = {
    "Pre-Norm": {"placement": "pre"},
    "HybridNorm": {"placement": "hybridnorm"},
    "HybridNorm*": {"placement": "hybridnorm*"},
}
FIRST_BLOCKS = {
    "HybridNorm": "hybridnorm", "HybridNorm*": "hybridnorm*", "First-QKV-Pre": "first-qkv-pre",
    "EmbedNorm": "embednorm-hybridnorm",
}  # fmt: skip
FLOWS = {
    "Pre-Norm, normal": ("pre", "normal"), "Pre-Norm, Megatron": ("pre", "megatron"),
    "Post-Norm, shifted": ("post-shifted", "megatron"), "Post-Norm, Eqs. 3-4": ("post", "megatron"),
    "HybridNorm": ("hybridnorm", "megatron"), "HybridNorm*": ("hybridnorm*", "megatron"),
}  # fmt: skip
"""Placements and initialisations of Figure 5; HybridNorm's App. E has its norms of Post-Norm in front."""
DENSE_550 = {"550M": _dense("550M", 400, "Tables 3 to 5: 400B tokens")}

# The Sharpness Disparity Principle ------------------------------------------------------------------------------------
SHARPNESS = Recipe(
    {
        **_at("App. A.1", betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, floor=0.05, length=1024, batch_size=480, steps=50_000),
        **_at("App. A.1: 1000 steps", warm_up=0.02), **_at("App. A.2, Switching Time", ramp="switch"),
        **_at("nanoGPT", std=0.02, precision="bfloat16", initialisation="megatron"),
        **_at("ours", windows=512, every=0),
    },
    {
        "layers": 2, "d_model": 32, "heads": 2, "length": 32, "batch_size": 16, "steps": 300, "lr": 4e-3, "windows": 64,
        "every": 0,
    },
    {**TINY, "layers": 2},
    "OpenWebText, GPT-2 tokens; MiniPile; C4, T5 tokens",
)  # fmt: skip
GPT = {**_at("App. A", activation="gelu", norm="layernorm", rotary=False), **_at("nanoGPT", tied=True, vocabulary=VOCABULARY)}
DECODER = {**_at("App. A", activation="swiglu", norm="rmsnorm", rotary=True), **_at("App. A: Hugging Face's LLaMA", tied=False)}
RATES = {
    "GPT-2 (small)": (6e-4, 6e-4), "LLaMA (0.13B)": (None, 1.2e-3), "LLaMA (0.25B)": (8e-4, 7.5e-4), "LLaMA (0.5B)": (8e-4,
    4.5e-4),
    "LLaMA (0.75B)": (6e-4, None), "LLaMA (1.1B)": (4e-4, None), "LLaMA (2B)": (2e-4, None),
    "LLaMA (66M)": (1e-3, None), "LLaMA (0.2B)": (1e-3, None), "LLaMA (0.4B)": (6e-4, None), "LLaMA (1B)": (3e-4, None),
}  # fmt: skip
"""Table 3: lr_max on OpenWebText and on MiniPile; Table 4: on C4."""
DIFFERENT = {"LLaMA (2B)": "sharpness-disparity/table3-llama-2b", "LLaMA (0.2B)": "sharpness-disparity/table4-llama-0.2b"}
"""Rows of the ledger that say why a count is not the print's."""
LLAMA_SMALL = {"norm": "rmsnorm", "activation": "swiglu", "rotary": True, "tied": False}


def _sharpness(
    row: Any, *, mini_pile: bool = False, small: Mapping[str, Any] = LLAMA_SMALL, tiny: Mapping[str, Any] = {}
) -> Model:
    kind, place = GPT if row.name.startswith("GPT") else DECODER, f"Table {row.table}"
    sizes = _at(place, d_model=row.d_model, d_ff=row.d_ff, heads=row.n_heads, layers=row.depth, lr=RATES[row.name][mini_pile])
    block = (("n_kv_heads", row.kv),) if row.kv else ()
    more = _at("nanoGPT" if row.table == 3 else "App. A.1, C4", vocabulary=VOCABULARY if row.table == 3 else T5, block=block)
    if row.table == 4:
        steps = round(20e6 * row.printed / (256 * 512))
        more |= _at("App. A.1, C4", length=256, batch_size=512, warm_up=1000 / steps)
        more |= _at("App. A.1, C4: 20 tokens a parameter", steps=steps)
    if mini_pile:
        more |= _at("App. A.1, MiniPile", length=512, batch_size=300, steps=30_000)
    numbers = {**kind, **sizes, **more}
    return Model(numbers, Printed(f"{row.printed}M", place), DIFFERENT.get(row.name, ""), small, tiny)


BY_NAME = {row.name: row for row in (*TABLE_3, *TABLE_4)}
SIZES = {  # small and tiny models of the scaling law, by the depth and width of the printed ones
    "LLaMA (0.13B)": ({"layers": 1, "d_model": 24}, {"layers": 1, "d_model": 8}),
    "LLaMA (0.25B)": ({"layers": 2, "d_model": 32}, {"layers": 1, "d_model": 16}),
    "LLaMA (0.5B)": ({"layers": 4, "d_model": 48}, {"layers": 2, "d_model": 24}),
}
BLOCKWISE: dict[str, Mapping[str, Any]] = {"AdamW": {"ratios": ()}, "Blockwise LR": {"ratios": PAPER}}
MINI = ratios_of({"Emb": 4.0, "FFN": 4.0, "VO": 4.0})
"""Blockwise ratios of Adam-mini (App. A.3)."""
QUARTER = {"LLaMA (0.25B)": _sharpness(BY_NAME["LLaMA (0.25B)"])}
FOLLOWED_SMALL = {
    "layers": 4, "d_model": 64, "heads": 4, "length": 64, "batch_size": 16, "windows": 256, "steps": 1000, "every": 100,
    "draws": 8, "batches": 4, "kept": (0, 10, 20, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900),
}  # fmt: skip
FOLLOWED_TINY = {"every": 10, "windows": 16, "batches": 2, "draws": 4, "kept": (0, 10, 20)}

# Closing the Curvature Gap --------------------------------------------------------------------------------------------
VISION = Recipe(
    {
        **_at("Fig. 2", placement="post"), **_at("Table 1", heads=1),
        **_at("ours: neither optimizer nor rate is printed", optimizer="adamw", lr=3e-3, weight_decay=0.0, clip=0.0,
        batch_size=128),
        **_at("ours", activation="relu", block=(("bias", True),), initialisation="normal", std=None, warm_up=0.0, floor=1.0),
        **_at("ours", windows=1024, log_spaced=False, every=100, measured=("norms",)),
    },
    {
        "placement": "post", "heads": 1, "lr": 3e-3, "weight_decay": 0.0, "clip": 0.0, "batch_size": 128, "activation": "relu",
        "block": (("bias", True),), "initialisation": "normal", "std": None, "warm_up": 0.0, "floor": 1.0, "windows": 128,
        "log_spaced": False, "every": 100, "measured": ("norms",), "text": "digits", "vocabulary": 10,
    },
    {"d_model": 8, "d_ff": 16, "steps": 30, "every": 10, "batch_size": 32, "windows": 32},
    "images and labels as an .npz file",
)  # fmt: skip
IMAGES = {
    "ViT-S": Model(_at("ViT-S", d_model=384, d_ff=1536, heads=6, layers=12, steps=100_000)),
    "MNIST": Model(
        {
            **_at("Table 1", d_model=16, d_ff=64, layers=1), **_at("MNIST; Table 1, patches of 4", image=(28, 28, 1, 4),
            length=49),
            **_at("MNIST", vocabulary=10), **_at("App. A.1", steps=1000),
        },
        small={"image": (8, 8, 1, 2), "length": 16, "layers": 1, "d_model": 16, "d_ff": 64, "steps": 1000},
        tiny={"image": (8, 8, 1, 4), "length": 4},
    ),
    "CIFAR-100": Model(
        {
            **_at("Table 1", d_model=128, d_ff=512, layers=8), **_at("CIFAR-100; patches of 4", image=(32, 32, 3, 4), length=64),
            **_at("CIFAR-100", vocabulary=100), **_at("ours: accuracy above 50 %, Sec. 5", steps=20_000),
        },
        small={"image": (8, 8, 1, 2), "length": 16, "layers": 8, "d_model": 16, "d_ff": 64, "steps": 500},
        tiny={"image": (8, 8, 1, 4), "length": 4, "layers": 2},
    ),
}  # fmt: skip
"""Classifiers of images."""


def _arms(*names: str) -> dict[str, Mapping[str, Any]]:
    return {name: CURSE[name] for name in names}


EXPERIMENTS: dict[str, Experiment] = {
    "curse-of-depth/table1": Experiment("Table 1", LLAMA, CURSE_MODELS, _arms("Post-LN", "DeepNorm", "Mix-LN", "Pre-LN", "LNS"),
        small={"steps": 100, "every": 0}, seeds=(0,)),
    "curse-of-depth/fig3": Experiment("Figures 3 and 6", LLAMA, {"130M": CURSE_MODELS["130M"]}, _arms("Post-LN", "Pre-LN", "LNS"),
        figure="curse_of_depth_2_3_6"),
    "curse-of-depth/fig4": Experiment("Figures 4 and 8", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Pre-LN, scaled init", "LNS"), _at("Sec. 5.4, Fig. 4", steps=10_000, every=100,
        measured=("variance",)), figure="curse_of_depth_4_8"),
    "curse-of-depth/fig5": Experiment("Figures 1 (right, 7B) and 5", LLAMA, {"7B": OTHERS["7B"]}, _arms("Pre-LN", "LNS"),
        small={"steps": 100, "every": 0}, seeds=(0,)),
    "curse-of-depth/table3": Experiment("Table 3", LLAMA, {"OLMo-1B": OTHERS["OLMo-1B"]},
        {"OLMo's init": {"placement": "pre", "initialisation": "olmo"}, "LNS": CURSE["LNS"]}, small={"steps": 200, "every": 0}),
    "curse-of-depth/table4": Experiment("Table 4", LLAMA, {"Qwen2.5-0.5B": OTHERS["Qwen2.5-0.5B"]}, _arms("Pre-LN", "LNS"),
        small={"steps": 200, "every": 0}),
    "curse-of-depth/table5": Experiment("Table 5 and Figure 7", VIT, {"ViT-S": IMAGES["ViT-S"]},
        {"Pre-LN": {"placement": "pre"}, "LNS after the norm": {"placement": "lns"},
         "LNS after attention and MLP": {"placement": "lns-after-branch"}}, figure="curse_of_depth_7"),
    "curse-of-depth/table6": Experiment("Table 6", LLAMA, {name: CURSE_MODELS[name] for name in ("130M", "250M")},
        _arms("Pre-LN", "LayerScale", "SkipInit", "Pre-LN, depth-scaled init", "Pre-LN, scaled init", "LNS", "LNS, scaled init"),
        small={"steps": 200, "every": 0}),
    "curse-of-depth/table7": Experiment("Table 7", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Admin", "Group-LN", "Sandwich-LN", "Mix-LN", "LNS"), figure="curse_of_depth_7"),
    "curse-of-depth/table8": Experiment("Table 8", LLAMA, {"130M": CURSE_MODELS["130M"]},
        _arms("Pre-LN", "Before LN", "After Attn/FFN", "After Residual", "LNS Only After Attn", "LNS Only After FFN", "LNS"),
        small={"steps": 200, "every": 0}),
    "hybridnorm/fig1": Experiment("Figures 1 and 7", HYBRID, {"1.2B": _dense("1.2B", 1000,
    "Fig. 1: 1T tokens")},
        HYBRID_ARMS),
    "hybridnorm/fig3": Experiment("Figures 3 and 8", HYBRID, {"MoE-1B-7B": MOE},
        {name: HYBRID_ARMS[name] for name in ("Pre-Norm", "HybridNorm")}),
    "hybridnorm/table3": Experiment("Table 3", HYBRID, DENSE_550,
        {f"{name}, {scheme}": {"placement": placement, "initialisation": scheme}
         for name, placement in (("Pre-Norm", "pre"), ("HybridNorm", "hybridnorm"))
         for scheme in ("normal", "depth-scaled", "megatron")}, figure="hybridnorm_table_3", seeds=(0, 1, 2, 3)),
    "hybridnorm/table4": Experiment("Table 4", HYBRID, DENSE_550,
        {name: {"placement": name.lower().removesuffix("-norm")} for name in ("QKVC-Post", "QKC-Post", "QK-Post", "KV-Post",
        "KC-Post", "Pre-QKV-Post", "Pre-QKV-Pre", "Pre-QK-Pre", "QKV-Pre", "Post-Norm", "Pre-Norm", "Mix-LN", "Post-Pre",
        "Pre-Post", "HybridNorm", "HybridNorm*",)}, figure="hybridnorm_tables_4_5"),
    "hybridnorm/table5": Experiment("Table 5", HYBRID,
        {**{name: replace(one, small={"layers": 16}) for name, one in DENSE_550.items()},
         "543M": _dense("543M", 400, "Table 5: 400B tokens", small={"layers": 29}, tiny={"layers": 6})},
        {"Post-Norm": {"placement": "post"}, **HYBRID_ARMS}, small={"steps": 100, "every": 100, "measured": ("gradient",)},
        figure="hybridnorm_tables_4_5"),
    "hybridnorm/fig4": Experiment("Figure 4", HYBRID, DENSE_550, {name: {"placement": one} for name, one in FIRST_BLOCKS.items()},
        figure="hybridnorm_4_5", seeds=(0, 1, 2, 3)),
    "hybridnorm/fig5": Experiment("Figure 5", HYBRID, DENSE_550,
        {name: {"placement": placement, "initialisation": scheme} for name, (placement, scheme) in FLOWS.items()},
        _at("Fig. 5", steps=100, every=100, measured=("gradient",)) | _at("ours", warm_up=0.9),
        {"layers": 16, "steps": 100, "every": 100, "measured": ("gradient",)}, "hybridnorm_4_5"),
    "hybridnorm/fig6": Experiment("Figure 6", HYBRID,
        {"151M": _dense("151M", 200, "Sec. 4.6: 200B tokens", small={"layers": 4, "d_model": 32, "d_ff": 84},
        tiny={"d_model": 8}),
         "285M": _dense("285M", 200, "Sec. 4.6: 200B tokens", small={"layers": 6, "d_model": 48, "d_ff": 128}),
         "550M": _dense("550M", 300, "Sec. 4.6: 300B tokens"),
         "1.2B": _dense("1.2B", 1000, "Sec. 4.6: 1T tokens", small={"d_model": 96, "d_ff": 256}, tiny={"d_model": 24})},
        {name: HYBRID_ARMS[name] for name in ("Pre-Norm", "HybridNorm")}),
    "sharpness-disparity/fig3": Experiment("Figures 1 (left), 2, 3, 8 and 9", SHARPNESS,
        {"GPT-2-like": _sharpness(BY_NAME["GPT-2 (small)"], small=FOLLOWED_SMALL, tiny=FOLLOWED_TINY),
         "LLaMA-like": _sharpness(BY_NAME["LLaMA (0.25B)"], small={**FOLLOWED_SMALL, **LLAMA_SMALL, "d_ff": 176},
                                  tiny={**FOLLOWED_TINY, "d_ff": 44})},
        {"AdamW": {}},
        _at("Fig. 3", every=1000, log_spaced=True, kept=(1000, 10_000, 20_000, 30_000, 40_000)) | _at("App. A.1: B = 1024",
        draws=8),
        figure="sharpness_disparity_3_8", seeds=(0,)),
    "sharpness-disparity/fig4": Experiment("Figures 1 (right), 4 and 5 (middle)", SHARPNESS,
        {name: _sharpness(BY_NAME[name], small={**LLAMA_SMALL, "layers": 1 + k, "d_model": 16 * (1 + k)} if k else {})
         for k, name in enumerate(("GPT-2 (small)", "LLaMA (0.25B)", "LLaMA (0.5B)", "LLaMA (0.75B)", "LLaMA (1.1B)",
         "LLaMA (2B)"))},
        BLOCKWISE, seeds=(0,)),
    "sharpness-disparity/fig5": Experiment("Figure 5 (left, MiniPile)", SHARPNESS,
        {name: _sharpness(BY_NAME[name], mini_pile=True, small={**LLAMA_SMALL, **small}, tiny=tiny)
         for name, (small, tiny) in SIZES.items()}, BLOCKWISE),
    "sharpness-disparity/fig5-c4": Experiment("Figure 5 (right, C4)", SHARPNESS,
        {name: _sharpness(BY_NAME[name]) for name in ("LLaMA (66M)", "LLaMA (0.2B)", "LLaMA (0.4B)", "LLaMA (1B)")},
        BLOCKWISE, seeds=(0,)),
    "sharpness-disparity/fig6": Experiment("Figure 6", SHARPNESS, QUARTER,
        {"Adam-mini": {"optimizer": "adam_mini"}, "Blockwise LR": {"optimizer": "adam_mini", "ratios": MINI}}),
    "sharpness-disparity/fig7-lion": Experiment("Figures 7 (left) and 11", SHARPNESS, QUARTER,
        {"Lion": {"ratios": ()}, "Blockwise LR": {"ratios": PAPER}},
        _at("App. A.3: a fifth of AdamW's", lr=1.6e-4) | _at("App. A.3", weight_decay=0.5, optimizer="lion")
        | _at("Lion", betas=(0.9, 0.99)) | _at("Fig. 11", every=1000),
        {"optimizer": "lion", "lr": 8e-4, "weight_decay": 0.5, "betas": (0.9, 0.99), "every": 100, "measured": ("sharpness",)}),
    "sharpness-disparity/fig7-wsd": Experiment("Figure 7 (right)", SHARPNESS, QUARTER, BLOCKWISE,
        _at("App. A.3", schedule="wsd", floor=0.0), {"schedule": "wsd", "floor": 0.0}),
    "sharpness-disparity/fig10": Experiment("Figure 10", SHARPNESS,
        {"LLaMA (0.25B)": _sharpness(BY_NAME["LLaMA (0.25B)"], mini_pile=True)},
        {"AdamW": {"ratios": ()}} | {
            ", ".join(f"{kind} {factor}" for kind, factor in ratios.items()): {"ratios": ratios_of(ratios)}
            for ratios in ({"Emb": 6, "QK": 4, "FFN": 3, "VO": 2}, {"Emb": 8, "QK": 6, "FFN": 4, "VO": 3},
                           {"Emb": 10, "QK": 8, "FFN": 6, "VO": 4})}),
    "sharpness-disparity/table2": Experiment("Table 2", SHARPNESS, QUARTER,
        {"w/o": {"ratios": ()}, "Emb": {"ratios": (("Emb", 10.0),)}, "Emb, FFN": {"ratios": (("Emb", 10.0), ("FFN", 6.0))},
         "Emb, FFN, QK, VO": {"ratios": PAPER}, "Norm x 2": {"ratios": (("Norm", 2.0),)}}),
    "curvature-gap/mnist": Experiment("Figures 3 to 5 and 7 to 11", VISION, {"MNIST": IMAGES["MNIST"]}, {"AdamW": {}},
        figure="curvature_gap_5", seeds=(0,)),
    "curvature-gap/cifar": Experiment("Figures 6 and 12", VISION, {"CIFAR-100": IMAGES["CIFAR-100"]}, {"AdamW": {}},
    figure="curvature_gap_6_12", seeds=(0,)),
}  # fmt: skip
"""Experiments by the name that ``python -m papers train`` takes: a paper, and a row of the ledger or its figure or table."""
NO_RUN = {
    "curse-of-depth/fig2": "weights of Qwen3-8B, DeepSeek-7B, LLaMA2-13B, BERT-Large: hessiankit.depth_diagnostics on them",
    "curse-of-depth/fig9": "weights of Qwen2.5-VL-7B: hessiankit.depth_diagnostics on them",
    "curse-of-depth/table2": "supervised fine-tuning of Table 1's models on Commonsense170K, then lm-evaluation-harness",
    "hybridnorm/table1": "lm-evaluation-harness on the models of hybridnorm/fig1",
    "hybridnorm/table2": "lm-evaluation-harness on the models of hybridnorm/fig3",
    "hybridnorm/fig2": "a drawing of the blocks: hessiankit.blocks.PLACEMENTS",
    "sharpness-disparity/table1": "lm-evaluation-harness on LLaMA (1.1B) of sharpness-disparity/fig4",
    "curvature-gap/fig1": "a drawing", "curvature-gap/fig2": "a drawing",
    "curvature-gap/table1": "numbers of the presets curvature-gap/mnist and curvature-gap/cifar",
    "hybridnorm/table6": "numbers of the presets", "hybridnorm/table7": "numbers of the presets",
    "sharpness-disparity/table3": "numbers of the presets", "sharpness-disparity/table4": "numbers of the presets",
}  # fmt: skip
"""Figures and tables that no run of this command makes, with the reason."""


def experiment_of(name: str) -> Experiment:
    """Return an experiment.

    Raises:
        InputError: There is none of this name.
    """
    if name in NO_RUN:
        raise InputError(f"train: {name} is no training run: {NO_RUN[name]}")
    if name not in EXPERIMENTS:
        raise unknown("train", "experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def numbers_of(experiment: Experiment, size: str, arm: str) -> dict[str, Printed]:
    """Return the numbers of the paper's preset with their places."""
    method = _at(experiment.shows, **experiment.arms[arm])
    return {**experiment.recipe.paper, **experiment.models[size].paper, **experiment.budget, **method}


def specs(
    name: str, preset: str = "small", *, seeds: tuple[int, ...] | None = None, **changes: Any
) -> dict[tuple[str, str], list[Spec]]:
    """Return the runs of an experiment, by model and method, one a seed; the paper's preset has one seed.

    Args:
        name: A key of :data:`EXPERIMENTS`.
        preset: A name in :data:`PRESETS`.
        seeds: Seeds; by default those of the experiment.
        changes: Attributes that are other than the preset's, such as ``steps`` or ``text``.

    >>> (spec, _), *_ = specs("curse-of-depth/table8", "tiny").values()
    >>> spec.arm, spec.size, spec.placement, spec.layers
    ('Pre-LN', '130M', 'pre', 4)
    """
    experiment = experiment_of(name)
    found = {}
    for size, model in experiment.models.items():
        for arm, method in experiment.arms.items():
            if preset == "paper":
                values = {key: number.value for key, number in numbers_of(experiment, size, arm).items()}
            else:
                values = {**experiment.recipe.small, **model.small, **experiment.small}
                if preset == "tiny":
                    values |= {**experiment.recipe.tiny, **model.tiny}
                values |= method
            values |= {"arm": arm, "size": size, **changes}
            label = f"{name.replace('/', '-')}-{slug(size)}-{slug(arm)}"
            chosen = seeds or ((0,) if preset == "paper" else experiment.seeds)
            found[size, arm] = [Spec(**{"name": f"{label}-{seed}", **values, "seed": seed}) for seed in chosen]
    return found


def slug(name: str) -> str:
    """Return a name as a part of a file's name.

    >>> slug("HybridNorm*"), slug("Pre-LN, scaled init")
    ('hybridnorm-star', 'pre-ln-scaled-init')
    """
    letters = (c if c.isalnum() or c in "-." else " " for c in name.replace("*", "-star").lower())
    return "-".join("".join(letters).split())
