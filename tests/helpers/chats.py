"""Targets that chat: the tokenizer behaviour of three real families, in small.

The templates do what the public ones do with roles, special tokens, blanks and thinking; what they say of dates, tools
and default system messages is left out. The tokenizer knows bytes, a token of two line breaks, and special tokens.
"""

from dataclasses import dataclass, replace

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from draftsmith.models import Target

# As in training libraries' patched ChatML templates: answers are marked, with their end of turn.
CHATML = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}
        {{- '\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Llama 3: the template begins with BOS, trims contents, and has no marks. The tokenizer puts BOS before raw texts.
LLAMA3 = """\
{{- bos_token }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Qwen3: thinking stays in the turns after the last question and is taken from those before it; the last answer gets
# an empty thought where it has none. A message's thought is its `reasoning_content` or stands in its content.
QWEN3 = """\
{%- set ns = namespace(last_query_index=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role != 'assistant' %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- else %}
        {%- set content = message.content %}
        {%- set thought = message.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_query_index and (loop.last or thought) %}
            {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
        {%- else %}
            {{- content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass
class Family:
    template: str
    special_tokens: list[str]
    eos: str
    bos: str | None = None  # put before raw texts by the tokenizer


def changed(family: Family, old: str, new: str) -> Family:
    """With another template; `old` must be there."""
    assert old in family.template
    return replace(family, template=family.template.replace(old, new))


CHATML_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
FAMILIES = {
    "chatml": Family(CHATML, CHATML_TOKENS, "<|im_end|>"),
    "llama3": Family(
        LLAMA3, ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "<|eot_id|>", "<|begin_of_text|>",
    ),
    "qwen3": Family(QWEN3, [*CHATML_TOKENS, "<think>", "</think>"], "<|im_end|>"),
}  # fmt: skip


def chat_tokenizer(family: Family) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, "ĊĊ"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(family.special_tokens)
    if family.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, tokenizer.token_to_id(family.bos))]
        )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=family.bos, eos_token=family.eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = family.template
    return fast


def chat_target(family: Family, padding: int = 0) -> Target:
    """A tiny random target; `padding` rows of its vocabulary lie beyond the tokenizer."""
    tokenizer = chat_tokenizer(family)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + padding,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return Target(LlamaForCausalLM(config), tokenizer, "tiny-chat")
