"""Mixtures, duplicates and the split: nothing twice, nothing on both sides, the shares that were asked for."""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.data.prompts.mixtures import read_mixture
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.prompts.prompts import read_prompts
from draftsmith.data.prompts.splits import deduplicate, opening_hash, prompt_hash, split_prompts, write_prompts
from draftsmith.models.errors import UserError


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, str]:
    """Three sources of 60, 30 and 10 prompts."""
    sizes = {"chat": 60, "code": 30, "math": 10}
    for name, size in sizes.items():
        (tmp_path / f"{name}.txt").write_text("".join(f"{name} {i}\n" for i in range(size)))
    return {name: str(tmp_path / f"{name}.txt") for name in sizes}


def mix(tmp_path: Path, *parts: dict[str, Any], **top: Any) -> list[Prompt]:
    path = tmp_path / "mix.yaml"
    path.write_text(yaml.safe_dump({"sources": list(parts), **top}))
    return read_mixture(path)


def counts(prompts: list[Prompt]) -> dict[str, int]:
    return Counter(prompt.domain for prompt in prompts)


@pytest.mark.parametrize(
    ("weights", "num_prompts", "expected"),
    [
        ((None, None, None), None, (60, 30, 10)),  # everything
        ((None, None, None), 50, (30, 15, 5)),  # in proportion
        ((1, 1, 1), None, (10, 10, 10)),  # as many as the scarcest allows
        ((3, 1.5, 0.5), None, (60, 30, 10)),
        ((2, 1, 1), 20, (10, 5, 5)),
        ((1, 1, 1), 10, (4, 3, 3)),  # each by itself would round to 3
        ((5, 1, 0.1), 5, (3, 1, 1)),  # at least one of each
    ],
)
def test_weights_are_shares(
    weights: tuple, num_prompts: int | None, expected: tuple, sources: dict[str, str], tmp_path: Path
) -> None:
    parts = [{"source": path, "weight": weight} for path, weight in zip(sources.values(), weights, strict=True)]
    prompts = mix(tmp_path, *parts, num_prompts=num_prompts)
    assert counts(prompts) == dict(zip(sources, expected, strict=True))  # the source's name is the domain
    assert len(deduplicate(prompts)) == len(prompts)


def test_a_smaller_mixture_is_part_of_a_larger_one(sources: dict[str, str], tmp_path: Path) -> None:
    """A run on more data then contains the run on less, and differs from it in nothing else."""
    parts = [{"source": path} for path in sources.values()]
    mixtures = [{prompt.text for prompt in mix(tmp_path, *parts, num_prompts=count)} for count in range(3, 101)]
    assert [len(prompts) for prompts in mixtures] == [*range(3, 101)]
    assert all(small < large for small, large in itertools.pairwise(mixtures))


def test_a_duplicate_counts_for_its_first_source(sources: dict[str, str], tmp_path: Path) -> None:
    """It would weigh double, and two sources that share prompts would seem larger than they are."""
    copy = tmp_path / "copy.txt"
    copy.write_text("  CHAT   7\nnew\n")
    prompts = mix(tmp_path, {"source": sources["chat"]}, {"source": str(copy)})
    assert counts(prompts) == {"chat": 60, "copy": 1}
    copy.write_text("chat 7\n")
    with pytest.raises(UserError, match="all prompts of .*copy.txt stand in the sources before"):
        mix(tmp_path, {"source": sources["chat"]}, {"source": str(copy)})


def test_domains(tmp_path: Path) -> None:
    """The mixture's word first, then the row's own, then the source's name."""
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "a", "domain": "own", "kind": "x"}, {"prompt": "b", "kind": "y"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.domain for prompt in mix(tmp_path, {"source": str(path)})] == ["own", "rows"]
    assert [prompt.domain for prompt in mix(tmp_path, {"source": str(path), "domain": "all"})] == ["all", "all"]
    assert [prompt.domain for prompt in mix(tmp_path, {"source": str(path), "domain_column": "kind"})] == ["x", "y"]


def test_texts_become_chats(sources: dict[str, str], tmp_path: Path) -> None:
    prompts = mix(tmp_path, {"source": sources["math"], "chat": True})
    assert prompts[0] == Prompt(messages=[{"role": "user", "content": "math 0"}], domain="math")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("- x", "mix.yaml: give settings by their names"),
        ("sources: []", "give `sources`"),
        ("sources: [{source: a.txt, wieght: 1}]", "wieght"),
        ("sources: [{source: a.txt, weight: heavy}]", "weight"),
        ("sources: [{source: a.txt, weight: 1}, {source: b.txt}]", "every source a weight"),
        ("sources: [{source: a.txt, weight: 0}]", "sources.0.weight=0: give more than 0"),
        ("sources: [{source: a.txt}, {source: a.txt}]", "each once"),
        ("sources: [{source: a.txt}]\nnum_prompts: 0", "num_prompts=0: give at least 1"),
        ("sources: [{source: a.txt, domain: x, domain_column: y}]", "give one"),
        ("sources: [{source: gone.txt}]", "no prompts file gone.txt"),
        ("sources: [", "not YAML"),
    ],
)
def test_mixtures_that_are_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "mix.yaml").write_text(content)
    with pytest.raises(UserError, match=reason):
        read_prompts(str(tmp_path / "mix.yaml"))
    with pytest.raises(UserError, match="No such file"):
        read_prompts(str(tmp_path / "gone.yaml"))


def test_more_than_there_is_names_the_scarce_source(sources: dict[str, str], tmp_path: Path) -> None:
    parts = [{"source": path, "weight": 1} for path in sources.values()]
    assert counts(mix(tmp_path, *parts, num_prompts=30)) == {"chat": 10, "code": 10, "math": 10}
    with pytest.raises(UserError, match=r"num_prompts 31 is more than the 30 .*math.txt has 10 prompts"):
        mix(tmp_path, *parts, num_prompts=31)


# --- the split


def chat(*texts: str, system: str = "") -> Prompt:
    """A conversation; every second text is an answer."""
    said = [{"role": "user" if i % 2 == 0 else "assistant", "content": text} for i, text in enumerate(texts)]
    return Prompt(messages=[*([{"role": "system", "content": system}] if system else []), *said])


PROMPTS = [Prompt(f"prompt {i}") for i in range(2000)]


def test_the_share_is_held_out_and_a_larger_one_contains_it() -> None:
    """Binomial: 0.05 of 2000 is 100 with a deviation of 9.7."""
    small, large = (split_prompts(PROMPTS, share) for share in (0.05, 0.2))
    assert 60 < len(small.held_out) < 140
    assert {prompt.text for prompt in small.held_out} < {prompt.text for prompt in large.held_out}
    assert small.train + small.held_out != PROMPTS  # not the first or the last ones
    assert sorted(map(prompt_hash, small.train + small.held_out)) == sorted(map(prompt_hash, PROMPTS))


@pytest.mark.parametrize(
    "twin",
    [
        lambda text: Prompt(f"  {text.upper()}\n"),
        lambda text: chat(text),
        lambda text: chat(text, system="Be brief."),
        lambda text: chat(text, "an answer", "and then?"),
        lambda text: Prompt(messages=chat(text).messages, tools=[{"name": "heat"}], domain="other"),
    ],
)
def test_nothing_leaks_between_sources(twin: Any) -> None:
    """Prompts that begin with the same question stand on the same side, in whatever form a source has them."""
    held_out = {prompt.text for prompt in split_prompts(PROMPTS, 0.1).held_out}
    twins = [twin(prompt.text) for prompt in PROMPTS]
    assert {PROMPTS[twins.index(prompt)].text for prompt in split_prompts(twins, 0.1).held_out} == held_out


def test_the_split_is_the_same_in_every_run() -> None:
    """Known digits: another Python, another machine or another order must not move a prompt to the other side."""
    assert opening_hash(Prompt("Heat  the\tiron ")) == opening_hash(chat("heat the iron"))
    assert opening_hash(Prompt("heat the iron")) == "378110b5f282c9af"
    assert split_prompts(PROMPTS[::-1], 0.1).held_out[::-1] == split_prompts(PROMPTS, 0.1).held_out


def test_duplicates_are_exact_after_normalisation() -> None:
    first = chat("Hot?", "Red.", "Now?")
    same = [chat("hot? ", "another answer", "now?")]  # answers are written anew
    others = [chat("Hot?"), chat("Hot?", "Red.", "When?"), chat("Hot?", "Red.", "Now?", system="Be brief.")]
    tools = Prompt(messages=first.messages, tools=[{"name": "heat"}])
    assert deduplicate([first, *same, *others, tools]) == [first, *others, tools]


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_shares_that_are_none_are_refused(share: float) -> None:
    with pytest.raises(UserError, match="held_out_share"):
        split_prompts(PROMPTS[:5], share)
    assert split_prompts(PROMPTS[:5], 0.0).train == PROMPTS[:5]


@pytest.mark.parametrize("num_prompts", [2, 5, 30])
@pytest.mark.parametrize("share", [0.0001, 0.05, 0.9999])
def test_of_few_prompts_one_is_held_out_and_one_is_not(num_prompts: int, share: float) -> None:
    """A larger share still holds out all that a smaller one does."""
    small, large = (split_prompts(PROMPTS[:num_prompts], each) for each in (share, min(0.9999, 2 * share)))
    assert small.train
    assert small.held_out
    assert {prompt.text for prompt in small.held_out} <= {prompt.text for prompt in large.held_out}


def test_prompts_that_all_begin_alike_cannot_be_held_out() -> None:
    with pytest.raises(UserError, match="held_out_share"):
        split_prompts([Prompt("heat the iron")] * 3, 0.5)


def test_written_prompts_are_read_back(tmp_path: Path) -> None:
    prompts = [
        Prompt("ünï\u2028x", domain="d"),
        chat("a", "b", "c"),
        Prompt(messages=chat("x").messages, tools=[{"a": 1}]),
    ]
    write_prompts(tmp_path / "held_out.jsonl", prompts)
    assert read_prompts(str(tmp_path / "held_out.jsonl")) == prompts
