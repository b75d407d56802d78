"""Every op gives results that lie as eager's do, whatever lies how in what it is given.

Inputs of torch's operator database are laid out anew: channels-last, transposed, sliced with a step, expanded.
"""

import re
import warnings

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import portable as pt
from portable.errors import PortableError
from portable.testing import lowered
from tests.conformance.aliasing import layout_difference

QUICK_SAMPLES, SAMPLES = 2, 6
# what torch's fake tensors, or its Python decompositions, were found to state otherwise
FOUND = re.compile(
    "as_strided_scatter|channel_shuffle|copysign|div|dropout|floor_divide|heaviside|interpolate|ldexp|logaddexp"
    "|logical_xor|lstsq|masked_fill|max_unpool2d|native_batch_norm|native_dropout_backward|nll_loss|nonzero|normal|one_hot|ones_like|pad|resize_as_|roll|xlogy"
)
OPS = {f"{op.name}{'-' * bool(op.variant_test_name)}{op.variant_test_name}": op for op in op_db}
QUICK = sorted(name for name in OPS if FOUND.fullmatch(name.rpartition(".")[2].partition("-")[0]))


def _transposed(x):
    return x.transpose(0, -1).contiguous().transpose(0, -1) if x.ndim > 1 else x


def _channels_last(x):
    if x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return x.transpose(1, 2).contiguous().transpose(1, 2) if x.ndim == 3 else x


def _sliced(x):
    wide = torch.zeros([2 * n for n in x.shape], dtype=x.dtype)
    return wide[(slice(None, None, 2),) * x.ndim].copy_(x) if x.ndim else x


def _expanded(x):
    return x[:1].clone().expand(x.shape) if x.ndim and x.shape[0] > 1 and x.numel() else x


LAYOUTS = {"transposed": _transposed, "channels-last": _channels_last, "sliced": _sliced, "expanded": _expanded}
WAYS = {
    "lowered": lowered,
    "compiled": lambda f, *args, **kwargs: pt.compile(f, backend="xla", fallback="error")(*args, **kwargs),
}


def calls(name, dtype, samples):
    """(layout, make) of each call; ``make`` gives its arguments and keyword arguments anew."""
    op = OPS[name]
    found = list(op.sample_inputs("cpu", dtype, requires_grad=False)) if dtype in op.supported_dtypes("cpu") else []
    for sample in found[:: max(1, len(found) // samples)]:
        given = ((sample.input, *sample.args), sample.kwargs)
        plain = all(x.layout == torch.strided for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor))
        for layout, lay in LAYOUTS.items():
            if plain:
                yield layout, lambda lay=lay, given=given: pytree.tree_map_only(torch.Tensor, lay, given)


def differences(name, dtype, way, samples):
    """How results lie otherwise than eager's; refusals are no differences."""
    torch._dynamo.reset()
    found = []
    for layout, make in calls(name, dtype, samples):
        try:
            args, kwargs = make()
            want = OPS[name].op(*args, **kwargs)
        except (RuntimeError, ValueError, IndexError, NotImplementedError):
            continue  # eager refuses this layout
        args, kwargs = make()
        try:
            have = WAYS[way](OPS[name].op, *args, **kwargs)
        except PortableError:
            continue
        pairs = zip(pytree.tree_leaves(want), pytree.tree_leaves(have), strict=True)
        tensors = [(w, h) for w, h in pairs if isinstance(w, torch.Tensor) and w.layout == torch.strided]
        found += [f"{layout}: {how}" for w, h in tensors if w.shape == h.shape and (how := layout_difference(w, h))]
    return found


@pytest.fixture(autouse=True)
def _quietly():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("name", QUICK)
def test_results_lie_as_those_of_eager_where_torch_states_other_strides(name):
    dtype = torch.float32 if torch.float32 in OPS[name].supported_dtypes("cpu") else torch.int64
    assert differences(name, dtype, "lowered", QUICK_SAMPLES) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
@pytest.mark.parametrize("name", OPS)
def test_results_of_every_operator_lie_as_those_of_eager(name, dtype, way):
    assert differences(name, dtype, way, SAMPLES if way == "lowered" else 1) == []
