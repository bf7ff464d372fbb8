"""Reads llama-architecture GGUF files: metadata -> config, quantised blocks -> float arrays.

llama.cpp stores q and k with their rows permuted for interleaved RoPE; this undoes it, so that
rotation in halves (HF's) is right.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.config import Llama3Scaling, TargetConfig
from spd_jax.weights import keymaps
from spd_jax.weights.files import Unchanged, file_sha256, one_line
from spd_jax.weights.gguf_tokenizer import tokenizer_from_gguf
from spd_jax.weights.lazy import LazyArray
from spd_jax.weights.loaded import LoadedTarget, run_dtype

_END_FIELDS = tuple(f"tokenizer.ggml.{n}_token_id" for n in ("eos", "eot", "eom"))
# Llama 3.x publishes these; GGUF keeps only the frequencies that they give.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def load_gguf(path: str | Path, dtype: str, tokenizer_cache: Path | None = None) -> LoadedTarget:
    """Reads a GGUF file into a target.

    Args:
      path: the file.
      dtype: run dtype of the arrays, "float32" or "bfloat16".
      tokenizer_cache: where to keep the built tokenizer.json; None: build it each time.
    Raises:
      ConfigError: not a whole GGUF file, another architecture, or a feature we do not run.
    """
    path, to = Path(path), run_dtype(dtype)
    file = Unchanged(path)
    fields, tensors = _read(path)
    config = _config(fields, tensors, path)
    left = set(tensors) - {keymaps.ROPE_FREQS}

    def take(name: str, shape: tuple[int, ...]) -> LazyArray:
        if name not in tensors:
            raise ConfigError(f"{path}: no tensor {name}; get the file anew")
        tensor = tensors[name]
        found = tuple(int(n) for n in reversed(tensor.shape))
        if found != shape:
            raise ConfigError(f"{path}: {name} should have shape {shape}, has {found}")
        _dequantize(tensor.data[:1], tensor, path)  # for its error
        left.discard(name)
        n_heads = {"attn_q": config.n_heads, "attn_k": config.n_kv_heads}.get(name.split(".")[-2])

        def read(rows: np.ndarray | slice = slice(None)) -> np.ndarray:
            file.check()  # a mapped file that was cut short kills the process
            return _dequantize(tensor.data[rows], tensor, path).astype(to)

        if n_heads is None:
            return LazyArray(shape, to, read, read)
        return LazyArray(shape, to, lambda: unpermute(read(), n_heads))

    params = keymaps.read_target(config, "gguf", keymaps.GGUF_LAYER_PREFIX, take)
    if left:
        raise ConfigError(f"{path}: unsupported tensor {min(left)}; use a plain llama model")
    tokenizer = tokenizer_from_gguf(fields, path, tokenizer_cache)
    stop = {fields[name] for name in _END_FIELDS if isinstance(fields.get(name), int)}
    stop |= set(tokenizer.end_ids if tokenizer else ())
    if stop and not 0 <= min(stop) <= max(stop) < config.vocab_size:
        raise ConfigError(
            f"{path}: end ids must be below the vocabulary's {config.vocab_size}, got "
            f"{sorted(stop)}; get the file anew"
        )
    return LoadedTarget(config, params, tokenizer, tuple(sorted(stop)), file_sha256(path))


def gguf_config(path: str | Path) -> TargetConfig:
    """Reads the geometry of a GGUF file.

    Raises:
      ConfigError: as `load_gguf`.
    """
    path = Path(path)
    return _config(*_read(path), path)


def unpermute(array: np.ndarray, n_heads: int) -> np.ndarray:
    """Returns q or k rows [n*E, in] from interleaved to half-split RoPE order."""
    n_rows = array.shape[0]
    pairs = array.reshape(n_heads, n_rows // n_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


class _Reader(gguf.GGUFReader):
    """GGUFReader over a plain view (a third of the time), which refuses to read past the end."""

    @property
    def data(self) -> np.ndarray:
        return self._plain

    @data.setter
    def data(self, mapped: np.memmap) -> None:
        self._plain = mapped.view(np.ndarray)

    def _get(self, offset, dtype, count=1, override_order=None):
        # Without this a damaged array length makes the library loop over empty reads for ever.
        if int(offset) + np.dtype(dtype).itemsize * int(count) > self._plain.size:
            raise ValueError(f"it ends at byte {self._plain.size}")
        return super()._get(offset, dtype, count, override_order)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; give the path of a .gguf file")
    try:
        reader = _Reader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except Exception as error:  # a damaged length or type makes the library raise anything
        reason = one_line(error)
        raise ConfigError(f"{path}: not a whole GGUF file ({reason}); get it anew") from None
    return fields, {tensor.name: tensor for tensor in reader.tensors}


def _dequantize(rows: np.ndarray, tensor: gguf.ReaderTensor, path: Path) -> np.ndarray:
    """Returns rows of a tensor's data as floats."""
    try:
        return gguf.quants.dequantize(rows, tensor.tensor_type)
    except NotImplementedError:
        kind = tensor.tensor_type.name
        raise ConfigError(f"{path}: {tensor.name} has unsupported type {kind}") from None


def _config(fields: dict[str, Any], tensors: dict[str, Any], path: Path) -> TargetConfig:
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConfigError(f"{path}: architecture must be 'llama', got {architecture!r}")

    def number(name: str, kind: type = int, default: Any = None) -> Any:
        value = fields.get(f"llama.{name}", default)
        is_number = isinstance(value, (int, kind)) and not isinstance(value, bool)
        if not (is_number and 0 < value < math.inf):
            raise ConfigError(f"{path}: llama.{name} must be a positive {kind.__name__}")
        return kind(value)

    d_model, n_heads = number("embedding_length"), number("attention.head_count")
    head_dim = number("attention.key_length", default=d_model // n_heads)
    embedding = tensors.get("token_embd.weight")
    config = TargetConfig(
        vocab_size=number(
            "vocab_size", default=0 if embedding is None else int(embedding.shape[-1])
        ),
        d_model=d_model,
        n_layers=number("block_count"),
        n_heads=n_heads,
        n_kv_heads=number("attention.head_count_kv", default=n_heads),
        head_dim=head_dim,
        d_ff=number("feed_forward_length"),
        # Stored as float32: the shortest decimal that gives it is what its author wrote.
        norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon", float)))),
        rope_theta=number("rope.freq_base", float, 10000.0),
        max_context=number("context_length"),
        tied_embeddings="output.weight" not in tensors,
    )
    unsupported = {
        "llama.expert_count": fields.get("llama.expert_count", 0) != 0,
        "llama.rope.dimension_count": number("rope.dimension_count", int, head_dim) != head_dim,
        "llama.attention.value_length": number("attention.value_length", int, head_dim) != head_dim,
        "llama.rope.scaling.type": fields.get("llama.rope.scaling.type", "none") != "none",
        "llama.attention.sliding_window": "llama.attention.sliding_window" in fields,
    }
    for name, found in unsupported.items():
        if found:
            raise ConfigError(f"{path}: {name} = {fields[name]} is not supported")
    if keymaps.ROPE_FREQS in tensors:
        divisors = tensors[keymaps.ROPE_FREQS]
        stored = _dequantize(divisors.data, divisors, path)
        return _with_llama3_rope(config, stored, path)
    return config


def _with_llama3_rope(config: TargetConfig, stored: np.ndarray, path: Path) -> TargetConfig:
    """Recognises the published Llama 3 scaling by the frequency divisors that it gives."""
    scaling = Llama3Scaling(float(stored.max()), _LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL)
    if stored.shape == (config.head_dim // 2,) and np.allclose(
        stored, llama3_divisors(config, scaling), rtol=1e-3
    ):
        return dataclasses.replace(config, rope_scaling=scaling)
    raise ConfigError(f"{path}: {keymaps.ROPE_FREQS} is not the scaling of Llama 3: unsupported")


def llama3_divisors(config: TargetConfig, scaling: Llama3Scaling) -> np.ndarray:
    """Returns what Llama 3 scaling divides each RoPE frequency by, [E/2]."""
    exponents = np.arange(0, config.head_dim, 2) / config.head_dim
    turns = scaling.original_max_position / (2 * math.pi * config.rope_theta**exponents)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / scaling.factor + smooth)
