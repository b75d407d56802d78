"""The cases of a trial lie where the backend's programs take their tensors."""

import pytest
import torch

from portable.errors import UnknownBackendError
from portable.lowering.context import Spec
from portable.slo import trial

META = torch.device("meta")  # stands for an accelerator that is not here


def unit():
    spec = Spec((6, 8), torch.float32)
    return trial.Unit("rms_norm", (spec, Spec((8,), torch.float32), 1e-6), {}, "")


def test_every_case_is_on_the_device_and_one_is_not_contiguous_there():
    cases = {
        name: [a for a in args if isinstance(a, torch.Tensor)] for name, args, _ in trial.cases_of(unit(), 0, META)
    }
    assert len(cases) == 10
    assert {x.device.type for tensors in cases.values() for x in tensors} == {"meta"}
    assert all(not x.is_contiguous() for x in cases["non-contiguous"])


def test_values_are_drawn_on_the_host():
    first, second = (trial.tensors_for(unit(), torch.Generator().manual_seed(3), d)[0] for d in (trial.HOST, META))
    again, _ = trial.tensors_for(unit(), torch.Generator().manual_seed(3))
    assert torch.equal(first[0], again[0])
    assert second[0].shape == first[0].shape


def test_the_device_is_the_backend_s():
    assert trial.device_of("cpu") == trial.device_of("xla") == torch.device("cpu")
    with pytest.raises(UnknownBackendError):
        trial.device_of("nonsense")
