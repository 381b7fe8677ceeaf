"""Kinds of weights, by model family."""

import pytest
from kinds_cases import by_kind, expected, kind_of
from torch import nn
from torch.nn.utils import parametrizations

from merit_lab.models import ModelConfig, build

# --- the lab's models and torch's ----------------------------------------------------------------------

LAB_SIZES = {"width": 32, "heads": 2, "layers": 2, "context": 16}


@pytest.mark.parametrize("vocab_size", [64, 32], ids=["", "vocabulary==width"])
@pytest.mark.parametrize(
    ("family", "tied", "names"),
    [
        (
            "gpt2",
            True,
            expected(
                embedding="token_embedding.weight position_embedding.weight",
                hidden="""blocks.#.attention.query_key_value.weight blocks.#.attention.output.weight
                    blocks.#.mlp.up.weight blocks.#.mlp.down.weight""",
                vector="blocks.#.attention_norm.weight blocks.#.mlp_norm.weight norm.weight",
            ),
        ),
        (
            "llama",
            False,
            expected(
                embedding="token_embedding.weight",
                head="head.weight",
                hidden="""blocks.#.attention.query.weight blocks.#.attention.key.weight
                    blocks.#.attention.value.weight blocks.#.attention.output.weight
                    blocks.#.mlp.gate.weight blocks.#.mlp.up.weight blocks.#.mlp.down.weight""",
                vector="blocks.#.attention_norm.weight blocks.#.mlp_norm.weight norm.weight",
            ),
        ),
    ],
    ids=["gpt2", "llama"],
)
def test_the_labs_models(family, tied, names, vocab_size) -> None:
    config = ModelConfig(family=family, tied=tied, vocab_size=vocab_size, **LAB_SIZES)
    assert by_kind(build(config)) == names


def test_torchs_transformer() -> None:
    kinds = by_kind(nn.Transformer(16, 2, 2, 2, 24, batch_first=True))
    assert kinds.keys() == {"hidden", "vector"}
    assert kinds["hidden"].split() == [
        *("encoder.layers.#.self_attn.in_proj_weight", "encoder.layers.#.self_attn.out_proj.weight"),
        "encoder.layers.#.linear#.weight",
        *("decoder.layers.#.self_attn.in_proj_weight", "decoder.layers.#.self_attn.out_proj.weight"),
        *(
            "decoder.layers.#.multihead_attn.in_proj_weight",
            "decoder.layers.#.multihead_attn.out_proj.weight",
        ),
        "decoder.layers.#.linear#.weight",
    ]
    assert all(name.endswith(("bias", "norm.weight", "norm#.weight")) for name in kinds["vector"].split())


def test_torchs_standalone_attention_and_blocks_are_hidden() -> None:
    kinds = by_kind(nn.TransformerEncoderLayer(16, 2, 24))
    assert kinds["hidden"] == "self_attn.in_proj_weight self_attn.out_proj.weight linear#.weight"
    kinds = by_kind(nn.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True))
    assert kinds == expected(
        hidden="q_proj_weight k_proj_weight v_proj_weight out_proj.weight",
        vector="in_proj_bias bias_k bias_v out_proj.bias",
    )


def test_recurrent_and_convolutional_layers_are_hidden() -> None:
    assert by_kind(nn.LSTM(4, 6, 2, proj_size=3))["hidden"] == "weight_ih_l# weight_hh_l# weight_hr_l#"
    for layer in (nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose3d(4, 6, 3)):
        assert by_kind(layer) == {"hidden": "weight", "vector": "bias"}


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(6, 6, 4, groups=6),  # as before the recurrence of Mamba and of gated linear attention
        nn.Conv2d(4, 8, 3, groups=4),
        nn.ConvTranspose1d(4, 4, 4, groups=4),
        parametrizations.weight_norm(nn.Conv1d(6, 6, 4, groups=6)),
    ],
    ids=["one each", "two each", "transposed", "parametrized"],
)
def test_convolutions_that_mix_no_channels_are_no_matrices(layer) -> None:
    assert set(by_kind(layer)) == {"vector"}
    assert by_kind(nn.Conv2d(1, 4, 3)) == {"hidden": "weight", "vector": "bias"}


# --- Hugging Face's models -----------------------------------------------------------------------------

VOCABULARY = 40
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 12,
}
LLAMA = {**BERT, **SPECIAL, "num_key_value_heads": 1, "head_dim": 8}
T5 = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
XLNET = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 2, "d_inner": 24}
VIT = {**BERT, "image_size": 8, "patch_size": 4}

LLAMA_ATTENTION = " ".join(f"model.layers.#.self_attn.{name}_proj.weight" for name in "qkvo")
LLAMA_HIDDEN = f"""{LLAMA_ATTENTION} model.layers.#.mlp.gate_proj.weight model.layers.#.mlp.up_proj.weight
    model.layers.#.mlp.down_proj.weight"""
LLAMA_NORMS = """model.layers.#.input_layernorm.weight model.layers.#.post_attention_layernorm.weight
    model.norm.weight"""
QK_NORMS = "model.layers.#.self_attn.q_norm.weight model.layers.#.self_attn.k_norm.weight"
EXPERTS = "model.layers.#.mlp.experts.gate_up_proj model.layers.#.mlp.experts.down_proj"

GPT2_TABLE = expected(
    embedding="transformer.wte.weight transformer.wpe.weight",
    hidden="""transformer.h.#.attn.c_attn.weight transformer.h.#.attn.c_proj.weight
        transformer.h.#.mlp.c_fc.weight transformer.h.#.mlp.c_proj.weight""",
    vector="""transformer.h.#.ln_#.weight transformer.h.#.ln_#.bias transformer.h.#.attn.c_attn.bias
        transformer.h.#.attn.c_proj.bias transformer.h.#.mlp.c_fc.bias transformer.h.#.mlp.c_proj.bias
        transformer.ln_f.weight transformer.ln_f.bias""",
)
LLAMA_TABLE = expected(
    embedding="model.embed_tokens.weight", head="lm_head.weight", hidden=LLAMA_HIDDEN, vector=LLAMA_NORMS
)
QKV_BIASES = " ".join(f"model.layers.#.self_attn.{name}_proj.bias" for name in "qkv")
QWEN3_MOE_TABLE = expected(
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    hidden=f"{LLAMA_ATTENTION} model.layers.#.mlp.gate.weight",
    experts=EXPERTS,
    vector=f"{QK_NORMS} {LLAMA_NORMS}",
)
GPT_OSS_TABLE = expected(
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    hidden=f"{LLAMA_ATTENTION} model.layers.#.mlp.router.weight",
    experts=EXPERTS,
    # By shape alone, the stacked biases of experts would be matrices.
    vector=f"""model.layers.#.self_attn.sinks {QKV_BIASES} model.layers.#.self_attn.o_proj.bias
        model.layers.#.mlp.router.bias model.layers.#.mlp.experts.gate_up_proj_bias
        model.layers.#.mlp.experts.down_proj_bias {LLAMA_NORMS}""",
)

BERT_EMBEDDINGS = " ".join(
    f"bert.embeddings.{name}_embeddings.weight" for name in ("word", "position", "token_type")
)
BERT_LAYERS = [
    *(f"bert.encoder.layer.#.attention.self.{name}" for name in ("query", "key", "value")),
    *("bert.encoder.layer.#.attention.output.dense", "bert.encoder.layer.#.attention.output.LayerNorm"),
    *("bert.encoder.layer.#.intermediate.dense",),
    *("bert.encoder.layer.#.output.dense", "bert.encoder.layer.#.output.LayerNorm"),
]
BERT_HIDDEN = " ".join(f"{name}.weight" for name in BERT_LAYERS if "Norm" not in name)
BERT_VECTORS = "bert.embeddings.LayerNorm.weight bert.embeddings.LayerNorm.bias " + " ".join(
    f"{name}.weight {name}.bias" if "Norm" in name else f"{name}.bias" for name in BERT_LAYERS
)
TRANSFORM = "cls.predictions.transform"
MASKED_LM_TABLE = expected(
    embedding=BERT_EMBEDDINGS,
    hidden=f"{BERT_HIDDEN} {TRANSFORM}.dense.weight",
    vector=f"""{BERT_VECTORS} cls.predictions.bias {TRANSFORM}.dense.bias {TRANSFORM}.LayerNorm.weight
        {TRANSFORM}.LayerNorm.bias""",
)
UNTIED_MASKED_LM_TABLE = {
    **MASKED_LM_TABLE,
    "head": "cls.predictions.decoder.weight",
    "vector": f"{MASKED_LM_TABLE['vector']} cls.predictions.decoder.bias",
}


def t5_attention(stack: str, attention: str) -> str:
    return " ".join(f"{stack}.block.#.layer.#.{attention}.{name}.weight" for name in "qkvo")


def t5_mlp(stack: str) -> str:
    mlp = f"{stack}.block.#.layer.#.DenseReluDense"
    return f"{mlp}.wi.weight {mlp}.wo.weight"


T5_TABLE = expected(
    # The relative position bias of each head is looked up like a token's vector.
    embedding=" ".join(
        ["shared.weight"]
        + [
            f"{stack}.block.#.layer.#.SelfAttention.relative_attention_bias.weight"
            for stack in ("encoder", "decoder")
        ]
    ),
    hidden=f"""{t5_attention("encoder", "SelfAttention")} {t5_mlp("encoder")}
        {t5_attention("decoder", "SelfAttention")} {t5_attention("decoder", "EncDecAttention")}
        {t5_mlp("decoder")}""",
    vector=" ".join(
        f"{stack}.block.#.layer.#.layer_norm.weight {stack}.final_layer_norm.weight"
        for stack in ("encoder", "decoder")
    ),
)
VIT_LAYERS = [
    *(f"vit.layers.#.attention.{name}_proj" for name in "qkvo"),
    *("vit.layers.#.layernorm_before", "vit.layers.#.layernorm_after", "vit.layers.#.mlp.fc#"),
]
VIT_TABLE = expected(
    embedding="""vit.embeddings.cls_token vit.embeddings.position_embeddings
        vit.embeddings.patch_embeddings.projection.weight""",
    head="classifier.weight",
    hidden=" ".join(f"{name}.weight" for name in VIT_LAYERS if "norm" not in name),
    vector=" ".join(
        ["vit.embeddings.patch_embeddings.projection.bias"]
        + [f"{name}.bias" for name in VIT_LAYERS]
        + [f"{name}.weight" for name in VIT_LAYERS if "norm" in name]
        + ["vit.layernorm.weight", "vit.layernorm.bias", "classifier.bias"]
    ),
)
XLNET_LAYER = "transformer.layer.#"
XLNET_TABLE = expected(
    embedding=f"transformer.mask_emb transformer.word_embedding.weight {XLNET_LAYER}.rel_attn.seg_embed",
    # In three dimensions, which make them no experts: (width, heads, width of a head).
    hidden=" ".join(f"{XLNET_LAYER}.rel_attn.{name}" for name in "qkvor")
    + f" {XLNET_LAYER}.ff.layer_#.weight",
    vector=f"""{XLNET_LAYER}.rel_attn.r_r_bias {XLNET_LAYER}.rel_attn.r_s_bias {XLNET_LAYER}.rel_attn.r_w_bias
        {XLNET_LAYER}.rel_attn.layer_norm.weight {XLNET_LAYER}.rel_attn.layer_norm.bias
        {XLNET_LAYER}.ff.layer_norm.weight {XLNET_LAYER}.ff.layer_norm.bias {XLNET_LAYER}.ff.layer_#.bias
        lm_loss.bias""",
)


@pytest.mark.parametrize(
    ("model", "config", "sizes", "table"),
    [
        (
            "GPT2LMHeadModel",
            "GPT2Config",
            {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8, **SPECIAL},
            GPT2_TABLE,
        ),
        ("LlamaForCausalLM", "LlamaConfig", LLAMA, LLAMA_TABLE),
        # As many tokens as the model is wide, so a head has the shape of every projection.
        ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "vocab_size": 16}, LLAMA_TABLE),
        (
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            QWEN3_MOE_TABLE,
        ),
        ("GptOssForCausalLM", "GptOssConfig", {**LLAMA, "num_local_experts": 4}, GPT_OSS_TABLE),
        ("BertForMaskedLM", "BertConfig", BERT, MASKED_LM_TABLE),
        ("BertForMaskedLM", "BertConfig", {**BERT, "tie_word_embeddings": False}, UNTIED_MASKED_LM_TABLE),
        ("T5ForConditionalGeneration", "T5Config", T5, T5_TABLE),
        ("ViTForImageClassification", "ViTConfig", VIT, VIT_TABLE),
        ("XLNetLMHeadModel", "XLNetConfig", XLNET, XLNET_TABLE),
    ],
)
def test_hugging_faces_models(model, config, sizes, table) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    built = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    kinds = by_kind(built)
    assert {kind: sorted(names.split()) for kind, names in kinds.items()} == {
        kind: sorted(names.split()) for kind, names in table.items()
    }


@pytest.mark.parametrize(
    ("model", "config", "head", "before"),
    [
        ("RobertaForSequenceClassification", "RobertaConfig", "classifier.out_proj", "classifier.dense"),
        ("DistilBertForSequenceClassification", "DistilBertConfig", "classifier", "pre_classifier"),
        ("BertForPreTraining", "BertConfig", "cls.seq_relationship", "bert.pooler.dense"),
        (
            "ElectraForPreTraining",
            "ElectraConfig",
            "discriminator_predictions.dense_prediction",
            "discriminator_predictions.dense",
        ),
        ("LlamaForSequenceClassification", "LlamaConfig", "score", "model.layers.1.mlp.down_proj"),
        ("BertForQuestionAnswering", "BertConfig", "qa_outputs", "bert.encoder.layer.1.output.dense"),
    ],
)
def test_the_heads_of_hugging_faces_classifiers(model, config, head, before) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 2} if "Distil" in config else LLAMA
    built = getattr(transformers, model)(getattr(transformers, config)(**{**sizes, "vocab_size": 16}))
    assert kind_of(built, f"{head}.weight") == "head"
    assert kind_of(built, f"{before}.weight") == "hidden"
