"""A real SGLang judges: started anew for each drafter, it counts what draftsmith's own decoder counts.

A draft model gets every text without the first token from SGLang, which moves tokens by one place as for EAGLE. So it
also keeps, at the end of what two prompts share, what the other prompt's next token gave: its prefix cache is left out.

DRAFTSMITH_SGLANG=VENV pytest -m engine -s tests/train/test_sglang_engine.py    VENV holds SGLang 0.5.23 for CPU
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from sglang_process import command_at_free_port
from transformers import AutoModelForCausalLM

from draftsmith.data.answers.endpoint import Endpoint
from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.data.http import Server
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.counters import Stats, total_of
from draftsmith.inference.measuring.judged import JudgedResult
from draftsmith.inference.measuring.measure import PromptSet
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import Target, load_drafter
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.sampling.trees import Chain, DynamicTree
from draftsmith.recipes.cli.main import main
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.recipes.quickstart.quickstart import EMBEDDED_TARGET, prompts_for, write_jsonl
from draftsmith.recipes.serving.engine_check import counted_as_engines_do
from draftsmith.train import train
from draftsmith.train.engine.answers import RequestSettings, measured_server, run_on_server, stats_by_batch
from draftsmith.train.engine.restarted import COMMAND, started_engine
from draftsmith.train.run_folder.checkpoint import checkpoints

pytestmark = pytest.mark.engine
METHODS = {"eagle3": "EAGLE3", "eagle": "EAGLE", "draft_model": "STANDALONE"}
NUM_PROMPTS, NUM_NEW_TOKENS = 12, 48
CHAIN, TREE = Chain(4), DynamicTree(num_nodes=10, depth=3, width=3)
DRAFTS = [("eagle3", CHAIN), ("eagle", CHAIN), ("draft_model", CHAIN), ("eagle3", TREE), ("eagle", TREE)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("judged")


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.from_pretrained(EMBEDDED_TARGET.resolve(), "cpu", torch.float32)


@pytest.fixture(scope="module")
def prompts(target: Target, folder: Path) -> list[list[int]]:
    """Prompts that also stand in held_out.jsonl; some of their answers end by themselves."""
    held_out = prompts_for(target, held_out=True)[:NUM_PROMPTS]
    write_jsonl(folder / "held_out.jsonl", held_out)
    return [target.encode(prompt.text) for prompt in held_out if prompt.text]


@pytest.fixture(scope="module")
def samples(target: Target, folder: Path) -> Path:
    write_jsonl(folder / "prompts.jsonl", prompts_for(target, held_out=False)[:32])
    settings = PrepareSettings(max_new_tokens=48, samplings=(Sampling(0.0),), batch_size=32)
    prepare(target, str(folder / "prompts.jsonl"), folder / "samples", settings)
    return folder / "samples"


@pytest.fixture(scope="module")
def trained(target: Target, samples: Path, folder: Path) -> Callable[[str], list[Path]]:
    """Return an early and a late checkpoint of a kind, which is trained when it is first asked for."""

    @functools.cache
    def made(kind: str) -> list[Path]:
        config = RECIPES[f"quickstart_{kind}"]()
        config.target, config.data.samples = target.name, str(samples)
        config.run.dir, config.run.device = str(folder / f"run-{kind}"), "cpu"
        config.run.steps, config.run.checkpoint_every = 24, 4
        _, early, *_, late = checkpoints(train(config))
        return [early, late]

    return made


@contextlib.contextmanager
def serving(target: Target, folder: Path, name: str, *options: str) -> Iterator[str]:
    """The URL of a server that stays as it is."""
    command, url = command_at_free_port(target.name, *options)
    server = Server(url, "--beside", "see to the command")
    with started_engine(command, folder, server, folder / f"{name}.log", lambda: None):
        yield url


@pytest.fixture(scope="module")
def plain(target: Target, folder: Path) -> Iterator[str]:
    with serving(target, folder, "plain") as url:
        yield url


def counted_by_us(target: Target, drafter: Path, prompts: list[list[int]], draft: Chain | DynamicTree) -> Stats:
    """Return draftsmith's own counters of these prompts, counted as SGLang does."""
    decoder = SpeculativeDecoder(target, load_drafter(drafter, target))
    tree = draft if isinstance(draft, DynamicTree) else None
    texts = decoder.generate(prompts, NUM_NEW_TOKENS, draft_length=draft.depth, tree=tree).token_ids
    return counted_as_engines_do(decoder, prompts, texts, draft)


def counted_without_first_token(
    target: Target, drafter: Path, prompts: list[list[int]], num_drafted: int
) -> tuple[int, int]:
    """Return the rounds and accepted tokens of a draft model that sees every text from its second token on."""
    decoder = SpeculativeDecoder(target, load_drafter("none", target))
    texts = decoder.generate(prompts, NUM_NEW_TOKENS).token_ids
    endless = decoder.generate(prompts, NUM_NEW_TOKENS + num_drafted, stop_at_eos=False).token_ids
    model = AutoModelForCausalLM.from_pretrained(drafter, dtype=torch.float32)
    rounds = accepted = 0
    for prompt, text, written in zip(prompts, texts, endless, strict=True):
        place = 1  # of the newest token's successor
        while place < len(text):
            context = [*prompt[1:], *written[:place]]
            asked = torch.tensor([context])
            drafts = model.generate(asked, max_new_tokens=num_drafted, do_sample=False, eos_token_id=[])[0]
            pairs = zip(drafts[len(context) :].tolist(), written[place:], strict=False)
            agree = [drafted == token for drafted, token in pairs]
            correct = [*agree, False].index(False)
            rounds, accepted, place = rounds + 1, accepted + correct, place + correct + 1
    return rounds, accepted


def options_of(kind: str, draft: Chain | DynamicTree) -> list[str]:
    """Return what tells an SGLang to draft so with $DRAFTER."""
    return [
        *("--speculative-algorithm", METHODS[kind], "--speculative-draft-model-path", "$DRAFTER"),
        *("--speculative-num-steps", str(draft.depth)),
        *("--speculative-eagle-topk", str(draft.width if isinstance(draft, DynamicTree) else 1)),
        *("--speculative-num-draft-tokens", str(draft.num_nodes + 1)),  # the newest token among them
        *(["--disable-radix-cache"] if kind == "draft_model" else []),
    ]


def judged(url: str, target: Target, drafters: list[Path], plain: str, folder: Path, out: Path) -> list[JudgedResult]:
    """The rows of drafters as `draftsmith evaluate --engine` writes them."""
    words = ["evaluate", "--engine", url, "--beside", f"none={plain}", "--target", target.name, "--repeats", "1"]
    words += ["--prompts", str(folder / "held_out.jsonl"), "--max-new-tokens", str(NUM_NEW_TOKENS)]
    words += ["--out", str(out)]
    assert main([*words, *(word for drafter in drafters for word in ("--drafter", str(drafter)))]) == 0
    rows = {}
    for file in out.rglob("evaluation.json"):
        evaluation = read_evaluation(file)
        (rows[evaluation.drafter],) = evaluation.judged
    return [rows[str(drafter)] for drafter in drafters]


@pytest.mark.parametrize(("kind", "draft"), DRAFTS)
def test_an_sglang_counts_what_we_count(
    kind: str,
    draft: Chain | DynamicTree,
    target: Target,
    prompts: list[list[int]],
    trained: Callable[[str], list[Path]],
    plain: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Of an early and a late EAGLE-3 drafter, each by an SGLang that was started for it; of others, of the late one."""
    drafters = trained(kind) if (kind, draft) == ("eagle3", CHAIN) else trained(kind)[1:]
    command, url = command_at_free_port(target.name, *options_of(kind, draft))
    monkeypatch.setenv(COMMAND, command)
    rows = judged(url, target, drafters, plain, folder, tmp_path / "judged")
    for drafter, row in zip(drafters, rows, strict=True):
        print(f"{kind}, {drafter.name}: {row.acceptance}; started in {row.start_seconds:.1f} s")
        assert row.setting.judge.engine.startswith("SGLang 0.5.23")
        expected = counted_by_us(target, drafter, prompts, draft)
        if kind == "draft_model":
            counted = row.acceptance.num_drafts, row.acceptance.num_accepted_tokens
            assert counted == counted_without_first_token(target, drafter, prompts, draft.depth)
            assert row.acceptance.num_emitted_tokens == expected.num_emitted_tokens
        else:
            assert row.acceptance == expected
        assert row.texts
        assert row.texts.identical == row.texts.checked == len(prompts)
        assert row.start_seconds
        assert row.swap_seconds is None
    assert rows[0].acceptance != rows[-1].acceptance or len(rows) == 1


def test_an_sglang_with_n_grams_writes_our_texts(
    target: Target, prompts: list[list[int]], folder: Path, plain: str
) -> None:
    """Its drafts are trees of what followed the last tokens in any text so far, so that its counters are its own."""
    options = ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "5"]
    with serving(target, folder, "ngram", *options) as url:
        server = measured_server(Endpoint(url, target, NUM_NEW_TOKENS), drafts=True)
        load = RequestSettings(Sampling(0.0), batch_size=1, repeats=0)
        run = run_on_server(server, PromptSet("held_out", prompts), load, lambda: None)
    expected = SpeculativeDecoder(target, load_drafter("none", target)).generate(prompts, NUM_NEW_TOKENS).token_ids
    assert run.texts == expected
    counted = total_of(stats_by_batch(run, 1))
    print(f"ngram: {counted}")
    assert counted.num_accepted_tokens > 0
    assert counted.num_drafts < sum(map(len, expected))


def test_a_plain_sglang_writes_our_texts(target: Target, prompts: list[list[int]], plain: str) -> None:
    """Ends of text among them, which SGLang leaves out of its answers or not."""
    endpoint = Endpoint(plain, target, NUM_NEW_TOKENS)
    expected = SpeculativeDecoder(target, load_drafter("none", target)).generate(prompts, NUM_NEW_TOKENS).token_ids
    assert [endpoint.complete(prompt, Sampling(0.0), 0).new_ids for prompt in prompts] == expected
    assert any(text[-1] in target.eos_token_ids for text in expected)
