"""What all tests share: the same random inputs at each run, alone or in any order."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
