"""Draft models: where they start, and training on what they write themselves."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafters import loss_of, random_batch
from families import MULTIMODAL, SERVED, family_config, plain_model, target_and_plain_model
from tiny_target import tiny_tokenizer
from transformers import AutoModelForCausalLM

from draftsmith.data.answers.prepare import PrepareSettings, prepare
from draftsmith.inference import SpeculativeDecoder
from draftsmith.inference.decoding.decoder import resolve_settings
from draftsmith.inference.measuring.results import read_evaluation
from draftsmith.models import Target, load_drafter, save_drafter
from draftsmith.models.batch import Batch
from draftsmith.models.drafters.draft_model import DraftModel, DraftModelConfig, model_of_layers
from draftsmith.models.drafters.medusa import Medusa, MedusaConfig
from draftsmith.models.errors import UserError
from draftsmith.models.sampling.sampling import Sampling
from draftsmith.models.slots.attention import ATTENTION
from draftsmith.models.slots.forward import run_causal
from draftsmith.models.training_free.draft_model_cascade import DraftModelCascade
from draftsmith.recipes.configs.recipes import RECIPES
from draftsmith.train import setup, train
from draftsmith.train.config import DataConfig, resolve
from draftsmith.train.evaluation.evaluate import what_training_brought
from draftsmith.train.inputs.on_policy import OnPolicy


def test_an_existing_model_drafts_as_it_is(tiny_target: Target, tiny_target_dir: Path, make_target_dir: Any) -> None:
    """The target as its own draft model is accepted whole; one with a padded vocabulary is cut to the target's."""
    drafter = DraftModel.from_target(DraftModelConfig(model=str(tiny_target_dir)), tiny_target)
    output = SpeculativeDecoder(tiny_target, drafter.eval()).generate(["strike the iron"], 24, draft_length=3)
    assert output.stats.total.mean_acceptance_length == 4
    padded = DraftModel.from_target(DraftModelConfig(model=str(make_target_dir(vocab_size=320))), tiny_target)
    assert padded.engine_config()["vocab_size"] == tiny_target.vocab_size


@pytest.mark.parametrize("model_type", ["cohere", "gemma2", "granite"])
def test_logits_have_the_scaling_of_their_family(model_type: str) -> None:
    """A draft model of all layers says of every token what the target says, in training, drafting and cascades."""
    target, _ = target_and_plain_model(model_type, SERVED[model_type])
    drafter = DraftModel(DraftModelConfig(), model_of_layers(target, [0, 1, 2]), target).eval()
    accepted, count = loss_of(drafter, random_batch(target), target)["sampled_acceptance_0"]
    assert accepted.item() == pytest.approx(count.item())
    for either in (drafter, DraftModelCascade(drafter, drafter)):
        settings = resolve_settings(either, Sampling(1.0), 16, 3, "probabilistic")
        total = SpeculativeDecoder(target, either).decode([[3, 5, 9]], replace(settings, stop_at_eos=False)).stats.total
        assert total.mean_acceptance_length == 4


def test_of_a_multimodal_model_the_text_drafts(tmp_path: Path) -> None:
    """As the causal language model that engines load; where there is none, at once with the reason."""
    texts = {"gemma3": "Gemma3ForCausalLM", "qwen3_vl": None}
    for model_type, architecture in texts.items():
        torch.manual_seed(0)
        folder = tmp_path / model_type
        plain_model(family_config(model_type, MULTIMODAL[model_type])).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        target = Target.from_pretrained(folder, "cpu")
        if architecture is None:
            for fields in ({"model": str(folder)}, {"hidden_size": 16}, {}):
                with pytest.raises(UserError, match="no causal language model of"):
                    DraftModel.from_target(DraftModelConfig(**fields), target)
            continue
        drafter = DraftModel.from_target(DraftModelConfig(model=str(folder)), target)
        assert drafter.engine_config()["architectures"] == [architecture]
        save_drafter(drafter, tmp_path / "saved")
        for either in (drafter, load_drafter(tmp_path / "saved", target)):
            output = SpeculativeDecoder(target, either.eval()).generate([[3, 5, 9]], 12, draft_length=3)
            assert output.stats.total.mean_acceptance_length == 4


def test_the_simulated_length_counts_tokens_that_are_right_in_a_row(tiny_target: Target) -> None:
    """It is that of four predictions in a row from each slot, as other families make them."""
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target)
    token_ids = torch.randint(3, 300, (2, 30), generator=torch.Generator().manual_seed(0))
    batch = Batch(token_ids, torch.arange(30).remainder(9).expand(2, -1) > 2)
    features = tiny_target.features(batch, ())
    chain_loss = drafter.new_chain_loss(batch)
    drafter.add_divergences(chain_loss, list(drafter.depths(chain_loss, batch, features, 4)), features)
    emitted, rounds = drafter.loss(batch, features)["simulated_acceptance_length"]
    assert (emitted, rounds) == chain_loss.sums()["simulated_acceptance_length"]
    assert rounds < emitted < 5 * rounds


def test_a_model_brings_its_own_size(tiny_target_dir: Path) -> None:
    with pytest.raises(UserError, match="leave"):
        DraftModelConfig(model=str(tiny_target_dir), num_layers=1)


DEPENDS_ON_PLACE = {
    "llama4_text": "their tensors do not fit a smaller llama4_text",  # layers with experts stand in a list of their own
    "minicpm3": "residual_scale of layer 0 depends on its place",
    "diffllama": "self_attn.lambda_init of layer 2 depends on its place",
    "gemma4_text": r"layers 0, 2 of gemma4_text \((The set of|their tensors)",  # the shared keys are those of layer 1
}


@pytest.mark.parametrize("model_type", SERVED)
def test_layers_compute_what_they_did_in_the_target(model_type: str) -> None:
    """Or are refused by name, in every family that is served."""
    model = AutoModelForCausalLM.from_config(
        family_config(model_type, SERVED[model_type]), attn_implementation=ATTENTION
    )
    target = Target(model.eval(), None, model_type, fuse_layers=False)
    if model_type in DEPENDS_ON_PLACE:
        with pytest.raises(UserError, match=DEPENDS_ON_PLACE[model_type]):
            DraftModel.from_target(DraftModelConfig(num_layers=2), target)
        return
    draft = DraftModel.from_target(DraftModelConfig(num_layers=2), target).model
    if model_type == "smollm3":
        assert draft.config.no_rope_layers == [1, 1]
    # the target with its middle layer taken out
    layers, types = target.decoder_layers, getattr(model.config, "layer_types", None)
    del layers[1]
    setattr(model.config, "num_layers" if model_type == "longcat_flash" else "num_hidden_layers", 2)
    if types:
        model.config.layer_types = [types[0], types[2]]
    token_ids = torch.arange(1, 12)[None]
    for module in model.modules():  # by which Llama 4 looks up what kind of layer it is
        if getattr(module, "layer_idx", None) == 2:
            module.layer_idx = 1
    found, expected = (run_causal(one.eval(), token_ids) for one in (draft, model))
    torch.testing.assert_close(found, expected)


def test_a_narrower_model_starts_with_the_targets_vocabulary(tiny_target: Target, tmp_path: Path) -> None:
    """Half as wide: its embedding keeps the main directions of the target's, as no other 16 could."""
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=1, hidden_size=16), tiny_target)
    whole, own = tiny_target.embedding.weight, drafter.model.get_input_embeddings().weight
    kept = torch.linalg.svdvals(whole.double())[:16]
    torch.testing.assert_close(torch.linalg.svdvals(own.double()), kept, rtol=1e-4, atol=1e-4)
    save_drafter(drafter, tmp_path)
    loaded = load_drafter(tmp_path, tiny_target)
    outputs = [
        SpeculativeDecoder(tiny_target, one.eval()).generate(["strike"], 12).stats.total for one in (drafter, loaded)
    ]
    assert outputs[0] == outputs[1]
    for width in (12, 64):  # no multiple of the head width 8; no narrower
        with pytest.raises(UserError, match="head width 8"):
            DraftModel.from_target(DraftModelConfig(hidden_size=width), tiny_target)


def test_on_policy_text_is_the_drafters_own(tiny_target: Target) -> None:
    """Answers stand where the target's stood, no longer, and are what the draft model samples for those prompts."""
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target).train()
    on_policy = OnPolicy(drafter, DataConfig("", on_policy_share=1.0), num_steps=10, seed=3)
    token_ids = torch.randint(1, tiny_target.vocab_size, (2, 20))
    documents = torch.tensor([[0] * 9 + [1] * 8 + [-1] * 3, [0] * 20])
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[0, 4:9] = loss_mask[0, 12:17] = loss_mask[1, 6:18] = True
    batch = Batch(token_ids, loss_mask, documents)
    found = on_policy.rewrite(batch, step=5)
    assert not (found.loss_mask & ~loss_mask).any()
    assert torch.equal(found.token_ids[~loss_mask], token_ids[~loss_mask])
    assert torch.equal(found.documents, documents)
    assert any(p.requires_grad for p in drafter.parameters())
    with torch.no_grad():
        rewritten = on_policy.rewrite(batch, step=5)
        assert torch.equal(rewritten.token_ids, found.token_ids)  # a resumed run writes it again
        drafter.model.get_output_embeddings().weight.neg_()
        assert not torch.equal(on_policy.rewrite(batch, step=5).token_ids, found.token_ids)  # weights as they are now


def test_on_policy_text_ends_where_the_targets_does(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a turn may stand in the target's generation_config.json alone."""
    monkeypatch.setattr(tiny_target.model.generation_config, "eos_token_id", [1, 2])
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target)
    assert drafter.as_target().eos_token_ids == [1, 2]


def test_the_share_of_on_policy_steps_rises(tiny_target: Target) -> None:
    drafter = DraftModel.from_target(DraftModelConfig(num_layers=1), tiny_target)
    config = DataConfig("", on_policy_share=0.5, on_policy_rise=0.5)
    on_policy = OnPolicy(drafter, config, num_steps=4000, seed=0)
    due = torch.tensor([on_policy.is_due(step) for step in range(4000)]).float()
    assert due[:1000].mean() == pytest.approx(0.125, abs=0.04)
    assert due[2000:].mean() == pytest.approx(0.5, abs=0.04)
    with pytest.raises(UserError, match="write no text"):
        OnPolicy(Medusa.from_target(MedusaConfig(), tiny_target), config, 10, 0)


@pytest.mark.parametrize("layout", ["FSDP2", "ZeRO-3"])
def test_on_policy_text_is_refused_from_a_drafter_in_pieces(
    layout: str, tiny_target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr(setup, "layout_of", lambda _: layout)
    words = [f"target={tiny_target_dir}", "data.samples=none", "data.on_policy_share=1", "run.device=cpu"]
    config = resolve(RECIPES["draft_model"](), None, [*words, f"run.dir={tmp_path}"])
    with pytest.raises(UserError, match=f"data.on_policy_share: .* {layout} holds .* recipes/launch/ddp.yaml or zero2"):
        setup.set_up(config)


def test_training_is_measured_against_the_untrained_model(
    tiny_target: Target, tiny_target_dir: Path, tmp_path: Path
) -> None:
    """The target's own copy cannot get better, and the run says so; on-policy steps run through the whole loop."""
    (tmp_path / "prompts.txt").write_text("strike the iron\nheats it again\n")
    prepare(tiny_target, str(tmp_path / "prompts.txt"), tmp_path / "samples", PrepareSettings(max_new_tokens=16))
    changes: dict[str, Any] = {
        "target": tiny_target_dir,
        "data.samples": tmp_path / "samples",
        "data.batch_size": 2,
        "data.on_policy_share": 1,
        "drafter.model": tiny_target_dir,
        "evaluation.prompts": tmp_path / "prompts.txt",
        "evaluation.repeats": 1,
        "evaluation.baselines": "[]",
        "run.device": "cpu",
        "run.dir": tmp_path / "run",
        "run.steps": 2,
        "optimizer.learning_rate": 0.1,
    }
    run = train(resolve(RECIPES["draft_model"](), None, [f"{key}={value}" for key, value in changes.items()]))
    assert (
        read_evaluation(run / "checkpoints" / "step-000000" / "evaluation.json").first.acceptance.mean_acceptance_length
        == 5
    )
    assert what_training_brought(run).startswith("training brought nothing: acceptance length 5.00 -> ")
