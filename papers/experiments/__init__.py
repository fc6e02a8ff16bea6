"""Experiments at a small scale: learning rates by block type, every norm placement, and their data and training loop."""
