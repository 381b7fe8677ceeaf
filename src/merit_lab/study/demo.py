"""`merit demo`: compare five optimizers on Python source code, in minutes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from merit_lab.models import PRESETS, num_parameters
from merit_lab.study.command import conclude, exit_status
from merit_lab.study.compare import Arguments, answer, plan
from merit_lab.train import MeasureConfig, TrainConfig


class Setup(NamedTuple):
    """Text, model and learning rates of the demo on one type of device."""

    corpus: Literal["demo", "embedded"]
    model: str
    steps: int
    rates: tuple[str, ...]


_OPTIMIZERS = ("adamw", "lamb-uncorrected", "merit", "muon", "muon-merit")
_BATCH = 256
# The learning rates are the best of a grid by factors of two, with one seed:
#   merit sweep tiny --data data/demo --batch 256 --steps 120 --measure.validation-sequences 512 --jobs 2
#     --optimizers adamw lamb-uncorrected merit muon muon-merit --lr adamw=1e-3 adamw=2e-3 adamw=4e-3 ...
#   AdamW 2e-3 2.738, LAMB 8e-2 2.422, MERIT 4e-2 2.413, Muon 3.2e-2 1.754, MuonMERIT 8e-2 1.496; one factor
#   of two lower and higher: AdamW 2.944, 2.923; LAMB 2.426, 3.383; MERIT 2.589, 2.742; Muon 2.006, 1.818;
#   MuonMERIT 2.079, 1.540.
#   merit compare nano-10m --data data/embedded --batch 256 --steps 200 --seeds 0 1 (on an H200), means:
#   AdamW 5e-4 2.429, LAMB 2e-2 2.173, MERIT 1e-2 2.128; one factor of two lower or higher:
#   AdamW 2.479, 2.579 (seed 0); LAMB 2.175, 2.722 (seed 0); MERIT 2.336 (seed 0), 2.589.
#   Muon and MuonMERIT were not run on it: their rates are the best on nano-10m-bpe (docs/results/).
SETUPS = {
    "cpu": Setup(
        "demo",
        "tiny",
        120,
        ("adamw=2e-3", "lamb-uncorrected=8e-2", "merit=4e-2", "muon=3.2e-2", "muon-merit=8e-2"),
    ),
    "cuda": Setup(
        "embedded",  # the model of 11M parameters reads 26 MB of text; the other text has 2 MB
        "nano-10m",
        200,
        ("adamw=5e-4", "lamb-uncorrected=2e-2", "merit=1e-2", "muon=1.6e-2", "muon-merit=4e-2"),
    ),
}


def main(argv: Sequence[str]) -> int:
    """Run the demo and return its exit status."""
    import torch

    from merit_lab.data.command import make
    from merit_lab.study.search import carry_out

    parser = argparse.ArgumentParser(
        prog="merit demo",
        description="Train a small language model on large batches with AdamW, LAMB, MERIT, Muon and "
        "MuonMERIT, and compare them. The text is Python source code: on a CPU a text that comes "
        "with the package, the same everywhere; on a GPU the installed packages.",
    )
    setup = SETUPS["cuda" if torch.cuda.is_available() else "cpu"]
    data, out = Path("data", setup.corpus), Path("runs/demo")
    parser.add_argument("--data", type=Path, default=data, help="folder for the text (%(default)s)")
    parser.add_argument("--out", type=Path, default=out, help="folder for the runs (%(default)s)")
    options = parser.parse_args(argv)
    if status := make(setup.corpus, options.data):
        return status
    often = MeasureConfig(
        validation_every=10, validation_sequences=512, attention_every=5, entropy_every=10, update_every=10
    )
    config = TrainConfig(
        data=options.data, model=PRESETS[setup.model], batch=_BATCH, steps=setup.steps, measure=often
    )
    print(
        f"\nA GPT-2 of {num_parameters(config.model) / 1e6:.1f}M parameters learns Python source code byte "
        f"by byte:\n{config.steps} steps of {config.batch} sequences of {config.model.context} bytes with "
        "each optimizer.\nOne seed and a small model: an illustration, not a result.\n",
        flush=True,
    )

    def work() -> None:
        arguments = Arguments(config=config, optimizers=_OPTIMIZERS, lr=setup.rates)
        carry_out(plan(arguments, options.out), options.out)
        conclude("merit demo", lambda: answer(options.out), options.out.resolve())

    return exit_status("merit demo", work)
