"""How tools/ makes the embedded target: its text, its training, which goes on where it was stopped, its measures."""

from dataclasses import replace
from email.message import Message
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from tiny_target_quality import function_loss, loops
from tiny_target_text import STANDARD_LIBRARY, Document, first_documents, licence_of, new_groups, shingles, words_of
from train_tiny_target import (
    END_OF_TURN,
    Shape,
    StepRows,
    TargetRun,
    Text,
    Training,
    mean_model,
    tokenize,
    train_tokenizer,
)
from unlearn_loops import (
    LoopPair,
    Unlearning,
    UnlearningRun,
    answers,
    continuation_losses,
    loop_pairs,
    loop_start,
    prompts_of,
    unlikelihood,
    write_mean,
)

from draftsmith.data.answers.turns import Dialogue
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.inference.measuring.spans import Markers
from draftsmith.models import Target
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling

SHAPE = Shape(262, 32, 48, num_layers=2, num_heads=2, num_key_value_heads=1, context=32)
TRAINING = Training(steps=8, tokens_per_step=64, compiled=False)
FUNCTIONS = [f"def f{i}(x):\n    return x + {i}\n" for i in range(40)]
CHAT = [{"role": "user", "content": "Write f."}, {"role": "assistant", "content": FUNCTIONS[0]}]


@pytest.fixture(scope="module")
def text() -> Text:
    documents = [Document(STANDARD_LIBRARY, text=function) for function in FUNCTIONS]
    documents += [Document("forge 1.0 (MIT)", messages=CHAT * 2)] * 5
    return Text(documents, FUNCTIONS[:2], train_tokenizer(FUNCTIONS, SHAPE))


def test_what_resembles_held_out_functions_or_earlier_ones_is_left_out() -> None:
    words = " ".join(f"word{i}" for i in range(40)).split()
    held_out = shingles(words_of("def a():\n    return " + " + ".join(words)))
    changed = (
        "def b():\n    return (" + " -\n  ".join([*words[:20], "other", *words[21:]]) + ")"
    )  # other layout, one word
    first, again = "def c(x):\n    return x + 1\n", "def d(x): return x+1\n"
    assert new_groups([[changed, first], [again], ["def e(): pass\n"]], set(), held_out) == [
        [first],
        ["def e(): pass\n"],
    ]


def test_licences_are_permissive_or_refused() -> None:
    def package(**fields: str) -> Any:
        about = Message()
        for name, value in fields.items():
            about[name] = value
        return SimpleNamespace(metadata=about, name="forge")

    assert licence_of(package(**{"License-Expression": "BSD-3-Clause"})) == "BSD-3-Clause"
    assert licence_of(package(Classifier="License :: OSI Approved :: MIT License")) == "MIT License"
    for stated in ("GPL-3.0", "MIT OR GPL-2.0", "MPL-2.0 AND MIT", ""):
        with pytest.raises(UserError, match="forge is under"):
            licence_of(package(License=stated))


def test_dialogues_have_their_share_at_most() -> None:
    documents = [Document("a", text="x" * 10)] * 5
    assert len(first_documents(documents, 35)) == 3


def test_an_epoch_holds_each_document_once(text: Text) -> None:
    documents = tokenize(text.documents, text.tokenizer)
    rows = StepRows(documents, SHAPE, TRAINING)
    steps = [rows.of_step(step) for step in range(2 * rows.steps_per_epoch)]
    assert {tuple(step.shape) for step in steps} == {(2, 33), (4, 17)}
    everything, orders = torch.cat(documents).bincount(minlength=300), []
    for epoch in (steps[: rows.steps_per_epoch], steps[rows.steps_per_epoch :]):
        assert all((step[:-1, -1] == step[1:, 0]).all() for step in epoch)
        orders.append(torch.cat([step[:, :-1].flatten() for step in epoch]))
        assert (orders[-1].bincount(minlength=300) <= everything).all()
        assert everything.sum() - len(orders[-1]) <= TRAINING.tokens_per_step
    assert not torch.equal(*orders)
    fresh = StepRows(documents, SHAPE, TRAINING)
    assert torch.equal(fresh.of_step(len(steps) - 1), steps[-1])


@pytest.fixture(scope="module")
def finished(text: Text, tmp_path_factory: pytest.TempPathFactory) -> TargetRun:
    run = TargetRun(text, tmp_path_factory.mktemp("finished"), SHAPE, TRAINING)
    run.train()
    return run


def same_weights(first: TargetRun, second: TargetRun) -> bool:
    pairs = zip(first.model.parameters(), second.model.parameters(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("stop", [3, 7])  # at the constant rate, and in the decay
def test_a_stopped_run_goes_on_as_if_it_had_not_been(
    stop: int, finished: TargetRun, text: Text, tmp_path: Path
) -> None:
    stopped = TargetRun(text, tmp_path, SHAPE, TRAINING)
    while stopped.step < stop:
        stopped.take_step()
    stopped.save()
    resumed = TargetRun(text, tmp_path, SHAPE, TRAINING)
    assert resumed.step == stop
    resumed.train()
    assert same_weights(resumed, finished)


def test_a_finished_run_is_extended_from_before_its_decay(finished: TargetRun, text: Text) -> None:
    """Its decay leaves no trace in a longer run, nor in one that decays later. The same run stays as it is."""
    again = TargetRun(text, finished.out, SHAPE, TRAINING)
    assert again.step == 8
    assert same_weights(again, finished)
    longer = TargetRun(text, finished.out, SHAPE, replace(TRAINING, steps=16))
    assert longer.step == 6
    assert not same_weights(longer, finished)
    optimizer = replace(TRAINING.optimizer, decay_share=0.125)
    later = TargetRun(text, finished.out, SHAPE, replace(TRAINING, optimizer=optimizer))
    assert (later.step, later.decay_start) == (6, 7)
    with pytest.raises(UserError, match="holds 6 steps: give --steps 8 or more"):
        TargetRun(text, finished.out, SHAPE, replace(TRAINING, steps=6))


def test_a_run_begins_with_the_mean_of_models(finished: TargetRun, text: Text, tmp_path: Path) -> None:
    """They are written in bf16, at half the size."""
    other = TargetRun(text, tmp_path / "other", SHAPE, replace(TRAINING, seed=1))
    other.save()
    start = [str(run.out / "model") for run in (finished, other)]
    run = TargetRun(text, tmp_path / "run", SHAPE, replace(TRAINING, start=start))
    assert run.step == 0
    for mean, *own in zip(*(one.model.parameters() for one in (run, finished, other)), strict=True):
        first, second = (weights.bfloat16().float() for weights in own)
        torch.testing.assert_close(mean, (first + second) / 2)
    assert not same_weights(finished, other)


def test_the_model_is_a_target_that_chats(finished: TargetRun) -> None:
    """Its turns end with a mark, after which a dialogue goes on with no token read twice or otherwise."""
    target = Target.from_pretrained(finished.out / "model", "cpu", torch.float32)
    assert target.tokenizer is not None
    end = target.tokenizer.convert_tokens_to_ids(END_OF_TURN)
    assert set(target.eos_token_ids) == {target.tokenizer.eos_token_id, end}
    asked = [CHAT[0], CHAT[1], {"role": "user", "content": "Again."}]
    dialogue = Dialogue(Prompt(messages=asked), 0, 0, Sampling(0.0), target, Markers.of_target(target))
    opened = dialogue.context
    dialogue.take([*target.tokenizer("x = 1", add_special_tokens=False)["input_ids"], cast(int, end)], 100)
    assert dialogue.context[: len(opened)] == opened
    assert target.tokenizer.decode(dialogue.context[len(opened) :]) == "x = 1<|end|><|user|>Again.<|end|><|assistant|>"
    assert not dialogue.samples  # one sample holds both turns


def test_the_loss_is_that_of_each_token_and_byte(text: Text, tmp_path: Path) -> None:
    """A model whose head knows nothing has the logarithm of the vocabulary as its loss."""
    run = TargetRun(text, tmp_path, SHAPE, TRAINING)
    torch.nn.init.zeros_(run.model.lm_head.weight)
    loss = function_loss(run.model, text.tokenizer, ["a = 1\n"])
    assert loss.per_token == pytest.approx(torch.tensor(len(text.tokenizer)).log().item())
    assert loss.num_bytes == 6
    assert loss.per_byte == pytest.approx(loss.nats / 6)


def test_a_loop_is_four_tokens_five_times() -> None:
    unit = [1, 2, 3, 4]
    assert loops([9, *unit, 8, *unit, 7, *unit, 6, *unit, 5, *unit])
    assert not loops([9, *unit, 8, *unit, 7, *unit, 6, *unit])
    assert loops([7] * 8)
    assert not loops([7] * 7)
    assert not loops([1, 2])


def test_the_last_steps_read_more_of_the_library(text: Text, tmp_path: Path) -> None:
    run = TargetRun(text, tmp_path, SHAPE, TRAINING)
    once = StepRows(tokenize(text.documents, text.tokenizer), SHAPE, TRAINING).num_tokens
    library = sum(map(len, tokenize(text.documents[: len(FUNCTIONS)], text.tokenizer)))
    assert run.rows.num_tokens == once + (TRAINING.stdlib_copies - 1) * library
    assert run.last_rows.num_tokens == once + (TRAINING.last_stdlib_copies - 1) * library
    run.step = run.decay_start
    del run.rows
    run.take_step()


def test_a_loop_begins_with_its_first_copy() -> None:
    unit = [1, 2, 3, 4, 5]
    assert loop_start([8, 9, 8, 9, *unit, *unit, *unit, *unit, *unit]) == 9
    with pytest.raises(ValueError, match="no loop"):
        loop_start([*unit, *unit])


def test_pairs_go_on_from_where_greedy_answers_loop(text: Text, tmp_path: Path) -> None:
    """A pair's beginning and its unwanted tokens are of the greedy answer; its wanted sample holds no loop."""
    model = TargetRun(text, tmp_path, SHAPE, TRAINING).model.eval()
    prompts = prompts_of(text.documents, text.tokenizer)
    settings = Unlearning(batch_size=7, num_unwanted=3)
    pairs = loop_pairs(model, prompts, settings)
    assert pairs
    greedy = [prompt + answer for prompt, answer in zip(prompts, answers(model, prompts, sampled=False), strict=True)]
    for pair in pairs:
        told = pair.beginning + pair.unwanted
        assert any(whole[: len(told)] == told for whole in greedy)
        assert len(pair.unwanted) <= 3
        assert not loops(pair.wanted)


def test_wanted_tokens_are_made_likelier_and_unwanted_ones_less(text: Text, tmp_path: Path) -> None:
    """The losses are -log(p) and -log(1 - p) of the tokens of continuations alone."""
    run = TargetRun(text, tmp_path, SHAPE, TRAINING)
    torch.nn.init.zeros_(run.model.lm_head.weight)
    losses = continuation_losses(run.model, [[3, 4, 5], [6]], [[7, 8], [9]])
    num_tokens = torch.tensor(float(len(text.tokenizer)))
    torch.testing.assert_close(losses, num_tokens.log().expand(3))
    torch.testing.assert_close(unlikelihood(losses), -(1 - 1 / num_tokens).log().expand(3))


def test_a_step_of_unlearning_learns_from_pairs(text: Text, tmp_path: Path) -> None:
    pair = LoopPair([3, 4, 5], wanted=[7, 8], unwanted=[9, 9])
    training = replace(TRAINING, optimizer=replace(TRAINING.optimizer, warmup_share=0.0, decay_share=1.0))
    run = UnlearningRun(text, tmp_path, SHAPE, training, [pair], Unlearning())

    def loss_of_pair() -> tuple[float, float]:
        with torch.no_grad():
            kinds = (continuation_losses(run.model, [pair.beginning], [own]) for own in (pair.wanted, pair.unwanted))
            wanted, unwanted = kinds
        return wanted.mean().item(), unlikelihood(unwanted).mean().item()

    before = loss_of_pair()
    run.train()
    after = loss_of_pair()
    assert after[0] < before[0]
    assert after[1] < before[1]


def test_given_again_the_mean_of_the_weights_before_and_after_is_the_same(text: Text, tmp_path: Path) -> None:
    """The state keeps the weights after the training, of which a mean is made anew."""
    first = TargetRun(text, tmp_path / "first", SHAPE, TRAINING)
    first.save_model()
    (tmp_path / "first/model/README.md").write_text("# Card\n\n| setting | value |\n")
    starts = [str(tmp_path / "first/model")]
    training = replace(TRAINING, optimizer=replace(TRAINING.optimizer, decay_share=1.0), start=starts)
    pairs = [LoopPair([3, 4, 5], wanted=[7, 8], unwanted=[9, 9])]
    written = []
    for _ in range(2):
        run = UnlearningRun(text, tmp_path / "out", SHAPE, training, pairs, Unlearning(kept_share=0.25))
        before = list(mean_model(starts).parameters())
        run.train()
        after = [weight.detach().clone() for weight in run.model.parameters()]
        write_mean(run, before, starts)
        written.append([weight.detach() for weight in mean_model([str(tmp_path / "out/model")]).parameters()])
        assert "Then unlearnt loops" in (tmp_path / "out/model/README.md").read_text()
    for weight, own, old, again in zip(written[0], after, before, written[1], strict=True):
        torch.testing.assert_close(weight, 0.75 * own + 0.25 * old.detach(), atol=0.01, rtol=0.01)  # written in bf16
        assert torch.equal(weight, again)
