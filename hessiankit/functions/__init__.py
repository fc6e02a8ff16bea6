"""Functions of torch whose second derivatives have closed forms: attention, and the cross entropy of a linear head.

`primitive_function` makes a differentiable function of a primitive; the others say of which one.
"""
