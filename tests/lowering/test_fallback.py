"""Fallback: an op without an exact lowering runs as torch's own kernel inside the program, and never in silence."""

import inspect
import json
import warnings

import jax.numpy as jnp
import pytest
import torch
from jax import lax
from torch._library.effects import EffectType
from torch.nn import functional as F

import portable as pt
from portable.errors import BackendUnavailableError, ConfigError, ProgramError, UnsupportedOpError
from portable.explain import Fallback
from portable.kernels import aten, native_code
from portable.lowering import fallback, registry
from portable.lowering.context import Context, Refused
from portable.lowering.program import Program
from portable.lowering.registry import lower
from portable.testing import lowered

A = torch.ops.aten
L = torch.linalg
RISING = "its rounding in less than float64"


def symmetric(n=5, dtype=torch.float32):
    x = torch.randn(2, n, n, dtype=dtype)
    return x + x.mT


def same(got, want):
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def exponential(x):
    return torch.matrix_exp(x) + 1


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("PORTABLE_FALLBACK", raising=False)
    torch._dynamo.reset()


@pytest.fixture
def scratch():
    """Defines ops of this test alone on the CPU: ``scratch(schema, function)`` gives the overload."""
    registry.load()
    before = dict(registry.RULES)
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:

        def define(schema, function, meta=torch.empty_like):
            library.define(schema)
            name = schema.partition("(")[0]
            library.impl(name, function, "CPU")
            library.impl(name, meta, "Meta")
            return getattr(torch.ops.portable_test, name).default

        yield define
    registry.RULES.clear()
    registry.RULES.update(before)


@pytest.fixture
def compiled():
    """What is compiled without a word; returns it and the explanation after a call."""

    def run(function, *args, mode="allow"):
        model = pt.compile(function, backend="xla", fallback=mode)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = model(*args)
        return result, pt.explain(model, show=False)

    return run


# Values: eager's, bit for bit.


TIES = (torch.arange(300) % 7).reshape(60, 5)
LABELS = torch.tensor([[1, 2, 3], [2, 2, 4]])
SCORES = torch.randn(12, 2, 5).log_softmax(-1)
LENGTHS = [12, 10], [3, 2]
MASK = torch.tensor([True, False, True, True])
EXACT = {
    "subnormal": (lambda x: A._logcumsumexp(x, 0), torch.eye(4) * 1e-40),
    "matrix_exp, float32": (torch.matrix_exp, torch.randn(3, 6, 6)),
    "matrix_exp, not contiguous": (lambda x: torch.matrix_exp(x.mT), torch.randn(3, 6, 6)),
    "matrix_exp, bfloat16": (torch.matrix_exp, torch.randn(3, 3).bfloat16()),
    "matrix_exp, NaN": (torch.matrix_exp, torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]])),
    "unstable sort, bfloat16": (lambda x: x.sort(dim=0), TIES.bfloat16()),
    "unstable argsort, int8": (lambda x: x.argsort(dim=0, descending=True), TIES.to(torch.int8)),
    "mode": (lambda x: x.mode(dim=0), TIES.float()),
    "images of bytes": (
        lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
        torch.randint(0, 255, (1, 2, 5, 5), dtype=torch.uint8),
    ),
    "twice": (lambda x: torch.matrix_exp(torch.matrix_exp(x) / 9), torch.randn(4, 4)),
}


@pytest.mark.parametrize("name", EXACT)
def test_the_answer_is_eagers_to_the_bit(name):
    function, *args = EXACT[name]
    with pytest.raises(UnsupportedOpError):
        lowered(function, *args)
    same(lowered(function, *args, fallback="allow"), function(*args))


def test_gradients_fall_back_like_everything_else():
    x, g = torch.randn(4, 4), torch.randn(4, 4)
    mine, eagers = (x.clone().requires_grad_() for _ in range(2))
    model = pt.compile(lambda x: torch.matrix_exp(x), backend="xla", fallback="allow")
    model(mine).backward(g)
    torch.matrix_exp(eagers).backward(g)
    same(mine.grad, eagers.grad)
    explanation = pt.explain(model, show=False)
    assert explanation.ops["aten.linalg_matrix_exp.default"] == {"aten fallback": 2}
    assert [c.kind for c in explanation.compiles] == ["forward", "backward"]


def test_autograd_inside_the_function_falls_back_too():
    def gradient(x):
        return torch.autograd.grad(torch.matrix_exp(x).sum(), x)[0]

    x = torch.randn(4, 4, requires_grad=True)
    same(lowered(gradient, x, fallback="allow"), gradient(x))


def test_an_op_of_another_library_falls_back_to_its_kernel_for_the_host(scratch):
    twice = scratch("twice(Tensor x) -> Tensor", lambda x: x * 2)
    same(lowered(lambda x: twice(x) + 1, torch.ones(3), fallback="allow"), torch.full((3,), 3.0))


def test_several_results_and_lists_of_tensors_come_back(scratch):
    pair = scratch("pair(Tensor x) -> (Tensor, Tensor)", lambda x: (x + 1, x.sum(0)), lambda x: (x + 1, x.sum(0)))
    parts = scratch("parts(Tensor[] x) -> Tensor[]", lambda x: [t * 2 for t in x], lambda x: [t * 2 for t in x])
    x = torch.arange(6.0).reshape(2, 3)
    same(lowered(lambda x: pair(x), x, fallback="allow"), (x + 1, x.sum(0)))
    same(lowered(lambda x: parts([x, x[0]]), x, fallback="allow"), [x * 2, x[0] * 2])


def test_a_result_that_torch_leaves_undefined_is_none(scratch):
    half = scratch("half(Tensor x) -> (Tensor, Tensor)", lambda x: (x / 2, None), lambda x: (x / 2, None))
    got = lowered(lambda x: half(x)[0], torch.ones(3), fallback="allow")
    same(got, torch.full((3,), 0.5))


# The modes.


def test_by_default_it_warns_once_an_op_with_the_reason_and_the_users_line():
    def readout(x):
        x = torch.matrix_exp(x)
        return torch.matrix_exp(x)

    model = pt.compile(readout, backend="xla")
    with pytest.warns(UserWarning, match=r"linalg_matrix_exp.default \(test_fallback.py:\d+, in readout\)") as caught:
        model(torch.eye(3))
        model(torch.eye(3))
        model(torch.eye(4))
    (message,) = [str(w.message) for w in caught if "matrix_exp" in str(w.message)]
    assert RISING in message
    assert "PORTABLE_FALLBACK" in message


def test_the_warning_stands_at_the_users_call():
    model = pt.compile(exponential, backend="xla")
    with pytest.warns(UserWarning, match="torch's own kernel") as caught:
        model(torch.eye(3))
    assert (caught[0].filename, caught[0].lineno) == (__file__, inspect.currentframe().f_lineno - 1)


def test_lowered_warns_at_the_users_call():
    with pytest.warns(UserWarning, match="torch's own kernel") as caught:
        lowered(exponential, torch.eye(3), fallback="warn")
    assert caught[0].filename == __file__


def test_the_refusal_names_the_modes_that_would_run_it():
    with pytest.raises(UnsupportedOpError) as caught:
        lowered(exponential, torch.eye(3), fallback="error")
    assert "fallback='warn' or 'allow'" in caught.value.remedy


def test_lowered_warns_too_where_it_is_asked_to():
    with pytest.warns(UserWarning, match="aten._logcumsumexp.default runs as torch's own kernel"):
        lowered(lambda x: A._logcumsumexp(x, 0), symmetric(), fallback="warn")


def test_allow_says_nothing_and_counts(compiled):
    x = torch.randn(3, 3)
    result, explanation = compiled(exponential, x)
    same(result, exponential(x))
    assert explanation.ops["aten.linalg_matrix_exp.default"] == {"aten fallback": 1}
    assert [(f.op, f.count) for f in explanation.fallbacks] == [("aten.linalg_matrix_exp.default", 1)]


def test_error_refuses_and_names_all_ops_at_once():
    def both(x):
        return torch.matrix_exp(x) + A._logcumsumexp(x, 0)

    for run in (pt.compile(both, backend="xla", fallback="error"), lambda x: lowered(both, x)):
        with pytest.raises(UnsupportedOpError) as caught:
            run(torch.eye(3))
        assert [o.op for o in caught.value.ops] == [
            "aten.linalg_matrix_exp.default",
            "aten._logcumsumexp.default",
        ]
        assert "fall back" not in str(caught.value)


def test_the_argument_beats_the_environment(monkeypatch):
    x = torch.eye(3)
    monkeypatch.setenv("PORTABLE_FALLBACK", "error")
    with pytest.raises(UnsupportedOpError):
        pt.compile(exponential, backend="xla")(x)
    with pytest.raises(UnsupportedOpError):
        lowered(exponential, x, fallback=None)
    same(pt.compile(exponential, backend="xla", fallback="allow")(x), exponential(x))
    monkeypatch.setenv("PORTABLE_FALLBACK", "allow")
    same(lowered(exponential, x, fallback=None), exponential(x))
    with pytest.raises(UnsupportedOpError):
        pt.compile(exponential, backend="xla", fallback="error")(x)
    with pytest.raises(UnsupportedOpError):
        lowered(exponential, x)
    with pytest.raises(ConfigError, match="warn, allow, error"):
        lowered(exponential, x, fallback="maybe")


def test_torch_compile_goes_by_the_environment(monkeypatch):
    monkeypatch.setenv("PORTABLE_BACKEND", "xla")
    with pytest.warns(UserWarning, match="torch's own kernel"):
        same(torch.compile(exponential, backend=pt.api.dynamo_backend)(torch.eye(3)), exponential(torch.eye(3)))
    torch._dynamo.reset()
    monkeypatch.setenv("PORTABLE_FALLBACK", "error")
    with pytest.raises(Exception, match="has no exact lowering"):
        torch.compile(exponential, backend=pt.api.dynamo_backend)(torch.eye(3))


@pytest.mark.parametrize("first", ["allow", "error"])
def test_models_of_one_function_with_different_modes_share_no_program(first):
    models = {mode: pt.compile(exponential, backend="xla", fallback=mode) for mode in ("allow", "error")}
    order = [first, *(mode for mode in models if mode != first)] * 2
    for mode in order:
        if mode == "allow":
            same(models[mode](torch.eye(3)), exponential(torch.eye(3)))
        else:
            with pytest.raises(UnsupportedOpError):
                models[mode](torch.eye(3))


def test_a_copy_of_a_compiled_function_keeps_its_mode():
    function, (target, options) = pt.compile(exponential, backend="xla", fallback="error").__reduce__()
    with pytest.raises(UnsupportedOpError):
        function(target, options)(torch.eye(3))


# What explain says.


def test_explain_lists_each_fallback_with_its_line_and_count(compiled):
    def model(x):
        for _ in range(2):
            x = torch.matrix_exp(x)
        return A._logcumsumexp(x, 0)

    _, explanation = compiled(model, torch.eye(3))
    exponentials, factor = explanation.fallbacks
    assert (exponentials.op, exponentials.count) == ("aten.linalg_matrix_exp.default", 2)
    assert (factor.op, factor.reason) == ("aten._logcumsumexp.default", "no lowering and no decomposition")
    assert all("test_fallback.py" in f.where and f.where.endswith("in model") for f in explanation.fallbacks)
    assert json.loads(json.dumps(explanation.to_dict()))["fallbacks"][0]["count"] == 2
    text = str(explanation)
    assert "fallback: aten.linalg_matrix_exp.default" in text
    assert "aten fallback" in text


def test_sizes_that_alone_fall_back_are_told_of_when_they_come():
    model = pt.compile(lambda x: x.sort(), backend="xla", dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(TIES[:7, 0].bfloat16())
    assert pt.explain(model, show=False).fallbacks == []
    with pytest.warns(UserWarning, match=r"aten.sort.default .*equal elements"):
        model(TIES[:, 0].bfloat16())
    explanation = pt.explain(model, show=False)
    assert [(f.op, f.count) for f in explanation.fallbacks] == [("aten.sort.default", 1)]
    assert explanation.ops["aten.sort.default"] == {"lowered": 1, "aten fallback": 1}


# An op within another.


def test_within_a_decomposition_only_the_op_itself_falls_back(compiled):
    def model(x):
        return torch.fake_quantize_per_channel_affine(x, torch.ones(2), torch.zeros(2), 0, 0, 255)  # composite

    x = symmetric()
    result, explanation = compiled(model, x)
    same(result, model(x))
    assert {f.op for f in explanation.fallbacks} == {"aten.fake_quantize_per_channel_affine_cachemask.default"}


def test_a_rule_that_lowers_torch_code_leaves_the_refused_op_in_it_to_fall_back_alone(scratch, compiled):
    outer = scratch("outer(Tensor x) -> Tensor", lambda x: pytest.fail("the parent ran"))
    lower(outer)(lambda ctx, x: ctx.torch(lambda x: torch.matrix_exp(x) * 2, x))
    x = torch.randn(3, 3)
    result, explanation = compiled(lambda x: outer(x), x)
    same(result, torch.matrix_exp(x) * 2)
    assert explanation.ops["portable_test.outer.default"] == {"lowered": 1}
    assert explanation.ops["aten.linalg_matrix_exp.default"] == {"aten fallback": 1}
    assert all("test_fallback.py" in f.where for f in explanation.fallbacks)


def test_a_rule_that_refuses_after_all_leaves_nothing_behind(scratch, compiled):
    def rule(ctx, x):
        ctx.torch(lambda x: torch.matrix_exp(x) * torch.poisson(x, generator=torch.Generator()), x)
        ctx.check(jnp.any(lax.ne(x, x)), lambda found: pytest.fail("it was checked"))
        ctx.refuse("not this one")

    outer = scratch("outer(Tensor x) -> Tensor", lambda x: x * 3)
    lower(outer)(rule)
    result, explanation = compiled(lambda x: outer(x), torch.ones(3, 3))
    same(result, torch.full((3, 3), 3.0))
    assert [(f.op, f.reason) for f in explanation.fallbacks] == [("portable_test.outer.default", "not this one")]


# Where it cannot.


def refusal(function, *args):
    with pytest.raises(UnsupportedOpError) as caught:
        lowered(function, *args, fallback="allow")
    assert "fallback=" not in caught.value.remedy  # it is allowed already
    return [o.reason for o in caught.value.ops]


def test_without_a_compiler_the_refusal_says_so(tmp_path, monkeypatch):
    for name, value in {"PORTABLE_CACHE_DIR": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(native_code, "_registered", {})
    (reason,) = refusal(torch.matrix_exp, torch.eye(3))
    assert RISING in reason
    assert "cannot fall back: " in reason
    assert "need a C++ compiler" in reason
    assert "PORTABLE_CACHE_DIR" not in reason


def test_where_nothing_can_be_kept_the_refusal_says_which_variable_to_set(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("PORTABLE_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(native_code, "_registered", {})
    (reason,) = refusal(torch.matrix_exp, torch.eye(3))
    assert "set PORTABLE_CACHE_DIR to a folder that can be written" in reason


def test_what_cannot_be_built_is_tried_once_a_program(monkeypatch):
    def build():
        attempts.append(1)
        raise BackendUnavailableError("g++ could not build it")

    attempts = []
    monkeypatch.setattr(aten.CODE, "register", build)
    reasons = refusal(lambda x: torch.matrix_exp(x) + A._logcumsumexp(x, 0), torch.eye(3))
    assert len(attempts) == 1
    assert len(reasons) == 2
    assert all("cannot fall back: g++ could not build it" in reason for reason in reasons)


def test_an_op_that_is_called_for_its_effect_is_refused(scratch):
    say = scratch("say(Tensor x) -> Tensor", lambda x: x + 1)
    torch.library._register_effectful_op(say, EffectType.ORDERED)
    try:
        (reason,) = refusal(lambda x: say(x), torch.ones(3))
    finally:
        torch.library._register_effectful_op(say, None)
    assert "called for its effect" in reason


def test_on_a_platform_that_is_no_host_the_refusal_says_so():
    program = Program("tpu", "tpu", fallback=True)
    with pytest.raises(Refused, match="cannot be called inside a program on tpu"):
        fallback.torch_kernel(Context(program, A.linalg_matrix_exp.default, None), (), {})


def test_what_is_random_or_goes_by_storage_is_refused_with_both_reasons():
    (reason,) = refusal(lambda x: x.clone().uniform_(generator=torch.Generator()), torch.ones(3))
    assert "explicit torch.Generator" in reason
    assert "draws from torch's generator" in reason
    (reason,) = refusal(lambda x: x[1:2].as_strided((20,), (1,), 0), torch.ones(3, 4))
    assert "outside of its input" in reason
    assert "storage" in reason


def test_a_sparse_result_is_refused():
    assert "not a dense tensor" in refusal(lambda x: x.to_sparse(), torch.eye(3))[0]


def test_an_op_with_no_kernel_on_the_host_is_refused(scratch):
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("nowhere(Tensor x) -> Tensor")
        library.impl("nowhere", torch.empty_like, "Meta")
        (reason,) = refusal(lambda x: torch.ops.portable_test.nowhere(x), torch.ones(3))
    assert "torch has no CPU kernel of it" in reason


def test_every_op_that_is_named_unfit_exists():
    assert [name for name in fallback.UNFIT if not hasattr(A, name)] == []


def test_what_the_kernel_raises_is_raised_when_the_program_runs(scratch):
    def never(x):
        raise ValueError("not with these numbers")

    picky = scratch("picky(Tensor x) -> Tensor", never)
    with pytest.raises(ProgramError, match="not with these numbers"):
        lowered(lambda x: picky(x), torch.ones(3), fallback="allow")


def test_a_kernel_that_contradicts_its_shape_propagation_is_an_error(scratch):
    liar = scratch("liar(Tensor x) -> Tensor", lambda x: x.double())
    with pytest.raises(ProgramError, match="the kernel gave double"):
        lowered(lambda x: liar(x), torch.ones(3), fallback="allow")


def test_a_fallback_compares_by_what_it_says():
    assert Fallback("op", "reason") == Fallback("op", "reason", "", 1)
