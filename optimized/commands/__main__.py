"""`python -m optimized.commands`: the command `twin` without installing it."""

import sys

from optimized.commands import main

if __name__ == "__main__":
    sys.exit(main())
