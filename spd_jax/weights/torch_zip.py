"""Reads and writes the zip files of torch.save without torch, and runs nothing a pickle asks for.

Only tensors over plain storages and plain containers are understood; any other global is refused
by name, every size is checked against the file, and nothing is unpacked to disk.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import reprlib
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from spd_jax.checks import ConfigError
from spd_jax.weights.files import one_line

_STORAGES = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
}
_STORAGE_NAMES = {dtype: name for name, dtype in _STORAGES.items()}
_MAX_PICKLE = 64 << 20  # bytes of data.pkl; the arrays are not in it
_ROOT = "archive"  # the folder inside a zip that is written; a reader finds it by data.pkl
_ALIGNMENT = 64  # of each storage in the file, for readers that map it


class _StorageType(NamedTuple):
    dtype: np.dtype


def load_torch_zip(path: Path) -> Any:
    """Returns the object that torch.save wrote, its tensors as numpy arrays.

    Raises:
      ConfigError: the file is not whole, or asks for anything but tensors and plain containers.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _Reader(archive, path).load()
    except ConfigError as error:
        raise ConfigError(f"{path}: {one_line(error)}") from None
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a head.pt") from None
    except Exception as error:  # a damaged pickle can make its machine raise anything
        raise ConfigError(
            f"{path}: not a whole torch.save zip file ({one_line(error)}); get it anew"
        ) from None


# The python unpickler: its memo is a dict, where the C one allocates what a hostile index says.
class _Reader(pickle._Unpickler):
    dispatch = dict(pickle._Unpickler.dispatch)

    def __init__(self, archive: zipfile.ZipFile, path: Path):
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ConfigError("holds compressed entries, which torch.save never writes")
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            raise ConfigError("its entries claim more bytes than the file has")
        self._sizes = {entry.filename: entry.file_size for entry in entries}
        if len(self._sizes) != len(entries):
            raise ConfigError("names an entry twice, which torch.save never does")
        pickles = [name for name in self._sizes if name.endswith("/data.pkl")]
        if len(pickles) != 1 or self._sizes[pickles[0]] > _MAX_PICKLE:
            raise ConfigError("must hold one data.pkl of a sane size; is it a torch.save file?")
        self._archive, self._root = archive, pickles[0].removesuffix("data.pkl")
        order = f"{self._root}byteorder"
        if order in self._sizes and archive.read(order) != b"little":
            raise ConfigError("big-endian tensors are not supported")
        self._storages: dict[str, np.ndarray] = {}
        super().__init__(io.BytesIO(archive.read(pickles[0])), encoding="utf-8")

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and name in _STORAGES:
            return _StorageType(_STORAGES[name])
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if (module, name) == ("collections", "OrderedDict"):
            return _ordered_dict
        raise ConfigError(f"refused: its pickle asks for {one_line(f'{module}.{name}')!r}")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _, n_items = pid
        if kind != "storage" or not isinstance(storage, _StorageType):
            raise ConfigError(f"refused: unknown persistent object {reprlib.repr(pid)}")
        if type(key) is not str:
            raise ConfigError(f"refused: a storage named by a {type(key).__name__}")
        name = f"{self._root}data/{key}"
        if name not in self._sizes:
            raise ConfigError(f"storage {reprlib.repr(key)} is missing; get the file anew")
        if not isinstance(n_items, int) or n_items * storage.dtype.itemsize != self._sizes[name]:
            raise ConfigError(
                f"storage {reprlib.repr(key)} has {self._sizes[name]} bytes, claims "
                f"{reprlib.repr(n_items)} items"
            )
        if name not in self._storages:
            self._storages[name] = np.frombuffer(self._archive.read(name), np.uint8)
        return self._storages[name].view(storage.dtype)

    def load_build(self) -> None:
        # Sets attributes: needed only for the _metadata of a state dict, which nobody reads.
        self.stack.pop()
        if type(self.stack[-1]) is not collections.OrderedDict:
            raise ConfigError("refused: its pickle sets attributes of an object")

    dispatch[pickle.BUILD[0]] = load_build

    def load_setitem(self) -> None:
        _check_keys(self.stack[-2:])
        super().load_setitem()

    dispatch[pickle.SETITEM[0]] = load_setitem

    def load_setitems(self) -> None:
        _check_keys(self.stack)  # what came since the last mark
        super().load_setitems()

    dispatch[pickle.SETITEMS[0]] = load_setitems

    def load_dict(self) -> None:
        _check_keys(self.stack)
        super().load_dict()

    dispatch[pickle.DICT[0]] = load_dict

    def load_refused(self) -> None:
        raise ConfigError("refused: its pickle makes sets or objects, which torch.save never does")

    # What is left hashes nothing but the keys checked above: hashing a tuple of tuples that share
    # members takes exponential time.
    for _code in (
        *(pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET),
        *(pickle.OBJ, pickle.INST, pickle.NEWOBJ, pickle.NEWOBJ_EX),
        *(pickle.EXT1, pickle.EXT2, pickle.EXT4),
        *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    ):
        dispatch[_code[0]] = load_refused


def _check_keys(pairs: list[Any]) -> None:
    """Raises ConfigError unless every other item, a key, is a text or an integer."""
    for key in pairs[::2]:
        if type(key) not in (str, int):
            raise ConfigError(f"refused: a key of type {type(key).__name__}")


def _ordered_dict() -> collections.OrderedDict:
    return collections.OrderedDict()  # its items come one by one, by SETITEMS


def _rebuild_tensor(storage, offset, size, stride, requires_grad=False, hooks=None, meta=None):
    """Returns the strided view that torch._utils._rebuild_tensor_v2 would."""
    numbers = (offset, *size, *stride)
    if not isinstance(storage, np.ndarray) or len(size) != len(stride):
        raise ConfigError("refused: a tensor without storage or strides")
    if len(size) > 32 or not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        found = reprlib.repr((size, stride, offset))
        raise ConfigError(f"refused: a tensor of size, strides and offset {found}")
    n_items = math.prod(size)
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if n_items > storage.size or (n_items and last >= storage.size):
        raise ConfigError(f"a tensor of size {tuple(size)} reaches beyond its storage")
    if not n_items:
        return np.zeros(size, storage.dtype)
    steps = tuple(step * storage.itemsize for step in stride)
    return np.lib.stride_tricks.as_strided(storage[offset:], size, steps, writeable=False)


def save_torch_zip(file: IO[bytes], value: Any) -> None:
    """Writes what torch.save would for `value`, readable with weights_only=True.

    Args:
      file: open for writing, at its start.
      value: plain containers, texts, numbers and numpy arrays of the dtypes that are read here.
    """
    pickled = io.BytesIO()
    writer = _Writer(pickled)
    writer.dump(value)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        _write_entry(archive, "data.pkl", pickled.getvalue())
        _write_entry(archive, "byteorder", b"little")
        for i, array in enumerate(writer.arrays):
            flat = np.ascontiguousarray(array).reshape(-1)
            _write_entry(archive, f"data/{i}", memoryview(flat.view(np.uint8)))
        _write_entry(archive, "version", b"3\n")


def _write_entry(archive: zipfile.ZipFile, name: str, content: bytes | memoryview) -> None:
    entry = zipfile.ZipInfo(f"{_ROOT}/{name}")  # dated 1980: equal heads are equal files
    start = archive.fp.tell() + 30 + len(entry.filename)  # of the content without an extra field
    start += 20 if len(content) * 1.05 > zipfile.ZIP64_LIMIT else 0  # zipfile adds its own then
    n_padding = -(start + 4) % _ALIGNMENT
    entry.extra = b"FB" + n_padding.to_bytes(2, "little") + bytes(n_padding)
    archive.writestr(entry, content)


class _Global(NamedTuple):
    """A name that a pickle asks its reader for."""

    module: str
    name: str


class _Storage(NamedTuple):
    """The bytes of one array, kept beside the pickle."""

    kind: _Global
    key: str
    n_items: int


_REBUILD = _Global("torch._utils", "_rebuild_tensor_v2")


# The python pickler: it lets a global be written without importing the module that has it.
class _Writer(pickle._Pickler):
    dispatch = dict(pickle._Pickler.dispatch)

    def __init__(self, file: IO[bytes]):
        super().__init__(file, protocol=2)
        self.arrays: list[np.ndarray] = []  # array i is the storage "i"

    def persistent_id(self, obj: Any) -> tuple | None:
        if isinstance(obj, _Storage):
            return ("storage", obj.kind, obj.key, "cpu", obj.n_items)
        return None

    def save_global_name(self, obj: _Global) -> None:
        self.write(pickle.GLOBAL + f"{obj.module}\n{obj.name}\n".encode())
        self.memoize(obj)

    dispatch[_Global] = save_global_name

    def save_array(self, array: np.ndarray) -> None:
        kind = _Global("torch", _STORAGE_NAMES[array.dtype])
        storage = _Storage(kind, str(len(self.arrays)), array.size)
        self.arrays.append(array)
        strides = tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
        self.save(_REBUILD)
        self.save((storage, 0, array.shape, strides, False, collections.OrderedDict()))
        self.write(pickle.REDUCE)
        self.memoize(array)

    dispatch[np.ndarray] = save_array
