"""The whole models are of the sizes that their names say, and none of their weights is made."""

import pytest
import torch

from tests.examples.test_examples import load

PARAMETERS = {"resnet50": 25.6e6, "vit_s": 22.0e6, "bert_base": 109.5e6, "llama_1b": 1236e6}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_whole_model_has_the_usual_number_of_parameters_and_no_values(name):
    with torch.device("meta"):
        model, args = getattr(load("whole_models"), name)()
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(PARAMETERS[name], rel=0.01)
    assert {x.device.type for x in (*model.parameters(), *args)} == {"meta"}
