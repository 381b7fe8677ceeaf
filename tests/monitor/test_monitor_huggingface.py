"""Hugging Face models of several architectures, against the logits that their eager attention holds."""

import pytest
import torch

from merit_optim.monitor import AttentionMonitor

transformers = pytest.importorskip("transformers", reason="needs transformers")

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 64}
# Long enough a sequence for the window to hide something.
WINDOW = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}

CASES = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4}),
    "gpt2 scaled by layer": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "scale_attn_by_inverse_layer_idx": True},
    ),
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER | WINDOW | {"use_sliding_window": True}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER | {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", DECODER | WINDOW | {"head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", DECODER | WINDOW | {"head_dim": 8}),
    "bert": ("BertModel", "BertConfig", SMALL | {"intermediate_size": 48}),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        SMALL
        | {"intermediate_size": 48, "local_attention": 6, "global_attn_every_n_layers": 2, "pad_token_id": 0},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 99,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}


def build(case: str, attention: str) -> torch.nn.Module:
    model_class, config_class, options = CASES[case]
    config = getattr(transformers, config_class)(**options, attn_implementation=attention)
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "norm" not in name:
                weight.normal_(std=0.3)  # far from uniform attention
    return model.eval()


def inputs(case: str) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 99, (3, 12), generator=torch.Generator().manual_seed(1))
    padding = torch.ones_like(tokens)
    padding[1, 11:] = padding[2, 9:] = 0  # every query sees a key, or eager and sdpa would differ
    batch = {"input_ids": tokens, "attention_mask": padding}
    return batch | {"labels": tokens} if case == "t5" else batch


def materialised(case: str, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Largest logit and mean entropy of what each softmax over tokens was given, in the order of calls."""
    observed = []
    original = torch.nn.functional.softmax

    def remember(logits, dim=-1, **options):
        weights = original(logits, dim=dim, **options)
        if logits.ndim == 4:
            visible = logits > -1e30
            rows = visible.any(-1)
            ours = original(logits.double().masked_fill(~visible, -torch.inf), dim=-1)
            entropies = -torch.special.xlogy(ours, ours).sum(-1).masked_fill(~rows, 0.0)
            largest = logits.masked_fill(~visible, -torch.inf).amax(dim=(0, 2, 3))
            observed.append((largest, (entropies.sum(dim=(0, 2)) / rows.sum(dim=(0, 2))).float()))
        return weights

    with monkeypatch.context() as patch, torch.no_grad():
        patch.setattr(torch.nn.functional, "softmax", remember)
        build(case, "eager")(**inputs(case))
    return observed


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("case", CASES)
def test_readings_are_those_of_the_materialised_logits(case, attention, monkeypatch) -> None:
    if attention == "sdpa" and case == "gemma2":
        pytest.skip("Gemma 2 caps its logits, which sdpa cannot do")
    expected = materialised(case, monkeypatch)
    model = build(case, attention)
    monitor = AttentionMonitor(model)
    with monitor, torch.no_grad():
        model(**inputs(case))
    reading = monitor.read()
    layers = list(reading.max_logits)
    assert len(layers) == len(expected)
    assert all("att" in name.lower() for name in layers)
    assert all(hasattr(model.get_submodule(name), "config") for name in layers)
    for name, (largest, entropy) in zip(layers, expected, strict=True):
        torch.testing.assert_close(
            reading.max_logits[name],
            largest,
            rtol=1e-4,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
        torch.testing.assert_close(
            reading.entropy[name],
            entropy,
            rtol=1e-3,
            atol=1e-4,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert torch.stack(list(reading.max_logits.values())).abs().min() > 0.1


def test_flash_kernels_are_observed_by_their_own_arguments(monkeypatch) -> None:
    """A function in the place of a flash kernel, with its conventions: padding as (batch, keys), a window."""
    seen = []

    def flash(module, query, key, value, mask, **options):  # noqa: ARG001
        seen.append((query.detach(), key.detach(), mask, options))
        return torch.zeros_like(query).transpose(1, 2), None

    registry = transformers.modeling_utils.AttentionInterface
    monkeypatch.setitem(registry._global_mapping, "my_flash_attention", flash)
    masks = transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(masks, "my_flash_attention", masks["flash_attention_2"])
    model = build("qwen2", "sdpa")
    model.config._attn_implementation_internal = (
        "my_flash_attention"  # unchecked: no such kernel is installed
    )
    monitor = AttentionMonitor(model)
    with monitor, torch.no_grad():
        model(**inputs("qwen2"))
    reading = monitor.read()
    assert len(seen) == 2
    distance = torch.arange(12)[:, None] - torch.arange(12)
    for index, (name, observed) in enumerate(reading.max_logits.items()):
        query, key, mask, options = seen[index]
        assert mask.shape == (3, 12)
        assert options["sliding_window"] == (5 if index == 0 else None)
        visible = (distance >= 0) & mask[:, None, None].bool()
        visible &= distance < 5 if index == 0 else True
        logits = query @ key.repeat_interleave(2, 1).mT * options["scaling"]
        logits = logits.masked_fill(~visible, -torch.inf)
        torch.testing.assert_close(observed, logits.amax(dim=(0, 2, 3)))
        weights = logits.softmax(-1)
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean(dim=(0, 2))
        torch.testing.assert_close(reading.entropy[name], entropy, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "is_observed"),
    [
        ({}, True),
        ({"cu_seq_lens_q": [0, 2, 4]}, False),
        ({"position_ids": [[0, 1, 2, 3]]}, True),
        ({"position_ids": [[5, 6, 7, 8]]}, True),  # after keys in a cache
        ({"position_ids": [[0, 1, 0, 1]]}, False),
        ({"position_ids": [[0, 1, 0, 1]], "attention_mask": [[1, 1, 1, 1]]}, True),
        ({"indices": [[[0], [1], [1], [3]]]}, False),
        ({"block_indices": [[[0], [0], [1], [1]]]}, False),
    ],
    ids=str,
)
def test_packed_texts_and_chosen_keys_are_not_observed(arguments, is_observed) -> None:
    """A flash kernel hides keys there that are not hidden by the mask."""
    from merit_optim.monitor.arguments import of_flash

    query = torch.zeros(1, 2, 4, 8)
    tensors = {name: torch.tensor(value) for name, value in arguments.items()}
    observed = of_flash(torch.nn.Identity(), query, query, query, **tensors)
    assert (observed is not None) == is_observed


def test_without_chosen_keys_all_are_observed() -> None:
    from merit_optim.monitor.arguments import of_flash

    query = torch.zeros(1, 2, 4, 8)
    assert of_flash(torch.nn.Identity(), query, query, query, None, indices=None) is not None


def test_rows_with_positions_of_their_own_are_observed() -> None:
    """Kernels take only a single row for several texts."""
    from merit_optim.monitor.arguments import of_flash

    query, positions = torch.zeros(2, 2, 4, 8), torch.tensor([[0, 1, 2, 3], [0, 0, 0, 1]])
    assert of_flash(torch.nn.Identity(), query, query, query, None, position_ids=positions) is not None


def test_of_a_mask_longer_than_the_keys_a_flash_kernel_sees_the_end() -> None:
    """As with a cache that keeps only the keys of a window."""
    from merit_optim.monitor.arguments import of_flash

    key = torch.zeros(1, 2, 4, 8)
    observed = of_flash(torch.nn.Identity(), key[:, :, :1], key, key, torch.tensor([[0, 0, 0, 1, 1, 1]]))
    assert observed.mask.tolist() == [[[[False, True, True, True]]]]
    assert observed.options["offset"] == 3


def test_of_a_mask_longer_than_the_keys_eager_attention_sees_the_beginning() -> None:
    from merit_optim.monitor.arguments import of_eager

    key = torch.zeros(1, 2, 3, 8)
    mask = torch.arange(5.0).expand(1, 1, 3, 5)
    observed = of_eager(torch.nn.Identity(), key, key, key, mask)
    assert observed.mask.tolist() == [[3 * [[0.0, 1.0, 2.0]]]]


def test_two_attached_monitors_leave_the_registry_as_it_was() -> None:
    registry = transformers.modeling_utils.AttentionInterface
    before = registry.get_interface
    model = build("llama", "eager")
    monitors = [AttentionMonitor(model), AttentionMonitor(model)]
    detach = [monitor.attach() for monitor in monitors]
    model(**inputs("llama"))
    assert registry.get_interface is before
    one, other = (monitor.read().max_logits for monitor in monitors)
    assert one.keys() == {f"model.layers.{i}.self_attn" for i in (0, 1)}
    torch.testing.assert_close(one, other)
    for end in detach:
        end()


def test_monitors_that_overlap_leave_the_registry_as_it_was() -> None:
    """They end in the order in which they began, as two callbacks do."""
    registry = transformers.modeling_utils.AttentionInterface
    before = registry.get_interface
    model = build("llama", "eager")
    first, second = AttentionMonitor(model), AttentionMonitor(model)
    for _ in range(2):
        first.start()
        second.start()
        first.stop()
        model(**inputs("llama"))
        second.stop()
        assert registry.get_interface is before
    assert second.read() is not None


@pytest.mark.parametrize("kind", ["eager", "flash"])
def test_no_entropy_if_sinks_take_part_of_the_attention(kind) -> None:
    from merit_optim.monitor import arguments

    query = torch.randn(1, 2, 4, 8)
    of = arguments.of_eager if kind == "eager" else arguments.of_flash
    assert "entropy" not in of(torch.nn.Identity(), query, query, query, None).options
    sinks = torch.zeros(2)
    assert of(torch.nn.Identity(), query, query, query, None, s_aux=sinks).options["entropy"] is False


def test_gpt_oss_with_its_sinks() -> None:
    config = transformers.GptOssConfig(
        **DECODER | {"num_hidden_layers": 1},
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        attn_implementation="eager",
    )
    model = transformers.GptOssForCausalLM(config)
    monitor = AttentionMonitor(model)
    with monitor, torch.no_grad():
        model(torch.arange(6)[None])
    reading = monitor.read()
    assert list(reading.max_logits) == ["model.layers.0.self_attn"]
    assert reading.entropy == {}


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_observing_changes_no_bit_and_leaves_nothing(attention) -> None:
    registry = transformers.modeling_utils.AttentionInterface
    before = registry.get_interface
    results = []
    for observe in (False, True):
        model = build("llama", attention).train()
        monitor = AttentionMonitor(model)
        batch = inputs("llama") | {"labels": inputs("llama")["input_ids"]}
        if observe:
            monitor.start()
        loss = model(**batch).loss
        monitor.stop()
        results.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
        assert model.config._attn_implementation == attention
        assert registry.get_interface is before
        assert not any(
            vars(m).get(name) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")
        )
        assert not any("merit" in name for module in model.modules() for name in vars(module))
    for plain, observed in zip(*results, strict=True):
        assert torch.equal(plain, observed)


def test_dropout_does_not_reach_the_reading() -> None:
    readings = []
    for dropout in (0.0, 0.9):
        model = build("llama", "sdpa").train()
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        monitor = AttentionMonitor(model)
        with monitor:
            model(**inputs("llama"))
        readings.append(monitor.read().max_logits["model.layers.0.self_attn"])
    assert torch.equal(*readings)


@torch.no_grad()
@pytest.mark.slow
def test_a_compiled_model_is_observed_in_its_graph() -> None:
    """By the registry; test_attention_monitor.py has it for functions of torch."""
    torch.compiler.reset()
    expected, observed = [], []
    for compiled in (False, True):
        model = build("llama", "eager")
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
        batch = inputs("llama")
        run(**batch)  # before the monitor comes
        monitor = AttentionMonitor(model)
        for _ in range(2):
            with monitor:
                run(**batch)
            (observed if compiled else expected).append(monitor.read())
        run(**batch)
        assert monitor.read() is None
    for eager, graph in zip(expected, observed, strict=True):
        assert (
            list(eager.max_logits)
            == list(graph.max_logits)
            == [f"model.layers.{i}.self_attn" for i in (0, 1)]
        )
        for name in eager.max_logits:
            torch.testing.assert_close(eager.max_logits[name], graph.max_logits[name])
            torch.testing.assert_close(eager.entropy[name], graph.entropy[name])
    torch.compiler.reset()
