"""The names of all fields that files may hold, by walking the types that read them: a new field is tried at once."""

from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from transformers import LlamaConfig

from draftsmith.data.answers.prepare import PrepareSettings
from draftsmith.data.samples.sample import Sample
from draftsmith.inference.measuring.results import Evaluation
from draftsmith.inference.planning.costs import Costs
from draftsmith.inference.traffic.load_test import LoadTest
from draftsmith.models import DRAFTERS
from draftsmith.recipes.report_data.contents import Choice
from draftsmith.train import TrainConfig


def names_of(kind: Any) -> set[str]:
    """Return the names of the fields of a type, and of the types in it."""
    own = {field.name for field in fields(kind)} if is_dataclass(kind) else set()
    hints = get_type_hints(kind).values() if own else get_args(kind)
    return own.union(*(names_of(hint) for hint in hints))


FOREIGN = """architectures auto_map quantization_config rope_scaling rope_parameters sliding_window layer_types head_dim
dtype torch_dtype num_experts is_encoder_decoder text_config vision_config model_type tie_word_embeddings
draft_vocab_size eagle_config eagle_aux_hidden_state_layer_ids target_hidden_size
speculators_model_type transformer_layer_config
medusa_num_heads medusa_num_layers original_lm_head medusa_fc_bias norm_before_residual norm_before_fc fc_norm
norm_output trained_for draft_vocab_hash
hydra_num_heads tokenizer_class chat_template added_tokens_decoder model_max_length extra_special_tokens bos_token
do_sample temperature attn_implementation num_kv_shared_layers hidden_act partial_rotary_factor original_max"""
FIELDS_OF_FILES = sorted(set().union(*map(names_of, (Evaluation, Choice, LoadTest, Costs, PrepareSettings, Sample))))
FIELDS_OF_MODELS = sorted(
    {*FOREIGN.split(), *LlamaConfig().to_dict()}.union(
        names_of(TrainConfig), *(names_of(drafter.config_class) for drafter in DRAFTERS.values())
    )
)
