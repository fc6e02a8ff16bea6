"""Experiments of the papers at a small scale: learning rates by block type, every norm placement, their data and training loop."""
