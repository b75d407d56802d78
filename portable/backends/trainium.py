"""`trainium`: AWS Trainium 2 and 3 through TorchNeuron (torch-neuronx ≥ 2.33), which makes it torch's device `neuron`.

Facts from AWS's Neuron documentation, release 2.33 (October 2026): the Dynamo backend is "neuron"; dynamic=True is
refused; "shapes that vary between steps run, recompiling per new shape". `torch.neuron` has torch.cuda's surface.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from portable.backends.base import Capabilities
from portable.backends.gpu import Gpu
from portable.backends.vendor import VendorBackend
from portable.kernels.fingerprint import ABSENT, version


class Trainium(VendorBackend, Gpu):
    name = "trainium"
    device_type = "neuron"
    package = "torch_neuronx"
    dynamo = "neuron"
    device_name = "f'{torch.neuron.device_count()} NeuronCores'"
    where = "a Trainium instance (trn2, trn3)"
    static_shapes = "the Neuron compiler takes static shapes alone"
    no_graphs = "the Neuron compiler makes one program of a graph: there are no launches to record"

    def capabilities(self) -> Capabilities:
        """The tensor engine is a 128 × 128 systolic array that takes 16-bit numbers at full rate, and float32 at a
        quarter of it (AWS's NKI documentation); the device has no arithmetic of 64 bits."""
        emulated = {
            torch.float64: "the device has no arithmetic of 64 bits",
            torch.int64: "the device has no arithmetic of 64 bits (neuronx-cc's options --native-int64 and "
            "--implicit-integer-downcast)",
            torch.float32: "its matrix products take a quarter of bfloat16's rate",
        }
        return Capabilities(
            self.dtypes() - {torch.complex64, torch.complex128},
            emulated,
            {"matmul": 128},
            collectives="neuron",
        )

    def hardware(self) -> dict[str, str]:
        return {
            "device": str(self.properties().name),
            "architecture": "neuron",
            "driver": ABSENT,
            "runtime": f"torch-neuronx {version('torch-neuronx')} neuronx-cc {version('neuronx-cc')}",
        }

    def tolerances(self) -> Mapping[torch.dtype, float]:
        """The compiler may multiply float32 in bfloat16 (its option --auto-cast)."""
        exact = super().tolerances()
        return {**exact, torch.float64: exact[torch.bfloat16], torch.float32: exact[torch.bfloat16]}


BACKEND = Trainium
