"""The nodes of a recording: who reads whom, names, and what a graph leaves behind."""

from __future__ import annotations

import gc
import weakref

from hessiankit.tracing.graph import Graph, map_nodes


def test_inputs_and_users():
    graph = Graph()
    a, b = graph.add("placeholder", "a"), graph.add("placeholder", "b")
    c = graph.add("call_function", "f", (b, [a, (a, 2)]), {"other": b})
    assert c.all_input_nodes == (b, a)
    assert (a.users, b.users, c.users) == ([c], [c], [])
    assert graph.nodes == [a, b, c]


def test_names_are_unique_and_those_of_torch_fx():
    graph = Graph()
    names = [graph.add("call_function", "f", name=name).name for name in ("tanh", "sum", "tanh", "sum", "tanh")]
    assert names == ["tanh", "sum_1", "tanh_1", "sum_2", "tanh_2"]


def test_nodes_are_replaced_within_containers():
    graph = Graph()
    a, b = graph.add("placeholder", "a"), graph.add("placeholder", "b")
    assert map_nodes({a: 1, b: 2}.__getitem__, ((a, [b, 5]), {"x": slice(a, None, b)})) == ((1, [2, 5]), {"x": slice(1, None, 2)})


class Target:
    """What can be seen to be freed."""


def test_a_graph_that_was_cleared_needs_no_garbage_collection():
    graph, target = Graph(), Target()
    graph.add("call_function", "f", (graph.add("call_function", target),))
    freed = weakref.ref(target)
    gc.disable()
    try:
        del target
        assert freed() is not None
        graph.clear()
        assert freed() is None
    finally:
        gc.enable()
