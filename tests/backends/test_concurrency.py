"""One compiled model, many threads and processes."""

import multiprocessing
import os
import subprocess
import sys
import textwrap
import threading

import pytest
import torch

import portable as pt
from portable.testing import lowered

SHAPES = ((3, 8), (5, 8), (16, 8))


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()


def in_eight_threads(work) -> None:
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


@pytest.mark.parametrize("calls", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_eight_threads_on_three_shapes_get_eager_answers(calls):
    eager = model()
    compiled = pt.compile(eager, backend="xla")
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            inputs = [torch.randn(shape, generator=generator) for shape in SHAPES]
            with torch.no_grad():
                want = [eager(x) for x in inputs]
                start.wait()
                for i in range(calls):
                    for x, y in zip(inputs, want, strict=True):
                        torch.testing.assert_close(compiled(x + 0 * i), y, rtol=1e-5, atol=1e-6)
        except BaseException as failure:
            failures.append(failure)

    in_eight_threads(work)
    assert not failures, failures[0]
    explanation = pt.explain(compiled, show=False)
    assert not explanation.fallbacks
    assert len(explanation.compiles) <= 2 * len(SHAPES)


def test_lowered_gives_eager_answers_in_eight_threads():
    eager = model()
    failures: list[BaseException] = []
    start = threading.Barrier(8)

    def work(seed: int) -> None:
        try:
            x = torch.randn(seed + 1, 8, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                start.wait()
                torch.testing.assert_close(lowered(lambda x: eager(x), x), eager(x), rtol=1e-5, atol=1e-6)
        except BaseException as failure:
            failures.append(failure)

    in_eight_threads(work)
    assert not failures, failures[0]


FORKED = """
    import os, signal, sys, torch, portable as pt
    torch.set_num_threads(1)  # torch's own OpenMP pool does not survive a fork
    eager = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh()).eval()
    compiled = pt.compile(eager, backend="xla")
    x = torch.randn(3, 8)
    with torch.no_grad():
        want = eager(x)
        torch.testing.assert_close(compiled(x), want)
        child = os.fork()
        if child == 0:
            signal.alarm(200)                                                               # a hang ends with the test
            torch.testing.assert_close(compiled(x), want)                                   # the parent's program
            again = pt.compile(lambda x: (x.sin() @ x.t()).sum(), backend="xla")
            torch.testing.assert_close(again(x), (x.sin() @ x.t()).sum())                   # a new one
            grad = torch.ones(3, requires_grad=True)
            with torch.enable_grad():
                pt.compile(lambda g: (g * g).sum(), backend="xla")(grad).backward()
            torch.testing.assert_close(grad.grad, 2 * torch.ones(3))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        torch.testing.assert_close(compiled(x), want)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_runs_and_compiles():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


FORKED_KERNELS = """
    import os, sys, torch, portable as pt
    torch.set_num_threads(1)
    def of(provider):
        return pt.compile(lambda x: x.cumsum(0) * 2, backend="xla", kernels=f"aten.cumsum.default={provider}")
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(of("aten")(x), x.cumsum(0) * 2)  # the parent has a client and one library
        child = os.fork()
        if child == 0:
            for provider in ("aten", "cpp"):
                program = of(provider)
                torch.testing.assert_close(program(x[:4]), x[:4].cumsum(0) * 2)
                (chosen,) = pt.explain(program, show=False).decisions["aten.cumsum.default"]
                if chosen.runs_as != f"kernel {provider}":
                    os._exit(7)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_a_forked_child_compiles_programs_that_call_kernels_in_native_code():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED_KERNELS)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


FORKED_WHILE_COMPILING = """
    import os, signal, sys, threading, torch, portable as pt
    torch.set_num_threads(1)
    begun = threading.Event()
    def compile_in_turn():
        for width in range(1, 9):
            pt.compile(torch.nn.Linear(8, width), backend="xla")(torch.randn(2, 8))
            begun.set()
    threading.Thread(target=compile_in_turn, daemon=True).start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(200)
        x = torch.randn(3, 8)
        torch.testing.assert_close(pt.compile(lambda x: x.sin() + 1, backend="xla")(x), x.sin() + 1)
        os._exit(0)
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) and 1)
"""


def test_a_child_forked_while_another_thread_compiles_compiles_too():
    program = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(FORKED_WHILE_COMPILING)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def _spawned(queue) -> None:
    x = torch.ones(3, 8)
    with torch.no_grad():
        eager = model()
        got = pt.compile(eager, backend="xla")(x)
        queue.put((os.getpid(), torch.equal(got.round(decimals=4), eager(x).round(decimals=4))))


def test_a_spawned_child_compiles_and_runs():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_spawned, args=(queue,))
    process.start()
    pid, agrees = queue.get(timeout=240)
    process.join()
    assert pid == process.pid
    assert agrees


FACTORS = """
import sys, threading, torch
import portable as pt

def side_by_side(*xs):
    return [torch.linalg.solve_triangular(torch.tril(x) + 8 * torch.eye(16), x, upper=False) for x in xs]

def one_after_another(x):
    a = torch.tril(x) + 8 * torch.eye(16)
    return torch.linalg.inv(a), torch.linalg.qr(x)[1], torch.linalg.cholesky(a @ a.mT)

def work():
    for _ in range(20):
        compiled(*inputs)

torch.manual_seed(0)
threads = int(sys.argv[1])
inputs = [torch.randn(512, 16, 16) for _ in range(8 if threads == 1 else 1)]
function = side_by_side if threads == 1 else one_after_another
with torch.no_grad():
    compiled = pt.compile(function, backend="xla", dynamic=False)
    for got, want in zip(compiled(*inputs), function(*inputs)):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
torch.set_grad_enabled(False)
started = [threading.Thread(target=work) for _ in range(threads)]
[t.start() for t in started]
[t.join() for t in started]
"""


@pytest.mark.parametrize("threads", [1, 6])
def test_factors_of_many_matrices_do_not_take_all_threads_of_the_pool(threads):
    """jaxlib's LAPACK waits, in a thread of XLA's pool, for the other threads: two such calls waited for ever."""
    done = subprocess.run(
        [sys.executable, "-c", FACTORS, str(threads)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
