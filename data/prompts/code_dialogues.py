"""Dialogues made of functions: the user asks for one in words, and the assistant writes it.

The words are those of the function's docstring. The answer is the function without it, so that no answer merely copies
what was asked.
"""

import ast

from draftsmith.data.prompts.standard_library import definition_of

Message = dict[str, str]

MOST_TURNS = 3  # of a dialogue


def code_dialogues(groups: list[list[str]]) -> list[list[Message]]:
    """Return dialogues about the documented functions of each group, the methods of one class or one function alone.

    Each has up to three turns, and each turn asks for one function.
    """
    dialogues = []
    for group in groups:
        turns = [turn for turn in map(code_turn, group) if turn is not None]
        for first in range(0, len(turns), MOST_TURNS):
            dialogues.append([message for turn in turns[first : first + MOST_TURNS] for message in turn])
    return dialogues


def code_turn(function: str) -> list[Message] | None:
    """Return a question for a function and the answer; None for one without a docstring on lines of its own."""
    definition = definition_of(function)
    docstring = ast.get_docstring(definition)
    if not docstring or len(definition.body) == 1:
        return None
    quoted, code = definition.body[:2]
    assert quoted.end_lineno is not None
    lines = function.splitlines(keepends=True)
    if lines[quoted.lineno - 1][: quoted.col_offset].strip() or code.lineno <= quoted.end_lineno:
        return None
    summary = " ".join(docstring.split("\n\n")[0].split())
    question = f"Write the function {definition.name}({ast.unparse(definition.args)}). {summary}"
    answer = "".join(lines[: quoted.lineno - 1]) + "".join(lines[quoted.end_lineno :]).lstrip("\n")
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
