"""Checkpoints written for peers: their names of tensors and order of rows."""

import dataclasses

import numpy as np
import pytest

from benchmarks.peer_scripts import write_checkpoint, write_decoder
from jaxserve.models import llama
from server.commands.bench import shapes


@pytest.mark.parametrize(
    ("name", "bloom", "names"),
    [
        (
            "transformer.h.3.mlp.dense_4h_to_h.bias",
            True,
            ("blk.3.ffn_down.bias", "layer.3.ffn.linear_1.bias"),
        ),
        ("word_embeddings.weight", True, ("token_embd.weight", "embeddings.weight")),
        (
            "transformer.h.3.attn.c_attn.weight",
            False,
            ("blk.3.attn_qkv.weight", "layer.3.self_attention.linear.0.weight"),
        ),
        ("h.3.ln_2.bias", False, ("blk.3.ffn_norm.bias", "layer.3.ffn.layer_norm.beta")),
        ("wpe.weight", False, ("position_embd.weight", "position_encodings.encodings")),
        ("ln_f.weight", False, ("output_norm.weight", "layer_norm.gamma")),
        ("lm_head.weight", False, None),
        ("h.0.attn.bias", False, None),
    ],
)
def test_names_of_converted_tensors(name, bloom, names):
    assert write_checkpoint.rename(name, bloom=bloom) == names


def test_the_order_of_qkv():
    fused = np.arange(2 * 3 * 2).reshape(12, 1)  # two heads of size two: q0 q0 k0 k0 v0 v0 q1 ...
    assert write_checkpoint.split_qkv(fused, 2)[:, 0].tolist() == [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


def test_rows_of_a_rotated_head():
    rows = np.arange(12).reshape(12, 1)  # two heads of size six
    assert write_decoder.pairs_side_by_side(rows, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def test_factors_of_llama_3():
    config = shapes.config_of("llama-3.2-1b")
    factors = write_decoder.llama3_factors(llama.hf_config(config))
    plain = dataclasses.replace(config.rotary, kind="default")
    np.testing.assert_allclose(plain.frequencies() / config.rotary.frequencies(), factors, rtol=1e-5)
    assert len(set(factors.round(3).tolist())) > 3
