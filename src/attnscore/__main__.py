"""``python -m attnscore`` is the command ``attnscore``."""

import sys

from attnscore.cli import main

if __name__ == "__main__":
    sys.exit(main())
