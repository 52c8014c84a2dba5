"""``python -m ekiden.cli``: the same command as ``ekiden``; how ``ekiden up`` starts services."""

import sys

from ekiden.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
