"""graphs=: recorded launches, results that outlive the next call, a limit on sizes, and a reason for every skip."""

import logging
from dataclasses import replace

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters
from torch._inductor import compile_fx, config, cudagraph_trees, cudagraph_utils
from torch._inductor.output_code import CompiledFxGraph

import portable as pt
from portable import backends
from portable.backends import graphs
from portable.backends.cpu import Cpu
from portable.errors import ConfigError, GraphCaptureError
from portable.explain import GraphRecord, Record


def double(x):
    return 2 * x


@pytest.mark.parametrize("value", ["on", "", object()])
def test_an_illegal_policy_names_the_legal_ones(value):
    if value == "":
        assert pt.compile(double, backend="cpu", graphs=value) is not None  # as for any other option: unset
        return
    with pytest.raises(ConfigError, match="graphs=.* is not legal(.|\n)*auto, require, off"):
        pt.compile(double, backend="cpu", graphs=value)


@pytest.mark.parametrize("name", ["cpu", "cpu:eager", "xla"])
def test_a_backend_without_launches_refuses_require_with_the_reason_and_notes_nothing_else(name):
    with pytest.raises(ConfigError, match=f"graphs='require', and backend {name} records none: .* no launches"):
        pt.compile(double, backend=name, graphs="require")
    for policy in ("auto", "off"):
        compiled = pt.compile(double, backend=name, graphs=policy)
        compiled(torch.ones(2))
        assert pt.explain(compiled, show=False).notes == []


def test_torch_compile_takes_the_policy_as_an_option():
    with pytest.raises(BackendCompilerFailed, match="graphs='no' is not legal"):
        torch.compile(double, backend="portable", options={"backend": "cpu", "graphs": "no"})(torch.ones(2))
    torch._dynamo.reset()
    compiled = torch.compile(double, backend="portable", options={"backend": "cpu", "graphs": "off"})
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))


@pytest.fixture
def recording(monkeypatch):
    """A host backend that says its launches can be recorded: Inductor looks at the graph, and says why it does not."""

    class Recording(Cpu):
        name = "recording"

        def capabilities(self):
            return replace(super().capabilities(), graphs=True)

    monkeypatch.setattr(backends, "plugins", lambda: {"recording": backends.Plugin("recording", "it 1", Recording)})
    return "recording"


def test_inductors_reasons_are_in_the_record_forward_and_backward(recording):
    model = torch.nn.Linear(4, 4)
    compiled = pt.compile(model, backend=recording)
    compiled(torch.ones(2, 4)).sum().backward()
    explained = pt.explain(compiled, show=False)
    assert [n.reason for n in explained.notes] == [
        "graph 0 (forward) is not recorded: it launches nothing on the device",
        "graph 0 (backward) is not recorded: its forward pass is not",
    ]
    assert "graphs: graph 0 (forward) is not recorded" in str(explained)
    assert [n["topic"] for n in explained.to_dict()["notes"]] == ["graphs", "graphs"]


def test_require_raises_inductors_reason(recording):
    compiled = pt.compile(double, backend=recording, graphs="require")
    with pytest.raises(
        GraphCaptureError, match=r"the launches of graph 0 \(inference\) of double are not .*cpu device"
    ):
        compiled(torch.ones(2))


def test_off_asks_inductor_for_nothing(recording):
    before = counters["inductor"]["cudagraph_skips"]
    compiled = pt.compile(double, backend=recording, graphs="off")
    with config.patch({"triton.cudagraphs": True}):  # as TORCHINDUCTOR_CUDAGRAPHS=1 sets it
        compiled(torch.ones(2))
    assert counters["inductor"]["cudagraph_skips"] == before
    assert pt.explain(compiled, show=False).notes == []


def test_a_reason_is_plain_and_has_the_users_line():
    reason = (
        'skipping cudagraphs due to mutated inputs (1 instances). Found from : \n   File "/a/model.py", line 7, in f'
    )
    assert graphs._plainly(reason) == ("mutated inputs (1 instances)", "model.py:7, in f")
    assert graphs._plainly("disabling cudagraphs due to incompatible op aten.nonzero")[0] == (
        "incompatible op aten.nonzero"
    )


def plans(function, *args, grad=False):
    """(the plan, the number of results) of each ATen graph of a function, by kind."""
    from portable import capture

    found = {}

    def compiler(gm, inputs):
        def compile_aten(aten, fakes, kind):
            found[kind] = graphs.Plan.of(aten, kind), len(next(iter(reversed(aten.graph.nodes))).args[0])
            return torch._functorch.aot_autograd.make_boxed_func(aten.forward)

        return capture.aot(gm, inputs, compile_aten)

    torch._dynamo.reset()
    out = torch.compile(function, backend=compiler, dynamic=True)(*args)
    if grad:
        out.sum().backward()
    return found


def test_the_arguments_that_are_sizes_and_the_results_that_callers_keep():
    with torch.no_grad():
        plan, results = plans(lambda x: (x + 1, x.sum(0)), torch.ones(3, 4))["inference"]
    assert len(plan.sizes) == 2
    assert plan.kept == (0, 1) and results == 2
    assert plan.incompatible == ""


def test_what_only_the_backward_pass_reads_is_not_copied():
    x = torch.ones(3, 4, requires_grad=True)
    found = plans(lambda x: (x.sin() * x.cos()).exp(), x, grad=True)
    plan, results = found["forward"]
    assert plan.kept == (0,)
    assert results > 1
    assert len(found["backward"][0].kept) == 1


@pytest.fixture
def replaying():
    """`Recorded` around a function that answers, as a replay does, in the same memory each time."""
    record = Record("model", "cuda", "native")
    memory = torch.zeros(4)

    def replay(args):
        n, x = args
        args.clear()
        memory.copy_(2 * x)
        return (memory, n)

    def make(required=False, call=replay):
        watch = graphs.Watch(GraphRecord(0, (), (), "first call", 0.0), record, "inference", required)
        return graphs.Recorded(call, graphs.Plan((0,), (0,), ""), watch)

    return record, make


def test_a_result_outlives_the_next_replay(replaying):
    _, make = replaying
    recorded = make()
    first, _ = recorded([4, torch.ones(4)])
    second, size = recorded([4, torch.full((4,), 3.0)])
    assert first.tolist() == [2.0] * 4
    assert second.tolist() == [6.0] * 4
    assert size == 4


@pytest.mark.parametrize(
    "layout",
    [lambda x: x, lambda x: x.t(), lambda x: x[:, ::2], lambda x: x[:1].expand(4, 4), lambda x: x.unfold(0, 2, 1)],
)
def test_a_copied_result_has_its_strides_and_values(layout):
    x = layout(torch.arange(16.0).reshape(4, 4))
    (own,) = graphs._owned([x], [0])
    assert own.stride() == x.stride()
    assert torch.equal(own, x)
    assert own.data_ptr() != x.data_ptr()


def test_sizes_beyond_the_limit_run_unrecorded_and_the_record_says_so_once(replaying):
    record, make = replaying
    captured = []

    def call(args):
        key = args[0]
        captured.append((key, cudagraph_trees.is_cudagraph_capture_sizes((key,))))
        return [args[1] + key, key]

    recorded = make(call=call)
    for n in [*range(graphs.LIMIT + 2), 0, graphs.LIMIT]:
        assert recorded([n, torch.zeros(4)])[0].tolist() == [n] * 4
    assert [able for _, able in captured] == [True] * graphs.LIMIT + [False, False, True, False]
    (note,) = record.notes
    assert note.reason.endswith("its sizes are beyond the first 8 sets, and each recording holds its memory")
    assert config.triton.cudagraph_capture_sizes is None


def test_a_call_that_inductor_does_not_record_leaves_its_reason(replaying):
    record, make = replaying

    def call(args):
        cudagraph_utils.log_cudagraph_skip_and_bump_counter("skipping cudagraphs due to mutated inputs (1 instances)")
        return [args[1], args[0]]

    recorded = make(call=call)
    recorded([4, torch.zeros(4)])
    assert [n.reason for n in record.notes] == ["graph 0 (inference) is not recorded: mutated inputs (1 instances)"]
    assert not any(isinstance(h, graphs._Listener) for h in cudagraph_utils.cudagraphs_log.handlers)
    with pytest.raises(GraphCaptureError, match="mutated inputs"):
        make(required=True, call=call)([4, torch.zeros(4)])


def test_a_skip_after_the_first_calls_is_noticed_too(replaying):
    record, make = replaying
    count = 0

    def call(args):
        nonlocal count
        count += 1
        if count > graphs.SETTLING:
            cudagraph_utils.log_cudagraph_skip_and_bump_counter("exceeding max re-recording limit")
        return [args[1], args[0]]

    recorded = make(call=call)
    for _ in range(graphs.SETTLING + 1):
        recorded([4, torch.zeros(4)])
    assert [n.reason for n in record.notes] == ["graph 0 (inference) is not recorded: TORCH_LOGS=cudagraphs says why"]


def test_the_listener_hears_only_within_its_context():
    with graphs._reasons() as heard:
        cudagraph_utils.cudagraphs_log.warning("one")
    cudagraph_utils.cudagraphs_log.warning("two")
    assert heard == ["one"]
    assert logging.WARNING == graphs._Listener().level


@pytest.fixture
def replayed(recording, monkeypatch):
    """Inductor's whole way to a recording, on the host: a stand-in for the recording itself answers each call of the
    same sizes in the same memory, as a replay does. Gives the sizes of each recording."""
    recordings = []

    def cudagraphify(model, static_input_idxs=(), *, device_index, stack_traces, is_backward, is_inference, **rest):
        memory = {}

        def run(inputs):
            key = tuple(x for x in inputs if isinstance(x, int))
            results = model(inputs)
            if not cudagraph_trees.is_cudagraph_capture_sizes(key):
                return results
            if key not in memory:
                recordings.append(key)
                memory[key] = results
                return results
            for old, new in zip(memory[key], results, strict=True):
                if isinstance(old, torch.Tensor):
                    old.copy_(new)
            return memory[key]

        return run

    post_compile = CompiledFxGraph.post_compile

    def on_a_device(self, *args):
        self.device_idxs = {0}
        post_compile(self, *args)

    monkeypatch.setattr(cudagraph_utils, "check_lowering_disable_cudagraph", lambda devices: None)
    monkeypatch.setattr(CompiledFxGraph, "post_compile", on_a_device)
    monkeypatch.setattr(compile_fx, "cudagraphify", cudagraphify)
    with config.patch(fx_graph_cache=False):
        yield recordings


def test_results_of_a_recorded_model_outlive_later_calls(replayed):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    compiled = pt.compile(model, backend="recording", graphs="require")
    inputs = [torch.randn(4, 8) for _ in range(5)]
    with torch.no_grad():
        results = [compiled(x) for x in inputs]
        for got, x in zip(results, inputs, strict=True):
            torch.testing.assert_close(got, model(x))
    assert replayed == [()]
    assert pt.explain(compiled, show=False).notes == []


def test_a_recorded_model_trains_as_eager_does(replayed):
    models = []
    for make in (lambda m: m, lambda m: pt.compile(m, backend="recording", graphs="require")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
        run, optimiser = make(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(4):
            for _ in range(2):  # gradients accumulate over two passes
                run(torch.randn(4, 8)).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad()
        models.append(model)
    assert replayed == [(), ()]
    for mine, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, eager)


def test_a_model_of_many_sizes_is_recorded_for_the_first_and_right_for_all(replayed):
    with config.patch(graph_partition=False):  # which cuts out all that runs on the host
        compiled = pt.compile(lambda x: (x * 2).relu().sum(0), backend="recording", dynamic=True)
        with torch.no_grad():
            inputs = [torch.randn(n, 5) for n in [*range(2, 14)] * 2]
            results = [compiled(x) for x in inputs]
    for got, x in zip(results, inputs, strict=True):
        torch.testing.assert_close(got, (x * 2).relu().sum(0))
    assert len(replayed) == graphs.LIMIT
    assert len(pt.explain(compiled, show=False).notes) == 1


needs_gpu = pytest.mark.hardware("rocm" if torch.version.hip else "cuda")


@needs_gpu
def test_on_a_gpu_results_outlive_later_calls_and_nothing_is_skipped():
    backend = "rocm" if torch.version.hip else "cuda"
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64)).to("cuda")
    compiled = pt.compile(model, backend=backend, graphs="require")
    inputs = [torch.randn(8, 64, device="cuda") for _ in range(6)]
    with torch.no_grad():
        got = [compiled(x) for x in inputs]
        for y, x in zip(got, inputs, strict=True):
            torch.testing.assert_close(y, model(x), atol=1e-4, rtol=1e-4)
    assert pt.explain(compiled, show=False).notes == []


@needs_gpu
def test_on_a_gpu_training_with_recorded_launches_learns_as_eager_does():
    backend = "rocm" if torch.version.hip else "cuda"
    models = []
    for make in (lambda m: m, lambda m: pt.compile(m, backend=backend, graphs="require")):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to("cuda")
        run, optimiser = make(model), torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(6):
            x = torch.randn(8, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(step))
            for _ in range(2):  # gradients accumulate over two passes
                run(x).square().mean().backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=step % 2 == 0)
        models.append(model)
    for mine, eager in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(mine, eager, atol=1e-4, rtol=1e-4)


@needs_gpu
def test_on_a_gpu_sizes_beyond_the_limit_are_right_and_unrecorded():
    backend = "rocm" if torch.version.hip else "cuda"
    compiled = pt.compile(lambda x: (x * 2).relu().sum(0), backend=backend, dynamic=True)
    with torch.no_grad():
        for n in [*range(2, 16), *range(2, 16), *range(2, 16)]:
            x = torch.randn(n, 32, device="cuda")
            torch.testing.assert_close(compiled(x), (x * 2).relu().sum(0))
    (note,) = pt.explain(compiled, show=False).notes
    assert "beyond the first 8" in note.reason
