"""`accelerate launch -m draftsmith.inference ...` is `draftsmith evaluate ...`, prompts shared out."""

import sys

from draftsmith.recipes.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
