"""A module's computation as a list of primitive applications, and rewritings of such a list.

`trace` has the list, recorded by `recording`; `decompositions` and `primitives` say which primitives an operation of torch is.
`reassociation` and `attention_fusion` rewrite products so that rows stay apart, and written-out attention as one primitive.
"""
