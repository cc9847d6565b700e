"""Conversations that the target answers: what it sees before each turn, to the token, and what is trained on."""

import copy
from collections.abc import Callable

import pytest

from draftsmith.data.answers.prepare import PrepareSettings, decode_answers
from draftsmith.data.answers.turns import Dialogue, split_turns
from draftsmith.data.prompts.prompt_formats import Prompt
from draftsmith.data.samples.sample import Sample, loss_mask
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.measuring.spans import Markers
from draftsmith.models import Target, load_drafter
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling

TURN, END = "<|turn|>", "<|end|>"
PLAIN = (
    "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
)
STRIPS_THINKING = PLAIN.replace("m.content", "(m.content.split('</think>')[-1] if not loop.last else m.content)")
OPENS_THINKING = PLAIN.replace("<|turn|>assistant\n", "<|turn|>assistant\n<think>")
TRIMS = PLAIN.replace("m.content", "m.content | trim")
# As gpt-oss: thoughts are refused in the content and left out of history, and the answer has a channel.
HARMONY = (
    "{% for m in messages %}"
    "{% if m.role != 'assistant' %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}"
    "{% else %}{% if '<|channel|>' in m.content %}{{ raise_exception('tags in the content') }}{% endif %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
HARMONY_TOKENS = ["<|start|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>", "<|constrain|>"]
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "heat it"},
    {"role": "assistant", "content": "written by another"},
    {"role": "user", "content": "strike it"},
    {"role": "assistant", "content": "by another, too"},
]


@pytest.fixture(scope="module")
def make_target(tiny_target: Target) -> Callable[[str], Target]:
    """The tiny target with a chat template; <|end|> ends its texts. Its weights know nothing of the new tokens."""

    def make(template: str) -> Target:
        target = copy.copy(tiny_target)
        target.tokenizer = copy.deepcopy(tiny_target.tokenizer)
        assert target.tokenizer is not None
        target.tokenizer.add_special_tokens({"additional_special_tokens": [TURN, END]})
        target.tokenizer.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        target.tokenizer.chat_template = template
        target.model = copy.copy(tiny_target.model)
        target.model.generation_config = copy.deepcopy(tiny_target.model.generation_config)
        target.model.generation_config.eos_token_id = target.tokenizer.convert_tokens_to_ids(END)
        return target

    return make


def begin(target: Target, messages: list[dict]) -> Dialogue:
    return Dialogue(Prompt(messages=messages, domain="forge"), 7, 7, Sampling(), target, Markers.of_target(target))


def ids(target: Target, text: str) -> list[int]:
    assert target.tokenizer is not None
    return target.tokenizer(text, add_special_tokens=False)["input_ids"]


def answer(target: Target, dialogue: Dialogue, *texts: str) -> list[Sample]:
    for text in texts:
        dialogue.take(ids(target, text), most=1000)
    assert dialogue.finished
    return dialogue.samples


def texts(target: Target, sample: Sample) -> list[tuple[str, str]]:
    assert target.tokenizer is not None
    return [(target.tokenizer.decode(sample.token_ids[s.start : s.end]), s.label) for s in sample.spans]


def test_turns_are_one_sample_where_the_template_leaves_history_alone(make_target: Callable[[str], Target]) -> None:
    """The answers of others are gone, and only the target's own are trained on."""
    target = make_target(PLAIN)
    (sample,) = answer(target, begin(target, CHAT), "It glows.<|end|>", "Struck.<|end|>")
    whole = (
        "<|turn|>system\nbe brief<|end|>\n<|turn|>user\nheat it<|end|>\n<|turn|>assistant\nIt glows.<|end|>\n"
        "<|turn|>user\nstrike it<|end|>\n<|turn|>assistant\nStruck.<|end|>"
    )
    assert sample.token_ids == ids(target, whole)
    assert texts(target, sample) == [("It glows.<|end|>", "answer"), ("Struck.<|end|>", "answer")]
    assert loss_mask(sample).sum() == len(ids(target, "It glows.<|end|>Struck.<|end|>"))
    assert (sample.finish_reason, sample.prompt_index, sample.domain) == ("eos", 7, "forge")


def test_of_several_answers_in_a_row_none_stays() -> None:
    """But a call with its result, which no other call has, and what opens a conversation."""
    roles = "assistant user assistant assistant user assistant assistant tool"
    turns = split_turns([{"role": role, "content": ""} for role in roles.split()])
    assert [[message["role"] for message in turn.messages] for turn in turns] == [
        ["assistant", "user"],
        ["user"],
        ["assistant", "tool"],
    ]


def test_a_turn_that_the_template_refuses_is_found_before_anything_is_answered(
    make_target: Callable[[str], Target],
) -> None:
    """As Mistral's, Gemma's and Llama-2's: user and assistant have to take turns."""
    roles = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('take turns') }}{% endif %}"
    target = make_target(PLAIN.replace("{% for m in messages %}", "{% for m in messages %}" + roles))
    messages = [*CHAT[1:], {"role": "user", "content": "cool it"}]
    begin(target, messages).check_later_turns()
    with pytest.raises(UserError, match="take turns"):
        begin(target, [*messages, {"role": "user", "content": "now"}]).check_later_turns()


def test_tokens_stay_as_sampled_through_later_turns(make_target: Callable[[str], Target]) -> None:
    """A text sampled letter by letter would be tokenised otherwise if it were rendered again."""
    target = make_target(PLAIN)
    sampled = [token for letter in "The iron" for token in ids(target, letter)] + ids(target, END)
    assert sampled != ids(target, "The iron<|end|>")
    dialogue = begin(target, CHAT)
    dialogue.take(sampled, most=1000)
    (sample,) = answer(target, dialogue, "Struck.<|end|>")
    first = sample.spans[0]
    assert sample.token_ids[first.start : first.end] == sampled


def test_thinking_taken_out_of_history_ends_the_sample(make_target: Callable[[str], Target]) -> None:
    """The second answer is written without sight of the first one's thoughts, so it may not stand behind them."""
    target = make_target(STRIPS_THINKING)
    first, second = answer(
        target, begin(target, CHAT), "<think>hot?</think>It glows.<|end|>", "<think>hit</think>Struck.<|end|>"
    )
    assert texts(target, first) == [("<think>hot?</think>", "thinking"), ("It glows.<|end|>", "answer")]
    assert texts(target, second) == [("<think>hit</think>", "thinking"), ("Struck.<|end|>", "answer")]
    seen = second.token_ids[: second.spans[0].start]
    assert seen == ids(
        target,
        "<|turn|>system\nbe brief<|end|>\n<|turn|>user\nheat it<|end|>\n<|turn|>assistant\nIt glows.<|end|>\n"
        "<|turn|>user\nstrike it<|end|>\n<|turn|>assistant\n",
    )
    (whole,) = answer(target, begin(target, CHAT), "It glows.<|end|>", "Struck.<|end|>")  # nothing to take out
    assert len(whole.spans) == 2


def test_trimmed_answers_end_the_sample(make_target: Callable[[str], Target]) -> None:
    target = make_target(TRIMS)
    first, second = answer(target, begin(target, CHAT), " It glows.<|end|>", "Struck.<|end|>")
    assert texts(target, first) == [(" It glows.<|end|>", "answer")]
    assert target.tokenizer is not None
    assert "\nIt glows." in target.tokenizer.decode(second.token_ids[: second.spans[0].start])


def test_a_template_may_open_the_thinking(make_target: Callable[[str], Target]) -> None:
    target = make_target(OPENS_THINKING)
    (sample,) = answer(target, begin(target, CHAT[:2]), "hot?</think>It glows.<|end|>")
    assert texts(target, sample) == [("hot?</think>", "thinking"), ("It glows.<|end|>", "answer")]


def test_tool_calls_are_labelled(make_target: Callable[[str], Target]) -> None:
    target = make_target(PLAIN)
    (sample,) = answer(target, begin(target, CHAT[:2]), "So <tool_call>heat()</tool_call><|end|>")
    labels = [("So ", "answer"), ("<tool_call>heat()</tool_call>", "tool_call"), ("<|end|>", "answer")]
    assert texts(target, sample) == labels


def test_a_tool_result_stays_with_its_own_call(make_target: Callable[[str], Target]) -> None:
    """The target writes a call of its own, but the result in the conversation was that of the given one."""
    given = {"role": "assistant", "content": "<tool_call>heat(900)</tool_call>"}
    messages = [*CHAT[:2], given, {"role": "tool", "content": "red"}, {"role": "assistant", "content": "old"}]
    target = make_target(PLAIN)
    call, reply = answer(target, begin(target, messages), "<tool_call>heat()</tool_call><|end|>", "It is red.<|end|>")
    assert texts(target, call)[0] == ("<tool_call>heat()</tool_call>", "tool_call")
    assert texts(target, reply) == [("It is red.<|end|>", "answer")]
    assert target.tokenizer is not None
    assert "heat(900)" in target.tokenizer.decode(reply.token_ids)
    assert "heat()" not in target.tokenizer.decode(reply.token_ids)


def harmony(make_target: Callable[[str], Target]) -> Target:
    """Return a target that ends its turns as gpt-oss does, by an answer or by a call."""
    target = make_target(HARMONY)
    assert target.tokenizer is not None
    target.tokenizer.add_special_tokens({"additional_special_tokens": HARMONY_TOKENS})
    ends = target.tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    target.model.generation_config.eos_token_id = ends
    return target


def test_harmony_goes_on_without_its_thoughts(make_target: Callable[[str], Target]) -> None:
    """What the target reads before its second turn is what serving gives it: the first answer, in its channel."""
    target = harmony(make_target)
    wrote = "<|channel|>analysis<|message|>hot?<|end|><|start|>assistant<|channel|>final<|message|>{}<|return|>"
    first, second = answer(target, begin(target, CHAT), wrote.format("It glows."), wrote.format("Struck."))
    assert texts(target, first) == [
        ("<|channel|>analysis<|message|>hot?<|end|>", "thinking"),
        ("<|start|>assistant<|channel|>final<|message|>It glows.<|return|>", "answer"),
    ]
    assert second.token_ids[: second.spans[0].start] == ids(
        target,
        "<|start|>system<|message|>be brief<|end|><|start|>user<|message|>heat it<|end|>"
        "<|start|>assistant<|channel|>final<|message|>It glows.<|end|><|start|>user<|message|>strike it<|end|>"
        "<|start|>assistant",
    )
    assert [span.label for span in second.spans] == ["thinking", "answer"]


def test_a_call_without_a_result_ends_the_conversation(make_target: Callable[[str], Target]) -> None:
    target = harmony(make_target)
    wrote = "<|channel|>commentary to=functions.heat <|constrain|>json<|message|>{}<|call|>"
    (sample,) = answer(target, begin(target, CHAT), wrote)
    assert texts(target, sample) == [(wrote, "tool_call")]
    assert (sample.finish_reason, sample.unanswered_turns) == ("eos", 1)


def test_a_cut_answer_ends_the_conversation(make_target: Callable[[str], Target]) -> None:
    """Nobody replies to half a sentence; the sample says that a turn got no answer."""
    target = make_target(PLAIN)
    (sample,) = answer(target, begin(target, CHAT), "It")
    assert (sample.finish_reason, sample.unanswered_turns) == ("length", 1)


@pytest.mark.parametrize(("template", "num_samples"), [(PLAIN, 1), (TRIMS, 1)])
def test_a_conversation_ends_at_the_context(
    template: str, num_samples: int, make_target: Callable[[str], Target]
) -> None:
    target = make_target(template)
    dialogue = begin(target, CHAT)
    dialogue.take(ids(target, " It glows.<|end|>"), most=len(dialogue.context) + 6)
    assert dialogue.finished
    assert [sample.finish_reason for sample in dialogue.samples] == ["eos"] * num_samples
    assert dialogue.samples[-1].unanswered_turns == 1
    assert len(dialogue.samples[0].spans) == 1


def test_every_turn_is_what_the_target_decodes(tiny_target: Target, make_target: Callable[[str], Target]) -> None:
    """Through the decoder, turns of several conversations together: each context gets its own greedy answer."""
    target = make_target(PLAIN.replace("<|end|>", "").replace("<|turn|>", ""))  # only tokens that the weights know
    chats = [[{"role": "user", "content": str(i)}, *CHAT[2:]] for i in range(6)]
    plain = SpeculativeDecoder(target, load_drafter("none", target))
    contexts = [begin(target, chat).context for chat in chats]
    common = [token for answer in plain.generate(contexts, 24).token_ids for token in set(answer[2:])]
    target.model.generation_config.eos_token_id = max(set(common), key=common.count)  # so that answers end

    settings = PrepareSettings(max_new_tokens=24, batch_size=2)
    dialogues = [begin(target, chat) for chat in chats]
    done = list(decode_answers(plain, dialogues, settings))
    assert sorted(map(id, done)) == sorted(map(id, dialogues))
    assert {dialogue.num_answers for dialogue in done} >= {2}
    for sample in (sample for dialogue in done for sample in dialogue.samples):
        for start, end, _ in sample.spans:
            assert plain.generate([sample.token_ids[:start]], 24).token_ids[0] == sample.token_ids[start:end]


@pytest.mark.parametrize(
    ("roles", "said"),
    [
        ("user", ["user"]),
        ("system user assistant user", ["system user", "user"]),
        ("assistant user assistant", ["assistant user"]),  # an opening line is given
        ("user assistant", ["user"]),
        ("user assistant tool assistant", ["user", "tool"]),
        ("assistant", []),
    ],
)
def test_turns(roles: str, said: list[str]) -> None:
    turns = split_turns([{"role": role, "content": ""} for role in roles.split()])
    assert [" ".join(message["role"] for message in turn.messages) for turn in turns] == said
    assert [turn.kept_answer is not None for turn in turns] == [
        "tool" in "".join(said[i + 1 : i + 2]) for i in range(len(said))
    ]


def test_nothing_to_answer_is_refused(make_target: Callable[[str], Target]) -> None:
    target = make_target(PLAIN)
    with pytest.raises(UserError, match="nothing to answer"):
        begin(target, [{"role": "assistant", "content": "hello"}])


def test_messages_without_a_template_are_refused(tiny_target: Target) -> None:
    with pytest.raises(UserError, match="no chat template"):
        begin(tiny_target, CHAT)
