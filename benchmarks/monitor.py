"""What watching attention adds to a training step.

    python benchmarks/monitor.py [--batch 32] [--context 1024] [--output results.json]

A step is a forward and a backward pass under bf16 autocast, and MERIT's step. The models have GPT-2 small's
size and random weights: a Llama of transformers, which knows nothing of being watched, and the lab's GPT-2,
which observes itself. Variants of a case share one model and take turns, so that a cost is the median of
ratios between neighbours in time. Reading waits for the device, be it the monitor or the loss: a variant
that reads the monitor in every step is compared with one that reads the loss in every step. Flex attention
trains on GPUs only; on a CPU its cases are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from merit_lab.measure.bench.command import environment
from merit_lab.models import PRESETS, build
from merit_optim import MERIT
from merit_optim.monitor import AttentionMonitor

Step = Callable[[], object]
UNREAD, READ = "no monitor", "no monitor, loss read"
# What variants are compared with; the others with UNREAD.
AGAINST = dict.fromkeys(
    ("largest logits read", "largest logits and entropy read", "largest logits, TF32"), READ
)
WARM_UP = 3  # steps of each variant: the first compiles, and is one that a monitor at rest observes


@dataclass(frozen=True)
class Case:
    """A model, its attention, and how it is compiled: "no", "blocks" one by one, or the "whole"."""

    library: str
    attention: str
    compiled: str

    def __str__(self) -> str:
        compiled = {"no": "uncompiled", "blocks": "blocks compiled", "whole": "compiled"}[self.compiled]
        return f"{self.library}, {self.attention}, {compiled}"

    def variants(self, args: argparse.Namespace) -> dict[str, Step]:
        """What takes turns."""
        return of_lab(self, args) if self.library == "lab" else of_transformers(self, args)


# What is asked for most comes first: the time may be up before the end.
CASES = [
    Case("transformers", "flex", "blocks"),
    Case("lab", "flex", "whole"),
    Case("transformers", "sdpa", "blocks"),
    Case("transformers", "flex", "no"),
    Case("transformers", "sdpa", "no"),
    Case("lab", "sdpa", "no"),
]


def of_transformers(case: Case, args: argparse.Namespace) -> dict[str, Step]:
    """A model that knows nothing of the monitor."""
    from transformers import LlamaConfig, LlamaForCausalLM  # its GPT-2 knows no flex attention

    config = LlamaConfig(
        vocab_size=args.vocabulary,
        max_position_embeddings=args.context,
        hidden_size=args.width,
        intermediate_size=8 * args.width // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        tie_word_embeddings=True,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="flex_attention" if case.attention == "flex" else case.attention,
    )
    model = LlamaForCausalLM(config).to(args.device)
    compile_model(model, model.model.layers, case)
    tokens = make_tokens(args, args.context)
    optimizer = MERIT(model.parameters(), lr=1e-4)

    def step(monitor: AttentionMonitor | None = None, *, read: bool = False) -> None:
        with monitor or nullcontext(), torch.autocast(args.device, torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        finish(loss, optimizer)
        if not read:
            return
        loss.item()
        if monitor is not None:
            reading = monitor.read()
            if monitor.every == 1 and (reading is None or len(reading.max_logits) != args.layers):
                raise RuntimeError(f"of {args.layers} layers the monitor saw {reading}")

    def watched(*, every: int = 1, entropy: bool = False, read: bool = False) -> Step:
        monitor = AttentionMonitor(model, every=every, entropy=entropy)
        return lambda: step(monitor, read=read)

    variants = {
        UNREAD: step,
        "monitor at rest": watched(every=10**9),
        "largest logits": watched(),
        READ: lambda: step(read=True),
        "largest logits read": watched(read=True),
    }
    if case.attention == "sdpa":  # flex has no entropy
        variants["largest logits and entropy read"] = watched(entropy=True, read=True)
        if case.compiled == "no":  # which is fixed when a graph is compiled
            variants["largest logits, TF32"] = with_tf32(watched(read=True))
    return variants


def of_lab(case: Case, args: argparse.Namespace) -> dict[str, Step]:
    """The lab's model, which observes itself."""
    config = replace(
        PRESETS["gpt2-small"],
        width=args.width,
        heads=args.heads,
        layers=args.layers,
        context=args.context,
        attention=case.attention,
    ).with_vocab(args.vocabulary)
    model = build(config).to(args.device)
    compile_model(model, model.blocks, case)
    tokens = make_tokens(args, args.context + 1)
    optimizer = MERIT(model.parameters(), lr=1e-4)

    def step(*, observe: bool = False, read: bool = False) -> None:
        with torch.autocast(args.device, torch.bfloat16):
            output = model(tokens[:, :-1], tokens[:, 1:], observe="max" if observe else False)
        finish(output.loss, optimizer)
        if read:
            output.loss.item()
        if read and observe:
            output.attention.max_logits.cpu()

    return {
        UNREAD: step,
        "largest logits": lambda: step(observe=True),
        READ: lambda: step(read=True),
        "largest logits read": lambda: step(observe=True, read=True),
    }


def compile_model(model: nn.Module, blocks: nn.ModuleList, case: Case) -> None:
    parts = {"no": [], "blocks": blocks, "whole": [model]}[case.compiled]
    for part in parts:
        part.compile(dynamic=False)


def make_tokens(args: argparse.Namespace, length: int) -> Tensor:
    return torch.randint(args.vocabulary, (args.batch, length), device=args.device)


def finish(loss: Tensor, optimizer: MERIT) -> None:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def with_tf32(step: Step) -> Step:
    """The step with float32 products by tensor cores: the monitor's, for autocast has all the others."""

    def run() -> None:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            step()
        finally:
            torch.set_float32_matmul_precision(before)

    return run


def measure(case: Case, args: argparse.Namespace, deadline: float) -> list[dict[str, Any]]:
    """Milliseconds of a step for each variant, and its cost: how much longer it takes than without."""
    torch.manual_seed(0)
    variants = case.variants(args)
    results = []
    for name, step in variants.items():
        begun = time.perf_counter()
        step()
        synchronize(args.device)
        first_step = time.perf_counter() - begun
        with peak_memory(args.device) as memory:
            for _ in range(WARM_UP - 1):
                step()
        results.append(
            {"case": str(case), "variant": name, "first_step_s": first_step, "memory_gib": memory.get("gib")}
        )
    num_graphs = counters["stats"]["unique_graphs"]
    times: dict[str, list[float]] = {name: [] for name in variants}
    for turn in range(args.rounds):
        if turn >= 3 and time.monotonic() > deadline:
            break
        for name in variants if turn % 2 == 0 else reversed(variants):
            times[name].append(time_of(variants[name], args.steps, args.device))
    for result in results:
        of_variant = times[result["variant"]]
        against = AGAINST.get(result["variant"], UNREAD)
        ratios = [one / base for one, base in zip(of_variant, times[against], strict=True)]
        result |= {
            "against": against,
            "median_ms": statistics.median(of_variant),
            "fastest_ms": min(of_variant),
            "slowest_ms": max(of_variant),
            "cost": statistics.median(ratios) - 1,
            "cost_quartiles": [ratio - 1 for ratio in statistics.quantiles(ratios)[::2]],
            "rounds": len(of_variant),
            "graphs_compiled_while_timed": counters["stats"]["unique_graphs"] - num_graphs,
        }
    return results


def time_of(step: Step, num_steps: int, device: str) -> float:
    """Milliseconds a step, over several in a row that nothing but they themselves wait for."""
    if device != "cuda":
        begun = time.perf_counter()
        for _ in range(num_steps):
            step()
        return (time.perf_counter() - begun) * 1e3 / num_steps
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(num_steps):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / num_steps


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def peak_memory(device: str) -> Iterator[dict[str, float]]:
    found: dict[str, float] = {}
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    yield found
    if device == "cuda":
        torch.cuda.synchronize()
        found["gib"] = torch.cuda.max_memory_allocated() / 2**30


def show(results: list[dict[str, Any]]) -> None:
    print(f"\n{'':34} {'ms':>9} {'cost':>8} {'quartiles':>18} {'GiB':>6} {'first s':>8}")
    case = None
    for r in results:
        if r["case"] != case:
            case = r["case"]
            print(case + (f": {r['failed']}" if "failed" in r else ""))
        if "failed" in r:
            continue
        low, high = r["cost_quartiles"]
        memory = "" if r["memory_gib"] is None else f"{r['memory_gib']:.1f}"
        spread = f"{100 * low:+.2f}%..{100 * high:+.2f}%"
        again = r["graphs_compiled_while_timed"]
        print(
            f"  {r['variant']:32} {r['median_ms']:9.3f} {100 * r['cost']:+7.2f}% {spread:>18} {memory:>6} "
            f"{r['first_step_s']:8.1f}" + (f"  {again} graphs compiled while timed" if again else "")
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--rounds", type=int, default=12, help="turns of each variant, 3 or more")
    parser.add_argument("--steps", type=int, default=8, help="steps in a turn")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--limit", type=float, default=100.0, help="seconds after which no case begins")
    parser.add_argument("--output", type=Path, help="write the results as JSON")
    args = parser.parse_args()
    if args.rounds < 3:
        parser.error(f"--rounds {args.rounds}: quartiles need 3 or more")
    deadline = time.monotonic() + args.limit
    options = {name: value for name, value in vars(args).items() if name not in ("output", "only", "limit")}
    record: dict[str, Any] = {
        "environment": environment(torch.device(args.device)),
        "options": options,
        "results": [],
    }
    for case in CASES:
        if args.only not in str(case) or (case.attention == "flex" and args.device == "cpu"):
            continue
        if time.monotonic() > deadline:
            print(f"{case}: left out, the time is up", flush=True)
            continue
        begun = time.monotonic()
        try:
            results = measure(case, args, deadline)
        except Exception as error:  # the other cases are still worth their time
            traceback.print_exc()
            results = [{"case": str(case), "failed": f"{type(error).__name__}: {error}"}]
        print(f"{case}: {time.monotonic() - begun:.0f} s", flush=True)
        record["results"] += results
        if args.output:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(record, indent=1) + "\n")
        torch.compiler.reset()
        gc.collect()
        if args.device == "cuda":
            torch.cuda.empty_cache()
    show(record["results"])


if __name__ == "__main__":
    main()
