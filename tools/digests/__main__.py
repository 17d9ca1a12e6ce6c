"""``python -m tools.digests``."""

import sys

from tools.digests.command import main

if __name__ == "__main__":
    sys.exit(main())
