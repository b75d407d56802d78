"""The work of the process that compiles for absent devices (see `deviceless`): XLA's compilers, and what they say."""

from __future__ import annotations

import math
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from portable.backends.deviceless import Compiled

OPTIONS = {"xla_allow_excess_precision": False}
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def compile_here(request: Mapping[str, Any], module: bytes) -> Compiled:
    """Answer one request of `deviceless.compile_for`."""
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir

    with mlir.make_ir_context():
        program = ir.Module.parse(module)
        flops = matrix_flops(program)
        if request["shardings"]:
            _shard(program, request["shardings"])
        try:
            devices = _devices(request["target"], request["mesh_size"])
        except RuntimeError as failure:
            return Compiled(problem=str(failure), no_such_slice=True)
        began = time.perf_counter()
        try:
            executable = _compiled(devices, program)
        except RuntimeError as failure:  # the compiler's own: its words are the result
            return _refused(program, str(failure), flops, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    memory, cost = executable.get_compiled_memory_stats(), _cost(executable)
    return Compiled(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        flops=flops,
        compiler_flops=max(cost.get("flops", 0.0), 0.0),
        bytes_accessed=max(cost.get("bytes accessed", 0.0), 0.0),
        collectives=collectives(executable.hlo_modules()[0].to_string()),
        seconds=seconds,
    )


def _devices(target: Mapping[str, Any], n: int) -> list[Any]:
    """The first ``n`` devices of a description of the target. One TPU is the first of the smallest host."""
    from jax.experimental import topologies

    if target["config"]:
        about = {"target_config": target["config"], "topology": f"1x1x{n}"}
        return list(topologies.get_topology_desc(target["device"], target["platform"], **about).devices)
    topology = target["topology"] if target["size"] > 1 else target["host"]
    return list(topologies.get_topology_desc(f"{target['device']}:{topology}", target["platform"]).devices)[:n]


def _compiled(devices: list[Any], program: Any) -> Any:
    import numpy as np
    from jax._src import compiler
    from jax._src.lib import xla_client

    n = len(devices)
    assignment = np.arange(n).reshape(1, n) if n > 1 else None
    options = compiler.get_compile_options(1, n, device_assignment=assignment)
    build = options.executable_build_options
    build.use_spmd_partitioning = n > 1
    build.use_shardy_partitioner = False
    build.allow_spmd_sharding_propagation_to_output = [n > 1 for _ in _main(program).type.results]
    options.env_option_overrides = list(OPTIONS.items())
    return devices[0].client.compile(program, xla_client.DeviceList(tuple(devices)), options)


def _cost(executable: Any) -> dict[str, float]:
    try:
        return dict(executable.cost_analysis())
    except RuntimeError:  # XLA:GPU has none
        return {}


def _refused(program: Any, message: str, flops: dict[str, float], seconds: float) -> Compiled:
    """What is known of a program that did not compile. Where it lacked memory the compiler names all that it wanted,
    arguments and results included (libtpu calls that temporaries)."""
    wanted = re.search(r"(?:temporaries \(|Used )([\d.]+)([KMGT]?)", message)
    if not wanted:
        return Compiled(problem=message.strip(), flops=flops, seconds=seconds)
    needed = int(float(wanted[1]) * _UNITS[wanted[2]])
    arguments, results = (sum(map(_size, kinds)) for kinds in (_main(program).type.inputs, _main(program).type.results))
    return Compiled(
        problem=message.strip(),
        argument_bytes=arguments,
        output_bytes=results,
        temporary_bytes=max(needed - arguments - results, 0),
        needed_bytes=needed,
        flops=flops,
        seconds=seconds,
    )


def _size(kind: Any) -> int:
    """Bytes of a tensor type."""
    element = str(kind.element_type)
    bits = re.search(r"\d+", element)
    one = max(int(bits[0]) // 8, 1) if bits else 1
    return math.prod(kind.shape) * one * (2 if "complex" in element else 1)


def _main(program: Any) -> Any:
    from jaxlib.mlir import ir

    return next(op for op in program.body.operations if getattr(op, "sym_name", None) == ir.StringAttr.get("main"))


def _shard(program: Any, shardings: Sequence[str]) -> None:
    """Note on each argument of the program how it lies on the devices."""
    from jaxlib.mlir import ir

    main = _main(program)
    attributes = [
        ir.DictAttr.get({**{a.name: a.attr for a in old}, "mhlo.sharding": ir.StringAttr.get(new)})
        for old, new in zip(main.arg_attrs, shardings, strict=True)
    ]
    main.arg_attrs = ir.ArrayAttr.get(attributes)


_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast)(-start)?\("
)
_SHAPE = re.compile(r"([a-z]+)(\d+)\w*\[([\d,]*)\]")


def collectives(hlo: str) -> dict[str, tuple[int, int]]:
    """{kind: (how many, bytes that they give)} of the collectives in a compiled program's text."""
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for line in hlo.splitlines():
        found = _COLLECTIVE.search(line)
        if found:
            parts = [_bytes(*shape) for shape in _SHAPE.findall(found[1])]
            count[found[2]] += 1
            size[found[2]] += max(parts, default=0) if found[3] else sum(parts)  # -start gives its operand as well
    return {kind: (n, size[kind]) for kind, n in count.items()}


def _bytes(kind: str, bits: str, sizes: str) -> int:
    return math.prod(int(n) for n in sizes.split(",") if n) * max(int(bits) // 8, 1)


def matrix_flops(program: Any) -> dict[str, float]:
    """{dtype of the operands: floating-point operations} of the matrix products and convolutions of a module, two for
    each multiplication. The body of a loop counts once. "float32 in parts" is what TF32 or bfloat16 may compute, as
    ``torch.set_float32_matmul_precision`` allows."""
    from jaxlib.mlir.dialects import stablehlo

    flops: Counter[str] = Counter()
    for op in _operations(program.operation):
        if op.name == "stablehlo.dot_general":
            lhs = op.operands[0].type
            numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
            n = math.prod(lhs.shape[d] for d in numbers.lhs_contracting_dimensions)
        elif op.name == "stablehlo.convolution":
            kernel = op.operands[1].type
            numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
            n = math.prod(kernel.shape) // max(kernel.shape[numbers.kernel_output_feature_dimension], 1)
        else:
            continue
        kind = _dtype(op.operands[0].type.element_type)
        exact = kind != "float32" or "HIGHEST" in str(op.attributes["precision_config"])
        flops[kind if exact else "float32 in parts"] += 2 * n * math.prod(op.results[0].type.shape)
    return {dtype: float(n) for dtype, n in flops.items()}


def _operations(op: Any) -> Iterator[Any]:
    for region in op.regions:
        for block in region:
            for inner in block:
                yield inner.operation
                yield from _operations(inner.operation)


_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16", "f8E4M3FN": "float8_e4m3fn"}
_DTYPES |= {"f8E5M2": "float8_e5m2", "i8": "int8", "ui8": "uint8", "i32": "int32", "i64": "int64"}


def _dtype(kind: Any) -> str:
    return _DTYPES.get(str(kind), str(kind))
