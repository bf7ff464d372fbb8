"""The same target in HF transformers on torch, where that is installed: a yardstick, no need."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from spd_jax.checks import ConfigError
from spd_jax.weights.fetch import fetch_smollm2


def hf_loops(source: str, prompt: Sequence[int]) -> dict[str, Callable[[int], list[int]]]:
    """Returns, by setting, what decodes n tokens greedily after a prompt, in float32.

    The settings are numbers of torch's threads, up to one for each core.

    Args:
      source: smollm2-135m, a .gguf file or an HF directory.
    Raises:
      ConfigError: torch is missing, or the target is of another kind.
    """
    try:
        import accelerate  # noqa: F401 - transformers wants it to read a .gguf file
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"--hf needs torch and accelerate: {error}; install them") from None
    path = fetch_smollm2() if source == "smollm2-135m" else Path(source)
    if path.suffix == ".gguf":
        files = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    elif path.is_dir():
        files = {"pretrained_model_name_or_path": path}
    else:
        raise ConfigError(f"--hf needs smollm2-135m, a .gguf file or an HF directory, got {source}")
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(**files, dtype=torch.float32).eval()

    @torch.inference_mode()
    def prefill() -> tuple[object, torch.Tensor]:
        out = model(torch.tensor([list(prompt)]), use_cache=True)
        return out.past_key_values, out.logits[:, -1:].argmax(-1)

    cache, first = prefill()

    @torch.inference_mode()
    def decode(n: int, n_threads: int) -> list[int]:
        torch.set_num_threads(n_threads)
        n_written = cache.get_seq_length() - len(prompt)
        if n_written:
            cache.crop(-n_written)
        ids = [first]
        for _ in range(n):
            logits = model(ids[-1], past_key_values=cache, use_cache=True).logits
            ids.append(logits[:, -1:].argmax(-1))
        return torch.cat(ids, 1)[0].tolist()

    def with_threads(n_threads: int) -> Callable[[int], list[int]]:
        return lambda n: decode(n, n_threads)

    return {f"{n} threads": with_threads(n) for n in range(1, (os.cpu_count() or 1) + 1)}
