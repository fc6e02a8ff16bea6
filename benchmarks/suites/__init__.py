"""The benchmarks of the suite, by name."""

from benchmarks.plan import Benchmark
from benchmarks.suites import attention, dense, growth, handshake, hvp, limit, memory, scalars, scale, sharpness

BENCHMARKS: dict[str, Benchmark] = {
    module.BENCHMARK.name: module.BENCHMARK
    for module in (dense, hvp, scalars, memory, growth, limit, sharpness, handshake, scale, attention)
}
ALIASES = {"dense_hessian": "dense"}
