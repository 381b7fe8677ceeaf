"""Kinds of weights: edge cases."""

from collections.abc import Callable

import pytest
import torch
from kinds_cases import by_kind, expected, kind_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from merit_optim.optim.kinds import kinds_of


class Attention(nn.Module):
    """Attention with the names that output heads have too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width)
        self.output = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)


class Decoder(nn.Module):
    """A model with one block outside any list, and an output layer with any name."""

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
def test_an_output_layer_at_the_level_of_the_embedding_is_a_head_whatever_its_name(
    vocabulary, output
) -> None:
    kinds = by_kind(Decoder(vocabulary, output=output))
    assert (kinds["head"], kinds["hidden"]) == (f"{output}.weight", DECODER_HIDDEN)


@pytest.mark.parametrize("wrap", [lambda head: nn.ModuleDict({"proj": head}), nn.Sequential])
def test_an_output_layer_inside_another_module_is_a_head_by_its_size(wrap) -> None:
    model = Decoder()
    model.to_tokens = wrap(model.to_tokens)
    kinds = by_kind(model)
    assert kinds["head"].startswith("to_tokens.")
    assert kinds["hidden"] == DECODER_HIDDEN


def test_a_tied_head_is_an_embedding_and_appears_once() -> None:
    model = Decoder()
    model.to_tokens.weight = model.embedding.weight
    kinds = kinds_of(model)
    assert kinds[model.to_tokens.weight] == "embedding"
    assert "head" not in kinds.values()
    assert len(kinds) == len(list(model.parameters()))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


class DataParallelLike(nn.Module):
    """A wrapper that names the model ``module``, as DataParallel, DDP and the like do."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


def each_layer_wrapped(model: nn.Module) -> nn.Module:
    """With a wrapper around each layer, as FSDP or activation checkpointing adds."""
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


def test_blocks_that_are_compiled_separately_are_blocks() -> None:
    model = nn.Module()
    model.embedding = nn.Embedding(16, 16)
    model.blocks = nn.ModuleList(compiled(Attention(16)) for _ in range(2))
    model.lm_head = compiled(nn.Linear(16, 16))
    assert kind_of(model, "blocks.1._orig_mod.output.weight") == "hidden"
    assert kind_of(model, "lm_head._orig_mod.weight") == "head"


def test_an_output_layer_for_labels_has_another_size_than_the_vocabulary() -> None:
    model = Decoder(output="output")
    model.output = nn.Linear(16, 3)
    assert kind_of(model, "output.weight") == "head"
    assert kind_of(model, "attention.output.weight") == "hidden"


def test_a_head_of_several_layers_is_its_last_layer_and_heads_in_a_list_are_all_heads() -> None:
    model = nn.Module()
    model.body = nn.Linear(8, 8)
    model.classifier = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    model.lm_heads = nn.ModuleList(nn.Linear(8, 5) for _ in range(2))
    assert [kind_of(model, f"classifier.{i}.weight") for i in (0, 2)] == ["hidden", "head"]
    assert [kind_of(model, f"lm_heads.{i}.weight") for i in (0, 1)] == ["head", "head"]


@pytest.mark.parametrize("name", ["position_embedding", "wpe", "embed_positions"])
def test_a_layer_with_as_many_outputs_as_there_are_positions_is_no_head(name) -> None:
    model = Decoder(output="lm_head")
    model.add_module(name, nn.Embedding(24, 16))
    model.wider = nn.Linear(16, 24)
    assert by_kind(model)["head"] == "lm_head.weight"


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


class LoRAInside(nn.Linear):
    """A layer with its small matrices as its own parameters."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__(num_inputs, num_outputs)
        self.lora_A = nn.Parameter(torch.zeros(2, num_inputs))


class Experts(nn.Module):
    """A mixture of ``num`` experts, and a router."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, num, bias=False)
        self.w1 = nn.Parameter(torch.zeros(num, 12, 8))
        self.w1_bias = nn.Parameter(torch.zeros(num, 12))
        self.w2_EDF = nn.Parameter(torch.zeros(num, 8, 12))  # named by its shape, as in torchtitan
        self.w2_bias_ED = nn.Parameter(torch.zeros(num, 8))


@pytest.mark.parametrize("num", [1, 4])
def test_stacked_experts_and_their_router(num) -> None:
    assert by_kind(Experts(num)) == {
        "hidden": "gate.weight",
        "experts": "w# w#_EDF",
        "vector": "w#_bias w#_bias_ED",
    }


class Tables(nn.Module):
    """Raw parameters without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positional_embedding = nn.Parameter(torch.zeros(5, 8))
        self.latent_queries = nn.Parameter(torch.zeros(1, 5, 8))
        self.latents = nn.Parameter(torch.zeros(5, 8))
        self.latents_1d = nn.Parameter(torch.zeros(5, 8))
        self.compress_ape = nn.Parameter(torch.zeros(5, 8))
        self.learned_queries = nn.Parameter(torch.zeros(5, 8))
        self.latent_query = nn.Parameter(torch.zeros(5, 8))
        self.query = nn.Parameter(torch.zeros(5, 8))
        self.tables = nn.ParameterDict({"position_0": nn.Parameter(torch.zeros(5, 8))})
        self.mask_tokens = nn.ParameterList([torch.zeros(5, 8), torch.zeros(5, 8)])
        self.token_mixer = nn.Parameter(torch.zeros(5, 8))
        self.post_projection = nn.Parameter(torch.zeros(8, 8))
        self.layer_scale = nn.Parameter(torch.ones(8, 1, 1))
        self.head_scale = nn.Parameter(torch.ones(2, 4))
        self.D = nn.Parameter(torch.ones(2, 4))  # Mamba's
        self.bias_u = nn.Parameter(torch.ones(2, 4))  # Transformer-XL's
        self.attention_biases = nn.Parameter(torch.ones(2, 4))
        self.norm = nn.LayerNorm((5, 8))
        self.row = nn.Linear(8, 1)


def test_parameters_without_a_layer_go_by_their_names() -> None:
    assert by_kind(Tables()) == expected(
        embedding="""pos_embed cls_token positional_embedding latent_queries latents latents_#d compress_ape
            learned_queries latent_query query tables.position_# mask_tokens.#""",
        hidden="token_mixer post_projection row.weight",
        vector="layer_scale head_scale D bias_u attention_biases norm.weight norm.bias row.bias",
    )


@pytest.mark.parametrize("name", ["output", "output_layer", "out_proj", "readout"])
@pytest.mark.parametrize("is_deep", [False, True])
def test_the_head_of_a_pipeline_s_last_stage_is_beside_the_blocks(name, is_deep) -> None:
    """It has no embedding there. A layer as wide as the blocks may be one more of them."""
    blocks = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(8, 16), "output": nn.Linear(16, 8)}) for _ in "ab")
    inner = nn.ModuleDict({"layers": blocks}) if is_deep else blocks
    stage = nn.ModuleDict({"inner": inner, "norm": nn.LayerNorm(8), name: nn.Linear(8, 40)})
    assert by_kind(stage)["head"] == f"{name}.weight"
    assert all(hidden.startswith("inner.") for hidden in by_kind(stage)["hidden"].split())
    stage["out"] = nn.Linear(8, 8)
    assert kind_of(stage, "out.weight") == "hidden"


def test_the_only_matrix_of_a_users_layer_goes_by_the_layers_name() -> None:
    def layer(**shapes: tuple[int, ...]) -> nn.Module:
        module = nn.Module()
        for name, shape in shapes.items():
            module.register_parameter(name, nn.Parameter(torch.zeros(shape)))
        return module

    model = nn.ModuleDict(
        {
            "embed": layer(W_E=(40, 8)),
            "mlp": layer(W_in=(8, 32), W_out=(32, 8)),
            "embed_mlp": layer(W_in=(8, 32), W_out=(32, 8)),
            "unembed": layer(W_U=(8, 40), b_U=(40,)),
        }
    )
    assert by_kind(model) == expected(
        embedding="embed.W_E",
        head="unembed.W_U",
        hidden="mlp.W_in mlp.W_out embed_mlp.W_in embed_mlp.W_out",
        vector="unembed.b_U",
    )


class Holder(nn.Module):
    """A library's layer that is not a subclass of torch's."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape))


def holder(name: str, *shape: int) -> nn.Module:
    """A layer whose class has this name."""
    return type(name, (Holder,), {})(*shape)


def tied(**others: nn.Module) -> nn.ModuleDict:
    """A model whose head has the weight of its embedding, with other layers between the two."""
    embedding, decoder = nn.Embedding(40, 8), nn.Linear(8, 40, bias=False)
    decoder.weight = embedding.weight
    return nn.ModuleDict({"embedding": embedding, **others, "decoder": decoder})


def dense(*shape: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(*shape, bias=False)})


class SaysNothing(Decoder):
    def get_output_embeddings(self) -> nn.Module:
        raise NotImplementedError


class SaysQuery(Decoder):
    def get_output_embeddings(self) -> nn.Module:
        return self.attention.query


Dict, Table, Linear = nn.ModuleDict, nn.Embedding, nn.Linear
BLOCKS = (nn.ModuleList, lambda blocks: nn.Sequential(*blocks))
# A model, and the names of some of its kinds.
MODELS: list[tuple[nn.Module, dict[str, str]]] = [
    # An embedding wins over a head. The layer before a tied head, as ModernBERT's, is hidden,
    # unless it has as many outputs.
    (tied(head=dense(8, 8)), {"embedding": "embedding.weight", "hidden": "head.dense.weight"}),
    (tied(head=dense(8, 40)), {"embedding": "embedding.weight", "head": "head.dense.weight"}),
    (
        Dict({"tables": nn.ModuleList([Table(40, 16)]), "to_tokens": Linear(16, 40)}),
        {"head": "to_tokens.weight"},
    ),
    (Dict({"decoder_embed": Linear(8, 4), "decoder_pred": Linear(4, 12)}), {"head": "decoder_pred.weight"}),
    (Dict({"codebooks_head": holder("CsmCodebooksHead", 3, 8, 40)}), {"head": "codebooks_head.weight"}),
    (Dict({"conv": nn.Conv2d(3, 8, 3), "fc": Linear(8, 5)}), {"head": "fc.weight"}),
    (SaysNothing(), {"head": "to_tokens.weight"}),
    (SaysQuery(), {"head": "attention.query.weight to_tokens.weight"}),
    (nn.ParameterDict({"query": torch.zeros(8, 8), "key": torch.zeros(8, 8)}), {"hidden": "key query"}),
    (Dict({"head": LoRAInside(16, 40)}), {"head": "head.weight", "hidden": "head.lora_A"}),
    # A layer in a block is not a head, whatever its name; nor are modules of attention named so.
    *(
        (
            Dict({"embedding": Table(40, 16), "blocks": of(Dict({"score": Linear(16, 16)}) for _ in "ab")}),
            {"hidden": "blocks.#.score.weight"},
        )
        for of in BLOCKS
    ),
    (
        Dict(
            {
                "embedding": Table(40, 16),
                "blocks": nn.Sequential(*(Dict({"heads": nn.ModuleList([Linear(16, 16)])}) for _ in "ab")),
            }
        ),
        {"hidden": "blocks.#.heads.#.weight"},
    ),
    *(
        (nn.ParameterDict({name: torch.zeros(8, 40)}), {"head": name})
        for name in ("lm_head", "head_linear", "unembed", "classifier")
    ),
    # By the names of classes.
    *(
        (Dict({"a": table, "b": layer}), {"embedding": "a.weight", kind: "b.weight"})
        for table in (holder("VocabularyEmbedding", 40, 16), nn.EmbeddingBag(40, 16))
        for layer, kind in (
            (holder("ColumnLinear", 40, 16), "head"),
            (holder("Conv1D", 16, 40), "head"),
            (holder("Router", 40, 16), "hidden"),
        )
    ),
    (holder("CausalConv", 8, 8, 3), {"hidden": "weight"}),
    (holder("GroupedLinear", 8, 8, 3), {"experts": "weight"}),
    # Patches are embedded.
    (
        Dict({"patch_embed": nn.Conv2d(3, 8, 4, 4), "stem": nn.Conv2d(8, 8, 3)}),
        {"embedding": "patch_embed.weight", "hidden": "stem.weight"},
    ),
    (
        Dict({"embeddings": Dict({"patch_projection": Linear(12, 8)})}),
        {"embedding": "embeddings.patch_projection.weight"},
    ),
    (Dict({"to_patch_embedding": nn.Sequential(Linear(8, 8))}), {"embedding": "to_patch_embedding.#.weight"}),
    (
        Dict({"embedding_model": Dict({"body": Dict({"conv": nn.Conv1d(8, 8, 3)})})}),
        {"hidden": "embedding_model.body.conv.weight"},
    ),
]


def test_kinds_of_small_models() -> None:
    for model, kinds in MODELS:
        found = by_kind(model)
        assert {kind: found.get(kind) for kind in kinds} == kinds, model


def test_matrices_beside_a_norm_are_hidden() -> None:
    """As in TransformerEngine, which has modules of a norm and the layers behind it."""
    norm = holder("MultiHeadRMSNorm", 2, 4)
    mlp, split = holder("LayerNormMLP", 8), holder("LayerNormLinear", 8)
    for module, names in ((mlp, ("fc1_weight", "fc2_weight")), (split, ("query_weight", "key_weight"))):
        for name in names:
            module.register_parameter(name, nn.Parameter(torch.zeros(8, 8)))
    assert by_kind(nn.Sequential(norm, mlp, split)) == expected(
        hidden="#.fc#_weight #.query_weight #.key_weight", vector="#.weight"
    )


def test_tables_in_a_list_belong_to_the_module_with_the_list() -> None:
    """As axial positions do."""
    model = nn.ModuleDict({name: holder(name, 5, 8) for name in ("AxialEmbeddings", "Mixer")})
    for module in model.values():
        module.weights = nn.ParameterList([torch.zeros(5, 1, 8), torch.zeros(5, 8)])
    assert (
        kind_of(model, "AxialEmbeddings.weights.0")
        == kind_of(model, "AxialEmbeddings.weights.1")
        == "embedding"
    )
    assert kind_of(model, "Mixer.weights.1") == "hidden"


class Doubled(nn.Module):
    """A parametrization with a weight."""

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
    with pytest.raises(TypeError, match="needs the model itself"):
        kinds_of(nn.Linear(2, 2).parameters())  # type: ignore[arg-type]


def test_a_sequential_model_has_blocks_and_a_head() -> None:
    blocks = [Attention(16) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(16, 16), *blocks, nn.LayerNorm(16), nn.Linear(16, 16))
    kinds = kinds_of(model)
    assert {kinds[param] for block in blocks for param in block.parameters()} == {"hidden", "vector"}
    assert kind_of(model, "5.weight") == "head"
