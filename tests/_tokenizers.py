"""A small byte-level tokenizer with ChatML markers, trained here, and chat templates written out."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

# As shipped with SmolLM2-135M-Instruct: a default system message, no generation marks.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Puts an empty block of reasoning before the last answer only, and trims, as Qwen3's does.
THINKING = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] | trim + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Beginning-of-text first, no special tokens around turns, end-of-text after each answer (as Llama 2's).
INSTRUCT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] | trim + ' ' + eos_token }}{% endif %}"
    "{% endfor %}"
)
_TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face.",
    "system user assistant yes no hello, how are you today? I am well, thank you. And you?",
] * 4


@lru_cache(maxsize=1)
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # A pair of line feeds is one token, so that texts that begin with one merge with the template's.
    tokenizer.train_from_iterator([*_TEXT, "\n\n\n\n " * 40], trainer)
    return tokenizer.to_str()


def small_tokenizer(
    template: str | None = SMOLLM2,
    pad: str = "<|im_end|>",
    bos: str | None = "<|im_start|>",
    eos: str = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """320 entries: ``<|endoftext|>`` 0, ``<|im_start|>`` 1, ``<|im_end|>`` 2; the pad token is the end token."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_backend()), bos_token=bos, eos_token=eos, pad_token=pad
    )
    tokenizer.chat_template = template
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = SMOLLM2) -> None:
    """Write the tokenizer's files beside a model's."""
    small_tokenizer(template).save_pretrained(folder)
