"""`python -m merit_optim` is the `merit` command."""

import sys

from merit_optim.cli import main

if __name__ == "__main__":
    sys.exit(main())
