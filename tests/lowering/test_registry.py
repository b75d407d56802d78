"""Registration: one rule an overload, or an error that names both places."""

import jax
import pytest
import torch
from jax import lax

from portable.capture import trace
from portable.errors import LoweringError, RegistrationError, UnsupportedOpError
from portable.lowering import registry
from portable.lowering.context import Spec
from portable.lowering.module import lower_graph
from portable.lowering.registry import elementwise, lower, register
from portable.testing import lowered

aten = torch.ops.aten


@pytest.fixture
def scratch_op():
    """A custom op with a fake kernel and no lowering; its rule, if a test registers one, is removed."""
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        library.impl("twice", lambda x: torch.empty_like(x), "Meta")
        op = torch.ops.portable_test.twice.default
        yield op
        registry.RULES.pop(op, None)


def test_a_second_rule_for_an_overload_is_refused_and_names_both_places():
    registry.load()
    with pytest.raises(
        RegistrationError, match=r"aten.add.Tensor has a lowering already, at .*elementwise.*test_registry"
    ):
        elementwise(aten.add.Tensor)(lambda x, y, *, alpha=1: x)


def test_a_packet_is_refused_with_an_example_of_the_right_key():
    with pytest.raises(RegistrationError, match=r"packet of overloads(.|\n)*aten.add.Tensor"):
        register(aten.add, lambda ctx, x: x, "here")


def test_a_string_is_refused():
    with pytest.raises(RegistrationError, match="keyed by an OpOverload"):
        register("aten.add.Tensor", lambda ctx, x: x, "here")


def test_a_missing_overload_raises_where_it_is_named():
    with pytest.raises(AttributeError):
        lower(aten.add.NoSuchOverload)


def test_every_rule_is_keyed_by_an_overload_and_knows_its_place():
    for op, rule in registry.load().items():
        assert isinstance(op, torch._ops.OpOverload)
        assert rule.op is op
        assert rule.where


def test_an_op_of_another_package_gets_a_lowering(scratch_op):
    with pytest.raises(UnsupportedOpError, match="portable_test.twice"):
        lowered(scratch_op, torch.ones(3))
    lower(scratch_op)(lambda ctx, x: lax.add(x, x))
    torch.testing.assert_close(lowered(scratch_op, torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda ctx, x: lax.convert_element_type(x, "int32"), r"gave int32\[3\], torch gives float32\[3\]"),
        (lambda ctx, x: lax.reshape(x, (3, 1)), r"gave float32\[3, 1\], torch gives float32\[3\]"),
        (lambda ctx, x: (x, x), r"torch gives float32\[3\]"),
        (lambda ctx, x: 1 / 0, "ZeroDivisionError"),
    ],
    ids=["dtype", "shape", "count", "crash"],
)
def test_a_wrong_rule_is_an_internal_error_that_names_the_op(scratch_op, rule, message):
    lower(scratch_op)(rule)
    with pytest.raises(LoweringError, match=message) as caught:
        lowered(scratch_op, torch.ones(3))
    assert caught.value.op == "portable_test.twice.default"


def test_who_wrote_a_wrong_rule_is_told_where_it_is(scratch_op):
    def rule(ctx, x):
        return lax.convert_element_type(x, "int32")

    lower(scratch_op)(rule)
    with pytest.raises(LoweringError) as caught:
        lowered(scratch_op, torch.ones(3))
    assert caught.value.remedy == f"mend the lowering at {__file__}:{rule.__code__.co_firstlineno}"


def test_who_wrote_a_rule_that_fails_is_told_the_line(scratch_op):
    def rule(ctx, x):
        return _fails(x)

    lower(scratch_op)(rule)
    with pytest.raises(LoweringError, match="ZeroDivisionError") as caught:
        lowered(scratch_op, torch.ones(3))
    line = _fails.__code__.co_firstlineno + 1
    place = f"{__file__}:{rule.__code__.co_firstlineno}"
    assert caught.value.remedy == f"mend the lowering at {place}, which failed in line {line}"


def _fails(x):
    return x / (1 // 0)


def test_a_wrong_rule_of_portable_is_to_be_reported(scratch_op, monkeypatch):
    relu = registry.load()[aten.relu.default]  # any of its rules, of an op that it is wrong for
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("counted(Tensor x) -> Tensor")
        library.impl("counted", lambda x: torch.empty_like(x, dtype=torch.int32), "Meta")
        op = torch.ops.portable_test.counted.default
        monkeypatch.setitem(registry.RULES, op, registry.Rule(op, relu.apply, relu.where))
        with pytest.raises(LoweringError, match="please report it"):
            lowered(op, torch.ones(3))


@pytest.mark.parametrize(
    "rule",
    [lambda x: x, lambda ctx: None, lambda ctx, x, y: x, lambda ctx, *, x: x],
    ids=["no ctx", "too few", "too many", "by name"],
)
def test_a_rule_that_cannot_be_called_as_the_op_is_refused_at_registration(scratch_op, rule):
    with pytest.raises(RegistrationError, match=r"portable_test.twice.default at .*test_registry(.|\n)*\(ctx, x\)"):
        lower(scratch_op)(rule)
    assert scratch_op not in registry.RULES


def test_a_rule_takes_the_defaults_of_the_op():
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("scaled(Tensor x, int by=2, *, bool up=True) -> Tensor")
        op = torch.ops.portable_test.scaled.default
        with pytest.raises(RegistrationError, match=r"let it take \(ctx, x, by=2, \*, up=True\)"):
            lower(op)(lambda ctx, x, by, *, up=True: x)


def test_an_elementwise_formula_takes_the_op_s_arguments_without_ctx(scratch_op):
    with pytest.raises(RegistrationError, match=r"let it take \(x\)"):
        elementwise(scratch_op)(lambda ctx, x: x)


def test_a_rule_refuses_by_name(scratch_op):
    lower(scratch_op)(lambda ctx, x: ctx.refuse("only even sizes are exact"))
    with pytest.raises(UnsupportedOpError, match="portable_test.twice.default: only even sizes are exact"):
        lowered(scratch_op, torch.ones(3))


def test_all_unsupported_ops_are_named_at_once(scratch_op):
    with torch.library._scoped_library("portable_test", "FRAGMENT") as library:
        library.define("thrice(Tensor x) -> Tensor")
        library.impl("thrice", lambda x: torch.empty_like(x), "Meta")
        library.impl("thrice", lambda x: x * 3, "CPU")
        with pytest.raises(UnsupportedOpError) as caught:
            lowered(lambda x: scratch_op(x) + torch.ops.portable_test.thrice.default(x), torch.ones(3))
    assert [op.op for op in caught.value.ops] == ["portable_test.twice.default", "portable_test.thrice.default"]


def test_jax_arrays_promote_like_torch_tensors():
    assert registry.described(jax.numpy.ones(3, "float32")) == (torch.float32, False)
    assert registry.described(True) is bool
    assert registry.described(2) is int


def _printed(ctx, x):
    jax.debug.print("{}", x)
    return x


@pytest.mark.parametrize(
    ("primitive", "rule"),
    [
        ("pure_callback", lambda ctx, x: jax.pure_callback(lambda v: v, jax.typeof(x), x)),
        ("io_callback", lambda ctx, x: jax.experimental.io_callback(lambda v: v, jax.typeof(x), x, ordered=True)),
        ("debug_print", _printed),
        (
            "pure_callback",
            lambda ctx, x: lax.cond(x[0] > 0, lambda: jax.pure_callback(lambda v: v, jax.typeof(x), x), lambda: x),
        ),
    ],
    ids=["pure", "ordered", "print", "in a branch"],
)
def test_a_rule_that_calls_back_into_python_is_refused_by_name_before_it_runs(scratch_op, primitive, rule):
    lower(scratch_op)(rule)
    with pytest.raises(
        LoweringError, match=rf"portable_test.twice.default .*{primitive}(.|\n)*Remedy: write it"
    ) as caught:
        lowered(scratch_op, torch.ones(3))
    assert caught.value.op == "portable_test.twice.default"
    gm = trace(lambda x: [scratch_op(x)], [torch.ones(3)])
    with pytest.raises(LoweringError, match=primitive):  # where JAX refuses it itself, without the op's name
        lower_graph(gm, [Spec((3,), torch.float32)], platform="tpu", backend="tpu")
