"""`draftsmith train` on stored features, then with the target beside the drafter, in a process with little memory.

    python tests/helpers/limited.py BYTES RECIPE key=value ...

Writes how the two runs ended to outcomes.json. RLIMIT_DATA counts all that is private and may be written to: files that
are mapped so, too, read or not.
"""

import json
import resource
import sys
from pathlib import Path

from draftsmith.recipes.cli.main import main


def outcome(arguments: list[str]) -> str:
    try:
        return f"exit code {main(['train', *arguments])}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    limit = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    stored = outcome(sys.argv[2:])
    beside = outcome([*sys.argv[2:], "data.features=online", "run.dir=beside"])
    Path("outcomes.json").write_text(json.dumps({"stored": stored, "beside": beside}))
