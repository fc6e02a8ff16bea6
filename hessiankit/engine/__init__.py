"""Second derivatives of a trace by reverse accumulation over its vertices.

    H = sum over primitives v of   J_v^T [lambda_v . D^2 phi_v] J_v

J_v is the Jacobian of v's inputs in the parameters and lambda_v the adjoint of its output. A trace is a computational graph;
its vertices are eliminated from the loss back to the parameters, and curvature between two vertices moves to their parents as
it does in edge pushing (Griewank and Walther, Evaluating Derivatives, chapters 7 and 10; Gower and Mello, Optim. Methods Softw.
27, 2012, 251-273), by blocks of rows in place of single numbers.

| noun | meaning | where |
|---|---|---|
| application | one primitive phi_v applied to values | `tracing.trace` |
| adjoint | lambda_v, the derivative of the loss in a value, of its shape | `Trace.adjoints` |
| vertex | a value at which tangents begin anew | `tangents` |
| tangents | the Jacobian of a value by earlier vertices, (S, *shape), dense or with structure | `tangents` |
| level | how many leading axes of a value keep their rows apart: all (row by row), 1 (sample by sample), 0 (dense) | `tangents` |
| parent | a vertex by which another one has tangents | `tangents` |
| parameter Jacobian | the Jacobian of a vertex in one parameter: X (x) I, a diagonal, a selection or an identity | `jacobians` |
| site | a value that is linear in some parameters, row by row, with their Jacobians | `jacobians` |
| vertex block | curvature K_tr (R, columns of t, columns of r) between two vertices | `vertex_blocks` |
| column block | the same with the columns of r already multiplied by its parameter Jacobian: columns of H | `column_blocks` |
| step | an application linearised at the point, for products with H | `linearisation` |
"""
