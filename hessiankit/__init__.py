"""A toolkit for the exact curvature of transformers."""
