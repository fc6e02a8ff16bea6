"""Functions of torch whose second derivatives have closed forms: attention, and the cross entropy of a linear head.

`primitive_function` makes a differentiable function of a primitive; `attention` and `cross_entropy` say of which one.
`twice_differentiable` calls them in place of torch's in unchanged programs, and `heads` tells it what logits were made of.
"""
