"""Random numbers in the order of the record. Inductor takes draws that do not need one another in any order, and leaves
out those that nothing uses: both would give later draws other numbers of the generator."""

import itertools

import torch
from torch._inductor import config, ir
from torch._inductor.graph import GraphLowering


def is_draw(node):
    return node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def number_draws(graph):
    for place, node in enumerate(filter(is_draw, graph.nodes)):
        node.meta["draw"] = place


def keep_draws_in_order():
    # It comes before the passes that move nodes.
    config.joint_custom_pre_pass = number_draws
    run_node, update_scheduler = GraphLowering.run_node, GraphLowering._update_scheduler
    draws = {}

    def run(graph, node):
        before = len(graph.operations)
        result = run_node(graph, node)
        if is_draw(node):
            kernels = [it for it in graph.operations[before:]
                       if isinstance(it, ir.ExternKernel) and not isinstance(it, ir.MultiOutput)]
            if "draw" not in node.meta or not kernels:
                raise RuntimeError(f"the place of {node.target} among the random numbers is not known")
            kernels[-1].has_side_effects = lambda: True
            draws.setdefault(graph, {})[node.meta["draw"]] = kernels[-1]
        return result

    def order(graph):
        kernels = [kernel for _, kernel in sorted(draws.get(graph, {}).items())]
        for earlier, later in itertools.pairwise(kernels):
            graph.additional_buffer_deps[later.get_operation_name()].add(earlier.get_name())
        return update_scheduler(graph)

    GraphLowering.run_node, GraphLowering._update_scheduler = run, order


