"""Reads HF directories (config.json + safetensors, one file or shards) with numpy only.

`write_target` writes one such directory, for tests and for tools that want tiny models.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from spd_jax.checks import ConfigError
from spd_jax.config import TargetConfig
from spd_jax.weights import keymaps
from spd_jax.weights.files import file_sha256, read_json
from spd_jax.weights.hf_config import config_from_hf, config_to_hf, text_config
from spd_jax.weights.lazy import LazyArray
from spd_jax.weights.loaded import LoadedTarget, run_dtype
from spd_jax.weights.tensors import TensorFile
from spd_jax.weights.tokenizer import ChatTokenizer, tokenizer_from_directory

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_IGNORED = ("rotary_emb.inv_freq",)  # buffers that old checkpoints store
_COMPOSITE_PREFIX = "model.language_model."  # of the language model's tensors in multimodal ones
_OTHER_PARTS = ("model.visual.", "mtp.")

log = logging.getLogger("spd_jax")


def load_hf(directory: str | Path, dtype: str) -> LoadedTarget:
    """Opens an HF directory as a target, whose tensors are read when they are wanted.

    Raises:
      ConfigError: not a model we run, or a file or tensor is missing, cut short or misshapen.
    """
    directory, to = Path(directory), run_dtype(dtype)
    config_path = directory / "config.json"
    hf = read_json(config_path)
    config = config_from_hf(hf, config_path)
    files, weights_path = _weight_files(directory)
    names = _language_model(files, directory)
    left = {name for name in names if not name.endswith(_IGNORED)}
    left -= {"lm_head.weight"} if config.tied_embeddings else set()

    def take(name: str, shape: tuple[int, ...]) -> LazyArray:
        if name not in names:
            raise ConfigError(f"{weights_path}: no tensor {name}; the checkpoint is not complete")
        left.discard(name)
        stored = names[name]
        return files[stored].take(stored, shape, to)

    fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in names)
    params = keymaps.read_target(config, "hf", keymaps.HF_LAYER_PREFIX, take, fused)
    if left:
        raise ConfigError(
            f"{weights_path}: unsupported tensor {min(left)}; use a plain {config.model_type}"
        )
    tokenizer = tokenizer_from_directory(directory)
    sha256 = _weights_sha256({file.path for file in files.values()}, weights_path)
    hf = text_config(hf, config_path) | {k: v for k, v in hf.items() if v is not None}
    stop_ids = _stop_ids(directory, hf, tokenizer, config.vocab_size)
    return LoadedTarget(config, params, tokenizer, stop_ids, sha256)


def hf_config(directory: str | Path) -> TargetConfig:
    """Reads the geometry of an HF directory, which needs no weights.

    Raises:
      ConfigError: not a model we run.
    """
    path = Path(directory) / "config.json"
    return config_from_hf(read_json(path), path)


def cached_config(hub_id: str) -> TargetConfig | None:
    """Reads the geometry of a hub model from the local cache; None where it is not there.

    Raises:
      ConfigError: not a model we run.
    """
    import huggingface_hub  # only for hub ids

    path = huggingface_hub.try_to_load_from_cache(hub_id, "config.json")
    return hf_config(Path(path).parent) if isinstance(path, str) else None


def snapshot(hub_id: str) -> Path:
    """Returns the local directory of a hub model, downloading it where it is not cached."""
    import huggingface_hub  # only for hub ids

    patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
    try:
        return Path(huggingface_hub.snapshot_download(hub_id, allow_patterns=patterns))
    except Exception as error:  # its types differ between versions, and its texts fill screens
        raise ConfigError(
            f"cannot get {hub_id!r} from the model hub ({type(error).__name__}: no network, or no"
            " such model); give a directory that holds it, or smollm2-135m or tiny"
        ) from None


def write_target(directory: str | Path, config: TargetConfig, params: dict[str, Any]) -> None:
    """Writes config.json and model.safetensors; arrays keep their dtype."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(keymaps.write_target(config, params, keymaps.HF_LAYER_PREFIX))
    save_file(tensors, str(directory / _SINGLE), metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config_to_hf(config), indent=2) + "\n")


def _weight_files(directory: Path) -> tuple[dict[str, TensorFile], Path]:
    """Returns tensor name -> its open file, and the file that lists them."""
    single, index = directory / _SINGLE, directory / _INDEX
    if single.is_file():
        file = TensorFile(single)
        return dict.fromkeys(file.names, file), single
    if not index.is_file():
        raise ConfigError(
            f"{directory}: neither {_SINGLE} nor {_INDEX}; convert the weights to safetensors"
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index}: no weight_map; get the file anew")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".."):
            raise ConfigError(f"{index}: {shard!r} is not the name of a file beside it")
    shards = {shard: TensorFile(directory / shard) for shard in sorted(set(weight_map.values()))}
    for name, shard in weight_map.items():
        if name not in shards[shard].names:
            raise ConfigError(f"{directory / shard}: no tensor {name}, which {_INDEX} puts there")
    return {name: shards[shard] for name, shard in weight_map.items()}, index


def _language_model(files: dict[str, TensorFile], directory: Path) -> dict[str, str]:
    """Returns plain name -> stored name of the tensors of the language model."""
    names: dict[str, str] = {}
    n_others = 0
    for name in files:
        plain = name.replace(_COMPOSITE_PREFIX, "model.", 1)
        if name.startswith(_OTHER_PARTS):
            n_others += 1
        elif plain in names:
            raise ConfigError(
                f"{directory}: {names[plain]} and {name} are the same tensor; remove one of them"
            )
        else:
            names[plain] = name
    if n_others:
        log.warning(
            "%s: %d tensors of vision and token prediction heads left out", directory, n_others
        )
    return names


def _weights_sha256(paths: set[Path], weights_path: Path) -> str:
    if weights_path.name == _SINGLE:
        return file_sha256(weights_path)
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()


def _stop_ids(
    directory: Path, hf: dict[str, Any], tokenizer: ChatTokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    # Without one, generation is configured from config.json, as in transformers.
    found = (read_json(path) if path.is_file() else hf).get("eos_token_id")
    path = path if path.is_file() else directory / "config.json"
    ids = [] if found is None else found if isinstance(found, list) else [found]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"{path}: eos_token_id must be an id or a list of ids, got {found!r}")
    ids = sorted({*ids, *(tokenizer.end_ids if tokenizer else ())})
    if ids and not 0 <= ids[0] <= ids[-1] < vocab_size:
        raise ConfigError(
            f"{path}: eos_token_id and the tokenizer's end ids must be below vocab_size "
            f"{vocab_size}, got {ids}; correct the one that is not"
        )
    return tuple(ids)
