"""Chat templates of the kinds in use, each with a tokenizer of bytes and its markers."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spd_jax.weights.tokenizer import ChatTokenizer, wrap_backend

MARKERS = (
    "<|im_start|>", "<|im_end|>", "<|start|>", "<|/start|>", "<|eot_id|>", "<think>", "</think>",
)  # fmt: skip
CHATML = (
    "{% for m in messages %}"
    "{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Thoughts are kept in the last answer only; without thinking, the prompt ends with an empty one.
THINKING = (
    "{% set ns = namespace(last=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set text = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = '' %}"
    "{% if m.reasoning_content %}{% set thought = m.reasoning_content %}"
    "{% elif '</think>' in m.content %}"
    "{% set thought = m.content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% endif %}"
    "<|im_start|>assistant\n"
    "{% if loop.index0 > ns.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ text }}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% endif %}{% endif %}"
)
# The empty thought of the prompt is not shown afterwards; a thinking target's is opened for it.
SWITCHED = (
    "{% for m in messages %}"
    "{% set text = m.content.split('</think>')[-1] | trim %}"
    "<|im_start|>{{ m.role }}\n"
    "{% if loop.last and '</think>' in m.content %}"
    "<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1] | trim }}\n</think>\n\n"
    "{% endif %}{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is false %}\n</think>\n\n{% endif %}{% endif %}"
)
HEADERS = (
    "{% for m in messages %}<|start|>{{ m.role }}<|/start|>\n\n{{ m.content | trim }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant<|/start|>\n\n{% endif %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = (  # no end of turn at all
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def markers_tokenizer(template: str, merges: tuple[str, ...] = ()) -> ChatTokenizer:
    """Returns a tokenizer whose ids below 256 are bytes; then merged pairs and MARKERS."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (chr(256 + i) for i in range(256))
    vocab = {chr(b) if b in printable else next(others): b for b in range(256)}
    pairs = []
    for merge in merges:
        letters = [next(c for c, b in vocab.items() if b == byte) for byte in merge.encode()]
        vocab["".join(letters)] = len(vocab)
        pairs.append(tuple(letters))
    backend = tokenizers.Tokenizer(models.BPE(vocab, pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(MARKERS))
    return wrap_backend(backend, template, "<|im_end|>")
