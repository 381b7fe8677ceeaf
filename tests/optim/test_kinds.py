"""What the weights of a model are, family by family, and at the edges of the rules."""

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from merit_optim.lab.models import ModelConfig, build
from merit_optim.optim.kinds import KINDS, kinds_of


def by_kind(model: nn.Module) -> dict[str, str]:
    """The names of each kind's parameters, with # for numbers, in the order of the model."""
    kinds, names = kinds_of(model), {}
    for name, param in model.named_parameters():
        names.setdefault(re.sub(r"\d+", "#", name), set()).add(kinds[param])
    assert all(len(found) == 1 for found in names.values()), names
    return {
        kind: " ".join(name for name, found in names.items() if found == {kind})
        for kind in KINDS
        if {kind} in names.values()
    }


def kind_of(model: nn.Module, name: str) -> str:
    return kinds_of(model)[model.get_parameter(name)]


def expected(**names: str) -> dict[str, str]:
    """As ``by_kind``, written over several lines."""
    return {kind: " ".join(names[kind].split()) for kind in KINDS if kind in names}


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
    found = by_kind(nn.Transformer(16, 2, 2, 2, 24, batch_first=True))
    assert found.keys() == {"hidden", "vector"}
    assert found["hidden"].split() == [
        *("encoder.layers.#.self_attn.in_proj_weight", "encoder.layers.#.self_attn.out_proj.weight"),
        "encoder.layers.#.linear#.weight",
        *("decoder.layers.#.self_attn.in_proj_weight", "decoder.layers.#.self_attn.out_proj.weight"),
        *(
            "decoder.layers.#.multihead_attn.in_proj_weight",
            "decoder.layers.#.multihead_attn.out_proj.weight",
        ),
        "decoder.layers.#.linear#.weight",
    ]
    assert all(name.endswith(("bias", "norm.weight", "norm#.weight")) for name in found["vector"].split())


def test_torchs_attention_and_blocks_by_themselves_are_hidden() -> None:
    found = by_kind(nn.TransformerEncoderLayer(16, 2, 24))
    assert found["hidden"] == "self_attn.in_proj_weight self_attn.out_proj.weight linear#.weight"
    found = by_kind(nn.MultiheadAttention(16, 2, kdim=8, vdim=12, add_bias_kv=True))
    assert found == expected(
        hidden="q_proj_weight k_proj_weight v_proj_weight out_proj.weight",
        vector="in_proj_bias bias_k bias_v out_proj.bias",
    )


def test_recurrent_and_convolutional_layers_are_hidden() -> None:
    assert by_kind(nn.LSTM(4, 6, 2, proj_size=3))["hidden"] == "weight_ih_l# weight_hh_l# weight_hr_l#"
    for layer in (nn.Conv1d(4, 6, 3), nn.Conv2d(4, 6, 3, groups=2), nn.ConvTranspose3d(4, 6, 3)):
        assert by_kind(layer) == {"hidden": "weight", "vector": "bias"}


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
QWEN2_BIASES = " ".join(f"model.layers.#.self_attn.{name}_proj.bias" for name in "qkv")
QWEN2_TABLE = {**LLAMA_TABLE, **expected(vector=f"{QWEN2_BIASES} {LLAMA_NORMS}")}
QWEN3_TABLE = {**LLAMA_TABLE, **expected(vector=f"{QK_NORMS} {LLAMA_NORMS}")}
GEMMA_TABLE = expected(embedding="model.embed_tokens.weight", hidden=LLAMA_HIDDEN, vector=LLAMA_NORMS)
MIXTRAL_TABLE = expected(
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    hidden=f"{LLAMA_ATTENTION} model.layers.#.mlp.gate.weight",
    experts=EXPERTS,
    vector=LLAMA_NORMS,
)
QWEN3_MOE_TABLE = {**MIXTRAL_TABLE, **expected(vector=f"{QK_NORMS} {LLAMA_NORMS}")}
GPT_OSS_TABLE = expected(
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    hidden=f"{LLAMA_ATTENTION} model.layers.#.mlp.router.weight",
    experts=EXPERTS,
    # The stacked biases of experts are matrices by their shape alone.
    vector=f"""model.layers.#.self_attn.sinks {QWEN2_BIASES} model.layers.#.self_attn.o_proj.bias
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
CLASSIFICATION_TABLE = expected(
    embedding=BERT_EMBEDDINGS,
    head="classifier.weight",
    hidden=f"{BERT_HIDDEN} bert.pooler.dense.weight",
    vector=f"{BERT_VECTORS} bert.pooler.dense.bias classifier.bias",
)


def t5_attention(stack: str, attention: str) -> str:
    return " ".join(f"{stack}.block.#.layer.#.{attention}.{name}.weight" for name in "qkvo")


def t5_mlp(stack: str) -> str:
    mlp = f"{stack}.block.#.layer.#.DenseReluDense"
    return f"{mlp}.wi.weight {mlp}.wo.weight"


T5_TABLE = expected(
    # A relative position's bias for each head is looked up as a token's vector is.
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
        # As many tokens as the model is wide: a head has the shape of every projection.
        ("LlamaForCausalLM", "LlamaConfig", {**LLAMA, "vocab_size": 16}, LLAMA_TABLE),
        ("Qwen2ForCausalLM", "Qwen2Config", LLAMA, QWEN2_TABLE),
        ("Qwen3ForCausalLM", "Qwen3Config", LLAMA, QWEN3_TABLE),
        ("GemmaForCausalLM", "GemmaConfig", LLAMA, GEMMA_TABLE),
        ("MixtralForCausalLM", "MixtralConfig", {**LLAMA, "num_local_experts": 4}, MIXTRAL_TABLE),
        (
            "Qwen3MoeForCausalLM",
            "Qwen3MoeConfig",
            {**LLAMA, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
            QWEN3_MOE_TABLE,
        ),
        ("GptOssForCausalLM", "GptOssConfig", {**LLAMA, "num_local_experts": 4}, GPT_OSS_TABLE),
        ("BertForMaskedLM", "BertConfig", BERT, MASKED_LM_TABLE),
        ("BertForMaskedLM", "BertConfig", {**BERT, "tie_word_embeddings": False}, UNTIED_MASKED_LM_TABLE),
        ("BertForSequenceClassification", "BertConfig", BERT, CLASSIFICATION_TABLE),
        ("BertForSequenceClassification", "BertConfig", {**BERT, "vocab_size": 16}, CLASSIFICATION_TABLE),
        ("T5ForConditionalGeneration", "T5Config", T5, T5_TABLE),
        ("ViTForImageClassification", "ViTConfig", VIT, VIT_TABLE),
    ],
)
def test_hugging_faces_models(model, config, sizes, table) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    built = getattr(transformers, model)(getattr(transformers, config)(**sizes))
    found = by_kind(built)
    assert {kind: sorted(names.split()) for kind, names in found.items()} == {
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


# --- the edges of the rules ----------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention with the names that output heads have too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)


class Decoder(nn.Module):
    """A model with one block that stands in no list, and an output layer with a name of its own."""

    def __init__(self, vocabulary: int = 40, width: int = 16, output: str = "to_tokens") -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.mix = nn.Linear(width, width)
        self.attention = Attention(width)
        self.add_module(output, nn.Linear(width, vocabulary))
        self.norm = nn.LayerNorm(width)


DECODER_HIDDEN = "mix.weight attention.query.weight attention.output.weight attention.out_proj.weight"


@pytest.mark.parametrize("vocabulary", [40, 16], ids=["", "vocabulary==width"])
@pytest.mark.parametrize("output", ["to_tokens", "output", "out_proj", "decoder", "lm_head", "unembedding"])
def test_an_output_layer_beside_the_embedding_is_a_head_whatever_its_name(vocabulary, output) -> None:
    found = by_kind(Decoder(vocabulary, output=output))
    assert (found["head"], found["hidden"]) == (f"{output}.weight", DECODER_HIDDEN)


def test_a_tied_head_is_an_embedding_and_stands_once() -> None:
    model = Decoder()
    model.to_tokens.weight = model.embedding.weight
    kinds = kinds_of(model)
    assert kinds[model.to_tokens.weight] == "embedding"
    assert "head" not in kinds.values()
    assert len(kinds) == len(list(model.parameters()))


def test_an_embedding_wins_whichever_owner_comes_first() -> None:
    table = nn.Embedding(40, 16)
    head = nn.Linear(16, 40, bias=False)
    head.weight = table.weight
    for model in (
        nn.ModuleDict({"head": head, "table": table}),
        nn.ModuleDict({"table": table, "head": head}),
    ):
        assert list(kinds_of(model).values()) == ["embedding"]


def test_a_frozen_parameter_has_a_kind() -> None:
    model = Decoder()
    before = kinds_of(model)
    assert kinds_of(model.requires_grad_(False)) == before


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


class DataParallelLike(nn.Module):
    """A wrapper that names the model ``module``, as DataParallel, DDP and the like do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def each_layer_wrapped(model: nn.Module) -> nn.Module:
    """With a wrapper around each layer, as of FSDP or activation checkpointing."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if next(child.children(), None) is None:
                setattr(parent, name, DataParallelLike(child))
    return model


@pytest.mark.parametrize(
    "wrap",
    [compiled, DataParallelLike, each_layer_wrapped, lambda model: DataParallelLike(compiled(model))],
    ids=["compiled", "parallel", "each layer", "both"],
)
@pytest.mark.parametrize("output", ["to_tokens", "output", "lm_head"])
def test_wrappers_do_not_matter(wrap: Callable[[nn.Module], nn.Module], output) -> None:
    model = Decoder(output=output)
    before = kinds_of(model)
    assert kinds_of(wrap(model)) == before


def test_blocks_that_are_compiled_one_by_one_are_blocks() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(16, 16)
    model.blocks = nn.ModuleList(compiled(Attention(16)) for _ in range(2))
    model.lm_head = compiled(nn.Linear(16, 16))
    assert kind_of(model, "blocks.1._orig_mod.output.weight") == "hidden"
    assert kind_of(model, "lm_head._orig_mod.weight") == "head"


def test_a_sequential_model_has_blocks_and_a_head() -> None:
    blocks = [Attention(16) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(16, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 16))
    kinds = kinds_of(model)
    assert {kinds[param] for block in blocks for param in block.parameters()} == {"hidden", "vector"}
    assert kind_of(model, "5.weight") == "head"


def test_a_head_of_several_layers_is_its_last_layer_and_heads_in_a_list_are_all_heads() -> None:
    model = nn.Module()
    model.body = nn.Linear(8, 8)
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model.lm_heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
    assert [kind_of(model, f"classifier.{i}.weight") for i in (0, 2)] == ["hidden", "head"]
    assert [kind_of(model, f"lm_heads.{i}.weight") for i in (0, 1)] == ["head", "head"]


def test_attention_heads_that_are_modules_are_hidden() -> None:
    """A list named ``heads``, as in lecture code, is no list of output heads."""
    model = nn.Module()
    model.embedding = nn.Embedding(40, 16)
    model.blocks = nn.Sequential(
        *(nn.ModuleDict({"heads": nn.ModuleList(Attention(16) for _ in range(2))}),) * 2
    )
    assert set(by_kind(model)) == {"embedding", "hidden", "vector"}


class LoRALinear(nn.Module):
    """A frozen layer and two small matrices."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})
        self.lora_rows = nn.Parameter(torch.zeros(rank, base.in_features))


@pytest.mark.parametrize("output", ["to_tokens", "output", "lm_head"])
def test_loras_matrices_are_hidden_and_the_layer_below_keeps_its_kind(output) -> None:
    model = Decoder(output=output)
    model.attention.query = LoRALinear(model.attention.query)
    setattr(model, output, LoRALinear(getattr(model, output)))
    for name in ("attention.query", output):
        for matrix in ("lora_A.default.weight", "lora_B.default.weight", "lora_rows"):
            assert kind_of(model, f"{name}.{matrix}") == "hidden"
    assert kind_of(model, f"{output}.base_layer.weight") == "head"
    assert kind_of(model, "attention.query.base_layer.weight") == "hidden"


class Experts(nn.Module):
    """A mixture with as many experts as asked for, and a router."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num, bias=False)
        self.w1 = nn.Parameter(torch.zeros(num, 12, 8))
        self.w1_bias = nn.Parameter(torch.zeros(num, 12))


@pytest.mark.parametrize("num", [1, 4])
def test_stacked_experts_and_their_router(num) -> None:
    assert by_kind(Experts(num)) == {"hidden": "gate.weight", "experts": "w#", "vector": "w#_bias"}


class Tables(nn.Module):
    """Parameters without a layer of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positional_embedding = nn.Parameter(torch.zeros(5, 8))
        self.latent_queries = nn.Parameter(torch.zeros(1, 5, 8))
        self.tables = nn.ParameterDict({"position_0": nn.Parameter(torch.zeros(5, 8))})
        self.mask_tokens = nn.ParameterList([torch.zeros(5, 8), torch.zeros(5, 8)])
        self.token_mixer = nn.Parameter(torch.zeros(5, 8))
        self.post_projection = nn.Parameter(torch.zeros(8, 8))
        self.layer_scale = nn.Parameter(torch.ones(8, 1, 1))
        self.head_scale = nn.Parameter(torch.ones(2, 4))
        self.norm = nn.LayerNorm((5, 8))
        self.row = nn.Linear(8, 1)


def test_parameters_without_a_layer_go_by_their_names() -> None:
    assert by_kind(Tables()) == expected(
        embedding="""pos_embed cls_token positional_embedding latent_queries tables.position_#
            mask_tokens.#""",
        hidden="token_mixer post_projection row.weight",
        vector="layer_scale head_scale norm.weight norm.bias row.bias",
    )


class VocabularyEmbedding(nn.Module):
    """An embedding of a library for tensor parallelism: no subclass of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(40, 16))


def test_embeddings_by_class() -> None:
    for layer in (nn.EmbeddingBag(40, 16), VocabularyEmbedding(), type("Mine", (nn.Embedding,), {})(40, 16)):
        model = nn.Sequential(layer, nn.Linear(16, 40))
        assert list(kinds_of(model).values()) == ["embedding", "head", "vector"]


def test_the_embedding_of_patches_is_no_hidden_matrix() -> None:
    patches = nn.ModuleDict({"patch_embed": nn.Conv2d(3, 8, 4, 4), "stem": nn.Conv2d(8, 8, 3)})
    assert by_kind(patches) == expected(
        embedding="patch_embed.weight", hidden="stem.weight", vector="patch_embed.bias stem.bias"
    )
    model = nn.ModuleDict({"to_patch_embedding": nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))})
    assert kind_of(model, "to_patch_embedding.1.weight") == "embedding"
    model = nn.ModuleDict(
        {"embedding_model": nn.ModuleDict({"body": nn.ModuleDict({"conv": nn.Conv1d(8, 8, 3)})})}
    )
    assert kind_of(model, "embedding_model.body.conv.weight") == "hidden"


class Doubled(nn.Module):
    """A parametrization with a weight of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.eye(width))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight @ self.turn


def test_parametrized_weights_keep_the_kind_of_their_layer() -> None:
    model = Decoder()
    for layer in (model.attention.query, model.to_tokens):
        parametrizations.weight_norm(layer)
    parametrizations.orthogonal(model.attention.output)
    parametrize.register_parametrization(model.embedding, "weight", Doubled(16))
    parametrize.register_parametrization(model.mix, "weight", Doubled(16))
    names = dict(model.named_parameters())
    kinds = {name: kinds_of(model)[param] for name, param in names.items() if param.ndim > 1}
    assert kinds == {
        "embedding.parametrizations.weight.original": "embedding",
        "embedding.parametrizations.weight.0.turn": "hidden",
        "mix.parametrizations.weight.original": "hidden",
        "mix.parametrizations.weight.0.turn": "hidden",
        "attention.query.parametrizations.weight.original0": "vector",
        "attention.query.parametrizations.weight.original1": "hidden",
        "attention.output.parametrizations.weight.original": "hidden",
        "attention.out_proj.weight": "hidden",
        "to_tokens.parametrizations.weight.original0": "vector",
        "to_tokens.parametrizations.weight.original1": "head",
    }


def test_a_model_that_cannot_say_its_head_is_sorted_all_the_same() -> None:
    class Refusing(Decoder):
        def get_output_embeddings(self) -> nn.Module:
            raise NotImplementedError

    assert kind_of(Refusing(), "to_tokens.weight") == "head"


def test_what_a_model_says_is_its_head_is_one() -> None:
    class Saying(Decoder):
        def get_output_embeddings(self) -> nn.Module:
            return self.attention.query

    assert kind_of(Saying(), "attention.query.weight") == "head"


def test_parameters_without_a_shape_yet_are_refused_unless_they_are_frozen() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet; .* one forward pass"):
        kinds_of(model)
    for param in model[0].parameters():
        param.requires_grad = False
    assert list(kinds_of(model).values()) == ["hidden", "vector"]
    model(torch.ones(2, 3))
    assert kind_of(model, "0.weight") == "hidden"


def test_parameters_in_place_of_the_model_are_refused() -> None:
    with pytest.raises(TypeError, match="takes the model itself"):
        kinds_of(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]
