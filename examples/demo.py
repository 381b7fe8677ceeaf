"""Train a small language model on large batches with AdamW, LAMB and MERIT, and compare them.

The model is a causal transformer over bytes; the text is the source code of the running Python's
standard library. All three runs start from the same weights and see the same batches.
"""

import argparse
import math
import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from merit_optim import LAMB, MERIT, param_groups

VOCABULARY = 256  # bytes
CONTEXT = 64
WIDTH = 64
HEADS = 2
LAYERS = 2
WEIGHT_DECAY = 0.1
MAX_GRAD_NORM = 1.0
WARMUP_SHARE = 0.1
FINAL_LEARNING_RATE_SHARE = 0.1
NUM_VALIDATION_SEQUENCES = 512
NUM_PROGRESS_LINES = 5


OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, betas=(0.9, 0.95)),
    "LAMB": LAMB,
    "MERIT": MERIT,
}
# The best of a grid of factors of two for each, at this size and seed 0.
PEAK_LEARNING_RATES = {"AdamW": 2e-3, "LAMB": 4e-2, "MERIT": 4e-2}


class Attention(nn.Module):
    """Causal self-attention. The scores are formed in full, so that they can be looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.output = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer(
            "future", torch.ones(CONTEXT, CONTEXT, dtype=torch.bool).triu(1), persistent=False
        )
        self.future: Tensor
        self.largest_logit = -math.inf

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        heads = self.query_key_value(x).view(batch, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        logits = (query @ key.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5
        logits = logits.masked_fill(self.future[:length, :length], -math.inf)
        if not self.training:
            self.largest_logit = max(self.largest_logit, logits.amax().item())
        mixed = logits.softmax(-1) @ value
        return self.output(mixed.transpose(1, 2).reshape(batch, length, WIDTH))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))  # type: ignore[no-any-return]


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def loss(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy, in nats, of predicting each byte from those before it."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.token(inputs) + self.position.weight[: inputs.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())

    def largest_logit(self) -> float:
        """Return the largest attention logit seen by any layer since it was put in eval mode."""
        return max(m.largest_logit for m in self.modules() if isinstance(m, Attention))


@dataclass(frozen=True)
class Outcome:
    """What one run came to."""

    name: str
    loss: float
    largest_logit: float

    @property
    def diverged(self) -> bool:
        return not math.isfinite(self.loss)


def read_text() -> tuple[Tensor, Tensor]:
    """Return the training and the validation bytes; every tenth file is for validation."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if len(files) < 20:
        sys.exit(
            f"The demo trains on Python's standard library, but {folder} holds {len(files)} .py "
            "files and at least 20 are needed. Run it with a Python that has its sources."
        )
    train_files = [file for index, file in enumerate(files) if index % 10 != 9]
    return to_bytes(train_files), to_bytes(files[9::10])


def to_bytes(files: Sequence[Path]) -> Tensor:
    text = bytearray().join(file.read_bytes() for file in files)
    return torch.frombuffer(text, dtype=torch.uint8)


def draw_batch(text: Tensor, num_sequences: int, generator: torch.Generator) -> Tensor:
    starts = torch.randint(len(text) - CONTEXT, (num_sequences, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)].long()


def learning_rate_share(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate at a step: linear warm-up, then a half cosine."""
    num_warmup = max(1, round(WARMUP_SHARE * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    progress = (step - num_warmup) / max(1, num_steps - num_warmup)
    cosine = (1 + math.cos(math.pi * progress)) / 2
    return FINAL_LEARNING_RATE_SHARE + (1 - FINAL_LEARNING_RATE_SHARE) * cosine


def train(
    name: str, text: Tensor, validation: Tensor, *, num_steps: int, batch_size: int, seed: int
) -> Outcome:
    """Train a fresh model with the named optimizer and measure it on the validation batch."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = LanguageModel()
    optimizer = OPTIMIZERS[name](param_groups(model, weight_decay=WEIGHT_DECAY), lr=PEAK_LEARNING_RATES[name])
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate_share, num_steps=num_steps))
    began = time.perf_counter()
    for step in range(1, num_steps + 1):
        loss = model.loss(draw_batch(text, batch_size, generator))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if step % max(1, num_steps // NUM_PROGRESS_LINES) == 0:
            seconds = time.perf_counter() - began
            progress = f"step {step:>4} of {num_steps}  loss {loss.item():.3f}  {seconds:3.0f} s"
            print(f"{name:<6} {progress}", flush=True)
    model.eval()
    with torch.no_grad():
        final_loss = model.loss(validation).item()
    return Outcome(name, final_loss, model.largest_logit())


def conclude(outcomes: Sequence[Outcome]) -> str:
    """Say in one sentence which run came out best, from the numbers alone."""
    finished = [outcome for outcome in outcomes if not outcome.diverged]
    diverged = [outcome.name for outcome in outcomes if outcome.diverged]
    if not finished:
        return "Every run diverged."
    by_loss = sorted(finished, key=lambda outcome: outcome.loss)
    by_logit = sorted(finished, key=lambda outcome: outcome.largest_logit)
    sentence = (
        f"In this run {by_loss[0].name} reached the lowest validation loss "
        f"({', '.join(f'{outcome.name} {outcome.loss:.3f}' for outcome in by_loss)}) and "
        f"{by_logit[0].name} kept the attention logits smallest "
        f"({', '.join(f'{outcome.name} {outcome.largest_logit:.1f}' for outcome in by_logit)})"
    )
    if diverged:
        sentence += f", while {' and '.join(diverged)} diverged"
    return f"{sentence}."


def compare(num_steps: int, batch_size: int, seed: int) -> None:
    text, validation_text = read_text()
    validation = draw_batch(validation_text, NUM_VALIDATION_SEQUENCES, torch.Generator().manual_seed(0))
    num_parameters = sum(parameter.numel() for parameter in LanguageModel().parameters())
    print(
        f"A transformer of {num_parameters:,} parameters learns Python source code byte by byte:\n"
        f"{num_steps} steps of {batch_size} sequences of {CONTEXT} bytes with each optimizer.\n"
        "One seed and a small model: an illustration, not a result.",
        flush=True,
    )
    outcomes = []
    for name in OPTIMIZERS:
        print()
        outcomes.append(train(name, text, validation, num_steps=num_steps, batch_size=batch_size, seed=seed))
    print("\n       learning rate   validation loss   largest attention logit")
    for outcome in outcomes:
        print(
            f"{outcome.name:<6} {PEAK_LEARNING_RATES[outcome.name]:13.3f}   {outcome.loss:15.3f}"
            f"   {outcome.largest_logit:23.1f}"
        )
    print(f"\n{conclude(outcomes)}")


def positive_integer(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is given, but a whole number from 1 is needed")
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=positive_integer, default=120, help="default: 120")
    parser.add_argument("--batch-size", type=positive_integer, default=256, help="default: 256")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    options = parser.parse_args()
    try:
        compare(options.steps, options.batch_size, options.seed)
    except KeyboardInterrupt:
        print("\nStopped before the comparison was complete.")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
