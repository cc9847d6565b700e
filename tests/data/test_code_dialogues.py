"""Dialogues made of functions, and the groups that these come in."""

import ast
from pathlib import Path

import pytest

from draftsmith.data.prompts.code_dialogues import code_dialogues, code_turn
from draftsmith.data.prompts.standard_library import function_groups, without_duplicates

DOCUMENTED = '''def strike(iron, times=3, *, hard: bool = False):
    """Hit the iron so
    many times.

    It had better be hot.
    """

    # it rings
    return [iron.hit(hard) for _ in range(times)]
'''


def test_the_question_is_the_docstring_and_the_answer_lacks_it() -> None:
    turn = code_turn(DOCUMENTED)
    assert turn is not None
    question, answer = turn
    assert question == {
        "role": "user",
        "content": "Write the function strike(iron, times=3, *, hard: bool=False). Hit the iron so many times.",
    }
    without = ast.parse(DOCUMENTED)
    assert isinstance(without.body[0], ast.FunctionDef)
    del without.body[0].body[0]
    assert ast.dump(ast.parse(answer["content"])) == ast.dump(without)
    assert "# it rings" in answer["content"]


@pytest.mark.parametrize(
    "function",
    [
        "def plain(x):\n    return x\n",
        'def only_words(x):\n    """Nothing else."""\n',
        'def one_line(x): "Words."; return x\n',
        'def shared_line(x):\n    "Words."; return x\n',
        'def empty(x):\n    ""\n    return x\n',
    ],
)
def test_functions_without_words_of_their_own_are_not_asked_for(function: str) -> None:
    assert code_turn(function) is None


def test_methods_of_one_class_share_a_dialogue_of_three_turns_at_most() -> None:
    methods = [f'def f{i}(self):\n    """Do {i}."""\n    return {i}\n' for i in range(5)]
    dialogues = code_dialogues([methods, ["def g(): pass\n"], [DOCUMENTED]])
    assert [len(messages) for messages in dialogues] == [6, 4, 2]
    assert [message["role"] for message in dialogues[0]] == ["user", "assistant"] * 3


def test_a_file_is_read_by_classes_and_single_functions(tmp_path: Path) -> None:
    path = tmp_path / "forge.py"
    path.write_text(
        "class A:\n    x = 1\n    def f(self):\n        return 1\n    async def g(self): pass\ndef h(): pass\n"
    )
    groups = [["def f(self):\n    return 1\n", "async def g(self): pass\n"], ["def h(): pass\n"]]
    assert function_groups(path) == groups
    assert without_duplicates([*groups, groups[0]], {"def h(): pass\n"}) == groups[:1]
    for content in (b"def broken(:\n", b"x = '\xff'\n", b"x = 1\0\n"):
        path.write_bytes(content)
        assert function_groups(path) == []
