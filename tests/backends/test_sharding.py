"""How arguments lie on a mesh: XLA's notation, against the devices that each element belongs to."""

import re

import numpy as np
import pytest

from portable.backends.sharding import REPLICATED, Mesh
from portable.errors import ConfigError


def blocks(sharding, ndim):
    """{device: index of its block along each dimension}, as XLA reads the notation."""
    found = re.fullmatch(r"\{devices=\[([\d,]+)\]([\d,]+)( last_tile_dim_replicate)?\}", sharding)
    tiles = [int(n) for n in found[1].split(",")]
    devices = np.array([int(n) for n in found[2].split(",")]).reshape(tiles)
    return {int(device): index[:ndim] for index, device in np.ndenumerate(devices)}


def test_a_weight_is_divided_along_its_largest_dimension_and_an_input_along_its_first():
    mesh = Mesh({"batch": 2, "tensor": 4})
    x, w, bias = mesh.shardings([(6, 12), (8, 12), (8,)], ["x", "w", "b"], frozenset({1, 2}), 6)
    assert blocks(x, 2) == {device: (device // 4, 0) for device in range(8)}
    assert blocks(w, 2) == {device: (0, device % 4) for device in range(8)}
    assert bias == REPLICATED


def test_a_plan_names_the_dimension_of_a_weight():
    mesh = Mesh({"tensor": 4}, {"*.w": 0})
    (w,) = mesh.shardings([(8, 12)], ["layers.w"], frozenset({0}), None)
    assert blocks(w, 2) == {device: (device, 0) for device in range(4)}


def test_an_input_without_the_batch_is_on_every_device():
    mesh = Mesh({"batch": 2})
    assert mesh.shardings([(6, 3), (3, 3), ()], ["x", "mask", "n"], frozenset(), 6)[1:] == (REPLICATED, REPLICATED)


def test_a_plan_may_name_a_weight_as_its_module_does():
    mesh = Mesh({"tensor": 2}, {"0.weight": 1})
    mesh.check([("self.0.weight", (4, 4))])
    assert mesh.shardings([(4, 4)], ["self.0.weight"], frozenset({0}), None) != (REPLICATED,)


@pytest.mark.parametrize(
    ("shape", "plan", "shapes", "message"),
    [
        ({"data": 4}, None, [], "not legal"),
        ({"batch": 0}, None, [], "not legal"),
        ({"batch": 2}, {"w": 0}, [], "needs a mesh with the axis tensor"),
        ({"batch": 4}, None, [(6, 4)], "batch of 6 cannot be divided over 4"),
        ({"tensor": 4}, {"w": 0}, [(4, 4), (6, 4)], r"dimension 0 of w \[6, 4\] cannot be divided over 4"),
        ({"tensor": 4}, {"w": 2}, [(4, 4), (8, 4)], "dimension 2 of w"),
        ({"tensor": 4}, {"v*": 0}, [(4, 4), (8, 4)], "names no weight"),
        ({"tensor": 3}, None, [(4, 4), (8, 4)], "no weight can be divided over 3"),
        ({"tensor": 2.5}, None, [], "each value is an int"),
        ({"tensor": 2}, {"w": "0"}, [], "each value is an int"),
    ],
)
def test_a_mesh_or_plan_that_does_not_fit_is_refused_by_name(shape, plan, shapes, message):
    weights = frozenset(range(1, len(shapes)))
    with pytest.raises(ConfigError, match=message):
        mesh = Mesh(shape, plan)
        mesh.shardings(shapes, ["x", "w"][: len(shapes)], weights, shapes[0][0])
        mesh.check([("w", each) for each in shapes[1:]])
