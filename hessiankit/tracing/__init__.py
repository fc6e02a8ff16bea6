"""A module's computation as a list of primitive applications, and rewritings of such a list.

`trace` has the list, recorded by `recording`; `decompositions` and `primitives` say which primitives an operation of torch is.
`reassociation`, `attention_fusion` and `head_fusion` rewrite products so that rows stay apart, written-out attention as one
primitive, and a head with its cross entropy as another.
"""
