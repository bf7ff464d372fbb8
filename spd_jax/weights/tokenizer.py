"""Text <-> token ids: one thin wrapper for the tokenizers of HF directories, GGUF files and bytes.

The chat template is the model's own; `TextStream` decodes ids one by one for streaming.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from spd_jax.checks import ConfigError

# End-of-turn tokens of the chat templates in use; each counts where a template writes it.
CHAT_END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>",
)  # fmt: skip


class ChatTokenizer:
    """A tokenizer with its chat template; compared and hashed by identity (static in pytrees)."""

    def __init__(self, fast: Any, thinking: bool | None = None):
        """Wraps a transformers fast tokenizer.

        Args:
          thinking: what the chat template gets as `enable_thinking`; None: nothing, so that the
            template's own default holds.
        """
        self._fast, self._thinking = fast, thinking

    @property
    def thinking(self) -> bool | None:
        """What the chat template gets as `enable_thinking`; None: nothing."""
        return self._thinking

    def with_thinking(self, thinking: bool | None) -> ChatTokenizer:
        """Returns the tokenizer with another `thinking`; None: this one.

        Raises:
          ConfigError: it is neither None nor a boolean.
        """
        if thinking is None:
            return self
        if not isinstance(thinking, bool):
            raise ConfigError(f"thinking must be None, True or False, got {thinking!r}")
        return ChatTokenizer(self._fast, thinking)

    @property
    def vocab_size(self) -> int:
        """Ids below this have a token (a model's V may be larger: padding rows)."""
        return len(self._fast)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """The tokenizer's end id and the end-of-turn ids that its chat template writes."""
        ids = {self._fast.eos_token_id} - {None}
        template = self._template() or ""
        vocab = self._fast.get_vocab()
        ids |= {vocab[t] for t in CHAT_END_TOKENS if t in template and t in vocab}
        return tuple(sorted(ids))

    def encode(self, text: str) -> list[int]:
        """Returns the ids of raw text; nothing is added at either end.

        Raises:
          ConfigError: the text holds half a character, as undecodable bytes become.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"the text is not valid Unicode at character {error.start}; give it as UTF-8"
            ) from None
        return self._fast.encode(text, add_special_tokens=False)

    def encode_chat(self, messages: str | Sequence[dict[str, str]]) -> list[int]:
        """Returns the ids of a conversation and the opening of the assistant's turn.

        Args:
          messages: {"role", "content"} dicts, or a string: one user turn.
        Raises:
          ConfigError: the tokenizer has no chat template, or it refuses the messages.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        return self.encode(self.render_chat(messages, opens_turn=True))

    def render_chat(self, messages: Sequence[dict[str, str]], *, opens_turn: bool) -> str:
        """Returns the chat template's text of a conversation.

        Args:
          opens_turn: the opening of the assistant's turn follows (the generation prompt).
        Raises:
          ConfigError: the tokenizer has no chat template, or it refuses the messages.
        """
        if self._template() is None:
            raise ConfigError(
                "this target's tokenizer has no chat template; give the prompt as token ids"
            )
        settings = {} if self._thinking is None else {"enable_thinking": self._thinking}
        try:
            return self._fast.apply_chat_template(
                list(messages), add_generation_prompt=opens_turn, tokenize=False, **settings
            )
        except Exception as error:  # jinja2 raises many types for a template's own refusals
            reason = " ".join(str(error).split())
            raise ConfigError(f"the chat template refused the messages: {reason}") from None

    def marker_texts(self, ids: Sequence[int]) -> tuple[str, ...]:
        """Returns the texts of those ids that are markers: no ordinary text becomes them."""
        added = self._fast.backend_tokenizer.get_added_tokens_decoder()
        return tuple(added[i].content for i in ids if i in added)

    def decode(self, ids: Sequence[int], *, with_markers: bool = False) -> str:
        """Returns the text of ids, special tokens skipped unless asked for."""
        backend = self._fast.backend_tokenizer
        return backend.decode([int(i) for i in ids], skip_special_tokens=not with_markers)

    def stream(self) -> TextStream:
        """Returns a fresh incremental decoder."""
        return TextStream(self._fast.backend_tokenizer)

    def _template(self) -> str | None:
        template = getattr(self._fast, "chat_template", None)
        return template.get("default") if isinstance(template, dict) else template


class TextStream:
    """Decodes ids as they arrive and emits whole characters only."""

    def __init__(self, backend: tokenizers.Tokenizer):
        self._backend = backend
        self._pending: list[int] = []  # the newest ids; together they decode to ...
        self._shown = ""  # ... this text, which was emitted, and perhaps part of a character

    def push(self, ids: int | Sequence[int]) -> str:
        """Adds ids; returns the new text, without a character that is not whole yet."""
        self._pending += [int(ids)] if hasattr(ids, "__index__") else [int(i) for i in ids]
        text = self._backend.decode(self._pending)
        whole = text.rstrip("\ufffd")
        new, self._shown = whole[len(self._shown) :], max(self._shown, whole, key=len)
        if whole == text and len(self._pending) > 32:
            # Forget all but one id of context: decoders treat the first of a sequence specially.
            last = self._backend.decode(self._pending[-1:])
            if last and "\ufffd" not in last:
                self._pending, self._shown = self._pending[-1:], last
        return new

    def flush(self) -> str:
        """Returns what is left, a broken character as U+FFFD, and starts afresh."""
        new = self._backend.decode(self._pending)[len(self._shown) :]
        self._pending, self._shown = [], ""
        return new


def _transformers() -> Any:
    # Slow to import, so only where text is needed; it would advise to install torch.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    return transformers


def wrap_backend(backend: tokenizers.Tokenizer, chat_template: str | None, eos: str | None):
    """Returns the ChatTokenizer of a `tokenizers` tokenizer."""
    fast = _transformers().PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, clean_up_tokenization_spaces=False
    )
    fast.chat_template = chat_template
    return ChatTokenizer(fast)


def tokenizer_from_directory(directory: Path) -> ChatTokenizer | None:
    """Returns the tokenizer of an HF directory, None where it holds none."""
    if not any((directory / n).is_file() for n in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        fast = _transformers().AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # the library raises many types for damaged files
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{directory}: the tokenizer cannot be read: {reason}") from None
    if not getattr(fast, "is_fast", False):
        raise ConfigError(f"{directory}: no fast tokenizer; convert it to tokenizer.json")
    return ChatTokenizer(fast)
