"""Every family that is said to be served decodes trees on slots as transformers reads their branches, and others are
refused with the reason.

The witness is transformers' own model with eager attention and no cache, on each node's path as a text of its own.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import (
    ALTERNATES,
    LOCAL_EXPERTS,
    MULTIMODAL,
    RECURRENT,
    RUN_BY_ENGINES,
    SERVED,
    SLIDES,
    VOCABULARY,
    family_config,
    plain_model,
)
from tiny_target import tiny_tokenizer
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from draftsmith.inference.decoding.graphs import can_be_recorded
from draftsmith.models import DRAFTERS, Target
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import EagleConfig
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.trees import ancestor_words, node_depths
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.cache import SlotCache
from draftsmith.models.slots.window import Window, chain_window
from draftsmith.models.target.loading import LanguageModel, is_multimodal, model_without_memory
from draftsmith.models.target.support import why_not_decoded, why_not_trained

LENGTHS = [13, 8]  # of the prompts
CHUNK = 5
PARENTS = [[-1, -1, 0, 0, 2, 4], [-1, 0, 1, 1, 3, 0]]  # ragged trees, four and five deep
KEPT = [[1, 3, 5], [1, 2, 4]]  # columns of the branch that is kept of each
NEXT = 3  # tokens after it
FAMILIES = SERVED | RECURRENT | MULTIMODAL

REFUSED: dict[str, str] = {
    "bart": "encoder-decoder",
    "whisper": "encoder-decoder",
    "deepseek_v4": "rules of their own",
    "glm5_next": "pools of tokens",
    "mamba": "running state",
    "mamba2": "running state",
    "rwkv": "running state",
    "jamba": "running state",
    "recurrent_gemma": "running state",
    "minimax": "linear_attention",
    "bloom": "ALiBi",
    "mpt": "ALiBi",
    "bert": "both directions",
    "falcon": "code of its own",
    "gptj": "code of its own",
    "xglm": "code of its own",
    "phi4_multimodal": "multimodal",
    "t5": "encoder-decoder",
    "clip_text_model": "no causal language model",
}


def target_like(plain: PreTrainedModel, config: PretrainedConfig) -> Target:
    auto_class = AutoModelForMultimodalLM if is_multimodal(config) else AutoModelForCausalLM
    model = auto_class.from_config(config, attn_implementation=ATTENTION)
    model.load_state_dict(plain.state_dict())
    if is_multimodal(config):
        model = LanguageModel(model)
    return Target(model.eval().requires_grad_(False), None, config.model_type)


def branch(parents: list[int], column: int) -> list[int]:
    """Columns from the root to one."""
    return [0] if column == 0 else [*branch(parents, parents[column - 1] + 1), column]


class OnSlots:
    """A target decoding two rows on slots: ragged prompts in chunks, a tree, then on from the branch that is kept."""

    def __init__(self, target: Target, layer_ids: tuple[int, ...]) -> None:
        self.target, self.layer_ids, self.cache = target, layer_ids, SlotCache(2, 32)

    def read(self, token_ids: Tensor, window: Window) -> tuple[Tensor, Tensor]:
        """Logits [2, T, V] and captured layers [2, T, A * H]."""
        features = self.target.run(token_ids, window, self.cache, self.layer_ids)
        assert features.layers is not None
        return self.target.logits(features.last_hidden), features.layers

    def read_prompts(self, prompts: Tensor) -> None:
        for start in range(0, prompts.shape[1], CHUNK):
            chunk = prompts[:, start : start + CHUNK]
            num_text = (torch.tensor(LENGTHS) - start).clamp(0, chunk.shape[1])
            self.read(chunk, chain_window(torch.tensor([start, start]), chunk.shape[1], num_text))

    def read_trees(self, drafts: Tensor) -> tuple[Tensor, Tensor]:
        prefix, parents = torch.tensor(LENGTHS), torch.tensor(PARENTS)
        depths, words = node_depths(parents, 6), ancestor_words(parents, 6)
        slots = chain_window(prefix, drafts.shape[1]).slots
        return self.read(drafts, Window(slots, prefix[:, None] + depths, prefix, words))

    def keep_and_read(self, next_tokens: Tensor) -> tuple[Tensor, Tensor]:
        prefix = torch.tensor(LENGTHS)
        self.cache.keep_path(prefix, torch.tensor(KEPT))
        return self.read(next_tokens, chain_window(prefix + 1 + len(KEPT[0]), NEXT))


@torch.no_grad()
def on_their_own(plain: PreTrainedModel, texts: list[Tensor], layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Of each text's last token: logits and hidden states in a plain pass over the right-padded texts."""
    padded, last = in_rows(texts)
    output = plain(input_ids=padded, use_cache=False, output_hidden_states=True)
    layers = torch.cat([output.hidden_states[layer_id][last] for layer_id in layer_ids], -1)
    return output.logits[last], layers


def in_whole_rows(target: Target, texts: list[Tensor], layer_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The same of the features that a drafter is trained on."""
    padded, last = in_rows(texts)
    features = target.features(Batch(padded, torch.ones_like(padded, dtype=torch.bool)), layer_ids)
    assert features.layers is not None
    return target.logits(features.last_hidden[last]), features.layers[last]


def in_rows(texts: list[Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Right-padded rows of texts, and the place of each one's last token."""
    padded = nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=3)
    return padded, (torch.arange(len(texts)), torch.tensor([len(text) - 1 for text in texts]))


@pytest.mark.parametrize("model_type", FAMILIES)
def test_trees_on_slots_are_their_branches_in_plain_attention(model_type: str) -> None:
    """And so are the same texts in whole rows, as they are read in training."""
    config, layer_ids = family_config(model_type, FAMILIES[model_type]), (1, 2)
    assert why_not_trained(config) is None
    assert why_not_decoded(config) is None
    plain = plain_model(config)
    on_slots = OnSlots(target_like(plain, family_config(model_type, FAMILIES[model_type])), layer_ids)
    prompts, drafts, further = (torch.randint(3, VOCABULARY, (2, n)) for n in (max(LENGTHS), 7, NEXT))
    on_slots.read_prompts(prompts)
    found = [
        torch.cat(pair, 1) for pair in zip(on_slots.read_trees(drafts), on_slots.keep_and_read(further), strict=True)
    ]

    texts = []
    for row, length in enumerate(LENGTHS):
        text, parents = prompts[row, :length], PARENTS[row]
        texts += [torch.cat([text, drafts[row, branch(parents, column)]]) for column in range(7)]
        kept = torch.cat([text, drafts[row, [0, *KEPT[row]]]])
        texts += [torch.cat([kept, further[row, : count + 1]]) for count in range(NEXT)]
    expected = on_their_own(plain, texts, layer_ids)
    whole = in_whole_rows(on_slots.target, texts, layer_ids)
    for ours, of_rows, theirs in zip(found, whole, expected, strict=True):
        size = theirs.abs().max().clamp(min=1)
        assert (ours.flatten(0, 1) - theirs).abs().max() <= 1e-5 * size
        assert (of_rows - theirs).abs().max() <= 1e-5 * size


def test_the_page_names_the_families_that_are_tested() -> None:
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text()
    for title, families in (("What is decoded here", FAMILIES), ("What an engine has to run", RUN_BY_ENGINES)):
        section = page.partition(f"## {title}")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith("|")]
        assert set(re.findall(r"`(\w+)`", "".join(rows))) == set(families)
    assert len(FAMILIES) >= 90


def test_the_page_names_those_whose_rounds_are_not_recorded() -> None:
    page = (Path(__file__).parents[2] / "docs" / "targets.md").read_text()
    named = re.findall(r"`(\w+)`", page.partition("as a whole (of those above")[2].partition(")")[0])
    models = {name: model_without_memory(family_config(name, FAMILIES[name]), name) for name in FAMILIES}
    assert named == sorted(name for name, model in models.items() if not can_be_recorded(model))


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_layers_of_several_streams_are_not_read(kind: str) -> None:
    """Hy4's layers give a tensor for each stream. What reads the last hidden state alone is trained for it."""
    config = family_config("hy_v4", FAMILIES["hy_v4"])
    target = target_like(plain_model(config), config)
    with pytest.raises(UserError, match="layers of hy_v4 give 4 residual streams"):
        DRAFTERS[kind].from_target(DRAFTERS[kind].config_class(kind=kind), target)
    token_ids = torch.arange(3, 12)[None]
    batch = Batch(token_ids, torch.ones_like(token_ids, dtype=torch.bool))
    eagle = DRAFTERS["eagle"].from_target(EagleConfig(), target)
    for total, count in eagle.loss(batch, target.features(batch, eagle.layer_ids)).values():
        assert torch.isfinite(total / count)


@pytest.mark.parametrize("model_type", RUN_BY_ENGINES)
def test_what_an_engine_has_to_run_is_trained_for_without_decoding_here(model_type: str, tmp_path: Path) -> None:
    """Two questions with answers of their own; the refusal of the one names the way of the other."""
    config = family_config(model_type, RUN_BY_ENGINES[model_type])
    assert why_not_trained(config) is None
    assert why_not_decoded(config)
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"cannot be decoded here.*prepare --endpoint.*data\.features_endpoint"):
        Target.from_pretrained(tmp_path, "cpu")


@torch.no_grad()
@pytest.mark.parametrize("model_type", RUN_BY_ENGINES)
def test_first_layers_of_what_an_engine_runs_are_its_own(model_type: str, tmp_path: Path) -> None:
    """The states of an engine are compared with those of the first layers, which are read alone."""
    whole = plain_model(family_config(model_type, RUN_BY_ENGINES[model_type]))
    whole.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    token_ids = torch.randint(3, VOCABULARY - 8, (1, 9))
    first = Target.first_layers_from_pretrained(tmp_path, 2, torch.device("cpu"), torch.float32)
    found = first.features(Batch(token_ids, torch.ones_like(token_ids, dtype=torch.bool)), (2,)).layers
    expected = whole(input_ids=token_ids, use_cache=False, output_hidden_states=True).hidden_states[2]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("model_type", REFUSED)
def test_refusals_name_the_reason_before_weights_are_read(model_type: str, tmp_path: Path) -> None:
    """The directory holds a config and nothing else."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    CONFIG_MAPPING[model_type]().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=REFUSED[model_type]):
        Target.from_pretrained(tmp_path, "cpu")


def test_falcon_with_alibi_is_refused_for_it() -> None:
    assert "ALiBi" in (why_not_trained(CONFIG_MAPPING["falcon"](alibi=True)) or "")


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("phimoe", {**LOCAL_EXPERTS, **SLIDES}, "eager attention"),  # its window is in masks alone, no argument
        ("modernbert-decoder", ALTERNATES, "eager attention"),  # a head of several layers
        ("doge", {}, "masks"),  # masks of its own, which differ in texts longer than the check's
        ("opt", {"ffn_dim": 32, "word_embed_proj_dim": 16}, "head reads 16"),
    ],
)
def test_what_no_config_tells_is_found_when_loaded(model_type: str, changes: dict[str, Any], reason: str) -> None:
    config = family_config(model_type, changes)
    assert why_not_decoded(config) is None
    with pytest.raises(UserError, match=reason):
        target_like(plain_model(config), family_config(model_type, changes))


@torch.no_grad()
def test_llama_4_is_decoded_as_far_as_its_temperature_is_one() -> None:
    """Tokens further on have their queries scaled, by positions that transformers counts from the first of a pass."""
    changes = {**FAMILIES["llama4_text"], "floor_scale": 16, "attn_temperature_tuning": True}
    tuned = plain_model(family_config("llama4_text", changes))
    even = plain_model(family_config("llama4_text", {**changes, "attn_temperature_tuning": False}))
    even.load_state_dict(tuned.state_dict())
    target = target_like(tuned, family_config("llama4_text", changes))
    assert target.context == 15
    token_ids = torch.arange(3, 3 + 20)[None]
    same = (tuned(token_ids).logits == even(token_ids).logits).all(-1)[0]
    assert same.tolist() == [place < target.context for place in range(20)]


def test_weights_that_are_missing_are_not_made_up(tmp_path: Path) -> None:
    """transformers fills them with random numbers and goes on."""
    plain_model(family_config("llama", {})).base_model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"lacks 1 of its weights, lm_head\.weight"):
        Target.from_pretrained(tmp_path, "cpu")
