"""Mesh axes from texts and files."""

import pytest

from jaxserve.config import EngineConfig
from sharding import axes


def test_a_text_or_the_mesh_of_a_file_names_axes(tmp_path):
    file = tmp_path / "mesh.toml"
    file.write_text("[mesh]\nfsdp = 2\ntensor = 4\n")
    assert axes.read(None, file) == {"fsdp": 2, "tensor": 4}
    assert axes.read("data=2, tensor=2", file) == {"data": 2, "tensor": 2}
    file.write_text("[axes]\n")
    assert axes.read(None, file) == axes.read(None, None) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tensor", r"mesh is 'tensor'; write names and sizes such as data=2,tensor=4"),
        ("=4", r"mesh is '=4'; write names"),
        ("data=2,data=4", r"it has the axis 'data' twice"),
        ("data=0", r"mesh is 'data=0'; data is 0; it must be a whole number of at least 1"),
        ("data=two", r"data is 'two'; it must be a whole number"),
    ],
)
def test_a_text_without_names_and_sizes_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        axes.read(text, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh = 3", r"mesh is 3; write a section \[mesh\]"),
        ("[mesh]\ntensor = true", r"\[mesh\] tensor is True; it must"),
    ],
)
def test_a_mesh_of_a_file_without_sizes_is_refused(tmp_path, text, message):
    (tmp_path / "mesh.toml").write_text(text)
    with pytest.raises(ValueError, match=message):
        axes.read(None, tmp_path / "mesh.toml")


def test_groups_over_some_axes():
    mesh = {"x": 2, "y": 2, "z": 4}
    assert axes.members(mesh, ("z",)) == [0, 1, 2, 3]
    assert axes.members(mesh, ("x",)) == [0, 8]
    assert axes.members(mesh, ("x", "z")) == [0, 1, 2, 3, 8, 9, 10, 11]


def test_settings_of_devices_agree_with_the_mesh(tmp_path):
    config = EngineConfig(mesh="data=2,tensor=4,stage=3")
    assert (config.tensor, config.stages, config.stage_devices) == (4, 3, 8)
    assert config.stage_axes == {"data": 2, "tensor": 4}
    assert EngineConfig(mesh="data=2", tensor=4).stage_axes == {"data": 2, "tensor": 4}
    assert EngineConfig(tensor=2, stages=2).stage_axes == {"tensor": 2}
    with pytest.raises(ValueError, match=r"stages is 2, but the mesh is stage=3; give one of the two"):
        EngineConfig(mesh="stage=3", stages=2)
    (tmp_path / "mesh.toml").write_text("[mesh]\nfsdp = 2\n")
    assert EngineConfig(sharding=str(tmp_path / "mesh.toml")).mesh == "fsdp=2"
