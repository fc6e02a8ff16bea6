"""Second derivatives of a trace: directions pushed forward from the places of the parameters, and pulled back with curvature.

    H = sum over primitives v of   J_v^T [lambda_v . D^2 phi_v] J_v  =  A + A^T

J_v is the Jacobian of v's inputs with respect to the parameters and lambda_v the adjoint of its output. Forward over reverse
along unit directions gives columns of H; directions of rows that do not meet share a sweep, as in compressed differentiation
(Curtis, Powell and Reid, J. Inst. Maths Applics 13, 1974, 117-119; Gebremedhin, Manne and Pothen, SIAM Review 47, 2005,
629-705). A has each pair of places once, and half of each place with itself.

| noun | meaning | where |
|---|---|---|
| application | one primitive phi_v applied to values | `tracing.trace` |
| adjoint | lambda_v, the derivative of the loss with respect to a value, of its shape | `Trace.adjoints` |
| step | an application linearised at the point, with the inputs that move | `entrywise_fusion` |
| place | a value that parameters enter row by row, or a parameter taken whole | `paths` |
| parameter Jacobian | E_t, that of a place in one parameter: X (x) I, a diagonal, a selection or an identity | `jacobians` |
| level | how many leading axes of its values index rows that a path keeps apart: 0 if it is dense | `paths` |
| direction | a unit entry of a place in one row of each group that stays apart, or a parameter entry | `sweep_plans` |
| cut | a value that every way to the loss passes; a section lies between two | `sections` |
| sweep | tangents (S, *shape) pushed along steps, covectors pulled back with the curvature that the tangents pass | `sweep` |
| tail | what a cut keeps: curvature of the loss in its value, mixed derivatives in it and the parameters behind | `block_rows` |
| block row | what the directions of a place give at all later ones: K_tr, and E_t^T K_tr E_r | `block_rows` |
| matrix rows | block rows as summands of a matrix or a panel of it; sums over rows are `contractions` | `matrix_rows` |

`diagonal_rows` reads the curvature of each place with itself at equal columns; `cost` counts sweeps from shapes. Rows of long
chains of small operations are products with unit vectors (`product_rows`), by the `linearisation` that makes all products H v.
"""
