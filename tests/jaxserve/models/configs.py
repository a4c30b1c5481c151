"""Tiny configurations: one under each family's own name, and more for its switches."""

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
