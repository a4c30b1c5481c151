"""Another program's Orbax checkpoint, with its layers in one array each, as a Hugging Face directory."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from jaxserve import models, weights
from jaxserve.weights import CheckpointError
from jaxserve.weights.checkpoint import StoredTensors
from server.commands import cli
from tests.jaxserve.weights import directories

QWEN3 = directories.QWEN3 | {"attention_bias": False}
HEADS, KV_HEADS, DIM = QWEN3["num_attention_heads"], QWEN3["num_key_value_heads"], QWEN3["head_dim"]
SCALE = 2.0
LAYERS = "model.layers.{layer}."
NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def entry(name: str, array: str, **steps: object) -> str:
    lines = [f"name = {json.dumps(name)}", f"array = {json.dumps(array)}"]
    return "\n".join(["[[tensors]]", *lines, *(f"{key} = {value}" for key, value in steps.items()), ""])


MAPPING = "\n".join(
    [
        'checkpoint = "0/items"\n',
        entry("model.embed_tokens.weight", "params.embed"),
        entry("model.norm.weight", "params.norm"),
        *([] if QWEN3.get("tie_word_embeddings") else [entry("lm_head.weight", "params.head", transpose=[1, 0])]),
        *(entry(f"{LAYERS}{name}.weight", f"params.layers.{name.replace('.', '_')}", layers=1) for name in NORMS),
        *(
            entry(
                f"{LAYERS}self_attn.{name}_proj.weight",
                f"params.layers.{name}",
                layers=1,
                transpose=[1, 2, 0],
                deinterleave=1,
                merge=[0, 1],
                **({"scale": SCALE} if name == "q" else {}),
            )
            for name in ("q", "k")
        ),
        entry(f"{LAYERS}self_attn.v_proj.weight", "params.layers.v", layers=1, transpose=[1, 2, 0], merge=[0, 1]),
        entry(f"{LAYERS}self_attn.o_proj.weight", "params.layers.o", layers=0, transpose=[2, 0, 1], merge=[1, 2]),
        *(
            entry(f"{LAYERS}mlp.{name}_proj.weight", f"params.layers.{name}", layers=1, transpose=[1, 0])
            for name in ("gate", "up", "down")
        ),
    ]
)


def foreign(tensors: StoredTensors) -> dict:
    """The arrays as MaxText arranges them: layers on axis 1, kernels [in, heads, dim], rotary pairs side by side."""
    read = {name: np.asarray(tensors[name].values) for name in tensors.names()}
    count = QWEN3["num_hidden_layers"]

    def each(name: str) -> list[np.ndarray]:
        return [read[f"model.layers.{layer}.{name}.weight"] for layer in range(count)]

    def heads(name: str, number: int, *, pairs: bool = False, scale: float = 1.0) -> np.ndarray:
        parts = [part.reshape(number, DIM, -1).transpose(2, 0, 1) * scale for part in each(f"self_attn.{name}_proj")]
        if pairs:
            parts = [np.stack([part[..., : DIM // 2], part[..., DIM // 2 :]], -1).reshape(part.shape) for part in parts]
        return np.stack(parts, 1)

    layers = {name.replace(".", "_"): np.stack(each(name), 1) for name in NORMS}
    layers |= {n: np.stack([part.T for part in each(f"mlp.{n}_proj")], 1) for n in ("gate", "up", "down")}
    layers |= {
        "q": heads("q", HEADS, pairs=True, scale=1 / SCALE),
        "k": heads("k", KV_HEADS, pairs=True),
        "v": heads("v", KV_HEADS),
        "o": np.stack([part.reshape(-1, HEADS, DIM).transpose(1, 2, 0) for part in each("self_attn.o_proj")], 0),
    }
    ends = {"embed": read["model.embed_tokens.weight"], "norm": read["model.norm.weight"]}
    if "lm_head.weight" in read:
        ends["head"] = read["lm_head.weight"].T
    return {"params": ends | {"layers": layers}, "step": np.zeros((), np.int32)}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with config.json, a mapping, and an Orbax checkpoint of the tensors in tmp_path/hf."""
    config = models.parse_config(QWEN3)
    weights.write_hf(tmp_path / "hf", config, models.build(config).init(0, jnp.float32))
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_bytes((tmp_path / "hf" / "config.json").read_bytes())
    (directory / "mapping.toml").write_text(MAPPING)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(directory / "0" / "items", ocp.args.PyTreeSave(foreign(StoredTensors(tmp_path / "hf"))))
    return directory


def test_the_weights_are_those_of_the_source(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert cli.main(["convert", str(source), str(out), "--mapping", str(source / "mapping.toml")]) == 0
    model = models.build(weights.read_config(out))
    found, expected = (weights.load(path, model, jnp.dtype(jnp.float32)) for path in (out, tmp_path / "hf"))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize(
    ("wrong", "right", "told"),
    [
        (
            'array = "params.layers.v"',
            'array = "params.layers.w"',
            "has no array 'params.layers.w'; it has",
        ),
        ("transpose = [1, 2, 0]", "transpose = [1, 2]", "does not make 'model.layers.{layer}.self_attn.q_proj.weight'"),
        ("layers = 0", "", "must have {layer} in its name if it has layers"),
        ("scale = 2.0", 'scale = "2"', "has scale = '2'; it must be a number"),
        ("deinterleave = 1", "interleave = 1", "has 'interleave'; there are name, array, layers"),
        ('checkpoint = "0/items"', 'checkpoint = "1/items"', "1/items cannot be read"),
        ("model.norm.weight", "model.other.weight", "model.norm.weight"),
        ("[[tensors]]", "[[tensor]]", "has 'tensor'; it may have checkpoint and [[tensors]]"),
        ("[[tensors]]", "[[tensors", "is not TOML"),
    ],
)
def test_a_mistake_is_told_and_nothing_is_left(source: Path, tmp_path: Path, wrong: str, right: str, told: str) -> None:
    mapping = source / "mapping.toml"
    assert wrong in MAPPING
    mapping.write_text(MAPPING.replace(wrong, right))
    with pytest.raises(CheckpointError) as problem:
        weights.convert_mapped(source, tmp_path / "out", mapping)
    assert told in str(problem.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "source"]
