"""Keep the runs of plain.py as the lab keeps its own: lines of JSON become rows of a runs.parquet.

    python benchmarks/keep_plain.py LINES DATA ... --out results/texts/runs.parquet --commit COMMIT

DATA are the folders that the runs read (train.bin, val.bin, tokenizer), known by their names. Lines of runs
that failed are left out and named. LINES do not say where the runs were made: --device, --torch and --triton.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import polars as pl
from plain import HELD_OUT, RUN, read_line

from merit_lab.data.tokens import fingerprint, hash_file
from merit_lab.runs import archive
from merit_lab.runs.steps import COLUMNS

QKV = {"weights": "three weights", "split": "one weight, split", "one": "one weight"}
OWN = ("lr", "betas", "kinds", "fused")  # options that have a place of their own, or change no number
SHORT = {"torch.optim:AdamW": "adamw"}


def config_of(run: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The settings as a run of the lab has them."""
    scales = {one["rate_scale"] for one in options.get("kinds", {}).values()}
    if len(scales) > 1:
        raise ValueError(f"several rate_scale are not kept yet: {options['kinds']}")
    optimizer = {
        "name": SHORT.get(run["opt"], run["opt"]),
        "lr": options["lr"],
        "betas": options.get("betas"),
        "weight_decay": run["decay"],
        "max_grad_norm": run["max_norm"],
        "warmup": run["warmup"],
        "final": run["floor"],
        "options": [f"{key}={json.dumps(value)}" for key, value in options.items() if key not in OWN],
        **({"rate_scale": scales.pop()} if scales else {}),
    }
    heads = run["heads"] or run["width"] // 64
    shape = {"width": run["width"], "heads": heads, "layers": run["layers"], "context": run["context"]}
    return {
        "data": Path(run["data"]).name,
        "model": {"family": "gpt2" if run["shape"] == "gpt" else run["shape"], **shape, "vocab_size": 16384},
        "optimizer": optimizer,
        "measure": {"validation_sequences": HELD_OUT},
        "batch": run["batch"],
        "micro_batch": min(run["batch"], run["micro"]),
        "steps": run["steps"],
        "seed": run["seed"],
        "precision": "bf16",
        "qkv": QKV[run["qkv"]],
    }


def name_of(config: dict[str, Any]) -> str:
    """What tells the run from the others of its study."""
    optimizer = config["optimizer"]
    rest = f"-rest{optimizer['rate_scale']:g}" if "rate_scale" in optimizer else ""
    return (
        f"{config['data']}-{config['model']['width']}-{config['steps']}x{config['batch']}-{optimizer['name']}"
        f"-lr{optimizer['lr']:g}{rest}-warmup{optimizer['warmup']:g}-seed{config['seed']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("lines", type=Path)
    parser.add_argument("data", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--device", default="NVIDIA H200")
    parser.add_argument("--torch", default="2.11.0")
    parser.add_argument("--triton", default="3.6.0")
    a = parser.parse_args()
    data = {
        folder.name: {
            "folder": folder.name,
            "fingerprint": fingerprint(*(hash_file(folder / f"{one}.bin") for one in ("train", "val"))),
            "train_tokens": (folder / "train.bin").stat().st_size // 2,
            "validation_tokens": (folder / "val.bin").stat().st_size // 2,
        }
        for folder in a.data
    }
    heads, steps = [], []
    for line in map(json.loads, a.lines.read_text().splitlines()):
        if "error" in line:
            print(f"left out: {line['run']}: {line['error']}", file=sys.stderr)
            continue
        run, options = read_line(line["run"])
        if run["tag"] or run["init"] != RUN["init"] or run["schedule"] != RUN["schedule"]:
            raise ValueError(f"a record has no place for tag, init or schedule yet: {line['run']}")
        config = config_of(run, options)
        environment = {
            "loop": "benchmarks/plain.py",
            "parameters": line["parameters"],
            "versions": {"torch": a.torch, "triton": a.triton},
            "commit": a.commit,
            "device": {"type": "cuda", "name": a.device},
            "num_ranks": 1,
            "data": data[config["data"]],
        }
        name, status = name_of(config), "diverged" if line["validation_loss"] is None else "finished"
        heads.append(archive.Head(name, "", status, config, environment, {}))
        tokens = config["batch"] * config["model"]["context"]
        steps += [(name, step, step * tokens, loss) for step, loss in line["curve"]]
    known = ("run", "step", "tokens", "validation_loss")
    frame = pl.DataFrame(steps, [(name, COLUMNS[name]) for name in known], orient="row")
    rest = [pl.lit(None, kind).alias(name) for name, kind in COLUMNS.items() if name not in known]
    archive.add(a.out, heads, frame.with_columns(rest))
    print(f"{len(heads)} runs kept in {a.out}")


if __name__ == "__main__":
    main()
