"""What only a CUDA GPU can show: its attention kernels, and the memory of a training step."""

from dataclasses import replace

import pytest
import torch
from model_cases import FAMILIES, spread

from merit_lab.models import PRESETS, build
from merit_lab.models.attention import attend, causal_block_mask

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _forget_compiled_code():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("time", [128, 200, 1024])
@pytest.mark.parametrize("head_width", [16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_gives_the_exact_largest_logits_and_the_same_attention(time, head_width, dtype) -> None:
    torch.manual_seed(0)
    query, key, value = (
        2 * torch.randn(3, 4, time, head_width, device="cuda", dtype=dtype) for _ in range(3)
    )
    mask = causal_block_mask(time, query.device)
    # In float32: products rounded to bf16 would move large logits, and with them the attention, by far.
    exact = (tensor.float() for tensor in (query, key, value))
    plain, expected = attend(*exact, kind="math", observe=True)
    for observe in ("max", True):
        mixed, found = attend(query, key, value, kind="flex", block_mask=mask, observe=observe)
        assert found.shape == (1 if observe == "max" else 2, 4)
        tolerance = 1e-5 if dtype == torch.bfloat16 else 2e-3  # float32 inputs may go through TF32
        torch.testing.assert_close(found[0], expected[0], rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mixed.float(), plain, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["auto", "sdpa", "cudnn", "flex"])
def test_a_compiled_training_step_is_near_the_plain_one(family, attention) -> None:
    config = replace(FAMILIES[family], context=256, loss_chunk=300)
    tokens = torch.randint(config.vocab_size, (4, 257), device="cuda")
    results = []
    for kind in ("math", attention):
        chosen = replace(config, attention=kind, loss_chunk=None if kind == "math" else 300)
        model = spread(chosen, scale=0.05).cuda()
        run = model if kind == "math" else torch.compile(model, fullgraph=True)
        with torch.autocast("cuda", torch.bfloat16):
            output = run(tokens[:, :-1], tokens[:, 1:], observe=True)
        output.loss.backward()
        results.append((output, [p.grad for p in model.parameters()]))
    (expected, expected_gradients), (found, gradients) = results
    torch.testing.assert_close(found.loss, expected.loss, rtol=0.01, atol=0)
    torch.testing.assert_close(
        found.attention.max_logits, expected.attention.max_logits, rtol=0.05, atol=0.02
    )
    torch.testing.assert_close(found.attention.entropy, expected.attention.entropy, rtol=0.02, atol=0)
    for a, b in zip(gradients, expected_gradients, strict=True):
        assert (a - b).norm() < 0.05 * b.norm()


@pytest.mark.parametrize("attention", ["sdpa", "cudnn", "flex"])
def test_observing_changes_nothing(attention) -> None:
    config = replace(FAMILIES["gpt2"], context=256, attention=attention)
    model = spread(config).cuda()
    tokens = torch.randint(config.vocab_size, (4, 257), device="cuda")
    losses = []
    for observe in (False, "max", True):
        with torch.autocast("cuda", torch.bfloat16):
            losses.append(model(tokens[:, :-1], tokens[:, 1:], observe=observe).loss)
    assert torch.equal(losses[0], losses[1])
    assert torch.equal(losses[0], losses[2])


def test_a_training_step_holds_no_logits_of_the_whole_batch() -> None:
    """16384 tokens are 1.5 GiB of logits in bf16; with chunks of 2048 at least half of that is saved."""
    peaks = []
    for chunk in (0, 2048):
        config = replace(PRESETS["gpt2-small"], layers=2, loss_chunk=chunk)
        torch._dynamo.reset()
        model = build(config).cuda()
        run = torch.compile(model)
        tokens = torch.randint(50257, (16, 1025), device="cuda")
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(tokens[:, :-1], tokens[:, 1:], observe="max").loss
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated())
        del model, run, loss
    assert peaks[1] < peaks[0] - 0.75 * 2**30
