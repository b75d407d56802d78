"""What a portable op is: found in its folder, no wall to a capture, and one node where a kernel was chosen."""

import inspect
import json
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import portable as pt
from portable import ops
from portable.errors import RegistrationError
from portable.ops._op import PortableOp, choosing, chosen


def graph_of(function, *args, **options):
    """The graph that Dynamo captures of a call."""
    captured = []

    def backend(gm, inputs):
        captured.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True, **options)(*args)
    (graph,) = captured
    return graph


def described(graph):
    """The graph's nodes by their position, without the names that tell where a value was read."""
    position = {n: i for i, n in enumerate(graph.nodes)}
    rows = []
    for n in graph.nodes:
        args, kwargs = torch.fx.node.map_arg((n.args, n.kwargs), lambda x: f"%{position[x]}")
        rows.append((n.op, "" if n.op == "placeholder" else n.target, str(args), str(kwargs)))
    return rows


def test_the_folder_is_the_list_of_ops():
    folder = Path(ops.__file__).parent
    assert ops.names() == tuple(sorted(p.stem for p in folder.glob("[!_]*.py")))
    assert set(ops.names()) <= set(dir(ops))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'; the ops are attention, "):
        ops.nonsense  # noqa: B018


@pytest.mark.parametrize("name", ops.names())
def test_the_schema_is_the_signature_of_the_reference(name):
    op = getattr(ops, name)
    schema = torch._C.parse_schema(f"portable::{name}{op.schema}")
    assert op.overload._schema == schema
    wanted = {a.name: a.default_value if a.has_default_value() else inspect.Parameter.empty for a in schema.arguments}
    assert {p.name: p.default for p in inspect.signature(op).parameters.values()} == wanted
    assert op.name == name
    assert op.__doc__ == op.reference.__doc__
    assert all(part in op.__doc__ for part in ("Args:", "Returns:", "Raises:"))


def test_importing_an_op_s_file_by_its_path_leaves_the_op_callable():
    code = """
import json, sys, torch
import portable.ops.rms_norm
import portable as pt
before = hasattr(torch.ops.portable, "rms_norm")
out = pt.ops.rms_norm(torch.ones(1, 2)).tolist()
loaded = sorted(m for m in sys.modules if m.startswith("portable.ops.") and m[13] != "_")
print(json.dumps({"out": out, "registered": before or hasattr(torch.ops.portable, "rms_norm"),
                  "loaded": loaded, "dynamo": "torch._dynamo" in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["out"] == [pytest.approx([1.0, 1.0])]
    assert (result["registered"], result["dynamo"]) == (False, False)
    assert result["loaded"] == ["portable.ops.rms_norm"]


@pytest.mark.parametrize("name", ops.names())
@pytest.mark.parametrize("dynamic", [False, True])
def test_with_nothing_chosen_the_graph_is_the_reference_s(name, dynamic):
    op = getattr(ops, name)
    reference = op.reference
    args, kwargs = next(iter(op.samples()))
    got = graph_of(lambda *a: getattr(pt.ops, name)(*a, **kwargs), *args, dynamic=dynamic)
    want = graph_of(lambda *a: reference(*a, **kwargs), *args, dynamic=dynamic)
    assert described(got) == described(want)


def block(x, w):
    return pt.ops.swiglu(pt.ops.rms_norm(x, w), x).relu()


def test_a_chosen_op_is_one_node_and_the_others_are_not():
    with choosing({"rms_norm"}):
        graph = graph_of(block, torch.ones(2, 4), torch.ones(4))
    targets = [n.target for n in graph.nodes if n.op == "call_function"]
    assert targets[0] is ops.rms_norm.overload
    assert ops.swiglu.overload not in targets


def test_what_was_chosen_is_of_this_thread_alone_and_ends_with_its_block():
    seen = []
    with choosing({"rms_norm"}):
        other = threading.Thread(target=lambda: seen.append(chosen("rms_norm")))
        other.start()
        other.join()
        seen.append(chosen("rms_norm"))
        with choosing(()):
            seen.append(chosen("rms_norm"))
    assert [*seen, chosen("rms_norm")] == [False, True, False, False]


def test_choosing_an_unknown_op_raises():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"), choosing({"nonsense"}):
        pass


def test_the_choice_leaves_no_guard():
    compiled = torch.compile(lambda x: pt.ops.rms_norm(x), backend="eager", fullgraph=True)
    x = torch.ones(2, 4)
    with choosing({"rms_norm"}):
        compiled(x)
    with torch.compiler.set_stance("fail_on_recompile"):
        compiled(x)


@pytest.mark.parametrize("name", ops.names())
def test_a_chosen_op_without_a_kernel_runs_its_reference_on_xla(name):
    op = getattr(ops, name)
    args, kwargs = next(iter(op.samples()))
    compiled = pt.compile(lambda *a: getattr(pt.ops, name)(*a, **kwargs), backend="xla", fullgraph=True)
    with choosing({name}):
        got = compiled(*args)
    torch.testing.assert_close(got, op(*args, **kwargs), rtol=1e-5, atol=1e-5)


def test_the_node_gives_second_derivatives():
    x, w = torch.randn(2, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    inputs = (x.requires_grad_(), w.requires_grad_())
    assert torch.autograd.gradgradcheck(lambda x, w: ops.rms_norm.overload(x, w, 1e-6), inputs)


def test_a_chosen_op_inside_a_transform_is_its_reference():
    x, w = torch.randn(3, 2, 4), torch.ones(4)
    slope = torch.func.grad(lambda x, w: ops.rms_norm(x, w).square().sum())
    wanted = torch.vmap(slope, (0, None))(x, w)
    with choosing({"rms_norm"}):
        torch.testing.assert_close(torch.vmap(slope, (0, None))(x, w), wanted)
        graph = graph_of(lambda x, w: torch.vmap(ops.rms_norm, (0, None))(x, w), x, w)
    assert ops.rms_norm.overload not in [n.target for n in graph.nodes]


def test_gradients_flow_through_vmap_of_the_node():
    x, w = torch.randn(3, 2, 4, requires_grad=True), torch.randn(4)
    (got,) = torch.autograd.grad(torch.vmap(ops.rms_norm.overload, (0, None))(x, w).square().sum(), x)
    (want,) = torch.autograd.grad(ops.rms_norm(x, w).square().sum(), x)
    torch.testing.assert_close(got, want)


def test_one_tensor_given_twice_gets_both_gradients():
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(ops.swiglu.overload(x, x).sum(), x)
    (want,) = torch.autograd.grad(ops.swiglu(x, x).sum(), x)
    torch.testing.assert_close(got, want)


def test_fused_linear_cross_entropy_never_holds_the_logits():
    tokens, width, classes = 64, 8, 128
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                largest = max(largest, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    for form in (ops.fused_linear_cross_entropy.reference, ops.fused_linear_cross_entropy.overload):
        x, w = torch.randn(tokens, width, requires_grad=True), torch.randn(classes, width, requires_grad=True)
        with Watch():
            form(x, w, torch.zeros(tokens, dtype=torch.int64)).backward()
    assert largest <= max(x.numel(), w.numel())


def test_fused_linear_cross_entropy_takes_symbolic_token_counts():
    def loss(x, w, t):
        return pt.ops.fused_linear_cross_entropy(x, w, t)

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=True)
    w = torch.randn(12, 4)
    for tokens in (9, 10, 17):
        x, t = torch.randn(tokens, 4), torch.arange(tokens) % 12
        torch.testing.assert_close(compiled(x, w, t), torch.nn.functional.cross_entropy(x @ w.T, t))


def test_equal_logits_go_to_the_lower_expert():
    _, indices = ops.moe_route(torch.zeros(2, 5), 3)
    assert indices.tolist() == [[0, 1, 2]] * 2


def test_dispatch_and_combine_are_inverse():
    x, logits = torch.randn(7, 4), torch.randn(7, 5)
    weights, indices = ops.moe_route(logits, 2)
    rows, order, counts = ops.moe_dispatch(x, indices, 5)
    assert counts.sum() == 14
    assert torch.equal(indices.flatten()[order], torch.arange(5).repeat_interleave(counts))
    torch.testing.assert_close(ops.moe_combine(rows, order, weights), x)


def test_an_op_pickles_by_its_name():
    assert pickle.loads(pickle.dumps(ops.swiglu)) is ops.swiglu


def test_a_file_that_lacks_a_part_is_refused_by_name(tmp_path):
    module = type(ops)("portable.ops.half_done")
    with pytest.raises(RegistrationError, match="half_done has no half_done, SCHEMA, samples"):
        PortableOp.of("half_done", module)


def test_the_reference_on_fake_tensors_allocates_nothing():
    with FakeTensorMode():
        out = ops.attention(*(torch.empty(64, 64, 4096, 128, dtype=torch.bfloat16) for _ in range(3)), is_causal=True)
    assert out.shape == (64, 64, 4096, 128)
