"""Tiny configurations of Hugging Face models."""

_SIZES = {
    "hidden_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "vocab_size": 256,
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}

TINY = {
    # Weights stored as (inputs, outputs), tied embeddings, dropout.
    "gpt2": {
        **_NO_TOKENS,
        "n_embd": 16,
        "n_head": 2,
        "n_layer": 2,
        "n_positions": 32,
        "vocab_size": 256,
        "resid_pdrop": 0.1,
    },
    "llama": {**_SIZES, "num_key_value_heads": 1},
    "qwen2": {**_SIZES, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "gpt_neox": _SIZES,  # query, key and value of each head in one weight
}
