"""Curvature for training: block types, sharpness, depth, learning rates, monitoring, ranks."""
