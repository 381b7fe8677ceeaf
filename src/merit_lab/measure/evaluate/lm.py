"""lm-eval's Hugging Face model, extended by progress and a count of prompts that do not fit.

Imports lm-eval, so it is imported by harness.py only when there is something to evaluate.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from merit_lab.progress import WorkProgress

_HFLM: Any = import_module("lm_eval.models.huggingface").HFLM
_TOKENS_ON_A_CPU = 4096  # in one forward pass
_LARGEST_BATCH = 64

Request = tuple[Any, list[int], list[int]]  # origin, context, continuation


class CheckpointLM(_HFLM):  # type: ignore[misc]
    """An exported checkpoint as a model of lm-eval.

    Args:
        folder: of the checkpoint, with its tokenizer.
        prefix: the token before a text that has no context.
        context: the longest sequence that it was trained on; its positions may be many more.
        device: where to compute.
        autocast: bf16 matrix products, as in training on CUDA.
        progress: where to show progress.
    """

    def __init__(
        self,
        folder: Path,
        *,
        prefix: int,
        context: int,
        device: torch.device,
        autocast: bool,
        progress: WorkProgress,
    ) -> None:
        self.set_name = ""
        self.num_truncated = 0
        self._progress = progress
        super().__init__(
            pretrained=str(folder),
            max_length=context,
            device=str(device),
            dtype="float32",
            mixed_precision_dtype="bfloat16" if autocast else None,
            # On a GPU lm-eval finds the largest batch that fits.
            batch_size=1 if device.type == "cpu" else "auto",
            max_batch_size=_LARGEST_BATCH,
            prefix_token_id=prefix,
        )
        if device.type == "cpu":
            self.batch_size_per_gpu = min(max(_TOKENS_ON_A_CPU // self.max_length, 1), _LARGEST_BATCH)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, each in windows of the model's context."""
        del disable_tqdm  # shown by ours
        lengths = [len(self.tok_encode(request.args[0])) for request in requests]
        self._progress.begin(
            self.set_name, sum(-(-length // self.max_length) for length in lengths), "sequences"
        )
        output: list[float] = super().loglikelihood_rolling(requests, disable_tqdm=True)
        return output

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Return log-likelihoods of continuations; ``override_bs`` is set for windows of a rolling one."""
        del disable_tqdm
        if override_bs is None:
            longest = max(len(continuation) for _, _, continuation in requests)
            if longest > self.max_length:
                raise ValueError(
                    f"{self.set_name} has an answer of {longest} tokens, which is longer than the model's "
                    f"context of {self.max_length}: it cannot be evaluated with this model"
                )
            # The model's input is all but the last token.
            self.num_truncated = sum(
                len(context) + len(continuation) > self.max_length + 1
                for _, context, continuation in requests
            )
            # lm-eval computes requests that differ only in the last token once.
            inputs = {(*context, *continuation[:-1]) for _, context, continuation in requests}
            self._progress.begin(self.set_name, len(inputs), "sequences")
        output: list[tuple[float, bool]] = super()._loglikelihood_tokens(
            requests, disable_tqdm=True, override_bs=override_bs
        )
        return output

    def _model_call(self, inps: Tensor, *rest: Any, **options: Any) -> Tensor:
        logits: Tensor = super()._model_call(inps, *rest, **options)
        if logits.isnan().any():
            # Tasks would still return a number: of answers with NaN likelihood the first is chosen.
            raise ValueError(
                f"{self.set_name}: the model's logits are NaN, so the run diverged; choose an earlier "
                "checkpoint with --checkpoint"
            )
        self._progress.advance(len(inps))
        return logits
