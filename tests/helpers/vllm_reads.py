"""What vLLM makes of serving commands, without serving: run with the Python of an environment that has vLLM.

    PYTHON tests/helpers/vllm_reads.py COMMANDS.json OUT.json

COMMANDS.json: shell commands that begin with `vllm serve`.

OUT.json has, for each, method, draft length, and the draft length at each number of running requests from 0 on (null
without a schedule), all by vLLM's own command line, its validation, and its scheduler's table.
"""

import json
import shlex
import sys
from pathlib import Path

from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup


def read(command: str) -> dict[str, object]:
    words = shlex.split(command)
    assert words[:2] == ["vllm", "serve"]
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words[2:])
    arguments.model = arguments.model_tag  # as `vllm serve` does
    config = EngineArgs.from_cli_args(arguments).create_engine_config()
    speculative = config.speculative_config
    schedule, longest = speculative.num_speculative_tokens_per_batch_size, speculative.num_speculative_tokens
    size = config.scheduler_config.max_num_seqs
    return {
        "method": speculative.method,
        "num_speculative_tokens": longest,
        "lengths": schedule and build_dynamic_sd_schedule_lookup(schedule, size, longest),
    }


if __name__ == "__main__":
    commands = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([read(command) for command in commands]))
