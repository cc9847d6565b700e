"""The error that an engine died of, found in what it printed."""

import re

LOGGED = re.compile(r"(\(\w+ pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] ?)?(.*)")  # process, message
ERROR = re.compile(r"[\w.]*(?:Error|Exception)(?:: |$)")
WRAPPED = "root cause"  # in errors that only point to another one
PYDANTIC = re.compile(r"\d+ validation errors? for ")


def root_cause(stdout: str, stderr: str) -> str:
    """Return the error that a failed vLLM died of, in one line.

    Its processes log their tracebacks to stdout, the one that fails first; those that wait for it then raise errors
    of their own, in the end that of the main process on stderr. An error of the settings stands on stderr alone.
    """
    for text in (stdout, stderr):
        errors: dict[str, str] = {}  # process -> the last error that it logged
        lines = text.splitlines()
        for number, line in enumerate(lines):
            match = LOGGED.fullmatch(line)
            assert match is not None
            process, message = match.groups(default="")
            if ERROR.match(message) and WRAPPED not in message:
                if PYDANTIC.search(message):  # says what is wrong on the next line
                    message = f"{message}: {''.join(lines[number + 1 : number + 2]).strip()}"
                errors[process] = message
        if errors:
            return next(iter(errors.values()))
    return (stdout + stderr).strip().rpartition("\n")[2] or "no message"
