"""Measurements of speed and memory: ``python -m benchmarks --list``. What is right is a test's business; this is how fast."""
