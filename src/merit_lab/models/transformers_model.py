"""A causal language model of Hugging Face's transformers, with the interface of the lab's models."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from merit_lab.models.base import AttentionObservation, Model, Observe, Output, at_least_float32, check_inputs
from merit_lab.models.config import Counts
from merit_lab.models.transformers_config import HuggingFaceConfig, import_transformers, not_causal
from merit_optim.monitor.attention import AttentionMonitor
from merit_optim.optim.kinds import kinds_of


class HuggingFaceModel(Model):
    """A model that transformers builds and initializes from its configuration, in float32.

    The attention monitor is entered outside of the compiled code, so there is one graph with it and one
    without.
    """

    config: HuggingFaceConfig

    def __init__(self, config: HuggingFaceConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _build(config)
        self._monitors = {entropy: AttentionMonitor(self.model, entropy=entropy) for entropy in (False, True)}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        observe: Observe = False,
        of_sequences: bool = False,
    ) -> Output:
        """See :meth:`Model.forward`."""
        check_inputs(self.config, tokens)
        if not observe:
            return Output(*self._compute(tokens, targets, of_sequences), None)
        with self._monitors[observe is True] as monitor:
            loss, logits = self._compute(tokens, targets, of_sequences)
        return Output(loss, logits, _observation(monitor.take(), entropy=observe is True))

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile the computation, without the monitor."""
        self._compute = torch.compile(self._compute, *args, **options)  # type: ignore[method-assign]

    def sharded_parts(self) -> Iterable[nn.Module]:
        """Return the blocks: the first list with as many modules as there are layers; empty if none."""
        lists = (module for module in self.model.modules() if isinstance(module, nn.ModuleList))
        layers = getattr(self.config.configuration.get_text_config(), "num_hidden_layers", None)
        return next((blocks for blocks in lists if len(blocks) == layers), ())

    def export(self, folder: Path) -> None:
        """Write the model as ``save_pretrained`` does, in one file of weights."""
        self.model.save_pretrained(folder, max_shard_size=1 << 60)

    def _compute(
        self, tokens: Tensor, targets: Tensor | None, of_sequences: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        output = self.model(input_ids=tokens, use_cache=False)
        if targets is None:
            return None, output.logits
        logits = at_least_float32(output.logits.flatten(0, 1))
        if of_sequences:
            losses = F.cross_entropy(logits.detach(), targets.flatten(), reduction="none")
            return losses.view(targets.shape).mean(1), None
        loss = F.cross_entropy(logits, targets.flatten())
        # The load-balancing loss of experts is used in training, but is not part of the measured loss. Models
        # return it if their configuration sets output_router_logits.
        balance = getattr(output, "aux_loss", None)
        if self.training and balance is not None:
            loss = loss + self.config.configuration.get_text_config().router_aux_loss_coef * balance
        return loss, None


@lru_cache(maxsize=16)
def count(config: HuggingFaceConfig) -> Counts:
    """Return the number of parameters and the operations per token, with the width of all heads.

    Of stacked experts, only those that a token is routed to count. The operations are unknown for models
    without attention, and if the configuration has no num_experts_per_tok.
    """
    with torch.device("meta"):
        model = HuggingFaceModel(config)
    head = model.model.get_output_embeddings()
    total, multiplied, known = 0, 0.0, config.attention_width is not None
    for parameter, kind in kinds_of(model).items():
        size = parameter.numel()
        total += size
        if kind == "experts":
            chosen = getattr(config.configuration.get_text_config(), "num_experts_per_tok", None)
            known = known and chosen is not None
            multiplied += size * (chosen or 0) / parameter.shape[0]
        elif kind != "embedding" or (head is not None and parameter is head.weight):
            multiplied += size
    attention = 12 * config.layers * (config.attention_width or 0) * config.context if known else 0
    return Counts(total, round(6 * multiplied) + attention if known else None)


def _build(config: HuggingFaceConfig) -> Any:
    transformers = import_transformers()
    configuration = config.configuration
    implementation = {} if config.attention == "auto" else {"attn_implementation": config.attention}
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            configuration, dtype=torch.float32, trust_remote_code=False, **implementation
        )
    except Exception as error:  # the models of the library raise errors of many kinds
        raise ValueError(
            f"transformers cannot build the {config.family} model: {' '.join(str(error).split())}; change "
            "its configuration with --model.options, or its attention with --model.attention"
        ) from error
    if not _is_causal(model):
        raise not_causal(config.family)
    return model


def _is_causal(model: nn.Module) -> bool:
    """Whether tokens see only those before them, as far as the model declares it.

    AutoModelForCausalLM also opens encoders such as BERT, which look ahead.
    """
    flags = {bool(module.is_causal) for module in model.modules() if hasattr(module, "is_causal")}
    return True in flags or (not flags and getattr(model.config, "is_decoder", None) is not False)


def _observation(seen: dict[str, Tensor], *, entropy: bool) -> AttentionObservation | None:
    """Return the attention statistics of all layers; None if no attention was observed."""
    if not seen:
        return None
    heads = {observation.shape[1] for observation in seen.values()}
    if len(heads) > 1:
        raise ValueError(
            f"the layers have {', '.join(map(str, sorted(heads)))} heads, but attention is recorded as a "
            "table of layers and heads; train without it: --measure.attention-every 0 "
            "--measure.entropy-every 0"
        )
    stacked = torch.stack(list(seen.values()))
    return AttentionObservation(stacked[:, 0], stacked[:, 1] / stacked[:, 2] if entropy else None)
