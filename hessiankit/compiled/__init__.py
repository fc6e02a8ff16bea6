"""Compiled kernels for the two places where a dense Hessian's time goes on a processor: lifting curvature, and mirroring.

They are optional: ``pip install 'hessiankit[compiled]'`` and ``hessiankit compile`` build them once, and without them plain
torch does the same. See :mod:`hessiankit.compiled.library`.
"""
