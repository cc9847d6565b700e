"""`accelerate launch -m draftsmith.train ...` is `draftsmith train ...`."""

import sys

from draftsmith.recipes.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
