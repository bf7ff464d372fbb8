"""A tokenizer from GGUF metadata, built with `tokenizers` (transformers' GGUF path needs torch).

The metadata gives the vocabulary, the merges and the name of the pre-tokenizer.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line, replace_file
from spd_jax.weights.tokenizer import ChatTokenizer, wrap_backend

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPECIAL_TYPE, _USER_DEFINED_TYPE = 3, 4  # of tokenizer.ggml.token_type


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return byte_level
    if name == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if name == "llama-bpe":
        split = pre_tokenizers.Split(tokenizers.Regex(_LLAMA3_SPLIT), "isolated")
        plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([split, plain])
    return None


def _build(fields: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer | None:
    kind, pre = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre", "default")
    pre_tokenizer = _pre_tokenizer(pre) if kind == "gpt2" else None
    if pre_tokenizer is None:
        print(
            f"{path.name}: no support for its tokenizer ({kind!r}, pre-tokenizer {pre!r}):"
            " prompts must be token ids",
            file=sys.stderr,
        )
        return None
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError("a token is listed twice")
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    typed = list(zip(tokens, types, strict=True))
    added = tokenizers.AddedToken
    user = [added(t, normalized=False) for t, kind in typed if kind == _USER_DEFINED_TYPE]
    special = [added(t, special=True) for t, kind in typed if kind == _SPECIAL_TYPE]
    backend.add_tokens(user)
    backend.add_special_tokens(special)
    return backend


def tokenizer_from_gguf(
    fields: Mapping[str, Any], path: Path, cache: Path | None = None
) -> ChatTokenizer | None:
    """Returns the tokenizer that a GGUF file's metadata describes.

    Args:
      fields: the metadata.
      path: the file, for messages.
      cache: a tokenizer.json to read where it is sound, else to write.
    """
    backend = read_cached(cache) if cache else None
    if backend is None:
        try:
            backend = _build(fields, path)
        except Exception as error:  # the library raises plain Exception for bad merges
            reason = one_line(repr(error))
            raise ConfigError(f"{path}: bad tokenizer metadata ({reason}); get it anew") from None
        if backend is None:
            return None
        if cache:
            with contextlib.suppress(OSError):  # a read-only cache only costs building it again
                write_cached(cache, backend)
    eos = fields.get("tokenizer.ggml.eos_token_id")
    eos_token = backend.id_to_token(eos) if isinstance(eos, int) and eos >= 0 else None
    return wrap_backend(backend, fields.get("tokenizer.chat_template"), eos_token)


def read_cached(path: Path) -> tokenizers.Tokenizer | None:
    """Returns the cached tokenizer, None where it is absent or not what was written."""
    try:
        content = path.read_bytes()
        if _digest_path(path).read_bytes() == hashlib.sha256(content).hexdigest().encode():
            return tokenizers.Tokenizer.from_buffer(content)
    except Exception:  # absent, or written by another version of the library: build it again
        pass
    return None


def write_cached(path: Path, backend: tokenizers.Tokenizer) -> None:
    """Writes tokenizer.json and its digest; a reader never sees half of either."""
    content = backend.to_str().encode()
    replace_file(path, content)
    replace_file(_digest_path(path), hashlib.sha256(content).hexdigest().encode())


def _digest_path(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")
