"""`accelerate launch -m draftsmith.data ...` is `draftsmith prepare ...`."""

import sys

from draftsmith.recipes.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["prepare", *sys.argv[1:]]))
