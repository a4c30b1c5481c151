"""The families: what each module promises, and what the layers compute."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import models
from jaxserve.models import layers, products
from jaxserve.models.rotary import Rotary
from jaxserve.models.schema import alibi_slopes
from jaxserve.weights import naming
from sharding import specs
from tests.fixtures import dense

BLOOM = {
    "model_type": "bloom",
    "vocab_size": 61,
    "hidden_size": 24,
    "n_layer": 3,
    "n_head": 3,
    "initializer_range": 0.3,
}
GPT2 = BLOOM | {"model_type": "gpt2", "n_embd": 24, "n_positions": 32, "n_inner": 40}
GPT_NEOX = {
    "model_type": "gpt_neox",
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
}
LLAMA = GPT_NEOX | {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
QWEN2 = LLAMA | {"model_type": "qwen2", "head_dim": 4}
QWEN3 = LLAMA | {"model_type": "qwen3"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4}
PHI3 = LLAMA | {"model_type": "phi3", "sliding_window": 4}
GEMMA2 = LLAMA | {"model_type": "gemma2", "sliding_window": 4, "query_pre_attn_scalar": 12}
GEMMA3 = GEMMA2 | {"model_type": "gemma3_text", "layer_types": ["sliding_attention"] * 3}
GPTJ = GPT2 | {"model_type": "gptj", "rotary_dim": 4}
FALCON = GPT_NEOX | {"model_type": "falcon"}
MPT = {
    "model_type": "mpt",
    "vocab_size": 61,
    "d_model": 24,
    "n_layers": 3,
    "n_heads": 3,
    "initializer_range": 0.3,
}
OPT = GPT_NEOX | {"model_type": "opt", "ffn_dim": 40, "init_std": 0.3}
UNTIED = {"tie_word_embeddings": False}
NARROW = {"word_embed_proj_dim": 16}
CONFIGS = {
    "bloom": BLOOM,
    "bloom-untied": BLOOM | UNTIED,
    "bloom-post-norm": BLOOM | {"apply_residual_connection_post_layernorm": True},
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | UNTIED | {"scale_attn_by_inverse_layer_idx": True, "activation_function": "quick_gelu"},
    "gpt_neox": GPT_NEOX,
    "gpt_neox-tied": GPT_NEOX
    | {"tie_word_embeddings": True, "use_parallel_residual": False, "attention_bias": False, "rotary_pct": 1.0},
    "llama": LLAMA,
    "llama-tied": LLAMA | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "qwen2": QWEN2,
    "qwen2-windows": QWEN2 | WINDOWS | {"tie_word_embeddings": True},
    "qwen3": QWEN3,
    "qwen3-windows": QWEN3 | WINDOWS | {"attention_bias": True},
    "mistral": MISTRAL,
    "mistral-no-window": MISTRAL | {"sliding_window": None},
    "phi3": PHI3,
    "phi3-partly-rotated": PHI3 | {"sliding_window": None, "partial_rotary_factor": 0.75},
    "gemma2": GEMMA2,
    "gemma2-uncapped": GEMMA2
    | UNTIED
    | {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True},
    "gemma3_text": GEMMA3,
    "gemma3_text-pattern": GEMMA3
    | {"layer_types": None, "sliding_window_pattern": 2, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    "gptj": GPTJ,
    "gpt_bigcode": GPT2 | {"model_type": "gpt_bigcode"},
    "gpt_bigcode-multi-head": GPT2 | {"model_type": "gpt_bigcode", "multi_query": False},
    "falcon": FALCON,
    "falcon-grouped": FALCON
    | {"new_decoder_architecture": True, "num_attention_heads": 6, "num_kv_heads": 2, "bias": True}
    | UNTIED,
    "falcon-alibi": FALCON | {"alibi": True, "parallel_attn": False, "multi_query": False},
    "mixtral": LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": LLAMA
    | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    "gpt_oss": LLAMA | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 3},
    "mpt": MPT,
    "mpt-clipped": MPT | {"attn_config": {"clip_qkv": 2.0, "softmax_scale": 0.3}},
    "opt": OPT,
    "opt-post-norm": OPT | NARROW | UNTIED | {"do_layer_norm_before": False},
    "opt-without-head": OPT | {"do_layer_norm_before": False},
    "opt-bare": OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False, "_remove_final_layer_norm": True},
}


@pytest.fixture(params=CONFIGS)
def model(request) -> models.Model:
    return models.build(models.parse_config(CONFIGS[request.param]))


@pytest.fixture(params=models.families())
def plain_model(request) -> models.Model:
    return models.build(models.parse_config(CONFIGS[request.param]))


def test_every_family_has_a_config_here_and_a_sharding():
    assert {config["model_type"] for config in CONFIGS.values()} == set(models.families())
    for name in models.families():
        assert specs.default(name).rules


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=f"'mamba' is unknown; the known ones are {', '.join(models.families())}"):
        models.parse_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="model_type is missing"):
        models.parse_config({})


def test_tables_of_a_family_match_its_parameters(model):
    shapes = model.shapes(jnp.float32)
    axes = model.axes()
    stored = model.stored()
    structure = jax.tree.structure(shapes)
    assert jax.tree.structure(axes, is_leaf=models.is_tuple) == structure
    assert jax.tree.structure(stored, is_leaf=models.is_tuple) == structure
    places = [(leaf.name, leaf.share, leaf.every) for leaf in jax.tree.leaves(stored, is_leaf=models.is_tuple)]
    assert len(set(places)) == len(places)
    sizes, config = model.axis_sizes(), model.config
    assert (sizes["vocab"], sizes["embed"]) == (config.vocab_size, config.hidden_size)
    assert (sizes["heads"], sizes["ffn"]) == (config.num_heads, config.ffn_size)
    rules = specs.default(config.family).rules
    for parameter in naming.parameters(model, jnp.float32):
        name, logical, shape = parameter.name, parameter.axes, parameter.shape.shape
        assert len(shape) == len(logical), f"{name} has axes {logical} and shape {shape}"
        wrong = [axis for size, axis in zip(shape, logical, strict=True) if size % sizes[axis]]
        assert not wrong, f"{name} of shape {shape}: {wrong} of axes {logical}, which count {sizes}"
        assert set(logical) <= {*rules, "kv_heads"}, (
            f"{name} has axes {logical}; the family's sharding has rules for {list(rules)}"
        )


def test_init_shapes_and_seed(plain_model):
    first, other = (plain_model.init(seed, jnp.bfloat16) for seed in (0, 1))
    announced = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), plain_model.shapes(jnp.bfloat16))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), first) == announced
    kernels = [tree["layers"][i]["out"]["kernel"] for tree in (first, other) for i in range(2)]
    assert all(bool((a != b).any()) for i, a in enumerate(kernels) for b in kernels[:i])


def test_one_seed_draws_one_model():
    model = models.build(models.parse_config(CONFIGS["bloom"]))
    first, again = (model.init(0, jnp.bfloat16) for _ in range(2))
    assert all(jax.tree.leaves(jax.tree.map(lambda a, b: bool((a == b).all()), first, again)))


def test_a_config_survives_being_written(model):
    family = models.family(model.config.family)
    assert models.parse_config(family.hf_config(model.config)) == model.config


@pytest.mark.parametrize(
    ("model_type", "names"),
    [
        ("bloom", {"n_embed": 24, "num_hidden_layers": 3, "num_attention_heads": 3}),
        ("gpt2", {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3, "max_position_embeddings": 32}),
    ],
)
def test_other_names_of_the_same_sizes_are_read(model_type, names):
    usual = {"bloom": BLOOM, "gpt2": GPT2 | {"n_inner": None}}[model_type]
    entries = {"model_type": model_type, "vocab_size": 61, "initializer_range": 0.3} | names
    assert models.parse_config(entries) == models.parse_config(usual)


def test_experts_are_counted_by_either_name():
    named = CONFIGS["qwen3_moe"] | {"num_experts": None, "num_local_experts": 4}
    assert models.parse_config(named) == models.parse_config(CONFIGS["qwen3_moe"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": None}, "n_layer or num_hidden_layers is missing"),
        ({"n_layer": 0}, "n_layer is 0; it must be a whole number of at least 1"),
        ({"n_head": 5}, "hidden size 24 does not divide into 5 heads"),
        ({"vocab_size": "61"}, "vocab_size is '61'"),
        ({"add_cross_attention": True}, "add_cross_attention is True, which is not supported"),
        ({"activation_function": "mish"}, "activation_function is 'mish'; it must be one of gelu, "),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon is nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; it must be true or false"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'; it must be a token id"),
    ],
)
def test_entries_that_cannot_be_used_are_refused_in_words(change, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config(GPT2 | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"head_dim": 16}, r"head_dim is 16, which is not supported \(the heads share the hidden size\); only 8 is"),
        ({"rotary_pct": 0.0}, "rotated share of a head is 0.0, which is 0 of its 8 numbers; it must be pairs of them"),
        ({"rotary_pct": 0.4}, "rotated share of a head is 0.4, which is 3 of its 8 numbers; it must be pairs of them"),
        ({"rotary_pct": 1.5}, "rotated share of a head is 1.5, which is 12 of its 8 numbers; it must be pairs of them"),
        ({"rotary_emb_base": 0}, "rope_theta is 0.0; it must be more than 1"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling has factor 0.5; it must be at least 1"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters is of rope_type 'longrope', which is not"),
        ({"rope_parameters": "default"}, "rope_parameters is 'default'; it must be an object"),
        ({"hidden_act": "glu"}, "hidden_act is 'glu'; it must be one of gelu, "),
        ({"use_parallel_residual": 1}, "use_parallel_residual is 1; it must be true or false"),
    ],
)
def test_unsupported_rotary_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config(GPT_NEOX | change)


def test_both_ways_of_writing_rotary_positions_mean_the_same():
    old = GPT_NEOX | {"rotary_pct": 0.5, "rotary_emb_base": 500, "rope_scaling": None}
    new = GPT_NEOX | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}}
    both = old | {"rope_theta": 500, "partial_rotary_factor": 0.5}
    assert models.parse_config(old) == models.parse_config(new) == models.parse_config(both)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ffn_dim": None}, "ffn_dim is missing"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0; it must be a whole number of at least 1"),
        ({"word_embed_proj_dim": 12.5}, "word_embed_proj_dim is 12.5; it must be a whole number"),
        ({"do_layer_norm_before": "no"}, "do_layer_norm_before is 'no'; it must be true or false"),
        ({"enable_bias": 0}, "enable_bias is 0; it must be true or false"),
        ({"activation_function": "relu6"}, "activation_function is 'relu6'; it must be one of gelu, "),
        ({"num_attention_heads": 5}, "hidden size 24 does not divide into 5 heads"),
    ],
)
def test_unsupported_opt_entries_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config(OPT | change)


LAYER_TYPES = {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}


@pytest.mark.parametrize(
    ("entries", "windows"),
    [
        (QWEN2, ()),
        (QWEN2 | WINDOWS, (None, 4, 4)),
        (QWEN3 | WINDOWS | {"max_window_layers": 0}, (4, 4, 4)),
        (QWEN3 | WINDOWS | {"max_window_layers": 3}, ()),
        (QWEN2 | WINDOWS | LAYER_TYPES, (None, 4, None)),
        (QWEN2 | WINDOWS | {"use_sliding_window": False}, ()),
        (MISTRAL, (4, 4, 4)),
        (MISTRAL | LAYER_TYPES, (None, 4, None)),
        (MISTRAL | {"sliding_window": None}, ()),
        (GEMMA2, (4, None, 4)),
        (GEMMA3 | {"layer_types": None}, (4, 4, 4)),
        (GEMMA3 | {"layer_types": None, "sliding_window_pattern": 2}, (4, None, 4)),
        (GEMMA3 | LAYER_TYPES, (None, 4, None)),
        ({name: entry for name, entry in MISTRAL.items() if name != "sliding_window"}, (4096,) * 3),
    ],
)
def test_windows_of_layers_are_read(entries, windows):
    assert models.parse_config(entries).windows == windows


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (LLAMA | {"num_key_value_heads": 4}, "num_key_value_heads is 4; it must divide num_attention_heads, which is"),
        (MISTRAL | {"sliding_window": 0}, "sliding_window is 0; it must be a whole number of at least 1"),
        (MISTRAL | {"layer_types": ["full_attention"]}, "it must be a list with a name for each of 3 layers"),
        (MISTRAL | {"layer_types": ["chunked_attention"] * 3}, "layer_types has 'chunked_attention', which is not"),
        (QWEN2 | LAYER_TYPES, "layer_types has 'sliding_attention', but no sliding_window is in use"),
        (PHI3 | {"attention_bias": True}, "attention_bias is True, which is not supported"),
        (
            PHI3 | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}},
            "rope_scaling is of rope_type 'longrope', which is not supported; default is",
        ),
        (
            PHI3 | {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "rope_parameters is of rope_type 'yarn', which is not supported; default is",
        ),
        (GEMMA3 | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True, which is not supported"),
        (GEMMA3 | {"attn_logit_softcapping": 50.0}, r"attn_logit_softcapping is 50.0, which is not .*; leave it out"),
        (GEMMA3 | {"rope_scaling": {"type": "yarn"}}, "rope_type 'yarn', which is not supported; default, linear are"),
        *(
            (entries, r"partial_rotary_factor is 0.5, which is not .* \(the family rotates whole heads\); only 1 is")
            for entries in (
                LLAMA | {"partial_rotary_factor": 0.5},
                QWEN3 | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
                GEMMA3 | {"rope_parameters": {"sliding_attention": {"partial_rotary_factor": 0.5}}},
                FALCON | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5}},
            )
        ),
        (CONFIGS["gpt_oss"] | {"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0, which is not supported .*; only 1.702 is"),
        (QWEN2 | {"use_mrope": True}, "use_mrope is True, which is not supported"),
        (
            QWEN2 | {"dual_chunk_attention_config": {"chunk_size": 8}},
            r"dual_chunk_attention_config is {'chunk_size': 8}, which is not supported \(.*\); leave it out",
        ),
    ],
)
def test_unsupported_decoder_entries_are_refused(entries, message):
    with pytest.raises(ValueError, match=message):
        models.parse_config(entries)


@pytest.mark.parametrize("entries", [QWEN3 | WINDOWS, MISTRAL], ids=lambda e: e["model_type"])
def test_both_dialects_of_a_decoder_config_mean_the_same(entries):
    old = entries | {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 2.0}, "torch_dtype": "float16"}
    new = entries | {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}, "dtype": "float16"}
    assert models.parse_config(old) == models.parse_config(new)


def test_whole_heads_may_be_asked_for():
    for place in ({}, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 1.0}}):
        assert models.parse_config(MISTRAL | {"partial_rotary_factor": 1} | place) == models.parse_config(MISTRAL)


def test_both_dialects_of_gemma_3_mean_the_same():
    old = {"rope_theta": 500, "rope_local_base_freq": 50, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    kinds = {
        "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    }
    config = models.parse_config(GEMMA3 | old)
    assert models.parse_config(GEMMA3 | {"rope_parameters": kinds}) == config
    assert config.max_position == GEMMA3["max_position_embeddings"]  # which is stretched already
    assert models.parse_config(GEMMA3 | {"rope_theta": None}) == models.parse_config(GEMMA3 | {"rope_theta": 1e6})


def test_ends_of_a_text_are_read_as_the_library_reads_them():
    def ends(**entries):
        return models.parse_config(BLOOM | entries).eos_token_ids

    assert ends() == (2,)  # absent: the library's default for the family
    assert ends(eos_token_id=None) == ()
    assert ends(eos_token_id=7) == (7,)
    assert ends(eos_token_id=[7, 9]) == (7, 9)
    assert ends(eos_token_id=-1) == ends(eos_token_id=61) == ()


def test_alibi_slopes_of_head_counts_that_are_no_powers_of_two():
    np.testing.assert_allclose(alibi_slopes(4), [0.25, 0.0625, 0.015625, 0.00390625])
    np.testing.assert_allclose(alibi_slopes(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125])
    assert len(alibi_slopes(112)) == 112
    assert len(set(alibi_slopes(112).tolist())) == 112


def test_layers_scanned_equal_layers_unrolled(plain_model):
    params, positions = plain_model.init(0, jnp.float32), jnp.arange(5)
    attend = dense.attend(plain_model.config, 0)

    @jax.jit
    def unrolled(params, x):
        for i in range(plain_model.config.num_layers):
            x, _ = plain_model.layer(params, i, x, positions, attend, None)
        return x

    @jax.jit
    def scanned(params, x):
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *params["layers"])
        return jax.lax.scan(lambda x, weights: plain_model.block(0, weights, x, positions, attend, None), x, stacked)[0]

    x = jax.random.normal(jax.random.key(1), (5, 24))
    np.testing.assert_allclose(scanned(params, x), unrolled(params, x), atol=1e-5)


@pytest.mark.parametrize("size", [2, 6, 8])
def test_rotary_equals_complex_rotation(size):
    x, positions = jax.random.normal(jax.random.key(0), (5, 3, 8)), jnp.array([0, 1, 1, 7, 2000])
    y = np.asarray(Rotary(size=size, theta=100.0)(x, positions))
    turns = np.exp(1j * np.outer(positions, 100.0 ** -(np.arange(size // 2) * 2 / size)))[:, None]
    wide = np.asarray(x, np.float64)
    exact = (wide[..., : size // 2] + 1j * wide[..., size // 2 : size]) * turns
    np.testing.assert_allclose(y[..., : size // 2], exact.real, atol=5e-4)
    np.testing.assert_allclose(y[..., size // 2 : size], exact.imag, atol=5e-4)
    np.testing.assert_array_equal(y[..., size:], x[..., size:])
    np.testing.assert_array_equal(y[0], x[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_unbound_projections_sum_in_float32(rows, dtype):
    x = jax.random.normal(jax.random.key(0), (rows, 320), dtype)
    kernel = jax.random.normal(jax.random.key(1), (48, 320), dtype)
    exact = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T
    y = products.project(x, kernel)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, exact, atol=2e-4)


def test_a_norm_keeps_its_statistics_in_float32():
    config = models.parse_config(BLOOM | {"hidden_size": 192, "layer_norm_epsilon": 1e-3})
    norm = layers.LayerNorm(config)
    x = 100 + jax.random.normal(jax.random.key(0), (5, 192), jnp.bfloat16)
    wide = np.asarray(x, np.float64)
    exact = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize(
    "plain_model",
    [
        name if name in ("bloom", "gpt_oss") else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in models.families()
    ],
    indirect=True,
)
def test_gradients_flow_to_every_parameter(plain_model):
    params = plain_model.init(0, jnp.float32)
    tokens = jnp.arange(6)

    def loss(params):
        return -dense.logprobs(plain_model, params, tokens)[:-1, 3].mean()

    sizes = jax.tree.map(lambda leaf: float(jnp.abs(leaf).max()), jax.jit(jax.grad(loss))(params))
    assert all(size > 0 for size in jax.tree.leaves(sizes))


def test_a_config_with_too_many_layers_is_refused_at_once():
    entries = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_head": 2, "n_positions": 16}
    assert models.parse_config(entries | {"n_layer": 1024}).num_layers == 1024
    with pytest.raises(ValueError, match="the config has 99999 layers; at most 1024"):
        models.parse_config(entries | {"n_layer": 99_999})


def test_heads_of_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.parse_config(BLOOM).num_heads = 4
