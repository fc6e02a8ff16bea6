"""Experiments of The Sharpness Disparity Principle in Transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hessiankit.training.optim import PRESETS
from papers.experiments.catalogue.preset import TINY, Experiment, Model, Printed, Recipe, at
from papers.experiments.tuning.experiment import PAPER, ratios_of
from papers.sharpness_disparity.learning_rates import T5, TABLE_3, TABLE_4, VOCABULARY

SHARPNESS = Recipe(
    {
        **at("App. A.1", betas=(0.9, 0.95), weight_decay=0.1, clip=1.0, floor=0.05, length=1024, batch_size=480, steps=50_000),
        **at("App. A.1: 1000 steps", warm_up=0.02), **at("App. A.2, Switching Time", ramp="switch"),
        **at("nanoGPT", std=0.02, precision="bfloat16", initialisation="megatron"),
        **at("ours", windows=512, every=0),
    },
    {
        "layers": 2, "d_model": 32, "heads": 2, "length": 32, "batch_size": 16, "steps": 300, "lr": 4e-3, "windows": 64,
        "every": 0,
    },
    {**TINY, "layers": 2},
    "OpenWebText, GPT-2 tokens; MiniPile; C4, T5 tokens",
)  # fmt: skip
GPT = {**at("App. A", activation="gelu", norm="layernorm", rotary=False), **at("nanoGPT", tied=True, vocabulary=VOCABULARY)}
DECODER = {**at("App. A", activation="swiglu", norm="rmsnorm", rotary=True), **at("App. A: Hugging Face's LLaMA", tied=False)}
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
    sizes = at(place, d_model=row.d_model, d_ff=row.d_ff, heads=row.n_heads, layers=row.depth, lr=RATES[row.name][mini_pile])
    block = (("n_kv_heads", row.kv),) if row.kv else ()
    more = at("nanoGPT" if row.table == 3 else "App. A.1, C4", vocabulary=VOCABULARY if row.table == 3 else T5, block=block)
    if row.table == 4:
        steps = round(20e6 * row.printed / (256 * 512))
        more |= at("App. A.1, C4", length=256, batch_size=512, warm_up=1000 / steps)
        more |= at("App. A.1, C4: 20 tokens a parameter", steps=steps)
    if mini_pile:
        more |= at("App. A.1, MiniPile", length=512, batch_size=300, steps=30_000)
    numbers = {**kind, **sizes, **more}
    return Model(numbers, Printed(f"{row.printed}M", place), DIFFERENT.get(row.name, ""), small, tiny)


BY_NAME = {row.name: row for row in (*TABLE_3, *TABLE_4)}
SIZES = {  # small and tiny models of the scaling law, by the depth and width of the printed ones
    "LLaMA (0.13B)": ({"layers": 1, "d_model": 24}, {"layers": 1, "d_model": 8}),
    "LLaMA (0.25B)": ({"layers": 2, "d_model": 32}, {"layers": 1, "d_model": 16}),
    "LLaMA (0.5B)": ({"layers": 4, "d_model": 48}, {"layers": 2, "d_model": 24}),
}
BLOCKWISE: dict[str, Mapping[str, Any]] = {"AdamW": {"ratios": ()}, "Blockwise LR": {"ratios": PAPER}}
SETTINGS = {"6, 4, 3, 2": ratios_of(PRESETS["6/4/3/2"]), "8, 6, 4, 3": ratios_of(PRESETS["8/6/4/3"]), "10, 8, 6, 4": PAPER}
"""Figure 10: ratios of Emb, QK, FFN, VO."""
MINI = ratios_of({"Emb": 4.0, "FFN": 4.0, "VO": 4.0})
"""Blockwise ratios of Adam-mini (App. A.3)."""
QUARTER = {"LLaMA (0.25B)": _sharpness(BY_NAME["LLaMA (0.25B)"])}
FOLLOWED_SMALL = {
    "layers": 4, "d_model": 64, "heads": 4, "length": 64, "batch_size": 16, "windows": 256, "steps": 1000, "every": 100,
    "draws": 8, "batches": 4, "kept": (0, 10, 20, 50, 100, 200, 300, 400, 500, 600, 700, 800, 900),
}  # fmt: skip
FOLLOWED_TINY = {"every": 10, "windows": 16, "batches": 2, "draws": 4, "kept": (0, 10, 20)}
EXPERIMENTS: dict[str, Experiment] = {
    "sharpness-disparity/fig3": Experiment("Figures 1 (left), 2, 3, 8 and 9", SHARPNESS,
        {"GPT-2-like": _sharpness(BY_NAME["GPT-2 (small)"], small=FOLLOWED_SMALL, tiny=FOLLOWED_TINY),
         "LLaMA-like": _sharpness(BY_NAME["LLaMA (0.25B)"], small={**FOLLOWED_SMALL, **LLAMA_SMALL, "d_ff": 176},
                                  tiny={**FOLLOWED_TINY, "d_ff": 44})},
        {"AdamW": {}},
        at("Fig. 3", every=1000, log_spaced=True, kept=(1000, 10_000, 20_000, 30_000, 40_000)) | at("App. A.1: B = 1024",
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
        {"Adam-mini": {"optimizer": "adam_mini"}, "Blockwise LR": {"optimizer": "adam_mini", "ratios": MINI}},
        figure="sharpness_disparity_6_7_11", seeds=(0, 1, 2)),
    "sharpness-disparity/fig7-lion": Experiment("Figures 7 (left) and 11", SHARPNESS, QUARTER,
        {"Lion": {"ratios": ()}, "Blockwise LR": {"ratios": PAPER}},
        at("App. A.3: a fifth of AdamW's", lr=1.6e-4) | at("App. A.3", weight_decay=0.5, optimizer="lion")
        | at("Lion", betas=(0.9, 0.99)) | at("Fig. 11", every=1000),
        {"optimizer": "lion", "lr": 8e-4, "weight_decay": 0.5, "betas": (0.9, 0.99), "every": 100, "measured": ("sharpness",),
         "draws": 8}, figure="sharpness_disparity_6_7_11", seeds=(0, 1, 2)),
    "sharpness-disparity/fig7-wsd": Experiment("Figure 7 (right)", SHARPNESS, QUARTER, BLOCKWISE,
        at("App. A.3", schedule="wsd", floor=0.0), {"schedule": "wsd", "floor": 0.0},
        figure="sharpness_disparity_6_7_11", seeds=(0, 1, 2)),
    "sharpness-disparity/fig10": Experiment("Figure 10", SHARPNESS,
        {"LLaMA (0.25B)": _sharpness(BY_NAME["LLaMA (0.25B)"], mini_pile=True)},
        {"AdamW": {"ratios": ()}, **{name: {"ratios": ratios} for name, ratios in SETTINGS.items()}},
        figure="sharpness_disparity_4_10_table_2"),
    "sharpness-disparity/table2": Experiment("Table 2", SHARPNESS, QUARTER,
        {"w/o": {"ratios": ()}, "Emb": {"ratios": (("Emb", 10.0),)}, "Emb, FFN": {"ratios": (("Emb", 10.0), ("FFN", 6.0))},
         "Emb, FFN, QK, VO": {"ratios": PAPER}, "Norm x 2": {"ratios": (("Norm", 2.0),)}},
        figure="sharpness_disparity_4_10_table_2"),
}  # fmt: skip
