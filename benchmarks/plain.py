#!/usr/bin/env python3
"""A plain training loop, independent of the lab: run after run in one process on one compiled model.

    PYTHONPATH=src python plain.py SPECS --workers 2 --seconds 560 --out plain.jsonl

Each line of SPECS is one run, in words key=value; `#` begins a comment. RUN lists the loop's own keys; every
other key is an argument of the optimizer (its value is read as JSON where it can be), as in

    data=enwik8 steps=200 batch=512 opt=normuon lr=0.024 warmup=0.4
    data=mix width=512 opt=muon-merit lr=0.04 kinds={"embedding":{"rate_scale":0.8}} ratio_bounds=[0,0.1]

`data` is a folder that `merit prepare` made (train.bin, val.bin, dataset.json). `opt` is a name that
merit_optim.create knows, or module:Class of any torch optimizer. `qkv` says what query, key and value are:
three weights (the default: so every optimizer orthogonalises or rotates each by itself), one matrix with the
option `split`, or one matrix. Lines already in the output are not run again; no run begins that would not end
within --seconds. Needs torch and numpy alone. It shares no code with the lab: a second opinion on it, and
on what a run should cost.
"""

import argparse
import importlib
import json
import math
import multiprocessing
import time
import traceback
from multiprocessing.connection import wait
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

RUN = {
    "data": "data",
    "shape": "gpt",
    "layers": 8,
    "width": 256,
    "heads": 0,
    "context": 512,
    "batch": 128,
    "steps": 800,
    "warmup": 0.1,
    "floor": 0.1,
    "schedule": "cosine",
    "opt": "normuon",
    "decay": 0.1,
    "qkv": "weights",
    "max_norm": 1.0,
    "seed": 0,
    "micro": 128,
    "evaluations": 8,
    "init": 0.02,
    "precision": "highest",
    "tag": "",
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HELD_OUT, PIECE = 1024, 128  # sequences of the validation set, and how many at a time: the same for every run


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, llama: bool, qkv: str) -> None:
        super().__init__()
        self.heads, self.llama, self.three = heads, llama, qkv == "weights"
        for name in ("query", "key", "value") if self.three else ("qkv",):
            setattr(self, name, nn.Linear(width, width if self.three else 3 * width, bias=False))
        self.proj = nn.Linear(width, width, bias=False)

    def forward(self, x, rotation):
        weight = (
            torch.cat((self.query.weight, self.key.weight, self.value.weight))
            if self.three
            else self.qkv.weight
        )
        q, k, v = F.linear(x, weight).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.llama:
            q, k = rotate(q, *rotation), rotate(k, *rotation)
        return self.proj(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        )


def rotate(x, cos, sin):
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), -1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, llama: bool, qkv: str) -> None:
        super().__init__()
        norm, inner = (nn.RMSNorm, 8 * width // 3 // 64 * 64) if llama else (nn.LayerNorm, 4 * width)
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = Attention(width, heads, llama, qkv)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if llama else None

    def forward(self, x, rotation):
        x = x + self.attention(self.norm1(x), rotation)
        y = self.norm2(x)
        return x + self.down(
            F.silu(self.gate(y)) * self.up(y) if self.gate else F.gelu(self.up(y), approximate="tanh")
        )


class Model(nn.Module):
    """GPT-2 without biases, embedding and head tied; or Llama's shape, not tied."""

    def __init__(self, vocabulary: int, run: dict) -> None:
        super().__init__()
        width, llama = run["width"], run["shape"] == "llama"
        heads = run["heads"] or width // 64
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = None if llama else nn.Embedding(run["context"], width)
        self.blocks = nn.ModuleList(Block(width, heads, llama, run["qkv"]) for _ in range(run["layers"]))
        self.norm = nn.RMSNorm(width) if llama else nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if not llama:
            self.head.weight = self.embedding.weight
        angle = torch.arange(run["context"])[:, None] / 10000 ** (
            torch.arange(0, width // heads, 2) / (width // heads)
        )
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    @torch.no_grad()
    def restart(self, seed: int, std: float) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(seed)
        for name, p in self.named_parameters():
            if p.ndim < 2:
                p.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                last = name.endswith(("proj.weight", "down.weight"))
                p.normal_(0, std / (math.sqrt(2 * len(self.blocks)) if last else 1), generator=generator)
            p.grad = None

    def forward(self, x, y):
        z = self.embedding(x)
        if self.positions is not None:
            z = z + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            z = block(z, (self.cos, self.sin))
        return F.cross_entropy(self.head(self.norm(z)).float().flatten(0, 1), y.flatten())


class Text:
    """Tokens on the device; batches are sequences of all of the text in a random order, epoch after epoch."""

    def __init__(self, folder: str, context: int) -> None:
        index = json.loads((Path(folder) / "dataset.json").read_text())
        self.vocabulary, dtype = -(-index["vocab_size"] // 64) * 64, index["dtype"]

        def read(name: str) -> torch.Tensor:
            return torch.from_numpy(np.fromfile(Path(folder) / name, dtype).astype(np.int32)).to(DEVICE)

        self.train, held, self.length = read("train.bin"), read("val.bin"), context + 1
        there = len(held) // self.length
        count = min(there, HELD_OUT) // PIECE * PIECE or there
        spread = torch.linspace(
            0, there - 1, count
        ).long()  # from all of the validation text, not its beginning
        self.held = held[: there * self.length].view(there, self.length)[spread.to(DEVICE)].long()
        self.window = torch.arange(self.length, device=DEVICE)

    def batches(self, size: int, seed: int):
        generator, count = (
            torch.Generator().manual_seed(1000 + seed),
            (len(self.train) - 1) // (self.length - 1),
        )
        order = torch.empty(0, dtype=torch.long)
        while True:
            while len(order) < size:
                order = torch.cat((order, torch.randperm(count, generator=generator)))
            yield order[:size].to(DEVICE) * (self.length - 1)
            order = order[size:]


def make_optimizer(model: nn.Module, run: dict, options: dict) -> torch.optim.Optimizer:
    if ":" in run["opt"]:
        module, name = run["opt"].split(":")
        cls = getattr(importlib.import_module(module), name)
        decayed = [p for p in model.parameters() if p.ndim > 1]
        groups = [
            {"params": decayed, "weight_decay": run["decay"]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ]
        return cls(groups, **options)
    import merit_optim

    overrides = {"*qkv.weight": {"split": 3}} if run["qkv"] == "split" else None
    return merit_optim.create(
        run["opt"], merit_optim.param_groups(model, run["decay"], overrides=overrides), **options
    )


def read_line(line: str) -> tuple[dict, dict]:
    words = dict(word.split("=", 1) for word in line.split())
    run = RUN | {k: type(RUN[k])(v) for k, v in words.items() if k in RUN}
    allowed = {
        "qkv": ("weights", "split", "one"),
        "shape": ("gpt", "llama"),
        "schedule": ("cosine", "linear", "constant", "cooldown"),
    }
    for key, values in allowed.items():
        if run[key] not in values:
            raise ValueError(f"{key}={run[key]}: one of {', '.join(values)}")
    micro = min(run["batch"], run["micro"])
    if run["batch"] % micro:
        raise ValueError(f"batch={run['batch']} is no multiple of micro={micro}")
    options = {}
    for key, value in words.items():
        if key not in RUN:
            try:
                options[key] = json.loads(value)
            except json.JSONDecodeError:
                options[key] = value
    return run, options


class Trainer:
    """What the runs of one process share: texts and compiled models."""

    def __init__(self) -> None:
        self.texts, self.models = {}, {}
        # One graph for each shape, training and evaluation: never a symbolic one, never eager in silence.
        for name, value in {
            "recompile_limit": 1024,
            "accumulated_recompile_limit": 1024,
            "fail_on_recompile_limit_hit": True,
        }.items():
            if hasattr(torch._dynamo.config, name):
                setattr(torch._dynamo.config, name, value)

    def text(self, run: dict) -> Text:
        key = run["data"], run["context"]
        if key not in self.texts:
            self.texts[key] = Text(*key)
        return self.texts[key]

    def model(self, run: dict, text: Text) -> tuple[Model, nn.Module]:
        key = (text.vocabulary, *(run[k] for k in ("shape", "layers", "width", "heads", "context", "qkv")))
        if key not in self.models:
            base = Model(text.vocabulary, run).to(DEVICE)
            self.models[key] = base, torch.compile(base, dynamic=False) if DEVICE == "cuda" else base
        return self.models[key]

    def train(self, line: str) -> dict:
        run, options = read_line(line)
        torch.set_float32_matmul_precision(run["precision"])
        torch.manual_seed(run["seed"])
        text = self.text(run)
        base, model = self.model(run, text)
        micro, warm = min(run["batch"], run["micro"]), max(1, round(run["warmup"] * run["steps"]))
        parts = run["batch"] // micro

        def backward(starts) -> None:
            xy = text.train[starts[:, None] + text.window].long()
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(xy[:, :-1].contiguous(), xy[:, 1:].contiguous())
            (loss / parts).backward()

        def held_out() -> float:
            with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16):
                pieces = text.held.split(PIECE)
                return sum(model(v[:, :-1].contiguous(), v[:, 1:].contiguous()).item() for v in pieces) / len(
                    pieces
                )

        def rate(step: int) -> float:
            if step < warm:
                return (step + 1) / warm
            x = (step - warm) / max(1, run["steps"] - warm)
            fall = {
                "cosine": 0.5 * (1 + math.cos(math.pi * x)),
                "linear": 1 - x,
                "constant": 1.0,
                "cooldown": min(1.0, (1 - x) / 0.4),
            }[run["schedule"]]
            return run["floor"] + (1 - run["floor"]) * fall

        begin = time.time()
        backward(torch.zeros(micro, dtype=torch.long, device=DEVICE))  # compiles, where this shape is new
        first = held_out()
        compiled = time.time() - begin
        base.restart(run["seed"], run["init"])
        optimizer = make_optimizer(base, run, options)
        peaks = [group["lr"] for group in optimizer.param_groups]
        curve, batches, begin = [], text.batches(run["batch"], run["seed"]), time.time()
        every = max(1, run["steps"] // run["evaluations"])
        for step in range(run["steps"]):
            for starts in next(batches).split(micro):
                backward(starts)
            if run["max_norm"]:
                nn.utils.clip_grad_norm_(base.parameters(), run["max_norm"])
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * rate(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            if (step + 1) % every == 0 or step + 1 == run["steps"]:
                loss = held_out()
                curve.append([step + 1, round(loss, 4) if math.isfinite(loss) else None])
                if not math.isfinite(loss) or loss > 3 * first:
                    break
        ended = bool(curve) and curve[-1][0] == run["steps"]
        return {
            "validation_loss": curve[-1][1] if ended else None,
            "curve": curve,
            "seconds": round(time.time() - begin, 1),
            "compile_seconds": round(compiled, 1),
            "parameters": sum(p.numel() for p in base.parameters()),
        }


def work(pipe) -> None:
    """Train the lines that come, one at a time. After an error of CUDA the process ends."""
    trainer = Trainer()
    while True:
        try:
            line = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send({"run": line, **trainer.train(line)})
        except Exception as error:  # one run that fails must not take the others' GPU time
            traceback.print_exc()
            last = "CUDA" in str(error)
            pipe.send({"run": line, "error": f"{type(error).__name__}: {error}"[:500], "last": last})
            if last:
                return


def read_done(out: Path) -> set[str]:
    done = set()
    for line in out.read_text().splitlines() if out.exists() else ():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:  # torn when its writer was ended
            continue
        if "error" not in record:
            done.add(record["run"])
    return done


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("specs", type=Path)
    parser.add_argument(
        "--workers", type=int, default=1, help="processes on the one GPU; two are fastest for 10M"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=math.inf,
        help="begin no run that would not end by then, judged by the slowest so far",
    )
    parser.add_argument("--out", type=Path, default=Path("plain.jsonl"))
    a = parser.parse_args()
    done = read_done(a.out)
    lines = [" ".join(line.split("#")[0].split()) for line in a.specs.read_text().splitlines()]
    lines = [line for line in dict.fromkeys(lines) if line and line not in done]
    for line in lines:
        read_line(line)
    start, slowest, left, busy = time.time(), 0.0, list(reversed(lines)), {}
    spawn = multiprocessing.get_context("spawn")

    def hand_out(pipe, process) -> None:
        if left and time.time() - start + slowest < a.seconds:
            busy[pipe] = process, left.pop(), time.time()
            pipe.send(busy[pipe][1])
        else:
            pipe.close()

    def begin_worker() -> None:
        pipe, theirs = spawn.Pipe()
        process = spawn.Process(target=work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        hand_out(pipe, process)

    for _ in range(min(a.workers, len(lines))):
        begin_worker()
    while busy:
        for pipe in wait(list(busy)):
            process, line, began = busy.pop(pipe)
            try:
                record = pipe.recv()
            except (EOFError, ConnectionError):
                process.join()
                record = {
                    "run": line,
                    "error": f"the process ended with code {process.exitcode}",
                    "last": True,
                }
            last = record.pop("last", False)
            slowest = max(slowest, time.time() - began)
            with a.out.open("a") as file:
                file.write(
                    "\n" * (a.out.stat().st_size > 0 and not a.out.read_bytes().endswith(b"\n"))
                    + json.dumps(record)
                    + "\n"
                )
            print(record.get("validation_loss", record.get("error")), record.get("seconds"), line, flush=True)
            if not last:
                hand_out(pipe, process)
            elif left:
                begin_worker()
    if left:
        print(f"{len(left)} runs not begun: the same command goes on with them")


if __name__ == "__main__":
    main()
