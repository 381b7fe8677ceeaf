"""Models under torch.compile: one graph, the same numbers, and a loss that keeps no logits."""

from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from model_cases import FAMILIES, GPT2, sequences, spread
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition

from merit_lab.models.loss import loss_and_gradients

# torch's own modules, as inductor imports them.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("family", "autocast"),
    [("gpt2", False), pytest.param("gpt2-qk-norm", True, marks=pytest.mark.slow), ("llama", True)],
)
def test_a_compiled_model_is_one_graph_with_the_same_numbers(family, autocast) -> None:
    config = replace(FAMILIES[family], layers=1, loss_chunk=50)
    model = spread(config)
    tokens, targets = sequences(config)
    results = []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            output = run(tokens, targets, observe=True)
        output.loss.backward()
        results.append((output, [p.grad for p in model.parameters()]))
    (expected, expected_gradients), (found, gradients) = results
    tolerance = {"rtol": 0.02, "atol": 1e-3} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found.loss, expected.loss, **tolerance)
    torch.testing.assert_close(found.attention.max_logits, expected.attention.max_logits, **tolerance)
    torch.testing.assert_close(found.attention.entropy, expected.attention.entropy, **tolerance)
    for a, b in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(a, b, **tolerance)


def test_a_compiled_loss_keeps_no_logits_for_backward() -> None:
    """The compiler may move work between forward and backward; the loss stays whole, with its gradients."""
    config = replace(GPT2, vocab_size=997, loss_chunk=72)
    nodes: dict[str, list[torch.fx.Node]] = {}

    def remember(name):
        def compiler(module, _inputs):
            nodes[name] = list(module.graph.nodes)
            return make_boxed_func(module.forward)

        return compiler

    backend = aot_autograd(
        fw_compiler=remember("forward"),
        bw_compiler=remember("backward"),
        partition_fn=min_cut_rematerialization_partition,
    )
    torch.compile(spread(config), backend=backend)(*sequences(config, batch=6)).loss.backward()
    for name, count in (("forward", 1), ("backward", 0)):
        assert sum("cross_entropy_and_gradients" in str(node.target) for node in nodes[name]) == count
        tensors = [node.meta["val"] for node in nodes[name] if isinstance(node.meta.get("val"), torch.Tensor)]
        assert tensors
        assert not [x.shape for x in tensors if x.shape[-1:] == (997,) and x.shape[0] != config.width]


def test_the_fused_softmax_gives_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    inputs, weight = torch.randn(100, 48).bfloat16(), torch.randn(997, 48)
    targets = torch.randint(997, (100,))
    plain, fused = (
        loss_and_gradients(inputs, weight, targets, chunk=40, fused=fused) for fused in (False, True)
    )
    for one, other in zip(fused, plain, strict=True):
        assert (one - other).norm() < 2e-3 * other.norm()  # of bf16 products


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_inductors_code_gives_the_same_numbers(family) -> None:
    model = spread(FAMILIES[family])
    tokens, targets = sequences(GPT2)
    found = torch.compile(model, fullgraph=True)(tokens, targets, observe=True)
    expected = model(tokens, targets, observe=True)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(
        found.attention.max_logits, expected.attention.max_logits, rtol=1e-5, atol=1e-5
    )
