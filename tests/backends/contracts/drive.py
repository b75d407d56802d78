"""Drive one backend through everything that an adapter does, against its vendor's stand-in; prints what came of it.

Run as a program with the folder of the stand-ins on PYTHONPATH: the device that one registers stays for good.
"""

import importlib
import json
import sys

import torch

import portable as pt
from portable import backends
from portable.errors import PortableError


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x).relu()


def refusal(**options) -> str:
    try:
        pt.compile(Model(), **options)
    except PortableError as failure:
        return str(failure)
    return ""


def drive(name: str, package: str) -> dict:
    base, _, variant = name.partition(":")
    state = type(backends.backend_class(base).of(variant)).probe()
    backend = backends.get(name)
    calls = importlib.import_module(package).CALLS
    calls.clear()
    found = {"probe": [state.ready, state.reason], "device": str(backend.device()), "hardware": backend.hardware()}
    found["memory"] = list(vars(backend.memory_stats()).values())
    backend.synchronize()
    found["seconds"] = backend.seconds(lambda: calls.append("work"))
    backend.manual_seed(3)
    found["calls"], calls[:] = list(calls), []
    found["capabilities"] = {"graphs": backend.capabilities().graphs, **dict(backend.capabilities().multiples)}
    model = Model()
    compiled = pt.compile(model, backend=name)
    with torch.no_grad():
        same = [torch.equal(compiled(x), model(x)) for x in (torch.ones(n, 4) for n in range(2, 12))]
    explained = pt.explain(compiled, show=False)
    found |= {"same": same, "compiles": calls, "notes": list(map(str, explained.notes)), "ops": explained.ops}
    found["fallbacks"] = [f.reason for f in explained.fallbacks]
    found["refusals"] = [refusal(backend=name, graphs="require"), refusal(backend=name, dynamic=True)]
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(drive(*sys.argv[1:])) + "\n")
