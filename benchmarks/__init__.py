"""Measurements of speed: ``python -m benchmarks dense_hessian``. What is right is a test's business; this is how fast."""
