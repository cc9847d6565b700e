"""Draft models of another tokenizer than the target's: they draft in the target's vocabulary from the start."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_target import MARK, TEXT, tiny_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith.inference import SpeculativeDecoder
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig
from draftsmith.models.errors import UserError
from draftsmith.models.target.other_tokenizer import OtherTokenizer, pieces, token_bytes

ASCII = "".join(map(chr, range(33, 127)))


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """Subwords that write a space as sentencepiece does, with single bytes for what they lack."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<unk>", "<s>", "</s>", *bytes_],
        initial_alphabet=list(ASCII),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*TEXT, "forge and anvil, forge and anvil"], trainer)
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] not in bytes_]
    whole = Tokenizer.from_str(json.dumps(content))  # in which the bytes are tokens as others are
    return PreTrainedTokenizerFast(tokenizer_object=whole, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def byte_level_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level subwords with other merges than the target's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=290, special_tokens=["<end>", MARK], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["forge and anvil, forge and anvil, the iron"], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=MARK, eos_token="<end>")


TOKENIZERS = {"byte-level": byte_level_tokenizer, "sentencepiece": sentencepiece_tokenizer}


@pytest.fixture(params=TOKENIZERS)
def other(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


@pytest.fixture
def model_dir(other: PreTrainedTokenizerFast, make_target_dir: Any) -> Path:
    folder: Path = make_target_dir(vocab_size=len(other), num_hidden_layers=1, pad_token_id=len(other) - 1)
    other.save_pretrained(folder)
    return folder


def test_tokens_are_read_as_the_bytes_that_they_decode_to(other: PreTrainedTokenizerFast) -> None:
    """Of every text, whatever its letters."""
    read = token_bytes(other, "it")
    for text in ("the smith's anvil", " h\u00e9 \u2603", "a\tb"):
        ids = other(text, add_special_tokens=False)["input_ids"]
        assert b"".join(read[token_id] for token_id in ids).decode() == text
    assert not set(read) & set(other.all_special_ids)


def test_pieces_are_the_longest_at_each_place() -> None:
    own = {b"a": 0, b"ab": 1, b"abc": 2, b"d": 3}
    assert pieces(b"abcabd", own, 3) == [2, 1, 3]
    assert pieces(b"axd", own, 3) == [0, 3]  # there is nothing for x


def test_rows_are_those_of_the_same_bytes_or_the_mean_of_parts(other: PreTrainedTokenizerFast) -> None:
    target = tiny_tokenizer()
    table = OtherTokenizer(other, target, "it")
    weight = torch.randn(len(other), 8)
    rows = table.rows(weight, len(target) + 5)
    own_bytes, new_bytes = token_bytes(other, "it"), token_bytes(target, "target")
    for token_id, text in new_bytes.items():
        parts = [table.same[token_id]] if token_id in table.same else table.parts[token_id]
        assert b"".join(own_bytes[part] for part in parts) == text
        torch.testing.assert_close(rows[token_id], weight[parts].mean(0))
    assert table.parts  # there are such
    assert table.common(len(target) + 5).sum() == len(table.same)
    ends = (other.eos_token_id, other.vocab[MARK]) if MARK in other.vocab else (other.eos_token_id,)
    assert table.same[target.eos_token_id] in ends
    torch.testing.assert_close(rows[-1], weight.mean(0))  # of what the tokenizer does not know


def test_it_drafts_in_the_targets_vocabulary(model_dir: Path, tiny_target: Target, tmp_path: Path) -> None:
    """The text is the target's; a checkpoint is an ordinary model that loads with the target's vocabulary."""
    drafter = DraftModel.from_target(DraftModelConfig(model=str(model_dir)), tiny_target).eval()
    note = drafter.starting_note(torch.ones(tiny_target.vocab_size))
    assert note is not None
    assert "another tokenizer" in note
    save_drafter(drafter, tmp_path)
    prompts = ["The smith heats the iron", "strike"]
    plain, *others = (
        SpeculativeDecoder(tiny_target, one).generate(prompts, 24)
        for one in (load_drafter("none", tiny_target), drafter, load_drafter(tmp_path, tiny_target))
    )
    assert [output.token_ids for output in others] == [plain.token_ids] * 2
    assert others[0].stats.total == others[1].stats.total
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.vocab_size == tiny_target.vocab_size


def test_the_targets_own_weights_survive_another_order_of_tokens(
    tiny_target: Target, tiny_target_dir: Path, make_target_dir: Any
) -> None:
    """A copy of the target whose tokenizer numbers its tokens otherwise drafts as the target does: all is accepted."""
    tokenizer = tiny_tokenizer()
    state = tokenizer.backend_tokenizer.to_str()
    order = torch.randperm(len(tokenizer) - 1, generator=torch.Generator().manual_seed(0)) + 1  # the mark stays
    renumbered = renumber(state, [0, *order.tolist()])
    folder: Path = make_target_dir()
    model = AutoModelForCausalLM.from_pretrained(tiny_target_dir)
    places = torch.tensor([0, *order.tolist()])
    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        weight = layer.weight.data.clone()
        layer.weight.data[places] = weight
    model.save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=renumbered, bos_token=MARK, eos_token=MARK).save_pretrained(folder)
    drafter = DraftModel.from_target(DraftModelConfig(model=str(folder)), tiny_target).eval()
    output = SpeculativeDecoder(tiny_target, drafter).generate(["strike the iron"], 24, draft_length=3)
    assert output.stats.total.mean_acceptance_length == 4


def renumber(state: str, new_ids: list[int]) -> Tokenizer:
    """Return the tokenizer of a state whose tokens have new ids, by their old ones."""
    content = json.loads(state)
    content["model"]["vocab"] = {token: new_ids[old] for token, old in content["model"]["vocab"].items()}
    return Tokenizer.from_str(json.dumps(content))


def test_tokens_that_are_no_bytes_are_refused(tiny_target: Target, make_target_dir: Any) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "iron": 1}, unk_token="<unk>"))
    folder: Path = make_target_dir(vocab_size=2, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(folder)
    with pytest.raises(UserError, match="cannot be read as bytes"):
        DraftModel.from_target(DraftModelConfig(model=str(folder)), tiny_target)
