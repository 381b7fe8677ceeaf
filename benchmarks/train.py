"""How fast the lab trains: tokens a second, model FLOP/s utilisation and memory, with logits observed.

    python benchmarks/train.py [--model gpt2-small] [--attention auto cudnn] [--output results.json]

Each variant is a whole run of ``merit_lab.train`` in a process of its own, on random tokens: loader,
loss, optimizer, metrics and all. The first steps, in which the model is compiled, are left out. On a GPU the
optimizer's own time is measured beside them, by events around its steps, and given as a share of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from merit_lab.measure.bench.command import environment
from merit_lab.models import PRESETS, ModelConfig
from merit_lab.runs import Run
from merit_lab.train import CheckpointConfig, MeasureConfig, OptimizerConfig, TrainConfig, train

NUM_TOKENS = 2**24


def write_data(folder: Path, vocab_size: int) -> None:
    """Random tokens: what they say makes no difference to the speed."""
    generator = np.random.default_rng(0)
    for name, num in (("train", NUM_TOKENS), ("val", 2**16)):
        generator.integers(vocab_size, size=num, dtype=np.uint16).tofile(folder / f"{name}.bin")


def run(model: ModelConfig, observe: int, optimizer: str, args: argparse.Namespace, folder: Path) -> None:
    """One variant, in the folder ``run``, and the milliseconds of its optimizer's steps beside it."""
    milliseconds = _time_steps() if torch.cuda.is_available() else list
    train(
        TrainConfig(
            data=folder,
            model=model,
            optimizer=OptimizerConfig(name=optimizer, lr=1e-4),
            measure=MeasureConfig(
                validation_every=0, attention_every=observe, entropy_every=0, update_every=0
            ),
            checkpoint=CheckpointConfig(every_steps=0, every_minutes=0),
            batch=args.batch,
            micro_batch=args.micro_batch or args.batch,
            steps=args.steps,
        ),
        folder / "run",
    )
    (folder / "optimizer.json").write_text(json.dumps(milliseconds()))


def _time_steps() -> Callable[[], list[float]]:
    """Record events around every step of every optimizer; the times between them when called."""
    events: list[torch.cuda.Event] = []

    def mark(*_: object) -> None:
        events.append(torch.cuda.Event(enable_timing=True))
        events[-1].record()

    register_optimizer_step_pre_hook(mark)
    register_optimizer_step_post_hook(mark)

    def milliseconds() -> list[float]:
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) for begin, end in zip(events[::2], events[1::2], strict=True)]

    return milliseconds


def measure(model: ModelConfig, observe: int, optimizer: str, args: argparse.Namespace) -> dict[str, Any]:
    """Medians over the second half of the steps."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, model.vocab_size)
        child = multiprocessing.get_context("spawn").Process(
            target=run, args=(model, observe, optimizer, args, folder)
        )
        child.start()
        child.join()
        if child.exitcode:
            return {"failed": f"exit code {child.exitcode}"}
        steps = Run.open(folder / "run").metrics("train")[args.steps // 2 :]
        of_optimizer = json.loads((folder / "optimizer.json").read_text())[args.steps // 2 :]
    speeds = [step["tokens_per_second"] for step in steps]
    found: dict[str, Any] = {}
    if of_optimizer:
        whole = 1000 * args.batch * model.context / statistics.median(speeds)
        found["optimizer_ms"] = statistics.median(of_optimizer)
        found["optimizer_share"] = found["optimizer_ms"] / whole
    return found | {
        "tokens_per_second": statistics.median(speeds),
        "slowest": min(speeds),
        "fastest": max(speeds),
        "mfu": steps[-1]["mfu"] and statistics.median(step["mfu"] for step in steps),
        "memory_gib": steps[-1]["memory_gib"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-small", choices=PRESETS)
    parser.add_argument("--batch", type=int, default=64, help="sequences in a step")
    parser.add_argument("--micro-batch", type=int, help="sequences in a forward pass; all of them")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--optimizers", nargs="+", default=["merit"])
    parser.add_argument("--attention", nargs="+", default=["auto"])
    parser.add_argument("--loss-chunk", nargs="+", type=int, default=[None])
    parser.add_argument(
        "--observe", nargs="+", type=int, default=[1], help="steps between observations, or 0"
    )
    parser.add_argument("--float32-residual", action="store_true")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record: dict[str, Any] = {"environment": environment(device), "results": []}
    base = replace(PRESETS[args.model], float32_residual=args.float32_residual)
    variants = itertools.product(args.attention, args.loss_chunk, args.observe, args.optimizers)
    for attention, chunk, observe, optimizer in variants:
        variant = {
            "model": args.model,
            "batch": args.batch,
            "attention": attention,
            "loss_chunk": chunk,
            "observe_every": observe,
            "optimizer": optimizer,
            "float32_residual": args.float32_residual,
        }
        model = replace(base, attention=attention, loss_chunk=chunk)
        record["results"].append(variant | measure(model, observe, optimizer, args))
        print(json.dumps(record["results"][-1]), flush=True)
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
