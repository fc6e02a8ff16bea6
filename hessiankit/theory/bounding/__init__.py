"""Bounds on second derivatives: from norms, from intermediate values, from the matrix itself."""
