"""A tiny random Qwen2.5-VL with a tokenizer, a chat template and a processor, as vLLM loads it."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

CONTEXT = 512
PATCH, MERGED = 14, 2  # pixels of a patch, and patches on each side that become one token
TOKENS = [f"<|{name}|>" for name in ("endoftext", "im_start", "im_end", "vision_start", "vision_end", "image_pad")]
IDS = {f"{name}_token_id": place for place, name in enumerate(("vision_start", "vision_end", "image"), 3)}
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}{{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' if part.type == 'image' else part.text }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


def save_image_target(directory: Path) -> Path:
    """Write the target into a new folder; its heads have the width that attention on a CPU wants."""
    directory.mkdir()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [*TOKENS, "<|video_pad|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=280, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["user assistant describe the image"], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=CONTEXT
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(directory)
    text = {
        "vocab_size": len(fast),
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": CONTEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    vision = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH,
        "spatial_merge_size": MERGED,
        "fullatt_block_indexes": [1],
    }
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={**text, "initializer_range": 0.2},
        vision_config={**vision, "initializer_range": 0.2},
        video_token_id=len(TOKENS),
        tie_word_embeddings=False,
        **IDS,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(directory)
    pixels = {"min_pixels": (PATCH * MERGED) ** 2, "max_pixels": (8 * PATCH * MERGED) ** 2}
    values = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    sizes = {"patch_size": PATCH, "merge_size": MERGED, "temporal_patch_size": 2, **pixels, **values}
    for name, kind in (("preprocessor", "image_processor"), ("video_preprocessor", "video_processor")):
        form = {f"{kind}_type": "Qwen2VL" + kind.title().replace("_", ""), "processor_class": "Qwen2_5_VLProcessor"}
        (directory / f"{name}_config.json").write_text(json.dumps({**form, **sizes}))
    return directory
