"""The conformance kit finds what is wrong with a backend: each test here breaks one thing, and the kit's own test of it
fails."""

import time

import pytest
import torch

import portable as pt
from portable import backends
from portable.backends.base import Capabilities, MemoryStats, State
from portable.backends.cpu import Cpu
from portable.testing import BackendConformance, comparison, conformance


def outputs(change, kinds=torch.Tensor):
    """A `compile` whose programs give other results."""

    def compile(self, gm, example_inputs, graph, record):
        program = Cpu.compile(self, gm, example_inputs, graph, record)

        def run(*args):
            return torch.utils._pytree.tree_map_only(kinds, change, program(*args))

        return run

    return compile


def deaf(self, gm, example_inputs, graph, record):
    """Programs that work on copies: what they write to their arguments is lost."""
    program = Cpu.compile(self, gm, example_inputs, graph, record)
    return lambda *args: program(*[a.detach().clone() if isinstance(a, torch.Tensor) else a for a in args])


def seeded(self, gm, example_inputs, graph, record):
    program = Cpu.compile(self, gm, example_inputs, graph, record)

    def run(*args):
        torch.manual_seed(0)
        return program(*args)

    return run


def unaware_of_sizes(self, gm, example_inputs, graph, record):
    """Programs that remember the first batch."""
    program, first = Cpu.compile(self, gm, example_inputs, graph, record), []

    def run(*args):
        first[:] = first or [args]
        return program(*first[0])

    return run


def one_buffer(self, gm, example_inputs, graph, record):
    """Programs that write every result where the last one was."""
    program, kept = Cpu.compile(self, gm, example_inputs, graph, record), []

    def run(*args):
        results = program(*args)
        kept[:] = kept or [r.detach().clone() for r in results]
        return [k.copy_(r) for k, r in zip(kept, results, strict=True)]

    return run


def shared(self, gm, example_inputs, graph, record):
    """Programs that keep their arguments where another thread's call finds them."""
    program, kept = Cpu.compile(self, gm, example_inputs, graph, record), []

    def run(*args):
        kept[:] = args
        time.sleep(1e-3)
        return program(*kept)

    return run


def silent(self, gm, example_inputs, graph, record):
    return gm.forward


def off_by_a_little(x):
    return x * 1.001 if x.is_floating_point() else x


def without_nan(x):
    return x.nan_to_num() if x.is_floating_point() else x


def saturated(x):
    return x.clamp(-100, 100) if x.dtype == torch.int32 else x


def as_double(x):
    return x.double() if x.is_floating_point() else x


def to_meta(x):
    return x.to("meta")


def program(family, dtype, name):
    return {"program": (family, dtype, name)}


F32 = torch.float32
PROGRAM = "test_a_program_computes_what_eager_does"
TRAINING = "test_training_leaves_the_parameters_and_buffers_that_eager_leaves"
HARDWARE = "test_its_hardware_has_the_four_parts_of_a_fingerprint"
CAPABILITIES = "test_its_capabilities_are_well_formed"
SECONDS = "test_seconds_are_not_less_than_the_work_takes"
SEED = "test_a_seed_reproduces_random_numbers_and_two_calls_differ"
# By fault: the test that has to find it, the methods that are broken, the test's arguments.
BROKEN = {
    "error": (PROGRAM, {"compile": outputs(off_by_a_little)}, program("elementwise", F32, "erf")),
    "nan": (PROGRAM, {"compile": outputs(without_nan)}, program("edge", F32, "nan-inf-arithmetic")),
    "overflow": (PROGRAM, {"compile": outputs(saturated)}, program("integer", torch.int32, "wraps-around")),
    "dtype": (PROGRAM, {"compile": outputs(as_double)}, program("product", F32, "matmul")),
    "write": (PROGRAM, {"compile": deaf}, program("mutation", F32, "argument")),
    "gradient": (
        "test_gradients_are_those_of_eager",
        {"compile": outputs(off_by_a_little)},
        {"differentiable": ("edge", F32, "transposed")},
    ),
    "training": (TRAINING, {"compile": outputs(off_by_a_little)}, {"model": "perceptron", "optimiser": "sgd"}),
    "model": (
        "test_a_model_in_eval_mode_computes_what_eager_does",
        {"compile": outputs(off_by_a_little)},
        {"model": "transformer"},
    ),
    "statistics": ("test_running_statistics_are_written_back", {"compile": deaf}, {}),
    "tolerance": (
        "test_it_says_what_error_is_correct_for_each_float_dtype",
        {"tolerances": lambda self: {F32: 1e-5}},
        {},
    ),
    "hardware": (HARDWARE, {"hardware": lambda self: {"device": "A1"}}, {}),
    "empty hardware": (
        HARDWARE,
        {"hardware": lambda self: dict.fromkeys(("device", "architecture", "driver", "runtime"), " ")},
        {},
    ),
    "capabilities": (
        CAPABILITIES,
        {"capabilities": lambda self: Capabilities(frozenset({F32}), {torch.float64: "slow"})},
        {},
    ),
    "multiples": (
        CAPABILITIES,
        {"capabilities": lambda self: Capabilities(frozenset({F32}), multiples={"matmul": 0})},
        {},
    ),
    "name": ("test_its_name_is_what_users_write", {"__str__": lambda self: "other"}, {}),
    "label": ("test_its_name_is_what_users_write", {"label": lambda self: "cuda"}, {}),
    "variant": (
        "test_an_unknown_variant_is_refused_with_the_legal_ones",
        {"__init__": lambda self, variant="": setattr(self, "variant", "")},
        {},
    ),
    "device": ("test_tensors_live_on_its_device", {"device": lambda self: torch.device("meta")}, {}),
    "no time": (SECONDS, {"seconds": lambda self, function: function() or 0.001}, {}),
    "milliseconds": (SECONDS, {"seconds": lambda self, function: 1000 * Cpu.seconds(self, function)}, {}),
    "launch": ("test_seconds_wait_for_the_device", {"seconds": lambda self, function: 1e-7}, {}),
    "memory": ("test_memory_figures_are_consistent", {"memory_stats": lambda self: MemoryStats(10, 5, None)}, {}),
    "total": ("test_memory_figures_are_consistent", {"memory_stats": lambda self: MemoryStats(10, 10, 5)}, {}),
    "seed": (SEED, {"manual_seed": lambda self, seed: None}, {}),
    "same draw": (SEED, {"compile": seeded}, {}),
    "dropout": ("test_dropout_scales_what_it_keeps", {"compile": outputs(torch.ones_like)}, {}),
    "place": ("test_results_and_gradients_are_on_its_device", {"compile": outputs(to_meta)}, {}),
    "sizes": ("test_sizes_may_change_from_call_to_call", {"compile": unaware_of_sizes}, {}),
    "buffer": ("test_a_later_call_leaves_earlier_results_alone", {"compile": one_buffer}, {}),
    "threads": ("test_one_compiled_function_serves_several_threads", {"compile": shared}, {}),
    "meta": (
        "test_a_tensor_that_it_does_not_take_is_refused_by_name",
        {"check_input": lambda self, x, name: None},
        {"kind": "meta"},
    ),
    "explain": ("test_explain_names_the_backend_its_path_and_what_ran", {"compile": silent}, {}),
}


class Eager(Cpu):
    """`cpu:eager` under another name."""

    name = "acme"
    variants = ()

    def __init__(self, variant=""):
        super().__init__(variant)
        self.variant = "eager"

    def __str__(self):
        return "acme"


@pytest.fixture
def install(monkeypatch):
    """Install a backend `acme` with the methods given."""

    def install(changes):
        plugin = backends.Plugin("acme", "acme 1.0", type("Acme", (Eager,), changes))
        monkeypatch.setattr(backends, "plugins", lambda: {"acme": plugin})
        for cached in (comparison.results, comparison.gradients):
            cached.cache_clear()

    return install


class Acme(BackendConformance):
    backend = "acme"


def run(test, arguments):
    kit = Acme()
    getattr(kit, test)(here=backends.get("acme"), **arguments)


@pytest.mark.parametrize("fault", BROKEN)
def test_a_fault_is_found(install, fault):
    test, changes, arguments = BROKEN[fault]
    install(changes)
    with pytest.raises((pytest.fail.Exception, RuntimeError, NotImplementedError)) as caught:
        run(test, arguments)
    assert caught.type is pytest.fail.Exception or fault in ("device", "meta", "place")  # torch itself may refuse


@pytest.mark.parametrize("test", sorted({test for test, _, _ in BROKEN.values()}))
def test_nothing_is_found_where_nothing_is_wrong(install, test):
    install({})
    run(test, next(arguments for other, _, arguments in BROKEN.values() if other == test))


def test_the_dtypes_that_are_tested_are_those_of_the_capabilities(install):
    install({"capabilities": lambda self: Capabilities(frozenset({F32, torch.int64}))})
    assert comparison.dtypes_of("acme", "product") == [F32]
    assert comparison.dtypes_of("acme", "integer") == [torch.int64]


def test_moving_tensors_keeps_their_strides_and_offset():
    x = torch.arange(24.0).reshape(4, 6)[1:, ::2].t()
    (moved,) = comparison.moved((x,), torch.device("cpu"))
    assert (moved.stride(), moved.storage_offset()) == (x.stride(), x.storage_offset())
    assert torch.equal(moved, x)
    assert moved.data_ptr() != x.data_ptr()


def test_a_probe_that_initialises_a_device_is_found(monkeypatch):
    said = {"ready": True, "reason": "ready", "touched": ["acme"], "answer": [2, 2], "backend": "acme", "compiled": 1}
    with pytest.raises(pytest.fail.Exception, match="initialised acme"):
        Acme().test_its_probe_initialises_no_device(said)
    Acme().test_its_probe_initialises_no_device({**said, "touched": []})


def test_one_program_that_is_refused_hides_no_other(install):
    def no_erf(self, gm, example_inputs, graph, record):
        if any("erf" in str(node.target) for node in gm.graph.nodes):
            raise NotImplementedError("erf")
        return Cpu.compile(self, gm, example_inputs, graph, record)

    install({"compile": no_erf})
    found = comparison.results("acme", "elementwise", F32)
    assert [name for name, problem in found.items() if problem] == ["erf"]
    assert "erf" in found["erf"]


def test_a_backend_that_is_not_ready_fails_with_its_reason(install):
    install({"probe": classmethod(lambda cls: State(False, "no device", "buy one"))})
    with pytest.raises(pt.errors.BackendUnavailableError, match="no device"):
        run(HARDWARE, {})


def test_a_fresh_process_says_whether_a_probe_touched_jax():
    said, failure = conformance._in_a_fresh_process("cpu:eager")
    assert not failure
    assert (said["backend"], said["touched"], said["answer"]) == ("cpu:eager", [], [2, 2])
