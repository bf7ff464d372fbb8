"""Where parameters lie: packed slots, id mod R shards, and copies that are kept."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import spd_jax
from spd_jax.checks import ConfigError
from spd_jax.config import LayerKind, PipelineConfig
from spd_jax.engines import build_engine
from spd_jax.models import target as model
from spd_jax.pipeline import placing
from spd_jax.pipeline.heads import shard_ids
from spd_jax.pipeline.mesh import resolve_mesh
from spd_jax.pipeline.spec import EngineSpec
from tests.random_models import HYBRID, full_config, make_draft, make_prompt, make_target


@pytest.fixture(scope="module")
def layout():
    pipeline = PipelineConfig(4, 3)  # stages of 2, 1 and 1 layers
    return placing.Layout(pipeline, resolve_mesh(None, "dedicated", 3))


@pytest.mark.parametrize(
    "target", [make_target(4), make_target(8, base=HYBRID)], ids=["like layers", "unlike layers"]
)
def test_sharding_and_gathering_gives_the_same_parameters(target):
    n_layers = target.config.n_layers
    pipeline = PipelineConfig(n_layers, 3, (n_layers - 3, 1, 2))
    layout = placing.Layout(pipeline, resolve_mesh(None, "dedicated", 3))
    sharded = placing.shard_target(target.params, target.config, layout)
    whole = placing.unshard_target(sharded, target.config, layout)
    jax.tree.map(np.testing.assert_array_equal, whole, target.params)


def test_rows_lie_on_the_shard_of_their_id_modulo_the_ranks(layout):
    target = make_target(4)
    sharded = placing.shard_target(target.params, target.config, layout)
    embed, rows = sharded["embed"]["weight"], np.asarray(target.params["embed"]["weight"])
    assert embed.shape == (4, 25, 32)  # 97 ids on 4 ranks
    for shard in embed.addressable_shards:
        rank = shard.index[0].start
        held = np.asarray(shard.data)[0]
        np.testing.assert_array_equal(held[: len(rows[rank::4])], rows[rank::4])
        np.testing.assert_array_equal(held[len(rows[rank::4]) :], 0)


def test_ids_are_dealt_by_modulo_and_padded():
    table = shard_ids(np.array([0, 1, 2, 4, 8]), 4)
    assert table.tolist() == [[0, 4, 8], [1, -1, -1], [2, -1, -1], [-1, -1, -1]]


def test_wasted_bytes_are_those_of_slots_without_a_layer(layout):
    target = make_target(4)
    config = spd_jax.DraftConfig((0, 2, 4), 3, n_layers=1, feature_norm="none")
    draft = make_draft(target, config, "random")
    spec = EngineSpec(target.config, config, layout.pipeline)
    sharded = placing.shard_target(target.params, target.config, layout)
    weights = placing.mesh_weights(spec, sharded, draft.params, layout.mesh)
    layer = sum(x.size * 4 for x in jax.tree.leaves(model.layer_shapes(target.config, LayerKind())))
    assert placing.wasted_bytes(spec, weights) == [0, layer, layer, layer]


def test_wasted_bytes_of_unlike_layers_are_counted_by_part():
    target = make_target(8, base=HYBRID)  # attention in layers 1, 4, 7; experts where 3 | i is not
    config = spd_jax.DraftConfig((0, 8), 2, n_layers=1, d_ff=48)
    spec = EngineSpec(target.config, config, PipelineConfig(8, 2, (5, 3)))
    draft = make_draft(target, config, "random")
    layout = placing.Layout(spec.pipeline, resolve_mesh(None, "dedicated", 2))
    sharded = placing.shard_target(target.params, target.config, layout)
    weights = placing.mesh_weights(spec, sharded, draft.params, layout.mesh)
    shapes = [model.layer_shapes(target.config, kind) for kind in target.config.kinds]
    size = {
        part: sum(x.size * 4 for x in jax.tree.leaves(tree))
        for layer in shapes
        for part, tree in layer.items()
    }
    norms = ("mixer_norm", "mlp_norm")
    # Stage 0: 2 attention, 3 delta; 2 dense, 3 experts. Stage 1: 1, 2; 1, 2. The draft: 1; 1.
    ours = sum(x.size * 4 for x in jax.tree.leaves(draft.params["layers"]))
    whole = 2 * size["attn"] + 3 * size["delta"] + 2 * size["mlp"] + 3 * size["experts"]
    whole += 5 * sum(size[norm] for norm in norms)
    one_of_each = size["attn"] + size["delta"] + size["mlp"] + size["experts"]
    extra = placing.wasted_bytes(spec, weights)[0]  # the draft's attention has no q/k norms
    assert extra == 0
    waste_1 = one_of_each + 2 * sum(size[norm] for norm in norms)
    q_norms = 2 * target.config.head_dim * 4
    assert placing.wasted_bytes(spec, weights) == [0, waste_1, whole - ours]
    assert ours == size["attn"] - q_norms + size["mlp"] + sum(size[norm] for norm in norms)


def test_a_target_loaded_onto_a_mesh_decodes_there_and_generates_the_same():
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    target, whole = spd_jax.load_target("tiny", mesh=mesh), spd_jax.load_target("tiny")
    assert all(slot_leaf.shape[0] == 4 for slot_leaf in jax.tree.leaves(target.params["slots"]))
    config = spd_jax.DraftConfig((0, 4, 7, 10), 3, n_layers=1)
    draft = spd_jax.init_draft(whole, config, jax.random.key(0))
    want = spd_jax.generate(whole, [5, 6, 7], max_new_tokens=8, stop_ids=())
    result = spd_jax.decode(target, draft, [5, 6, 7], max_new_tokens=8, stop_ids=())
    assert result.stats.mode == "sharded" and result.stats.devices == 4
    assert result.tokens == want.tokens
    again = spd_jax.generate(target, [5, 6, 7], max_new_tokens=8, stop_ids=())
    assert again.tokens == want.tokens
    with pytest.raises(ConfigError, match="lies on a mesh"):
        jax.jit(lambda t: spd_jax.target_logits(t, jax.numpy.arange(4)))(target)


def test_engines_are_kept_and_share_what_was_placed(caplog):
    target = make_target(4, seed=77)
    drafts = [make_draft(target, full_config(4, 3), "random", seed=s) for s in (0, 1)]
    engines = [build_engine(target, d, None, None, None, "dedicated") for d in drafts]
    assert build_engine(target, drafts[0], None, None, None, "dedicated") is engines[0]
    assert sum("second copy" in r.message for r in caplog.records) == 1
    a, b = (engine.weights.heads.embed for engine in engines)
    assert a is b


@pytest.mark.parametrize(
    ("mesh", "placement", "expected"),
    [
        (None, "elsewhere", "placement must be one of"),
        ("everywhere", "auto", "mesh must be"),
        ("virtual", "dedicated", "needs devices"),
    ],
)
def test_places_that_cannot_be_are_one_line(mesh, placement, expected):
    with pytest.raises(ConfigError, match=expected) as error:
        resolve_mesh(mesh, placement, 3)
    assert "\n" not in str(error.value)


def test_a_mesh_of_another_size_is_an_error():
    mesh = Mesh(np.array(jax.devices()[:3]), ("x",))
    with pytest.raises(ConfigError, match="need a 1-D mesh of 4 devices"):
        resolve_mesh(mesh, "auto", 3)
    with pytest.raises(ConfigError, match="needs 21 devices, got 9"):
        resolve_mesh(None, "dedicated", 20)
    assert resolve_mesh(None, "auto", 20) is None


def test_the_callers_device_order_is_kept():
    devices = jax.devices()[3::-1]
    mesh = resolve_mesh(Mesh(np.array(devices), ("x",)), "auto", 3)
    assert list(mesh.devices) == devices


def test_decoding_with_uneven_stages_says_so(caplog):
    target = make_target(4, seed=78)
    draft = make_draft(target, full_config(4, 3), "random")
    prompt = make_prompt(2)
    spd_jax.decode(target, draft, prompt, max_new_tokens=1, stage_layers=(1, 1, 2), mesh="virtual")
    assert any("was trained for stages of 2,1,1" in r.message for r in caplog.records)
