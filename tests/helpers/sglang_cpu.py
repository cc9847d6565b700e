"""Starts SGLang's server on a CPU with the words of its command line; run by SGLang's own Python, not by the tests'.

The operators of a CPU have to be there before SGLang is imported, in each of its processes, all of which run the head
of this file.
"""

import os
import sys

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import sgl_kernel  # noqa: F401
from sglang.launch_server import run_server
from sglang.srt.server_args import prepare_server_args

if __name__ == "__main__":
    run_server(prepare_server_args(sys.argv[1:]))
