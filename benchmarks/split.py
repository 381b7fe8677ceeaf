"""What query, key and value as three matrices (``split=3``) cost in a step of Muon and MuonMERIT.

    python benchmarks/split.py [--models gpt2-small gpt2-medium] [--output FILE]

Milliseconds of a step on a CUDA device, all weights of the model: the median of five rounds of twenty steps,
the two by turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from merit_lab.measure.bench.model import WEIGHTS, Parameters
from merit_optim import Muon, MuonMERIT

ROUNDS, STEPS, WARM_UP = 5, 20, 10


def build(optimizer_class: type[Muon | MuonMERIT], model: str, *, split: bool) -> Muon | MuonMERIT:
    """An optimizer of the model's weights, with gradients that stay as they are."""
    weights = Parameters.of(WEIGHTS[model], torch.device("cuda"))
    attention = [weight for weight in weights.hidden if weight.shape[0] == 3 * weight.shape[1]]
    others = [weight for weight in weights.hidden if weight.shape[0] != 3 * weight.shape[1]]
    return optimizer_class(
        [
            {"params": others, "direction": "muon"},
            {"params": attention, "direction": "muon", **({"split": 3} if split else {})},
            {"params": weights.rest, "direction": "adam"},
        ]
    )


def milliseconds(optimizer: Muon | MuonMERIT) -> float:
    """Of a step, a mean over one round."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(STEPS):
        optimizer.step()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=["gpt2-small", "gpt2-medium"], choices=WEIGHTS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    print(device)
    results: dict[str, object] = {"device": device}
    for model in args.models:
        for optimizer_class in (Muon, MuonMERIT):
            optimizers = {
                label: build(optimizer_class, model, split=split)
                for label, split in (("whole", False), ("split", True))
            }
            for optimizer in optimizers.values():
                for _ in range(WARM_UP):
                    optimizer.step()
            rounds = [
                {label: milliseconds(optimizer) for label, optimizer in optimizers.items()}
                for _ in range(ROUNDS)
            ]
            medians = {label: statistics.median(one[label] for one in rounds) for label in optimizers}
            results[f"{model} {optimizer_class.__name__}"] = medians
            print(
                f"{model:12} {optimizer_class.__name__:10} whole {medians['whole']:6.2f} "
                f"split {medians['split']:6.2f}",
                flush=True,
            )
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
