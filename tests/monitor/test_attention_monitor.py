"""The monitor on models of plain torch, against logits computed all at once."""

import copy
import math
from contextlib import suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import BaseTorchFunctionMode

from merit_optim.monitor import AttentionMonitor, AttentionReading, interception
from merit_optim.monitor.observation import observe_attention


class Attention(nn.Module):
    """Called by an imported name, with any options."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(32, 32), nn.Linear(32, 16)
        self.options = options

    def heads(self, x) -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(y.unflatten(-1, (-1, 8)).transpose(1, 2) for y in (2 * self.query(x), 2 * self.key(x)))

    def forward(self, x):
        query, key = self.heads(x)
        mixed = scaled_dot_product_attention(query, key, key, enable_gqa=True, **self.options)
        return mixed.transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, **options) -> None:
        super().__init__()
        self.attention, self.norm = Attention(**options), nn.LayerNorm(32)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class OutOfLuck(Exception):
    """Raised by models in these tests, to distinguish it from errors of torch or the monitor."""


class Failing(nn.Module):
    """Attends, then fails."""

    def __init__(self, error: type[BaseException] = OutOfLuck) -> None:
        super().__init__()
        self.attention, self.error = Attention(), error

    def forward(self, x):
        self.attention(x)
        raise self.error


class Stack(nn.Sequential):
    """With a custom forward pass: torch.compile skips that of nn.Sequential."""

    def forward(self, x):
        for block in self:
            x = block(x)
        return x


def build(layers: int = 2, **options) -> Stack:
    torch.manual_seed(0)
    return Stack(*(Block(**options) for _ in range(layers)))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, 10, 32, generator=torch.Generator().manual_seed(seed))


def materialised(model: Stack, x: torch.Tensor, scale: float | None = None, mask=None):
    """Largest logit and mean entropy of each layer, by running the model layer by layer."""
    for block in model:
        query, key = block.attention.heads(block.norm(x))
        logits = query @ key.repeat_interleave(2, 1).mT * (scale or 1 / math.sqrt(8))
        logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
        weights = logits.softmax(-1)
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean(dim=(0, 2))
        yield logits.amax(dim=(0, 2, 3)).detach(), entropy.detach()
        x = block(x)


def assert_reads(reading: AttentionReading, names: list[str], expected) -> None:
    assert list(reading.max_logits) == list(reading.entropy) == names
    for name, (largest, entropy) in zip(names, expected, strict=True):
        torch.testing.assert_close(reading.max_logits[name], largest, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(reading.entropy[name], entropy, rtol=1e-4, atol=1e-5)


def test_one_query_head_may_serve_all_key_heads() -> None:
    class Shared(nn.Module):
        def forward(self, query, key):
            return scaled_dot_product_attention(query, key, key)

    model, query, key = Shared(), torch.randn(2, 1, 4, 8), torch.randn(2, 3, 5, 8)
    monitor = AttentionMonitor(model)
    with monitor:
        model(query, key)
    logits = query @ key.mT / math.sqrt(8)
    torch.testing.assert_close(monitor.read().max_logits["Shared"], logits.amax(dim=(0, 2, 3)))


NAMES = ["0.attention", "1.attention"]
LOWER = torch.ones(10, 10, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    ("options", "seen"),
    [
        ({}, {}),
        ({"is_causal": True}, {"mask": LOWER}),
        ({"attn_mask": LOWER}, {"mask": LOWER}),
        ({"attn_mask": LOWER[None, None].expand(3, 4, 10, 10)}, {"mask": LOWER}),
        ({"scale": 0.9, "is_causal": True, "dropout_p": 0.5}, {"scale": 0.9, "mask": LOWER}),
        ({"attn_mask": causal_upper_left(10, 10)}, {"mask": LOWER}),
    ],
    ids=["full", "causal", "mask", "mask of every head", "scale and dropout", "causal bias"],
)
def test_scaled_dot_product_attention(options, seen) -> None:
    model = build(1, **options)
    monitor = AttentionMonitor(model)
    with monitor:
        model(batch())
    assert_reads(monitor.read(), NAMES[:1], materialised(model, batch(), **seen))


class Plain(nn.Module):
    """Only the call."""

    def forward(self, *args):
        return F.scaled_dot_product_attention(*args)


@pytest.mark.parametrize("bias", [causal_upper_left(4, 7), causal_lower_right(4, 7)], ids=["upper", "lower"])
def test_a_causal_bias_is_observed_as_causal(bias: CausalBias) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 7, 8)
    readings = []
    for mask in (bias, bias._materialize()):
        monitor = AttentionMonitor(Plain())
        with monitor:
            monitor.model(query, key, key, mask)
        readings.append(monitor.read())
    torch.testing.assert_close(readings[0].max_logits, readings[1].max_logits)
    torch.testing.assert_close(readings[0].entropy, readings[1].entropy)
    assert readings[0].scalars()


@pytest.mark.filterwarnings("ignore:no attention was observed")
def test_a_mask_of_an_unknown_kind_is_not_guessed() -> None:
    class Mask(torch.Tensor):
        pass

    x = torch.randn(2, 3, 4, 8)
    monitor = AttentionMonitor(Plain())
    with monitor:
        monitor.model(x, x, x, torch.ones(4, 4).as_subclass(Mask))
    assert monitor.read() is None


def test_an_empty_batch_observes_nothing() -> None:
    model = build(is_causal=True)
    monitor = AttentionMonitor(model)
    with monitor:
        model(batch()[:0])
    reading = monitor.read()
    assert reading.max_logits["0.attention"].tolist() == [-math.inf] * 4
    assert reading.entropy == {}
    with monitor:
        model(batch()[:0])
        model(batch())
    assert_reads(monitor.read(), NAMES, materialised(model, batch(), mask=LOWER))


@pytest.mark.parametrize("inference_first", [True, False])
def test_inference_mode_and_training_in_one_step(inference_first) -> None:
    model = build()
    monitor = AttentionMonitor(model)
    with monitor:
        for inference in (inference_first, not inference_first):
            with torch.inference_mode(inference):
                model(batch())
    assert_reads(monitor.read(), NAMES, materialised(model, batch()))


@pytest.mark.parametrize(
    "shapes",
    [
        ((2, 2, 3, 4, 8), (2, 2, 3, 4, 8), (2, 3, 4, 4)),
        ((2, 2, 3, 4, 8), (2, 2, 3, 4, 8), (3, 4, 4)),
        ((2, 2, 3, 4, 8), (2, 1, 3, 4, 8), (2, 1, 1, 4, 4)),
        ((1, 2, 3, 4, 8), (2, 1, 3, 4, 8), (4, 4)),
    ],
)
def test_batches_of_batches_are_broadcast(shapes) -> None:
    torch.manual_seed(0)
    query, key, mask = (torch.randn(shape) for shape in shapes)
    monitor = AttentionMonitor(Plain())
    with monitor:
        monitor.model(query, key, key, mask)
    reading = monitor.read()
    logits = query @ key.mT / math.sqrt(8) + mask
    weights = logits.softmax(-1)
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean(dim=(0, 1, 3))
    torch.testing.assert_close(reading.max_logits, {"Plain": logits.amax(dim=(0, 1, 3, 4))})
    torch.testing.assert_close(reading.entropy, {"Plain": entropy})


@pytest.mark.parametrize("dims", [2, 3, 5])
def test_other_numbers_of_dimensions(dims) -> None:
    """Two and three have one head; five have batches of batches, with a mask for some of them."""
    shape = (2, 3, 4, 6, 8)[-dims:] if dims > 3 else (5, 6, 8)[-dims:]
    torch.manual_seed(0)
    query, key = torch.randn(shape), torch.randn(shape)
    mask = torch.rand({2: (6, 6), 3: (5, 6, 6), 5: (1, 3, 1, 6, 6)}[dims]) > 0.3
    mask[..., 0] = True

    class Model(nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, key, key, mask)

    monitor = AttentionMonitor(Model())
    with monitor:
        monitor.model(query)
    logits = (query @ key.mT / math.sqrt(8)).masked_fill(~mask, -torch.inf)
    largest = logits.amax(dim=(-2, -1))
    largest = largest.amax(dim=(0, 1)) if dims == 5 else largest.amax().reshape(1)
    torch.testing.assert_close(monitor.read().max_logits, {"Model": largest})


@pytest.mark.parametrize("training", [True, False], ids=["training", "fast path"])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("dim", [None, 24], ids=["one weight", "three weights"])
def test_multi_head_attention(training, need_weights, dim) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(32, 4, batch_first=True, kdim=dim, vdim=dim).train(training)
    x = torch.randn(3, 10, 32)
    memory = x if dim is None else torch.randn(3, 10, dim)
    padding = torch.arange(10) >= torch.tensor([10, 7, 4])[:, None]
    options = {"key_padding_mask": padding, "attn_mask": ~LOWER, "need_weights": need_weights}
    monitor = AttentionMonitor(layer)
    with torch.set_grad_enabled(training), monitor:
        layer(x, memory, memory, **options)
    weights = layer(x, memory, memory, **options | {"need_weights": True, "average_attn_weights": False})[1]
    entropy = -torch.special.xlogy(weights, weights).sum(-1).mean(dim=(0, 2)).detach()
    w_query, w_key = (
        layer.in_proj_weight.chunk(3)[:2] if dim is None else (layer.q_proj_weight, layer.k_proj_weight)
    )
    query, key = ((y @ w.T).unflatten(-1, (4, 8)).transpose(1, 2) for y, w in ((x, w_query), (memory, w_key)))
    logits = (query @ key.mT / math.sqrt(8)).masked_fill(~(LOWER & ~padding[:, None, None]), -torch.inf)
    expected = [(logits.amax(dim=(0, 2, 3)).detach(), entropy)]
    assert_reads(monitor.read(), ["MultiheadAttention"], expected)


def test_a_transformer_encoder_in_evaluation_is_seen_although_it_has_a_fast_path() -> None:
    layer = nn.TransformerEncoderLayer(32, 4, batch_first=True).eval()
    monitor = AttentionMonitor(layer)
    with torch.no_grad():
        plain = layer(batch())
        with monitor:
            torch.testing.assert_close(layer(batch()), plain)  # another path, so nearly
    assert list(monitor.read().max_logits) == ["self_attn"]


def test_several_passes_are_one_reading_and_a_reading_is_read_once() -> None:
    model = build(is_causal=True)
    monitor = AttentionMonitor(model)
    with monitor:
        model(batch(0))
        model(batch(1))
    with monitor:
        model(batch(2))
    each = [list(materialised(model, batch(seed), mask=LOWER)) for seed in range(3)]
    expected = [
        (torch.stack([x[0] for x in layer]).amax(0), torch.stack([x[1] for x in layer]).mean(0))
        for layer in zip(*each, strict=True)
    ]
    assert_reads(monitor.read(), NAMES, expected)
    assert monitor.read() is None


def test_chosen_steps_and_without_entropy() -> None:
    model = build()
    monitor = AttentionMonitor(model, every=3, entropy=False)
    observed = []
    for _ in range(7):
        with monitor:
            model(batch())
        observed.append(monitor.read())
    assert [reading is not None for reading in observed] == [True, False, False, True, False, False, True]
    assert observed[0].entropy == {}
    with pytest.raises(ValueError, match="every must be at least 1 step, got 0"):
        AttentionMonitor(model, every=0)


def test_attached_every_pass_is_a_step() -> None:
    model = build()
    monitor = AttentionMonitor(model, every=2)
    detach = monitor.attach()
    observed = []
    for _ in range(3):
        model(batch())
        observed.append(monitor.read())
    detach()
    model(batch())
    assert [reading is not None for reading in observed] == [True, False, True]
    assert monitor.read() is None
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_passes_of_a_copy_are_not_steps_of_the_model() -> None:
    """An average of the weights or a teacher is copied with the hooks of the model, and may run within it."""
    model = build()
    monitor = AttentionMonitor(model, every=2)
    monitor.attach()
    teacher = copy.deepcopy(model)

    def ask(*_: object) -> None:
        teacher(batch())

    model.register_forward_pre_hook(ask)
    observed = []
    for _ in range(4):
        teacher(batch())
        model(batch())
        observed.append(monitor.read())
    assert [reading is not None for reading in observed] == [True, False, True, False]


def test_attached_it_continues_after_a_failed_pass() -> None:
    model = build()
    monitor = AttentionMonitor(model)
    detach = monitor.attach()
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 10, 31))
    model(batch())
    detach()
    assert_reads(monitor.read(), NAMES, materialised(model, batch()))
    with monitor, pytest.raises(RuntimeError):
        model(torch.randn(3, 10, 31))
    with monitor:
        scaled_dot_product_attention(*torch.ones(3, 1, 1, 4, 8))  # nobody's, and not of the pass that failed
    with pytest.warns(UserWarning, match="no attention was observed"):
        assert monitor.read() is None


def test_attached_a_model_raises_its_own_errors() -> None:
    model = Failing()
    monitor = AttentionMonitor(model)
    detach = monitor.attach()
    for _ in range(2):
        with pytest.raises(OutOfLuck):
            model(batch())
        assert torch._C._len_torch_function_stack() == 0
        assert list(monitor.read().max_logits) == ["attention"]
    detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_attached_it_continues_after_an_interrupted_pass() -> None:
    """An interrupt calls no hooks at all."""
    model = Failing(KeyboardInterrupt)
    monitor = AttentionMonitor(model)
    detach = monitor.attach()
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model(batch())
        assert torch._C._len_torch_function_stack() == 1
    model.error = OutOfLuck
    with pytest.raises(OutOfLuck):
        model(batch())
    assert torch._C._len_torch_function_stack() == 0
    detach()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_modules_that_failed_are_left_with_the_one_that_caught_the_error() -> None:
    class Catching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.failing, self.instead = Failing(), Attention()

        def forward(self, x):
            with suppress(OutOfLuck):
                self.failing(x)
            return self.instead(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.catching = Catching()

        def forward(self, x):
            x = self.catching(x)
            return F.scaled_dot_product_attention(x, x, x)

    monitor = AttentionMonitor(Model())
    with monitor:
        monitor.model(batch())
    names = ["Model", "catching.failing.attention", "catching.instead"]
    assert list(monitor.read().max_logits) == names


def test_outside_of_steps_nothing_is_changed() -> None:
    model = build()
    functions = F.scaled_dot_product_attention, torch.nn.Module.__call__
    AttentionMonitor(model)
    monitor = AttentionMonitor(model, every=2)
    for observed in (True, False):
        with monitor:
            hooked = [name for name, m in model.named_modules() if m._forward_hooks or m._forward_pre_hooks]
            assert hooked == (["", "0", "0.attention", "1", "1.attention"] if observed else [])
            assert torch._C._len_torch_function_stack() == observed
            model(batch())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        assert not any("merit" in name for module in model.modules() for name in vars(module))
        assert torch._C._len_torch_function_stack() == 0
    assert (F.scaled_dot_product_attention, torch.nn.Module.__call__) == functions


def test_a_model_in_another_one_is_not_mixed_up_with_it() -> None:
    model, other = build(), build()
    monitor = AttentionMonitor(model[1])
    with monitor:
        other(batch())
        x = model(batch())
    assert x.requires_grad
    assert list(monitor.read().max_logits) == ["attention"]


def test_two_monitors_see_the_same() -> None:
    model = build()
    outer, inner = AttentionMonitor(model), AttentionMonitor(model)
    with outer:
        model(batch(1))
        with inner:
            model(batch())
    assert_reads(inner.read(), NAMES, materialised(model, batch()))
    assert outer.read().max_logits.keys() == set(NAMES)
    attached = [AttentionMonitor(model), AttentionMonitor(model[1])]
    detach = [monitor.attach() for monitor in attached]
    model(batch())
    for end in detach:
        end()
    expected = list(materialised(model, batch()))
    assert_reads(attached[0].read(), NAMES, expected)
    assert_reads(attached[1].read(), ["attention"], expected[1:])
    assert not any("merit" in name for module in model.modules() for name in vars(module))


def test_monitors_that_overlap_end_in_any_order() -> None:
    """They end in the order in which they began, with another mode among theirs."""
    model, foreign = build(), BaseTorchFunctionMode()
    first, second = AttentionMonitor(model), AttentionMonitor(model)
    expected = list(materialised(model, batch()))
    first.start()
    with foreign:
        second.start()
        model(batch())
        first.stop()
        assert torch._C._len_torch_function_stack() == 2
        model(batch())
        assert_reads(first.read(), NAMES, expected)
        second.stop()
        assert_reads(second.read(), NAMES, expected)
        assert torch._C._len_torch_function_stack() == 1
    assert torch._C._len_torch_function_stack() == 0
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert not any("merit" in name for module in model.modules() for name in vars(module))


def test_a_checkpointed_block_is_observed_once(monkeypatch) -> None:
    from torch.utils.checkpoint import checkpoint

    calls = []
    monkeypatch.setattr(
        interception, "observe_attention", lambda *a, **k: calls.append(1) or observe_attention(*a, **k)
    )
    model = build()
    monitor = AttentionMonitor(model)
    with monitor:
        x = batch().requires_grad_()
        for block in model:
            x = checkpoint(block, x, use_reentrant=False)
    x.sum().backward()
    assert len(calls) == 2
    assert_reads(monitor.read(), NAMES, materialised(model, batch()))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # torch's attention has no rule for vmap
@pytest.mark.parametrize("per_sample_gradients", [False, True])
def test_a_mapped_dimension_is_part_of_the_batch(per_sample_gradients) -> None:
    model = build()
    params = dict(model.named_parameters())
    monitor, x = AttentionMonitor(model), torch.stack([batch(), batch(1)])

    def loss(params, x):
        return functional_call(model, params, (x,)).sum()

    with monitor:
        vmap(grad(loss) if per_sample_gradients else loss, in_dims=(None, 0))(params, x)
    assert_reads(monitor.read(), NAMES, materialised(model, x.flatten(0, 1)))
    with monitor:
        model(batch())
    assert_reads(monitor.read(), NAMES, materialised(model, batch()))


def test_a_warning_if_no_attention_is_observed() -> None:
    class ByHand(nn.Module):
        def forward(self, x):
            return (x @ x.mT).softmax(-1) @ x

    monitor = AttentionMonitor(ByHand())
    with monitor:
        monitor.model(batch())
    with pytest.warns(UserWarning, match="no attention was observed in ByHand"):
        assert monitor.read() is None


def test_misuse_is_refused() -> None:
    model = build()
    monitor = AttentionMonitor(model)
    with monitor, pytest.raises(RuntimeError, match="already in a step"):
        monitor.start()
    model.compile(backend="eager")
    with pytest.raises(ValueError, match="compiled in place"):
        monitor.attach()

    class Changing(nn.Module):
        def forward(self, heads):
            x = torch.ones(1, heads, 4, 8)
            return F.scaled_dot_product_attention(x, x, x)

    monitor = AttentionMonitor(Changing())
    with monitor:
        monitor.model(2)
        with pytest.raises(RuntimeError, match="with 2 heads and then with 3"):
            monitor.model(3)


def test_numbers_for_a_logger() -> None:
    nan = float("nan")
    reading = AttentionReading(
        max_logits={"a": torch.tensor([1.0, 3.0]), "b": torch.tensor([2.0, nan])},
        entropy={"a": torch.tensor([0.5, 0.25])},
    )
    numbers = reading.scalars()
    assert numbers.pop("attention/max_logit/a") == 3.0
    assert numbers.pop("attention/min_entropy/a") == numbers.pop("attention/min_entropy") == 0.25
    assert all(math.isnan(value) for value in numbers.values())
    assert set(numbers) == {"attention/max_logit/b", "attention/max_logit"}


@pytest.mark.parametrize(
    "how", ["whole", *(pytest.param(x, marks=pytest.mark.slow) for x in ("in place", "blocks"))]
)
# torch.compile looks at the gradients of its inputs, and those of a second block are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled(how) -> None:
    """In the graph, and in few: one without a monitor, one for a step's first pass, one for the others."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    model = build(2, is_causal=True)
    expected = list(materialised(model, batch(), mask=LOWER))
    run = model
    if how == "whole":
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
    elif how == "in place":
        model.compile(backend="aot_eager", fullgraph=True)
    else:
        for block in model:
            block.compile(backend="aot_eager", fullgraph=True)
    run(batch())
    for _ in range(2):
        monitor = AttentionMonitor(run)
        with monitor:
            run(batch())
            run(batch()).sum().backward()
        assert_reads(monitor.read(), NAMES, expected)
        run(batch())
    assert counters["stats"]["unique_graphs"] <= 6
    torch.compiler.reset()


def test_flex_attention_gives_its_largest_logits(monkeypatch) -> None:
    """Its CUDA kernel does; the plain version that CPUs have does too, where no kernel is made of it."""
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(interception, "_gives_max_scores", lambda *_: True)
    mask = flex.create_block_mask(lambda _b, _h, q, k: q >= k, None, None, 10, 10, device="cpu")

    class Model(nn.Module):
        def forward(self, query, key):
            return flex.flex_attention(query, key, key, block_mask=mask, enable_gqa=True)

    torch.manual_seed(0)
    query, key = torch.randn(3, 4, 10, 16), torch.randn(3, 2, 10, 16)
    torch.compiler.reset()
    run = torch.compile(Model(), backend="aot_eager", fullgraph=True)
    monitor = AttentionMonitor(run)
    with monitor, torch.no_grad():
        observed = run(query, key)
    assert torch.equal(observed, run(query, key))
    logits = query @ key.repeat_interleave(2, 1).mT / 4
    reading = monitor.read()
    largest = logits.masked_fill(~LOWER, -torch.inf).amax(dim=(0, 2, 3))
    torch.testing.assert_close(reading.max_logits, {"Model": largest})
    assert reading.entropy == {}
    torch.compiler.reset()
