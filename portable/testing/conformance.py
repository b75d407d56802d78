"""What every backend must do, as tests: a subclass that names a backend is its whole test file.

from portable.testing import BackendConformance

class TestAcme(BackendConformance):
    backend = "acme"
"""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
import threading
import time
from typing import Any, ClassVar

import pytest
import torch

import portable as pt
from portable import backends
from portable.backends.base import Backend
from portable.errors import UnknownBackendError, UnsupportedInputError
from portable.slo.correctness import difference
from portable.testing import comparison, networks, refusal_score
from portable.testing.programs import FAMILIES

_ALONE = """
import json, sys, torch
from portable import backends
name, _, variant = sys.argv[1].partition(":")
state = backends.backend_class(name).probe()
jax = sys.modules.get("jax._src.xla_bridge")
touched = [n for n in ("cuda", "xpu") if getattr(torch, n).is_initialized()]
touched += ["JAX"] if jax and jax.backends_are_initialized() else []
touched += [n for n in [torch._C._get_privateuse1_backend_name()] if n != "privateuseone"]
import portable as pt
compiled = pt.compile(lambda x: x + 1)
answer = compiled(torch.ones(2, device=pt.device())).tolist()
found = pt.explain(compiled, show=False)
print(json.dumps({"ready": state.ready, "reason": state.reason, "touched": touched, "answer": answer,
                  "backend": found.backend, "compiled": sum(map(len, found.ops.values()))}))
"""
_SLEEP_S = 0.02


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _in_a_fresh_process(backend: str) -> tuple[dict[str, Any], str]:
    """(what it says, how it failed)."""
    done = subprocess.run(
        [sys.executable, "-c", _ALONE, backend],
        env={**os.environ, "PORTABLE_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        return {}, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""


def fail_if(problem: str) -> None:
    """Fail the test with ``problem``, unless it is ''."""
    if problem:
        pytest.fail(problem, pytrace=False)


class BackendConformance:
    """The tests. A test of a program is named by family, dtype and program.

    Attributes:
        backend: what is tested, as users write it.
        slow: shell patterns of the names of tests to mark `slow`, where the backend's compiler is.
        limitations: what is known to fail: the reason by shell pattern; such a test fails as soon as it passes.
    """

    backend: ClassVar[str]
    slow: ClassVar[tuple[str, ...]] = ()
    limitations: ClassVar[dict[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """One test a program and a dtype of the backend's capabilities."""
        for argument, gradients in (("program", False), ("differentiable", True)):
            if argument in metafunc.fixturenames:
                rows = [
                    pytest.param((family, dtype, p.name), id=f"{family}-{_short(dtype)}-{p.name}")
                    for family, (_, programs) in FAMILIES.items()
                    for dtype in self._dtypes(family, gradients)
                    for p in programs
                    if p.gradients or not gradients
                ]
                metafunc.parametrize(argument, rows)

    def _dtypes(self, family: str, gradients: bool) -> list[torch.dtype]:
        legal = comparison.dtypes_of(self.backend, family)
        if gradients:  # of one dtype: what a gradient is does not depend on it
            return [d for d in (torch.float32, torch.bfloat16, torch.float16) if d in legal][:1]
        return legal

    @pytest.fixture
    def here(self) -> Backend:
        """The backend, which must be able to run here."""
        return backends.get(self.backend)

    @pytest.fixture
    def alone(self) -> dict[str, Any]:
        """What a fresh process says that probes the backend, and then is told by PORTABLE_BACKEND to use it."""
        said, failure = _in_a_fresh_process(self.backend)
        fail_if(f"a process that uses {self.backend} failed:\n{failure}" if failure else "")
        return said

    # What it says about itself.

    def test_its_probe_says_whether_it_is_ready_and_why(self, alone: dict[str, Any]) -> None:
        fail_if("" if alone["ready"] else f"probe says that it is not ready: {alone['reason']}")
        fail_if("" if alone["reason"].strip() else "probe gives no reason")

    def test_its_probe_initialises_no_device(self, alone: dict[str, Any]) -> None:
        fail_if(f"probe initialised {', '.join(alone['touched'])} in its process" if alone["touched"] else "")

    def test_its_name_is_what_users_write(self, here: Backend) -> None:
        fail_if("" if str(here) == self.backend else f"{self.backend!r} calls itself {str(here)!r}")
        fail_if("" if here.path in ("stablehlo", "native") else f"path {here.path!r} is not stablehlo or native")
        fail_if("" if here.label().partition(":")[0] == here.name else f"label {here.label()!r} is of another backend")

    def test_an_unknown_variant_is_refused_with_the_legal_ones(self, here: Backend) -> None:
        with pytest.raises(UnknownBackendError, match="no variant 'nonsense'(.|\n)*legal:"):
            backends.get(f"{here.name}:nonsense")

    def test_tensors_live_on_its_device(self, here: Backend) -> None:
        x = torch.arange(4).to(here.device())
        fail_if("" if x.device.type == here.device().type else f"a tensor that was moved there is on {x.device}")
        fail_if("" if x.cpu().tolist() == [0, 1, 2, 3] else "a tensor that was moved there and back has changed")

    def test_its_hardware_has_the_four_parts_of_a_fingerprint(self, here: Backend) -> None:
        parts = here.hardware()
        wanted = {"device", "architecture", "driver", "runtime"}
        fail_if("" if set(parts) == wanted else f"hardware() has {sorted(parts)} instead of {sorted(wanted)}")
        empty = [name for name, text in parts.items() if not isinstance(text, str) or not text.strip()]
        fail_if(f"hardware() says nothing about {', '.join(empty)}; 'absent' is a value" if empty else "")

    def test_its_capabilities_are_well_formed(self, here: Backend) -> None:
        found = here.capabilities()
        fail_if(
            "" if found.dtypes and all(isinstance(d, torch.dtype) for d in found.dtypes) else "dtypes are not torch's"
        )
        foreign = set(found.emulated) - found.dtypes
        fail_if(f"{foreign} are emulated, but not among its dtypes" if foreign else "")
        fail_if("" if all(found.emulated.values()) else "an emulated dtype has no reason")
        bad = [m for m in found.multiples.values() if not isinstance(m, int) or m < 1]
        fail_if(f"multiples {bad} are not positive integers" if bad else "")
        fail_if(
            "" if isinstance(found.graphs, bool) and isinstance(found.collectives, str) else "graphs or collectives"
        )

    def test_it_says_what_error_is_correct_for_each_float_dtype(self, here: Backend) -> None:
        tolerances = here.tolerances()
        for dtype in (d for d in here.capabilities().dtypes if d.is_floating_point):
            value = tolerances.get(dtype, math.nan)
            fail_if("" if 0 < value < 1 else f"the tolerance of {dtype} is {value}")

    # Time, memory, random numbers.

    def test_seconds_are_not_less_than_the_work_takes(self, here: Backend) -> None:
        seconds = min(here.seconds(lambda: time.sleep(_SLEEP_S)) for _ in range(3))
        fail_if("" if 0.9 * _SLEEP_S <= seconds < 50 * _SLEEP_S else f"20 ms of work took {seconds:.4f} s")

    def test_seconds_wait_for_the_device(self, here: Backend) -> None:
        launch = self._work(here)

        def whole() -> float:
            began = time.perf_counter()
            launch().cpu()
            return time.perf_counter() - began

        whole()
        here.synchronize()
        rounds = [(whole(), here.seconds(launch)) for _ in range(9)]  # side by side: other work comes and goes
        took, timed = (min(times) for times in zip(*rounds, strict=True))
        fail_if("" if timed > took / 2 else f"work whose result is there after {took:.4f} s was timed as {timed:.4f} s")

    def test_after_synchronize_no_work_is_left(self, here: Backend) -> None:
        launch = self._work(here)
        launch().cpu()
        whole, left = [], []
        for _ in range(5):
            began = time.perf_counter()
            result = launch()
            here.synchronize()
            ended = time.perf_counter()
            result.cpu()
            whole.append(ended - began)
            left.append(time.perf_counter() - ended)
        fail_if(
            "" if min(left) < max(min(whole), 2e-3) else f"{min(left):.4f} s of work were left of {min(whole):.4f} s"
        )

    def _work(self, here: Backend) -> Any:
        x = torch.full((64, 64), 0.01, device=here.device())
        compiled = pt.compile(_repeated, backend=self.backend)
        return lambda: compiled(x)

    def test_memory_figures_are_consistent(self, here: Backend) -> None:
        found = here.memory_stats()
        values = {name: getattr(found, name) for name in ("used", "peak", "total")}
        bad = {k: v for k, v in values.items() if v is not None and (not isinstance(v, int) or v < 0)}
        fail_if(f"memory_stats() has {bad}: bytes, or None where the device does not say" if bad else "")
        used, peak, total = values.values()
        fail_if("" if used is None or peak is None or used <= peak else f"{used} bytes are used, {peak} at the peak")
        fail_if("" if used is None or total is None or used <= total else f"{used} bytes are used of {total}")

    def test_memory_that_tensors_take_is_counted_and_given_back(self, here: Backend) -> None:
        before = here.memory_stats().used
        if before is None or here.device().type == "cpu":
            return  # there is no figure, or the tensors are in the host's memory
        x = torch.ones(1 << 20, device=here.device())
        here.synchronize()
        taken = (here.memory_stats().used or 0) - before
        fail_if("" if taken >= x.nbytes else f"a tensor of {x.nbytes} bytes added {taken}")
        peak = here.memory_stats().peak
        fail_if("" if peak is None or peak >= before + x.nbytes else f"the peak is {peak} bytes with {x.nbytes} in use")

    def test_a_seed_reproduces_random_numbers_and_two_calls_differ(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: torch.rand_like(x) + torch.randn_like(x), backend=self.backend)
        x = torch.zeros(64, device=here.device())
        here.manual_seed(7)
        first, second = compiled(x).cpu(), compiled(x).cpu()
        here.manual_seed(7)
        again = compiled(x).cpu()
        fail_if("two calls gave the same random numbers" if torch.equal(first, second) else "")
        fail_if("" if torch.equal(first, again) else "the same seed gave other random numbers")

    def test_dropout_scales_what_it_keeps(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: torch.nn.functional.dropout(x, 0.25), backend=self.backend)
        kept = compiled(torch.ones(4096, device=here.device())).cpu()
        values, share = sorted(set(kept.tolist())), float((kept > 0).float().mean())
        fail_if("" if len(values) == 2 and values[0] == 0 and abs(values[1] - 4 / 3) < 1e-5 else f"values {values[:4]}")
        fail_if("" if abs(share - 0.75) < 0.05 else f"{share:.0%} were kept instead of 75%")

    # What it computes.

    def test_a_program_computes_what_eager_does(self, here: Backend, program: tuple[str, torch.dtype, str]) -> None:
        family, dtype, name = program
        fail_if(comparison.results(self.backend, family, dtype)[name])

    def test_gradients_are_those_of_eager(self, here: Backend, differentiable: tuple[str, torch.dtype, str]) -> None:
        family, dtype, name = differentiable
        fail_if(comparison.gradients(self.backend, family, dtype)[name])

    @pytest.mark.parametrize("model", sorted(networks.MODELS))
    def test_a_model_in_eval_mode_computes_what_eager_does(self, here: Backend, model: str) -> None:
        plain, x = networks.build(model).eval(), networks.example(model, 4)
        compiled = pt.compile(networks.build(model).eval().to(here.device()), backend=self.backend)
        with torch.no_grad():
            result = compiled(x.to(here.device()))
            exact = networks.build(model).eval().double()(x.double() if x.is_floating_point() else x)
            fail_if(difference(result, plain(x), exact, here.tolerances()))

    @pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
    @pytest.mark.parametrize("model", sorted(networks.MODELS))
    def test_training_leaves_the_parameters_and_buffers_that_eager_leaves(
        self, here: Backend, model: str, optimiser: str
    ) -> None:
        result = comparison.trained(model, self.backend, optimiser)
        eager = comparison.trained(model, None, optimiser)
        exact = comparison.trained(model, None, optimiser, torch.float64)
        fail_if(difference(result, eager, exact, here.tolerances()))

    def test_running_statistics_are_written_back(self, here: Backend) -> None:
        plain, moved = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3).to(here.device())
        compiled = pt.compile(moved, backend=self.backend)
        x = torch.linspace(-1, 3, 12).reshape(4, 3)
        for _ in range(2):
            plain(x), compiled(x.to(here.device()))
        fail_if(difference(list(moved.buffers()), list(plain.buffers()), list(plain.buffers()), here.tolerances()))
        count = int(moved.num_batches_tracked) if moved.num_batches_tracked is not None else 0
        fail_if("" if count == 2 else f"{count} batches were counted instead of 2")

    def test_what_eager_refuses_is_refused(self, here: Backend) -> None:
        if here.path != "stablehlo":
            return  # torch's own compilers answer for what they take
        score = refusal_score(self.backend, ops=r"^(mm|addmm|index_select|bitwise_and|nn\.functional\.linear)$")
        fail_if("\n".join(map(str, score.wrong)))

    # How it is called.

    def test_results_and_gradients_are_on_its_device(self, here: Backend) -> None:
        x = torch.ones(3, device=here.device(), requires_grad=True)
        result = pt.compile(lambda x: (x * 2, x.sum()), backend=self.backend)(x)
        (gradient,) = torch.autograd.grad(result[1], x)
        found = {y.device.type for y in (*result, gradient)}
        fail_if("" if found == {here.device().type} else f"results are on {', '.join(sorted(found))}")

    def test_sizes_may_change_from_call_to_call(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: (x * x).sum(0) / x.shape[0], backend=self.backend)
        for n in (3, 5, 2, 7, 1):
            x = torch.arange(4.0 * n).reshape(n, 4)
            result, expected = compiled(x.to(here.device())).cpu(), (x * x).sum(0) / n
            fail_if("" if torch.allclose(result, expected) else f"{n} rows gave {result} instead of {expected}")

    def test_a_later_call_leaves_earlier_results_alone(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: x * 2, backend=self.backend)
        first = compiled(torch.ones(64, device=here.device()))
        for value in (2.0, 3.0):
            compiled(torch.full((64,), value, device=here.device()))
        fail_if("" if first.cpu().eq(2).all() else f"the first result became {first.cpu()[:4]}")

    def test_one_compiled_function_serves_several_threads(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: (x * x).sum(), backend=self.backend)
        compiled(torch.ones(16, device=here.device()))
        wrong: list[str] = []

        def work(value: int) -> None:
            try:
                for _ in range(8):
                    result = float(compiled(torch.full((16,), float(value), device=here.device())))
                    if result != 16 * value * value:
                        wrong.append(f"{value}: {result}")
            except Exception as failure:  # a thread's failure is the test's
                wrong.append(f"{value}: {failure!r}")

        threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=120)
        fail_if("a call did not return in 120 s" if any(t.is_alive() for t in threads) else "; ".join(wrong))

    @pytest.mark.parametrize("kind", ["sparse", "meta"])
    def test_a_tensor_that_it_does_not_take_is_refused_by_name(self, here: Backend, kind: str) -> None:
        compiled = pt.compile(lambda weight: weight * 2, backend=self.backend)
        tensor = torch.ones(2, 2).to_sparse() if kind == "sparse" else torch.ones(2, 2, device="meta")
        with pytest.raises(UnsupportedInputError, match=f"(weight|argument 0)(.|\n)*{kind}"):
            compiled(tensor)

    def test_explain_names_the_backend_its_path_and_what_ran(self, here: Backend) -> None:
        compiled = pt.compile(lambda x: x.sin() + 1, backend=self.backend)
        compiled(torch.ones(3, device=here.device()))
        found = pt.explain(compiled, show=False)
        named = (found.backend, found.path)
        fail_if("" if named == (self.backend, here.path) else f"explain names {named}")
        fail_if("" if found.ops and found.compiles else "explain lists no operators or no compilation")
        fail_if(f"it ran outside its path: {found.fallbacks}" if found.fallbacks else "")

    def test_portable_backend_selects_it(self, alone: dict[str, Any]) -> None:
        fail_if("" if alone["backend"] == self.backend else f"PORTABLE_BACKEND={self.backend} gave {alone['backend']}")
        fail_if("" if alone["answer"] == [2, 2] and alone["compiled"] else f"1 + 1 gave {alone['answer']}")


def _repeated(x: torch.Tensor) -> torch.Tensor:
    y = x
    for _ in range(24):
        y = y @ x
    return y
