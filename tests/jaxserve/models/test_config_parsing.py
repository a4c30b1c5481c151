"""Which entries of a config.json are read, in which dialects, and which are refused by name."""

import dataclasses
import math

import pytest

from jaxserve import models
from tests.jaxserve.models.configs import (
    BLOOM,
    CONFIGS,
    FALCON,
    GEMMA2,
    GEMMA3,
    GPT2,
    GPT_NEOX,
    LLAMA,
    MISTRAL,
    OPT,
    PHI3,
    QWEN2,
    QWEN3,
    WINDOWS,
)


def test_an_unknown_family_is_refused_by_name():
    with pytest.raises(ValueError, match=f"'mamba' is unknown; the known ones are {', '.join(models.families())}"):
        models.parse_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="model_type is missing"):
        models.parse_config({})


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
        *(
            (
                entries | {"dual_chunk_attention_config": {"chunk_size": 8}},
                r"dual_chunk_attention_config is {'chunk_size': 8}, which is not supported \(.*\); leave it out",
            )
            for entries in (QWEN2, QWEN3, CONFIGS["qwen3_moe"])
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


def test_a_config_with_too_many_layers_is_refused_at_once():
    entries = {"model_type": "gpt2", "vocab_size": 32, "n_embd": 8, "n_head": 2, "n_positions": 16}
    assert models.parse_config(entries | {"n_layer": 1024}).num_layers == 1024
    with pytest.raises(ValueError, match="the config has 99999 layers; at most 1024"):
        models.parse_config(entries | {"n_layer": 99_999})


def test_heads_of_a_configuration_cannot_be_changed_in_place():
    with pytest.raises(dataclasses.FrozenInstanceError):
        models.parse_config(BLOOM).num_heads = 4
