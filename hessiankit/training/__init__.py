"""Readers of the curvature for training: block types, sharpness, depth, learning rates, monitoring, ranks."""
