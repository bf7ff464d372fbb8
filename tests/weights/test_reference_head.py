"""Reference heads without torch: the right arrays from sound files, a refusal from all others."""

import collections
import io
import json
import os
import pickle
import subprocess
import sys
import types
import zipfile

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from spd_jax.config import PipelineConfig, V10DraftConfig
from spd_jax.weights import keymaps, load_draft_file
from spd_jax.weights.leaves import read_leaves, sources
from spd_jax.weights.torch_zip import load_torch_zip

SIZES = {"D": 16, "E": 4, "HE": 16, "QE": 16, "GE": 8, "F": 24, "W": 20}
CONFIG = {
    "version": 11,
    "hidden_size": 16,
    "vocab_size": 20,
    "draft_vocab_size": 20,
    "num_stages": 2,
    "num_spec_layers": 1,
    "aggr_feature_bound": [0, 1, 3],
    "trained_with_use_deepest": False,
}
V10_ROWS = [[0, 1, 2], [0, 1]]  # of depth 2, of depth 1
V10_CONFIG = {k: v for k, v in CONFIG.items() if k != "aggr_feature_bound"} | {
    "version": 10,
    "shallow_hidden_layer_indices": V10_ROWS,
}


class Storage:
    """What a torch storage is to a pickle: a type name, a key and a length."""

    def __init__(self, kind: str, key: str, n_items: int):
        self.kind, self.key, self.n_items = kind, key, n_items


class Strided:
    """An array with a storage of its own choosing."""

    def __init__(self, storage: Storage, offset, size, stride):
        self.args = (storage, offset, size, stride, False, collections.OrderedDict())


def _rebuild_tensor_v2():
    """Only its name is pickled."""


_KINDS = {"float32": "FloatStorage", "float16": "HalfStorage", "bfloat16": "BFloat16Storage"}


class TorchPickler(pickle.Pickler):
    """Writes what torch.save writes."""

    def __init__(self, file, torch):
        super().__init__(file, protocol=2)
        self.torch, self.storages = torch, {}

    def persistent_id(self, obj):
        if isinstance(obj, Storage):
            return ("storage", getattr(self.torch, obj.kind), obj.key, "cpu", obj.n_items)

    def reducer_override(self, obj):
        if isinstance(obj, Strided):
            return sys.modules["torch._utils"]._rebuild_tensor_v2, obj.args
        if isinstance(obj, np.ndarray):
            key = str(len(self.storages))
            self.storages[key] = obj.tobytes()
            storage = Storage(_KINDS[obj.dtype.name], key, obj.size)
            stride = tuple(s // obj.itemsize for s in obj.strides)
            args = (storage, 0, obj.shape, stride, False, collections.OrderedDict())
            return sys.modules["torch._utils"]._rebuild_tensor_v2, args
        return NotImplemented


@pytest.fixture
def torch_save(tmp_path, monkeypatch):
    """(object, more files) -> path of a zip as torch.save would write it."""

    def save(obj, files=None, name="head.pt", compression=zipfile.ZIP_STORED):
        torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
        for kind in (*_KINDS.values(), "LongStorage"):
            setattr(torch, kind, type(kind, (), {"__module__": "torch"}))
        _rebuild_tensor_v2.__module__ = "torch._utils"
        utils._rebuild_tensor_v2, torch._utils = _rebuild_tensor_v2, utils
        file = io.BytesIO()
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", torch)
            patch.setitem(sys.modules, "torch._utils", utils)
            pickler = TorchPickler(file, torch)
            pickler.dump(obj)
        data = {f"data/{k}": v for k, v in pickler.storages.items()}
        return write_zip(tmp_path / name, file.getvalue(), data | (files or {}), compression)

    return save


def write_zip(path, pickled: bytes, files=None, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        archive.writestr("head/data.pkl", pickled)
        archive.writestr("head/byteorder", b"little")
        for name, data in (files or {}).items():
            archive.writestr(f"head/{name}", data)
    return path


def state_dict(dtype=np.float32, **changes) -> collections.OrderedDict:
    rng, state = np.random.default_rng(0), collections.OrderedDict()
    sizes = SIZES | changes

    def take(name, shape):
        state[name] = rng.standard_normal(shape, np.float32).astype(dtype)
        return state[name]

    leaves = [keymaps.proj_leaf(keymaps.REFERENCE_PROJ, i) for i in range(3)]
    read_leaves(keymaps.dense_leaves(True), "hf", "spec_layers.0.", sizes, take)
    for leaf in leaves:
        for name, shape in sources(leaf, "hf", "", sizes):
            take(name, shape)
    take("lm_head.weight", (sizes["W"], sizes["D"]))
    return state


def v10_state_dict() -> collections.OrderedDict:
    rng, state = np.random.default_rng(0), state_dict()
    for name in [name for name in state if name.startswith("aggr_projs.")]:
        del state[name]
    widths = {"stage_projs.0": 48, "stage_projs.1": 32, "g0_proj": 16}
    widths |= {f"fixed_stage_per_layer_projs.0.{i}": 16 for i in range(2)}
    for name, width in widths.items():
        state[f"{name}.weight"] = rng.standard_normal((16, width), np.float32)
    return state


def head(config=None, state=None) -> dict:
    return {"state_dict": state or state_dict(), "config": CONFIG | (config or {})}


def v10_head(config=None, state=None) -> dict:
    return {"state_dict": state or v10_state_dict(), "config": V10_CONFIG | (config or {})}


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_pt_and_safetensors_give_the_same_head(tmp_path, torch_save, assert_same, dtype):
    state = state_dict(dtype)
    state._metadata = {"": {"version": 1}}  # as every torch state dict has
    path = torch_save(head(state=state))
    save_file(dict(state), tmp_path / "head.safetensors")
    (tmp_path / "head_config.json").write_text(json.dumps(CONFIG))
    a, b, c = (load_draft_file(p) for p in (path, tmp_path / "head.safetensors", tmp_path))
    assert a[0] == b[0] == c[0] and a[2] == b[2] == c[2]
    assert_same(a[1], b[1])
    draft, params, meta = a
    assert (draft.anchors, draft.n_stages, draft.n_layers, draft.d_ff) == ((0, 1, 3), 2, 1, 24)
    assert draft.qk_norm and draft.feature_norm == "none" and draft.draft_ids is None
    assert meta == {
        "d_model": 16, "vocab_size": 20, "head_dim": 4, "n_heads": 4, "n_kv_heads": 2,
        "attn_gate": False,
    }  # fmt: skip
    qkv = [state[f"spec_layers.0.self_attn.{n}_proj.weight"] for n in "qkv"]
    loaded = params["layers"][0]["attn"]["qkv"]["weight"]
    np.testing.assert_array_equal(loaded, np.concatenate(qkv).astype(np.float32))
    assert [node["weight"].shape for node in params["projs"]] == [(16, 16), (16, 32), (16, 48)]


@pytest.mark.parametrize("prefix", keymaps.REFERENCE_PREFIXES)
def test_wrapper_prefixes_and_rotary_buffers_are_ignored(torch_save, assert_same, prefix):
    state = state_dict()
    wrapped = {prefix + name: array for name, array in state.items()}
    wrapped[prefix + "rotary_emb.inv_freq"] = np.ones(3, np.float32)
    plain = load_draft_file(torch_save(head(state=state), name="a.pt"))
    assert_same(load_draft_file(torch_save(head(state=wrapped), name="b.pt"))[1], plain[1])


def test_strides_and_offsets_are_followed(torch_save):
    data = np.arange(12, dtype=np.float32)
    tensor = Strided(Storage("FloatStorage", "x", 12), 1, (2, 3), (1, 4))
    path = torch_save({"t": tensor}, {"data/x": data.tobytes()})
    np.testing.assert_array_equal(load_torch_zip(path)["t"], [[1, 5, 9], [2, 6, 10]])


@pytest.mark.parametrize("value", [0, None, 11])
def test_a_missing_version_is_the_current_one(torch_save, value):
    assert load_draft_file(torch_save(head({"version": value})))[0].n_stages == 2


@pytest.mark.parametrize("version", [9, 13, "11", 10.0, True])
def test_other_versions_are_refused(torch_save, refused, version):
    with refused(f"version {version!r}", "not supported", "give v10, v11 or v12"):
        load_draft_file(torch_save(head({"version": version})))


def test_a_v10_head_keeps_its_tensors_by_depth_and_layer(tmp_path, torch_save, assert_same):
    state = v10_state_dict()
    save_file(dict(state), tmp_path / "head.safetensors")
    (tmp_path / "head_config.json").write_text(json.dumps(V10_CONFIG))
    a, b = (load_draft_file(p) for p in (torch_save(v10_head()), tmp_path))
    assert a[0] == b[0] and a[2] == b[2]
    assert_same(a[1], b[1])
    draft, params, meta = a
    assert draft == V10DraftConfig(((0, 1, 2), (0, 1), (0,)), n_layers=1, d_ff=24)
    assert meta["d_model"] == 16 and meta["n_heads"] == 4
    projs = [state[f"{name}.weight"] for name in ("stage_projs.0", "stage_projs.1", "g0_proj")]
    assert_same(params["projs"], [{"weight": array} for array in projs])
    fixed = [state[f"fixed_stage_per_layer_projs.0.{i}.weight"] for i in range(2)]
    assert_same(params["memory"], [[{"weight": array} for array in fixed]])
    assert params["layers"][0]["attn"].keys() == {"qkv", "o", "q_norm", "k_norm"}


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"shallow_hidden_layer_indices": None}, "must be 2 lists"),
        ({"shallow_hidden_layer_indices": V10_ROWS[:1]}, "must be 2 lists"),
        ({"shallow_hidden_layer_indices": [[0, 1], *V10_ROWS]}, "must be 2 lists"),
        ({"shallow_hidden_layer_indices": [0, 1]}, "must be a list of integers, got 0"),
        ({"shallow_hidden_layer_indices": [[0, 1, 2], []]}, "must be a list of integers"),
        ({"shallow_hidden_layer_indices": [[0, 1], [0, 1]]}, "stage_projs.0.weight"),
        ({"shallow_hidden_layer_indices": [[0, 1, 2], [0, -1]]}, "from 0 on, got -1"),
        ({"num_stages": 3}, "must be 3 lists"),
        ({"num_stages": 1, "shallow_hidden_layer_indices": V10_ROWS[:1]}, "n_stages"),
        ({"num_spec_layers": 2}, "fixed_stage_per_layer_projs.1.0"),
        ({"version": 11}, "aggr_feature_bound"),
    ],
)
def test_a_misfit_in_a_v10_config_is_named(torch_save, refused, config, word):
    with refused("head.pt", word):
        load_draft_file(torch_save(v10_head(config)))


def test_missing_misshapen_and_surplus_v10_tensors_are_named(torch_save, refused):
    for name in ("g0_proj", "stage_projs.1", "fixed_stage_per_layer_projs.0.1", "lm_head"):
        state = v10_state_dict()
        array = state.pop(f"{name}.weight")
        with refused(name):
            load_draft_file(torch_save(v10_head(state=state)))
        with refused(name):
            load_draft_file(torch_save(v10_head(state=state | {f"{name}.weight": array[1:]})))
    for name in ("self_attn.q_norm", "self_attn.k_norm"):
        state = {k: v for k, v in v10_state_dict().items() if name not in k}
        with refused(name):
            load_draft_file(torch_save(v10_head(state=state)))
    with refused("unsupported tensor aggr_projs.0.weight", "v10"):
        state = v10_state_dict() | {"aggr_projs.0.weight": array}
        load_draft_file(torch_save(v10_head(state=state)))


def test_draft_ids_are_sorted_and_unique(torch_save, refused):
    state = state_dict(W=3)
    path = torch_save(head({"draft_token_ids": [7, 0, 19, 7]}, state))
    assert load_draft_file(path)[0].draft_ids == (0, 7, 19)
    for bad in ([0, 7], [0, 7, 20], [-1, 0, 7], [], "0;7;19", [0, 7, 1.5]):
        with refused("draft_token_ids"):
            load_draft_file(torch_save(head({"draft_token_ids": bad}, state)))
    with refused("no draft_token_ids"):
        load_draft_file(torch_save(head(state=state)))


UNEVEN = [
    {"stage_layers": [1, 3]},
    {"stage_layers": (1, 3)},
    {"stage_layers": "1;3"},
    {"stage_layers": [[1], [3]]},
    {"stage_layers": [[0], [1, 2, 3]]},
    {"stage_layer_ranges": [[0, 1], (1, 4)]},
    {"stage_layers": "1;3", "stage_layer_ranges": [[0, 1], [1, 4]], "num_aggr_types": 3},
]


@pytest.mark.parametrize("version", [11, 12])
@pytest.mark.parametrize("fields", UNEVEN)
def test_uneven_stages_come_in_every_form(tmp_path, torch_save, assert_same, version, fields):
    pickled = load_draft_file(torch_save(head(fields | {"version": version})))
    draft, params, meta = pickled
    assert draft.stage_layers == (1, 3) and meta["n_layers"] == 4
    assert PipelineConfig(4, 2, draft.stage_layers).row_types(draft.anchors) == (0, 1, 2)
    save_file(dict(state_dict()), tmp_path / "head.safetensors")
    config = json.dumps(CONFIG | fields | {"version": version})
    (tmp_path / "head_config.json").write_text(config)
    beside = load_draft_file(tmp_path)
    assert (beside[0], beside[2]) == (draft, meta)
    assert_same(beside[1], params)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({}, "must have stage_layers"),
        ({"stage_layers": "1;3", "stage_layer_ranges": [[0, 2], [2, 4]]}, "contradict"),
        ({"stage_layers": "1;1;2"}, "2 positive counts (num_stages), got (1, 1, 2)"),
        ({"stage_layers": [0, 4]}, "2 positive counts"),
        ({"stage_layers": [1, 1]}, "goes to 3, but the stages (1, 1) have 2 layers"),
        ({"stage_layers": [[0, 1], [1, 2]]}, "in order"),
        ({"stage_layers": [[], [0, 1, 2, 3]]}, "must be a list of integers"),
        ({"stage_layers": []}, "must be the layers of each stage"),
        ({"stage_layers": [[1], 3]}, "must be a list of integers"),
        ({"stage_layers": 4}, "must be a list of integers, got 4"),
        ({"stage_layer_ranges": [[0, 1], [2, 4]]}, "going on where the one before ends"),
        ({"stage_layer_ranges": [[0, 4], [4, 4]]}, "going on where"),
        ({"stage_layer_ranges": [[0, 1, 4]]}, "must be pairs"),
        ({"stage_layer_ranges": "0-4"}, "must be a list of integers"),
        ({"stage_layer_ranges": []}, "must have stage_layers"),
        ({"stage_layers": "1;3", "num_aggr_types": 4}, "num_aggr_types 4 contradicts"),
    ],
)
def test_stages_that_contradict_are_named(torch_save, refused, fields, word):
    with refused("head.pt", word):
        load_draft_file(torch_save(head(fields | {"version": 12})))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"hidden_size": 32}, "hidden_size"),
        ({"num_spec_layers": 2}, "spec_layers.1."),
        ({"num_spec_layers": None}, "num_spec_layers"),
        ({"aggr_feature_bound": None}, "aggr_feature_bound"),
        ({"aggr_feature_bound": [0, 3, 1]}, "anchors"),
        ({"aggr_feature_bound": [0, 1, 2, 3]}, "aggr_projs.3"),
        ({"aggr_feature_bound": [0, 1]}, "aggr_projs.2"),
        ({"num_stages": 1}, "n_stages"),
        ({"stage_layers": "1;x"}, "stage_layers"),
        ({"stage_layers": [[1], [3, 4]]}, "stage_layers"),
        ({"num_aggr_types": 2}, "num_aggr_types"),
    ],
)
def test_a_misfit_in_config_is_named(torch_save, refused, config, word):
    with refused("head.pt", word):
        load_draft_file(torch_save(head(config)))


def test_missing_and_misshapen_tensors_are_named(torch_save, refused):
    for name in ("lm_head.weight", "aggr_projs.1.weight", "spec_layers.0.mlp.up_proj.weight"):
        state = state_dict()
        array = state.pop(name)
        with refused(name):
            load_draft_file(torch_save(head(state=state)))
        with refused(name):
            load_draft_file(torch_save(head(state=state | {name: array[0]})))


@pytest.mark.parametrize("n_rows", [16, 32])
def test_queries_with_twice_the_rows_are_gated(torch_save, n_rows):
    state = state_dict()
    state["spec_layers.0.self_attn.q_proj.weight"] = np.zeros((n_rows, 16), np.float32)
    _, params, meta = load_draft_file(torch_save(head(state=state)))
    assert meta["attn_gate"] is (n_rows == 32) and meta["n_heads"] == 4
    assert params["layers"][0]["attn"]["qkv"]["weight"].shape == (n_rows + 16, 16)


def test_queries_of_other_sizes_are_refused(torch_save, refused):
    state = state_dict()
    state["spec_layers.0.self_attn.q_proj.weight"] = np.zeros((24, 16), np.float32)
    with refused("q_proj", "24", "16"):
        load_draft_file(torch_save(head(state=state)))


class Call:
    """Pickles as a call."""

    def __init__(self, function, *args):
        self.reduced = (function, args)

    def __reduce__(self):
        return self.reduced


@pytest.mark.parametrize(
    ("function", "word"),
    [
        (os.system, "posix.system"),
        (eval, "builtins.eval"),
        (subprocess.Popen, "subprocess.Popen"),
        (getattr, "builtins.getattr"),
        (io.open, "io.open"),
        (np.zeros, "numpy.zeros"),
        (__import__, "builtins.__import__"),
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_pickle_that_calls_is_refused_by_name(tmp_path, refused, function, word, protocol):
    marker = tmp_path / "ran"
    payload = pickle.dumps({"config": Call(function, f"touch {marker}")}, protocol)
    word = word.split(".")[-1] if protocol < 3 else word  # modules have their Python 2 names there
    with refused("refused", word):
        load_draft_file(write_zip(tmp_path / "head.pt", payload))
    assert not marker.exists()


NESTED = b")" + b"2\x86" * 60  # t = (); 60 times t = (t, t)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "payload",
    [
        b"ctorch.hub\nload\n.",
        b"ctorch\nload\n.",
        b"ctorch._utils\n_rebuild_parameter\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0e__import__.os.\x93.",
        b"(S'touch x'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch x'\no.",  # OBJ
        b"ctorch._utils\n_rebuild_tensor_v2\n(N}S'__defaults__'\n)stb.",  # BUILD on a function
        b"ccollections\nOrderedDict\n}S'a'\nI1\nsb.",  # BUILD on a class
        b"ctorch\nFloatStorage\n)R.",  # a call of a storage type
        b"\x82\x01.",  # EXT1
        b"(S'storage'\nS'x'\nS'0'\nS'cpu'\nI4\ntQ.",
        b"I5\nQ.",
        b"\x80\x02}r\xff\xff\xff\xff.",  # a memo index of 4 billion: not allocated
        b"\x80\x04\x8d" + (1 << 62).to_bytes(8, "little") + b"x.",
        b"\x80\x02]" + b"(l" * 5000 + b".",
        b"\x80\x02}(" + NESTED + b"I1\nu.",  # a key that takes 2^60 steps to hash
        b"\x80\x02}" + NESTED + b"I1\ns.",
        b"(" + NESTED + b"I1\nd.",  # DICT
        b"\x80\x04\x8f(" + NESTED + b"\x90.",  # a set
        b"\x80\x04(" + NESTED + b"\x91.",  # a frozenset
        b"ccollections\nOrderedDict\n((" + NESTED + b"I1\nttR.",
        b"(S'storage'\n" + b"ctorch\nFloatStorage\n" + NESTED + b"S'cpu'\nI4\ntQ.",
        b"ctorch._utils\n_rebuild_tensor_v2\n(N" + NESTED + b"(I2\nt(I1\nttR.",
        b"",
        b"garbage",
    ],
)
def test_hostile_and_broken_pickles_are_refused(tmp_path, refused, payload):
    with refused("head.pt"):
        load_draft_file(write_zip(tmp_path / "head.pt", payload))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("field", ["version", "aggr_feature_bound", "num_stages"])
def test_an_absurd_value_in_the_config_is_shown_in_short(tmp_path, refused, field):
    pairs = f"}}S'{field}'\n".encode() + NESTED + b"s"
    payload = b"\x80\x02}(S'state_dict'\n}S'config'\n" + pairs + b"u."
    with refused("head.pt"):
        load_draft_file(write_zip(tmp_path / "head.pt", payload))


@pytest.mark.parametrize(
    ("offset", "size", "stride", "n_items"),
    [
        (0, (1 << 40,), (0,), 4),
        (0, (1 << 31, 1 << 31), (0, 0), 4),
        (0, (5,), (1,), 4),
        (1, (4,), (1,), 4),
        (0, (2, 2), (3, 1), 4),
        (-1, (2,), (1,), 4),
        (0, (2,), (-1,), 4),
        (0, (-2,), (1,), 4),
        (0, (2,), (1, 1), 4),
        (0, (2.0,), (1,), 4),
        (0, (2,), (1,), 1 << 50),
        (0, (2,), (1,), -4),
        (0, (2,), (1,), "4"),
    ],
)
def test_tensors_beyond_their_storage_are_refused(
    torch_save, refused, offset, size, stride, n_items
):
    tensor = Strided(Storage("FloatStorage", "x", n_items), offset, size, stride)
    with refused("head.pt"):
        load_torch_zip(torch_save({"t": tensor}, {"data/x": bytes(16)}))


@pytest.mark.parametrize("key", ["../../etc/passwd", "/etc/passwd", "absent", "../data.pkl"])
def test_storages_outside_the_archive_are_refused(torch_save, refused, key):
    tensor = Strided(Storage("FloatStorage", key, 4), 0, (2,), (1,))
    with refused("head.pt"):
        load_torch_zip(torch_save({"t": tensor}))


def test_compressed_and_overlapping_entries_are_refused(torch_save, refused, tmp_path):
    bomb = torch_save({}, {"data/0": bytes(50 << 20)}, compression=zipfile.ZIP_DEFLATED)
    assert bomb.stat().st_size < 1 << 20
    with refused("compressed"):
        load_torch_zip(bomb)
    with pytest.warns(UserWarning, match="Duplicate"):
        path = torch_save({}, {"data.pkl": b"N."}, name="two.pt")
    with refused("twice"):
        load_torch_zip(path)


@pytest.mark.parametrize("fraction", [0, 0.001, 0.1, 0.5, 0.9, 0.999])
def test_truncated_files_are_refused(torch_save, refused, fraction):
    path = torch_save(head())
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])
    with refused("head.pt"):
        load_draft_file(path)


def test_a_flipped_byte_in_a_tensor_is_noticed(torch_save, refused):
    state = state_dict()
    path = torch_save(head(state=state))
    data = bytearray(path.read_bytes())
    data[data.index(state["lm_head.weight"].tobytes()) + 5] ^= 1
    path.write_bytes(data)
    with refused("head.pt"):
        load_draft_file(path)


@pytest.mark.parametrize(
    "obj", [None, [], {"state_dict": 1, "config": {}}, {"state_dict": {"a": 1}, "config": {}}]
)
def test_other_contents_are_refused(torch_save, refused, obj):
    with refused("head.pt", "state_dict"):
        load_draft_file(torch_save(obj))


def test_golden_pt_and_safetensors_agree(golden, assert_same):
    paths = sorted((golden / "llama").glob("n*/head.pt"))
    assert paths
    for path in paths:
        a, b = load_draft_file(path), load_draft_file(path.parent)
        assert a[0] == b[0] and a[2] == b[2]
        assert_same(a[1], b[1])
        config = json.loads((path.parent / "head_config.json").read_text())
        assert a[0].anchors == tuple(config["aggr_feature_bound"])
        assert a[0].n_stages == config["num_stages"] and a[0].qk_norm
