"""`merit bench step` as a script: see src/merit_lab/measure/bench/step.py."""

import sys

from merit_lab.measure.bench.step import main

if __name__ == "__main__":
    main(sys.argv[1:])
