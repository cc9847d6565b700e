"""Heads for further tokens (MTP): read from the target's files, by each family's rules, trained as they draft."""

import json
from pathlib import Path

import pytest
import torch
from drafters import assert_trained_as_decoded, build, noisy, random_batch
from head_targets import FAMILIES, add_head, save_head_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafter_configs import MtpConfig
from draftsmith.models.drafters.mtp import Mtp
from draftsmith.models.eagle_parts.unrolled_attention import DraftingSlots
from draftsmith.models.errors import UserError

# The names of public checkpoints: MiMo-7B, Qwen3.5, GLM-4.5 with four experts and one shared one.
ATTENTION = [f"self_attn.{part}_proj.weight" for part in "qkvo"]
BIASES = [f"self_attn.{part}_proj.bias" for part in "qkv"]
HEAD_NORMS = ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
MLP = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
NORMS = ["input_layernorm.weight", "post_attention_layernorm.weight"]
NAMES = {
    "qwen2": {
        f"model.mtp_layers.0.{name}"
        for name in (
            *(f"{part}.weight" for part in ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
            *(*ATTENTION, *BIASES, *NORMS, *(f"mlp.{name}" for name in MLP)),
        )
    },
    "qwen3_5_text": {
        *(f"mtp.{part}.weight" for part in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
        *(f"mtp.layers.0.{name}" for name in (*ATTENTION, *HEAD_NORMS, *NORMS, *(f"mlp.{name}" for name in MLP))),
    },
    "glm4_moe": {
        f"model.layers.4.{name}"
        for name in (
            *(f"{part}.weight" for part in ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
            *(*ATTENTION, *BIASES, *HEAD_NORMS, *NORMS),
            *("mlp.gate.weight", "mlp.gate.e_score_correction_bias"),
            *(
                f"mlp.{expert}.{name}"
                for expert in ("shared_experts", *map("experts.{}".format, range(4)))
                for name in MLP
            ),
        )
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target without a head of each family."""
    return {family: save_head_target(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "llama"])  # as all drafters are tried on
def test_every_family_trains_as_it_drafts(family: str, folders: dict[str, Path]) -> None:
    target = Target.from_pretrained(folders[family], "cpu", torch.float32)
    assert_trained_as_decoded(build("mtp", target), target)


@pytest.mark.parametrize("family", NAMES)
def test_a_head_has_the_names_of_its_family(family: str, folders: dict[str, Path]) -> None:
    target = Target.from_pretrained(folders[family], "cpu", torch.float32)
    assert noisy("mtp", target).engine_tensors().keys() == NAMES[family]


@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text", "qwen2"])
def test_the_targets_own_head_is_read(family: str, tmp_path: Path) -> None:
    """By the name `mtp`, as a new drafter, and without the target's layers: the same tensors to the bit."""
    folder = save_head_target(tmp_path / "target", family)
    target = Target.from_pretrained(folder, "cpu", torch.float32)
    with pytest.raises(UserError, match="needs a checkpoint"):
        load_drafter("mtp", target)
    with pytest.raises(UserError, match="hold no head for further tokens; give drafter.starting_layers=random"):
        Mtp.from_target(MtpConfig(starting_layers="native"), target)
    head = add_head(folder, num_nextn_predict_layers=1, mtp_num_hidden_layers=1)
    repeats = {
        "model.layers.4.shared_head.head.weight": torch.zeros(3),
        "model.layers.4.embed_tokens.weight": torch.zeros(3),
    }
    if family == "glm4_moe":
        save_file(load_file(folder / "model.safetensors") | repeats, folder / "model.safetensors")
    target = Target.from_pretrained(folder, "cpu", torch.float32)
    for drafter in (
        load_drafter("mtp", target),
        Mtp.from_target(MtpConfig(), Target.head_from_pretrained(folder, None, "cpu")),
    ):
        assert drafter.config.starting_layers == "native"
        found = drafter.engine_tensors()
        assert found.keys() == head.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in head.items())


def test_a_new_layer_may_be_the_targets_last(folders: dict[str, Path]) -> None:
    """Experts, too, and the same from a target whose layers are not in memory."""
    whole = Target.from_pretrained(folders["glm4_moe"], "cpu", torch.float32)
    bare = Target.head_from_pretrained(folders["glm4_moe"], None, "cpu", torch.float32)
    last = whole.decoder_layers[-1].state_dict()
    for target in (whole, bare):
        drafter = Mtp.from_target(MtpConfig(starting_layers="target"), target)
        assert all(torch.equal(tensor, last[name]) for name, tensor in drafter.layer.state_dict().items())
    assert Mtp.from_target(MtpConfig(), whole).config.starting_layers == "random"


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("qwen2", {"num_nextn_predict_layers": 3}, "has 3 heads for further tokens"),
        ("qwen2", {"num_nextn_predict_layers": "1"}, "give a whole number"),
        ("glm4_moe", {"kv_lora_rank": 8}, "attends by compressed keys"),
        ("glm4_moe", {"model_type": "glm4"}, "targets of type glm4 have no head"),
    ],
)
def test_other_heads_are_refused_by_name(
    family: str, changes: dict[str, object], message: str, folders: dict[str, Path]
) -> None:
    target = Target.from_pretrained(folders[family], "cpu", torch.float32)
    for name, value in changes.items():
        setattr(target.text_config, name, value)
    with pytest.raises(UserError, match=message):
        Mtp.from_target(MtpConfig(), target)


def test_a_damaged_head_is_refused(tmp_path: Path) -> None:
    folder = save_head_target(tmp_path, "glm4_moe")
    add_head(folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.layers.4.hnorm.weight", "model.layers.4.mlp.experts.2.up_proj.weight"):
        save_file({key: tensor for key, tensor in tensors.items() if key != name}, folder / "model.safetensors")
        target = Target.from_pretrained(folder, "cpu", torch.float32)
        with pytest.raises(UserError, match="state_norm.weight|lack some of their matrices"):
            load_drafter("mtp", target)


def outputs(drafter: Mtp, batch: Batch, states: Tensor, num_steps: int) -> list[Tensor]:
    slots = DraftingSlots.from_counted(torch.ones_like(batch.loss_mask), batch.positions)
    with torch.no_grad():
        return list(drafter.unroll(batch, states.flatten(0, 1), slots, num_steps))


@pytest.mark.parametrize("family", ["qwen2", "glm4_moe"])
def test_no_slot_sees_what_is_not_known_when_it_drafts(family: str, folders: dict[str, Path]) -> None:
    """Step k of slot t reads states up to t and tokens up to t + 1 + k, and all of these."""
    target = Target.from_pretrained(folders[family], "cpu", torch.float32)
    drafter = build("mtp", target)
    assert isinstance(drafter, Mtp)
    batch = random_batch(target, rows=1)
    states = torch.randn(1, 12, target.hidden_size)
    expected = outputs(drafter, batch, states, 3)
    for slot in range(12):
        other_states, other_ids = states.clone(), batch.token_ids.clone()
        other_states[:, slot] += 1
        other_ids[:, slot] = (other_ids[:, slot] + 1) % target.vocab_size
        by_state = outputs(drafter, batch, other_states, 3)
        by_token = outputs(drafter, Batch(other_ids, batch.loss_mask), states, 3)
        for k in range(3):
            first = max(0, slot - 1 - k)
            of_state, of_token = (abs(found[k] - expected[k]).amax(-1) for found in (by_state, by_token))
            assert (of_state[:slot] < 1e-5).all()  # experts read their tokens in groups, which round otherwise
            assert of_state[slot:].min() > 1e-4
            assert (of_token[:first] < 1e-5).all()
            if slot > 1 + k:  # the token of slot 0's first step counts as zero
                assert of_token[first : 11 - k].min() > 1e-4


def test_which_states_and_which_order(folders: dict[str, Path]) -> None:
    """MiMo reads [state; embedding], and the state before the final norm; GLM goes on from the un-normed output."""
    drafters = {
        family: build("mtp", Target.from_pretrained(folders[family], "cpu", torch.float32))
        for family in ("qwen2", "glm4_moe", "qwen3_5_text")
    }
    mimo, glm, qwen = (drafters[family] for family in ("qwen2", "glm4_moe", "qwen3_5_text"))
    assert isinstance(mimo, Mtp)
    assert isinstance(glm, Mtp)
    assert isinstance(qwen, Mtp)
    assert (mimo.layer_ids, glm.layer_ids, qwen.layer_ids) == ((4,), (), ())
    hidden, token = torch.randn(1, 1, 32), torch.tensor([[5]])
    assert torch.equal(glm.recycled(hidden), hidden)
    assert torch.equal(qwen.recycled(hidden), qwen.last_norm(hidden))
    for drafter, state in ((mimo, slice(32)), (glm, slice(32, None))):
        drafter.fuse.weight.data[:, state] = 0  # what is left is the embedding's part, which position 0 does not have
        found = [
            drafter.read(token, states, torch.tensor([[place]]), attention_mask=None)
            for states, place in ((hidden, 1), (hidden + 1, 1), (hidden, 0))
        ]
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
    assert not mimo.layout.reads_normed


def test_a_checkpoint_is_the_head_alone(folders: dict[str, Path], tmp_path: Path) -> None:
    target = Target.from_pretrained(folders["glm4_moe"], "cpu", torch.float32)
    drafter = build("mtp", target)
    save_drafter(drafter, tmp_path)
    assert load_file(tmp_path / "model.safetensors").keys() == NAMES["glm4_moe"]
    assert json.loads((tmp_path / "config.json").read_text())["draftsmith"]["starting_layers"] == "random"
    found = load_drafter(tmp_path, target).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in drafter.state_dict().items())


def test_speculators_computes_the_same(folders: dict[str, Path], tmp_path: Path) -> None:
    """The logits of three steps of the same head (tests/helpers/witness_mtp.py), within 1e-5.

    Its later steps attend to each other's slots and stand where step 0 stood, unlike drafting in any engine and unlike
    training here; so they are computed step by step.
    """
    golden = load_file(Path(__file__).parents[1] / "golden/mtp_witness.safetensors")
    folder = save_head_target(tmp_path, "qwen3", vocab_size=96, intermediate_size=48)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {"model.embed_tokens.weight": golden["target.embedding"], "lm_head.weight": golden["target.head"]}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    target = Target.from_pretrained(folder, "cpu", torch.float32)
    head = {name: tensor for name, tensor in golden.items() if name.startswith("mtp.")}
    drafter = Mtp.from_engine({"hidden_size": 32, "vocab_size": 96}, head, target)
    states, positions = golden["hidden"][:, :12], torch.arange(12)[None]
    for step in range(3):
        fed = golden["tokens"][:, step + 1 : step + 13]
        with torch.no_grad():
            output = drafter.read(fed, states, positions, attention_mask=None)
            logits = target.logits(drafter.last_norm(output))
        torch.testing.assert_close(logits, golden[f"logits.{step}"], atol=1e-5, rtol=1e-5)
        states = drafter.recycled(output)
