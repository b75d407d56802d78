"""Compiles the Pallas kernels for TPUs that are not here, alone and within a program of ours; says what came as JSON.

A process of its own: libtpu is loaded into it and reads its environment then.
"""

import json
import sys
import traceback

import jax
import jaxlib
import torch
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import portable as pt
from portable.kernels.attention.pallas import attention
from portable.kernels.choice import Choice
from portable.kernels.rms_norm.pallas import rms_norm
from portable.kernels.select import Policy
from portable.lowering.context import Spec
from portable.lowering.module import lower_graph
from portable.ops._op import choosing

# (B, H, L, E), (B, G, S, E), width of the values, causal: one block and many, ragged ones, shared and odd heads
ATTENTION = (
    ((2, 4, 1024, 128), (2, 4, 1024, 128), 128, True),
    ((1, 8, 1000, 64), (1, 2, 1030, 64), 64, True),
    ((2, 8, 1, 128), (2, 1, 4096, 128), 128, False),
    ((1, 4, 7, 80), (1, 4, 9, 80), 96, False),
    ((1, 2, 5, 4), (1, 2, 5, 4), 5, True),
)
ROWS = ((64, 4096), (3, 8), (1000, 5000), (2, 3, 32768), (5,))


def calls(dtypes):
    """(name, function, shapes, dtype)."""
    for dtype in dtypes:
        for query, key, width, causal in ATTENTION:

            def attend(q, k, v, causal=causal):
                return attention(q, k, v, None, causal)

            yield f"attention {dtype}{query}", attend, (query, key, (*key[:3], width)), dtype
        for shape in ROWS:
            yield f"rms_norm {dtype}{shape}", rms_norm, (shape, shape[-1:]), dtype
        yield f"rms_norm {dtype}{shape} without a weight", rms_norm, (shape,), dtype


def compiled_alone(function, shapes, dtype, device):
    with jax.enable_x64(True):  # as our programs are traced
        types = [jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(device)) for shape in shapes]
        done = jax.jit(function).trace(*types).lower(lowering_platforms=("tpu",)).compile()
    return done.as_text().count('custom_call_target="tpu_custom_call"')


def compiled_in_a_program(device):
    """A model that calls both ops beside others, captured, decided and lowered as for a TPU that is here."""

    def model(x, w):
        x = pt.ops.rms_norm(x * 2, w, 1e-5)
        heads = x.unflatten(-1, (4, 16)).transpose(1, 2)
        return pt.ops.attention(heads, heads, heads, is_causal=True).transpose(1, 2).flatten(-2).sum(1)

    inputs = (torch.randn(2, 24, 64), torch.randn(64))
    with choosing(["rms_norm", "attention"]):
        gm = torch.fx.experimental.proxy_tensor.make_fx(model, tracing_mode="fake")(*inputs)
    choice = Choice("tpu", Policy.parse("rms_norm=pallas,attention=pallas"))
    specs = [Spec(tuple(x.shape), x.dtype) for x in inputs]
    lowered = lower_graph(gm, specs, platform="tpu", backend="tpu", choice=choice)
    runs = sorted(f"{op}: {how}" for op, how in lowered.ops if "kernel" in how)
    with mlir.make_ir_context():
        device.client.compile(mlir.ir.Module.parse(lowered.module), jaxlib._jax.DeviceList((device,)))
    return runs


if __name__ == "__main__":
    results = {}
    for target in sys.argv[1].split(","):
        device = topologies.get_topology_desc(platform="tpu", topology_name=target).devices[0]
        for name, function, shapes, dtype in calls(sys.argv[2:]):
            try:
                results[f"{target} {name}"] = compiled_alone(function, shapes, dtype, device)
            except Exception:
                results[f"{target} {name}"] = traceback.format_exc()[-1500:]
        results[f"{target} program"] = compiled_in_a_program(device)
    sys.stdout.write(json.dumps(results))
