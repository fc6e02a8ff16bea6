"""The Sharpness Disparity Principle in Transformers (Wang et al. 2025)."""

CHAPTERS = ("principle", "estimators", "feedforward", "attention", "embedding", "learning_rates")
