"""`merit evaluate`: run zero-shot tasks on a checkpoint of a run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from merit_lab.measure.evaluate.evaluation import evaluate
from merit_lab.measure.evaluate.sets import PAPER_SETS, SETS
from merit_lab.runs import EvaluationResult, step_path
from merit_lab.tables import Table, print_table


def main(argv: Sequence[str]) -> int:
    """Run the command and return its exit status."""
    options = _parser().parse_args(argv)
    try:
        results = evaluate(
            options.run,
            options.tasks,
            step=options.checkpoint,
            task_files=options.task_files,
            limit=options.limit,
            tokenizer=options.tokenizer,
            gpt2_vocabulary=options.gpt2_vocabulary,
        )
    except (OSError, ValueError, ModuleNotFoundError) as error:
        print(f"merit evaluate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "merit evaluate: interrupted; run the same command again to continue with the next set",
            file=sys.stderr,
        )
        return 130
    print_results(results)
    for result in results:
        if result.num_truncated:
            print(f"{result.name}: {result.num_truncated:,} prompts exceeded the context and were truncated")
    print(f"\nThe results are in {step_path(options.run / 'evaluate', results[0].step)}")
    return 0


def print_results(results: Iterable[EvaluationResult]) -> None:
    """Print a table with a row for each metric of each set."""
    rows = [
        (
            result.name if place == 0 else "",
            name,
            f"{result.num_items:,}" if place == 0 else "",
            f"{metric.value:.4g}",
            "" if metric.stderr is None else f"{metric.stderr:.2g}",
        )
        for result in results
        for place, (name, metric) in enumerate(result.metrics.items())
    ]
    print_table(Table(("Set", "Measure", "Items", "Value", "Error"), tuple(rows), num_text=2))


def add_tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the options about the run's tokenizer."""
    parser.add_argument(
        "--tokenizer",
        metavar="NAME",
        help="gpt2, bytes or a tokenizer.json, for data without a dataset.json (nanoGPT's)",
    )
    parser.add_argument(
        "--gpt2-vocabulary",
        metavar="FOLDER",
        type=Path,
        help="folder with GPT-2's vocab.bpe and encoder.json (default: tiktoken's cache, or a download)",
    )


def _parser() -> argparse.ArgumentParser:
    figures = "\n".join(f"  {name:<8} {' '.join(sets)}" for name, sets in PAPER_SETS.items())
    files = "\n".join(f"  {name:<14} {chosen.file}" for name, chosen in SETS.items())
    parser = argparse.ArgumentParser(
        prog="merit evaluate",
        description="Evaluate a checkpoint zero-shot with lm-eval. The results go into the run directory. "
        "If\ninterrupted, the same command continues; existing results are not computed again.",
        epilog=f"the paper's figures and tables, which can be given as tasks:\n{figures}\n\n"
        f"sets, and their files below --task-files:\n{files}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument(
        "--checkpoint", metavar="STEP", type=int, help="step of the checkpoint (default: the newest)"
    )
    parser.add_argument(
        "--tasks",
        metavar="TASK",
        nargs="+",
        default=["fig5"],
        help="sets to evaluate (default: lambada wikitext); without --task-files any task of lm-eval",
    )
    parser.add_argument(
        "--task-files",
        metavar="FOLDER",
        type=Path,
        help="folder with the files of the sets; without it they come from the Hugging Face hub",
    )
    parser.add_argument("--limit", metavar="N", type=int, help="use only the first N items of each set")
    add_tokenizer_options(parser)
    return parser
