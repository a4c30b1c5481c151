"""The known models: found by name, and of their published sizes."""

from __future__ import annotations

import pytest

from jaxserve.planning import model_catalog
from jaxserve.planning.predict import count_parameters

TABLE = 201_088 * 2880 / 1e9  # of embeddings, which gpt-oss leaves out where it counts active parameters


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("bloom-560m", 0.559),
        ("bloom-7b1", 7.07),
        ("gpt2", 0.124),
        ("gpt2-xl", 1.56),
        ("gpt3-13b", 12.9),
        ("gpt3-341b", 341),
        ("gpt-neox-20b", 20.6),
        ("gpt-j-6b", 6.05),
        ("llama-3-8b", 8.03),
        ("llama-3-70b", 70.6),
        ("llama-3.2-1b", 1.24),
        ("mistral-7b", 7.24),
        ("mixtral-8x7b", 46.7),
        ("qwen3-0.6b", 0.596),
        ("qwen3-32b", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("gemma-2-9b", 9.24),
        ("gemma-3-27b", 27.0),
        ("phi-3-mini-4k", 3.82),
        ("falcon-7b", 6.92),
        ("falcon-40b", 41.3),
        ("gpt-oss-20b", 20.9),
        ("gpt-oss-120b", 117),
        ("mpt-7b", 6.65),
        ("starcoder", 15.5),
    ],
)
def test_known_models_have_their_published_sizes(name, billions):
    assert count_parameters(model_catalog.find(name)[1])[0] / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.9), ("qwen3-30b-a3b", 3.3), ("gpt-oss-20b", 3.6 + TABLE), ("gpt-oss-120b", 5.1 + TABLE)],
)
def test_active_parameters_are_those_published(name, billions):
    assert count_parameters(model_catalog.find(name)[1])[1] / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.parametrize("name", model_catalog.KNOWN)
def test_every_known_model_is_read(name):
    assert model_catalog.find(name)[1].num_layers >= 12


def test_a_model_is_found_by_name_file_or_directory(tmp_path):
    assert model_catalog.find("gpt2")[1].num_layers == 12
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "n_layer": 3, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 8}'
    )
    assert model_catalog.find(str(folder / "config.json")) == model_catalog.find(str(folder))
    name, config = model_catalog.find(str(folder))
    assert (name, config.num_layers) == ("mine", 3)
    with pytest.raises(ValueError, match=r"model 'bloom-176' is neither .*; did you mean bloom-176b\?"):
        model_catalog.find("bloom-176")
    with pytest.raises(ValueError, match=r"model 'x' is neither .*; the known ones are bloom-560m"):
        model_catalog.find("x")
