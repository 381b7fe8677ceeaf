"""`merit bench growth` as a script: see src/merit_lab/measure/bench/growth.py."""

import sys

from merit_lab.measure.bench.growth import main

if __name__ == "__main__":
    main(sys.argv[1:])
