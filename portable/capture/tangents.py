"""What a backward pass gives for the outputs that have no gradient: nothing, as eager, where AOTAutograd counts zeros.

AOTAutograd compiles one backward graph for all outputs, and torch fills in zeros for an output that the loss does not
depend on. Eager does not run that output's part at all: a parameter that only it depends on keeps the gradient None,
and where its derivative is infinite no NaN (0 · ∞) comes of it. `without` gives the graph for the outputs that have a
gradient.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

aten = torch.ops.aten

# operators that give zeros where all their arguments that depend on an output's gradient are zeros
_LINEAR = frozenset(
    """
    _conj _fft_c2c _fft_c2r _fft_r2c _to_copy _unsafe_view abs alias as_strided bmm cat clone complex conj conj_physical
    constant_pad_nd convert_element_type convolution copy cumsum detach diag_embed diagonal dot expand flip fold gather
    im2col col2im imag index index_select laid_out lift_fresh_copy linear matmul mean mm movedim mul mv narrow neg
    new_zeros permute real repeat reshape resolve_conj roll rot90 select slice split split_with_sizes squeeze stack sum
    t transpose tril triu unbind unfold unsqueeze vdot view view_as_complex view_as_real zeros_like
    """.split()
)
_INTO = frozenset(("index_add", "index_put", "scatter", "scatter_add", "select_scatter", "slice_scatter", "where"))


def positions(gm: fx.GraphModule) -> list[int]:
    """Where among the arguments of a backward graph the gradients of the outputs are."""
    inputs = [n for n in gm.graph.nodes if n.op == "placeholder"]
    return [i for i, n in enumerate(inputs) if "tangents" in str(n.target)]


def without(gm: fx.GraphModule, undefined: Collection[int]) -> fx.GraphModule:
    """A backward graph that gives None for what depends on undefined gradients alone.

    It takes the same arguments; those at ``undefined`` are zeros.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    tangents = positions(gm)
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    depends = {inputs[i] for i in tangents}
    absent = {inputs[i] for i in undefined}
    for node in graph.nodes:
        needed = [m for m in node.all_input_nodes if m in depends]
        if not needed or node.op == "output":
            continue
        depends.add(node)
        gone = [m for m in needed if m in absent]
        if len(gone) == len(needed) and _vanishes(node, absent):
            absent.add(node)
        elif gone:
            other = _summand(node, absent, depends)
            if other is not None:
                node.replace_all_uses_with(other)
    output = graph.output_node()
    output.args = fx.map_arg(output.args, lambda n: None if n in absent else n)
    graph.eliminate_dead_code()
    return fx.GraphModule(gm, graph)


def _vanishes(node: fx.Node, absent: set[fx.Node]) -> bool:
    if node.op != "call_function":
        return False
    if not isinstance(node.target, OpOverload):
        return getattr(node.target, "__name__", "") == "getitem"
    name = node.target._schema.name.split("::")[1]
    if name in _INTO:
        return all(n in absent or _is_zero(n) for n in _values(name, node.args))
    if name in ("div", "masked_fill", "constant_pad_nd"):
        filled = node.args[2] if name != "div" and len(node.args) > 2 else 0
        return node.args[0] in absent and _is_zero(filled)
    return name in _LINEAR or "backward" in name


def _values(name: str, args: Sequence[Any]) -> list[Any]:
    """The arguments of which elements are taken: not the masks and indices."""
    if name == "where":
        return list(args[1:3])
    return [args[0], args[{"index_put": 2, "select_scatter": 1, "slice_scatter": 1}.get(name, 3)]]


def _is_zero(value: Any) -> bool:
    if not isinstance(value, fx.Node):
        return not isinstance(value, bool) and isinstance(value, (int, float, complex)) and value == 0
    if value.target in (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default):
        return True
    if value.target in (aten.full.default, aten.full_like.default):
        return _is_zero(value.args[1])
    return value.target is aten.scalar_tensor.default and _is_zero(value.args[0])


def _summand(node: fx.Node, absent: set[fx.Node], depends: set[fx.Node]) -> fx.Node | None:
    """Of a sum of two gradients, one of which is undefined, the other; None where it is no such sum."""
    if node.target is not aten.add.Tensor or len(node.args) < 2:
        return None
    first, second = node.args[:2]
    if second in absent:
        other = first
    elif node.kwargs.get("alpha", 1) == 1:
        other = second
    else:
        return None
    if not isinstance(other, fx.Node) or other not in depends:
        return None
    have, want = other.meta.get("val"), node.meta.get("val")
    if not isinstance(have, torch.Tensor) or not isinstance(want, torch.Tensor):
        return None
    return other if have.dtype == want.dtype and have.shape == want.shape else None
