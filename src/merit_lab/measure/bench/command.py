"""`merit bench`: time an optimizer's step on this machine."""

from __future__ import annotations

import sys

from merit_lab.measure.bench import growth, step

BENCHMARKS = {"step": step.main, "growth": growth.main}

USAGE = """usage: merit bench step|growth [--help] [options]

Time an optimizer's step on this machine.

  step    models of GPT-2's and Llama's shapes, with AdamW, LAMB, MERIT, Muon, SOAP and others side by side
  growth  how the cost grows with the size of the model, and with the number of its tensors
"""


def main(argv: list[str]) -> int:
    """Run the benchmark named first in ``argv``, and return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if argv[0] not in BENCHMARKS:
        print(f"{USAGE}\nmerit bench: unknown benchmark {argv[0]!r}", file=sys.stderr)
        return 2
    BENCHMARKS[argv[0]](argv[1:])
    return 0
