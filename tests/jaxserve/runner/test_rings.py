"""Products around rings of devices: the same numbers as on one, whatever is split and where the devices are."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.products import Quantized, bind, project
from jaxserve.runner import matmul, rings
from sharding import mesh as meshes
from sharding import specs
from sharding.spec import partition


def made(sizes: tuple[int, ...], seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), sizes)


@pytest.mark.parametrize("platform", ["tpu", "gpu"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("split", [0, 1])
@pytest.mark.parametrize(("mesh", "order"), [((2, 4), None), ((1, 3), (2, 0, 1)), ((2, 1), None)])
def test_a_ring_multiplies_as_one_device(mesh, order, split, quantized, platform, monkeypatch) -> None:
    on = meshes.make_mesh({"x": mesh[0], "y": mesh[1]})
    monkeypatch.setattr(rings, "FEWEST_TOKENS", 1)
    if order is not None:
        monkeypatch.setattr(meshes, "ring", lambda *_: order)
    x, wide = made((24, 48)), jnp.round(made((24, 48), 1) * 20)
    scales = made((24,), 2)
    matrix = Quantized(wide.astype(jnp.int8), scales) if quantized else wide
    split_by = {"tpu": "embed", "gpu": "tokens"}[platform]
    spec = dataclasses.replace(specs.default("bloom"), activations={split_by: ("x", "y")})
    over = tuple(axis for axis in ("x", "y") if on.shape[axis] > 1)
    held = jax.sharding.NamedSharding(on, partition(*((over, None), (None, over))[split]))
    described = jax.ShapeDtypeStruct((24, 48), x.dtype, sharding=held)
    bound = bind({"kernel": matrix}, matmul.DeviceProducts(native=None))
    shapes = {"kernel": Quantized(described, scales) if quantized else described}
    bound = rings.around(bound, shapes, on, spec, platform)
    assert bound["kernel"].matmul.ring is not None
    found = jax.jit(lambda x: project(x, bound["kernel"]))(x)
    expected = np.asarray(x) @ np.asarray(wide).T * (np.asarray(scales) if quantized else 1)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("over", [("x", "y"), ("y", "x")])
@pytest.mark.parametrize(
    ("sides", "closed"),
    [((4, 4), True), ((2, 2, 4), True), ((3, 4), True), ((2, 3, 5), True), ((1, 4, 1), False), ((3, 3), False)],
)
def test_devices_of_a_ring_are_neighbours(sides, closed, over) -> None:
    chips = np.empty(int(np.prod(sides)), object)
    chips[:] = [SimpleNamespace(coords=place, core_on_chip=0) for place in np.ndindex(*sides)]
    on = SimpleNamespace(devices=chips.reshape(2 if closed else 1, -1), axis_names=("x", "y"))
    order = meshes.ring(on, over)  # type: ignore[arg-type]
    assert sorted(order) == list(range(len(chips)))
    places = [chip.coords for chip in (on.devices if over == ("x", "y") else on.devices.T).ravel()]
    steps = {
        sum(abs(a - b) for a, b in zip(places[here], places[there], strict=True))
        for here, there in zip(order, (*order[1:], order[0]), strict=True)
    }
    assert (steps == {1}) is closed


def test_few_tokens_are_not_split_further() -> None:
    on = meshes.make_mesh({"x": 8})
    both = {"mesh": on, "over": ("x",), "order": tuple(range(8)), "hidden": partition(None, None), "split": 0}
    by_tokens, by_columns = (rings.Ring(by=by, **both) for by in ("tokens", "embed"))
    assert [by_tokens.pays(tokens) for tokens in (256, 2047, 2048)] == [False, False, True]
    assert by_columns.pays(1)
