"""The Sharpness Disparity Principle in Transformers (Wang et al. 2025)."""

CHAPTERS = (
    "principle",
    "notation",
    "estimators",
    "theorem_ffn",
    "bounds_ffn",
    "theorem_attention",
    "bounds_attention",
    "theorem_embedding",
    "bounds_embedding",
    "learning_rates",
    "tables",
)
