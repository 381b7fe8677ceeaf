"""Weights stored as (inputs, outputs) change as their transposes, a Linear's (outputs, inputs), do."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from kinds_cases import kind_of
from optimizer_cases import assert_same_bits, random_tensor
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import Optimizer

from merit_optim import OPTIMIZERS, Muon, MuonMERIT, NorMuon, create, param_groups
from merit_optim.optim import algorithm
from merit_optim.optim.kinds import transposed_in
from merit_optim.optim.spec import Spec

WIDTH, NUM_EXPERTS = 6, 2


class Conv1D(nn.Module):
    """A layer as Hugging Face's GPT-2 has it."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_inputs, num_outputs))
        self.bias = nn.Parameter(torch.empty(num_outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Experts(nn.Module):
    """Stacked experts as Hugging Face has them, in either orientation; every one sees all tokens."""

    def __init__(self, is_transposed: bool) -> None:
        super().__init__()
        self.is_transposed = is_transposed
        shape = (WIDTH, 2 * WIDTH) if is_transposed else (2 * WIDTH, WIDTH)
        self.gate_up_proj = nn.Parameter(torch.empty(NUM_EXPERTS, *shape))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.gate_up_proj if self.is_transposed else self.gate_up_proj.mT
        gate, up = (x @ weight[:, None]).chunk(2, -1)
        return (gate.sigmoid() * up).sum(0)


class Model(nn.Module):
    """A block with weights of both shapes, wide and tall, and one of three matrices; in float64."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        layer = Conv1D if is_transposed else nn.Linear
        self.embedding = nn.Embedding(9, WIDTH)
        self.qkv, self.proj = layer(WIDTH, 3 * WIDTH), layer(WIDTH, WIDTH)
        self.up, self.down = layer(WIDTH, 10), layer(10, WIDTH)
        self.experts = Experts(is_transposed)
        self.double()
        numbers = torch.Generator().manual_seed(0)
        for _, weight in self.as_linear():
            weight.data.copy_(torch.randn(weight.shape, generator=numbers, dtype=torch.float64) / 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        # Not softmax: with it the gradient of k's bias would be zero but for rounding.
        x = x + self.proj((q @ k.mT).tanh() @ v)
        x = x + self.experts(x)
        return x + self.down(self.up(x).tanh())

    def as_linear(self) -> list[tuple[str, Tensor]]:
        """All weights by name, transposed where they are stored so."""
        return [
            (name, param.mT if self.experts.is_transposed and is_layer(name) else param)
            for name, param in self.named_parameters()
        ]


def is_layer(name: str) -> bool:
    return name.endswith((".weight", "_proj")) and not name.startswith("embedding")


def train(optimizer: Optimizer, model: Model, num_steps: int = 5) -> dict[str, Tensor]:
    """The weights after some steps."""
    numbers = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        tokens = torch.randint(9, (4, 7), generator=numbers)
        goal = torch.randn(4, 7, WIDTH, generator=numbers, dtype=torch.float64)
        (model(tokens) - goal).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: weight.detach() for name, weight in model.as_linear()}


QKV = {"qkv.weight": {"split": 3}}
PARTS = {**QKV, "experts.*": {"matrix_dims": 2, "split": 2}, "proj.weight": {"split": (2, 4)}}
SCALES = [{"scale": scale} for scale in ("rms", "match_rms_adamw", "original", "spectral")]
# The longer side is not rotated: its averages have a null space, whose basis is arbitrary.
ROTATED = {"max_precond_dim": WIDTH, "precondition_frequency": 2}

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "merit": [{}, {"norm": "l2"}, {"element_wise": False}, {"matrix_dims": 2}],
    "muon": [*SCALES, {"nesterov": False, "ns_coefficients": "polar-express", "ns_steps": 3}],
    "normuon": [*SCALES, {"neuron_beta": 0.5}],
    "orscale": [*SCALES, {"calibrated": False}],
    "muon-merit": [{}, {"norm": "l2"}, {"element_wise": False}, {"ratio": "none"}],
    "soap": [ROTATED],
    "soap-merit": [ROTATED],
}
WITHOUT_SPLIT = ("adamw", "lion", "sophiag", "orscale", "soap", "soap-merit", "soap-muon")
CASES = [
    pytest.param(name, options, overrides, id=f"{name}, {options}, {len(overrides)} splits")
    for name in OPTIMIZERS
    if name != "muown"  # refuses outputs in columns
    for options in OPTIONS.get(name, [{}])
    for overrides in ([{}] if name in WITHOUT_SPLIT else [{}, PARTS])
]


def trained(
    name: str, overrides: dict[str, Any], *, is_transposed: bool, **options: Any
) -> dict[str, Tensor]:
    """The weights after some steps with an optimizer of this name."""
    model = Model(is_transposed=is_transposed)
    if "muon" in name or name == "orscale":
        options["ns_dtype"] = "float32"  # products in the precision of the weights, float64
    return train(create(name, param_groups(model, overrides=overrides), lr=0.05, **options), model)


@pytest.mark.parametrize(("name", "options", "overrides"), CASES)
def test_a_transposed_weight_changes_as_a_linear_one(name, options, overrides) -> None:
    linear, conv1d = (
        trained(name, overrides, is_transposed=is_transposed, **options) for is_transposed in (False, True)
    )
    torch.testing.assert_close(conv1d, linear, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    "options",
    [{"scale": "original", "neuron_beta": None}, {"neuron_beta": 0.9}, {"neuron_beta": 0.9, "split": 3}],
    ids=str,
)
def test_the_eager_engine_has_the_bits_of_the_definition(device, options) -> None:
    weight, param = (random_tensor((2, 8, 12), 1, device=device) for _ in range(2))
    group = {"params": [param], "direction": "muon", "matrix_dims": 2, "transposed": True, **options}
    optimizer = MuonMERIT([group], ns_dtype="float32")
    (group,) = optimizer.param_groups
    neurons = [torch.zeros(2, 1, 12, device=device)] if options["neuron_beta"] else []
    state: Sequence[Tensor] = (torch.zeros_like(weight), *neurons)
    for step in range(4):
        param.grad = random_tensor(weight.shape, 10 + step, device=device)
        optimizer.step()
        weight, state = algorithm.step(
            weight,
            param.grad,
            state,
            spec=Spec.of(group),
            lr=group["lr"],
            weight_decay=group["weight_decay"],
        )
    assert_same_bits([param, *list(optimizer.state[param].values())[1:]], [weight, *state])


def test_split_dim_is_a_dimension_of_the_stored_weight() -> None:
    """Who gave split_dim=1 for a Conv1D before its orientation was known still splits its outputs."""
    by_default, given = (
        trained("muon", {"qkv.weight": options}, is_transposed=True)
        for options in ({"split": 3}, {"split": 3, "split_dim": 1})
    )
    assert_same_bits(given, by_default)
    linear = trained("muon", {"qkv.weight": {"split": 3, "split_dim": 1}}, is_transposed=False)
    conv1d = trained("muon", {"qkv.weight": {"split": 3, "split_dim": 0}}, is_transposed=True)
    torch.testing.assert_close(conv1d, linear, rtol=1e-8, atol=1e-10)


# --- which weights ----------------------------------------------------------------------------------------


def marked(model: nn.Module) -> set[str]:
    """The names of the weights that are stored as (inputs, outputs)."""
    transposed = transposed_in(model)
    return {name for name, param in model.named_parameters() if param in transposed}


def test_layers_of_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    config = transformers.GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    gpt2 = transformers.GPT2LMHeadModel(config)
    layers = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    assert marked(gpt2) == {f"transformer.h.0.{layer}.weight" for layer in layers}
    (hidden,) = [group for group in NorMuon(param_groups(gpt2)).param_groups if group.get("transposed")]
    assert {param.shape for param in hidden["params"]} == {(16, 48), (16, 16), (16, 64), (64, 16)}

    small = {"hidden_size": 16, "intermediate_size": 24, "head_dim": 8, "num_attention_heads": 2}
    config = transformers.GptOssConfig(
        vocab_size=40, num_hidden_layers=1, num_key_value_heads=1, num_local_experts=4, **small
    )
    experts = {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
    gpt_oss = transformers.GptOssForCausalLM(config)
    assert marked(gpt_oss) == {f"model.layers.0.mlp.experts.{name}" for name in experts}
    groups = NorMuon(param_groups(gpt_oss)).param_groups
    assert [group["matrix_dims"] for group in groups if group.get("transposed")] == [2]

    config = transformers.Llama4TextConfig(
        vocab_size=40,
        num_hidden_layers=1,
        num_key_value_heads=1,
        num_local_experts=4,
        intermediate_size_mlp=24,
        pad_token_id=0,
        **small,
    )
    llama4 = transformers.Llama4ForCausalLM(config)  # whose experts do not say so
    assert marked(llama4) == {
        f"model.layers.0.feed_forward.experts.{name}" for name in ("gate_up_proj", "down_proj")
    }

    xlnet = transformers.XLNetLMHeadModel(
        transformers.XLNetConfig(vocab_size=40, d_model=16, n_layer=1, n_head=2, d_inner=24)
    )
    assert marked(xlnet) == {f"transformer.layer.0.rel_attn.{name}" for name in "qkvr"}

    funnel = transformers.FunnelBaseModel(
        transformers.FunnelConfig(vocab_size=40, block_sizes=[1], d_model=16, n_head=2, d_head=8, d_inner=24)
    )
    assert marked(funnel) == {"encoder.blocks.0.0.attention.r_kernel"}
    assert kind_of(funnel, "encoder.blocks.0.0.attention.r_kernel") == "hidden"


def test_a_conv1d_that_torch_has_wrapped() -> None:
    """torch makes subclasses for parametrizations and for FSDP2."""
    layer = parametrizations.spectral_norm(Conv1D(3, 4))
    assert marked(layer) == {"parametrizations.weight.original"}
    sharded = type("FSDPConv1D", (Conv1D,), {})(3, 4)
    assert marked(nn.Sequential(sharded, nn.Linear(4, 4))) == {"0.weight"}


# --- groups -----------------------------------------------------------------------------------------------


def test_an_override_decides() -> None:
    model = Model(is_transposed=True)
    groups = param_groups(model, overrides={"*": {"transposed": False}})
    assert not any(group["transposed"] for group in Muon(groups).param_groups)
    groups = param_groups(Model(is_transposed=False), overrides={"qkv.weight": {"transposed": True}})
    (qkv,) = [group for group in NorMuon(groups).param_groups if group.get("transposed")]
    assert qkv["param_names"] == ["qkv.weight"]


@pytest.mark.parametrize(
    ("group", "shape", "message"),
    [
        ({"transposed": 1}, (6, 4), "transposed is 1; it must be True or False"),
        ({"transposed": True}, (6, 4, 3), "has 3 dimensions: use matrix_dims=2"),
        ({"transposed": True, "split": 2, "split_dim": 0}, (6, 4), "each column, and split_dim=0 cuts"),
        ({"transposed": True, "split": 3}, (6, 4), "does not divide its 4 columns"),
    ],
)
def test_refusals(group, shape, message) -> None:
    param = nn.Parameter(torch.ones(shape))
    with pytest.raises(ValueError, match=message):
        NorMuon([{"params": [param], "direction": "muon", **group}])
    MuonMERIT([{"params": [param], "direction": "muon", "matrix_dims": 2, "transposed": True}])
