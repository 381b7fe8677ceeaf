"""`merit export`: export a run's checkpoint to a folder that Hugging Face's transformers opens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from merit_lab.measure.evaluate.command import add_tokenizer_options
from merit_lab.measure.evaluate.export import export
from merit_lab.measure.evaluate.tokenizer import tokenizer_of
from merit_lab.train.snapshot import Snapshot


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="merit export",
        description="Write a checkpoint as a folder that AutoModelForCausalLM and AutoTokenizer open.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="folder to create")
    parser.add_argument(
        "--checkpoint", metavar="STEP", type=int, help="step of the checkpoint (default: the newest)"
    )
    add_tokenizer_options(parser)
    options = parser.parse_args(argv)
    try:
        snapshot = Snapshot.find(options.run, options.checkpoint)
        tokenizer = tokenizer_of(snapshot.run, options.tokenizer, options.gpt2_vocabulary)
        export(snapshot, options.folder, tokenizer)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"merit export: {error}", file=sys.stderr)
        return 1
    about = (
        "without a tokenizer, which the run's data does not name: give --tokenizer"
        if tokenizer is None
        else f"with the tokenizer {tokenizer.name}"
    )
    print(f"{options.folder} holds the model after {snapshot.step} steps, {about}")
    return 0
