"""Rows over several devices: the update is that of one device, and the target may lie in parts."""

import dataclasses

import jax
import numpy as np
import pytest

from spd_jax.checks import ConfigError
from spd_jax.models.draft import init_params
from train.batches import make_batch
from train.config import TrainConfig
from train.optimizer import learning_rate, make_optimizer
from train.parallel import BY_ROW, WHOLE, Devices, assemble, find_devices, one_device
from train.step import init_state, make_train_step
from train.teacher import Teacher

CONFIG = TrainConfig(lr=3e-3, warmup_steps=2)


def train(small, corpus, devices: Devices, params, n_rows: int, n_steps: int):
    """Returns the parameters after some steps on batches of `n_rows` rows, and their losses."""
    schedule = learning_rate(CONFIG, 100)
    optimizer = make_optimizer(CONFIG, schedule)
    draft = init_params(small.target, small.draft, small.target_params, jax.random.key(1))
    state = devices.put_whole(init_state(draft, optimizer, jax.random.key(2)))
    step = make_train_step(small.target, small.draft, optimizer, schedule, devices=devices)
    teacher = Teacher(small.target, small.draft, params, corpus, None, devices)
    losses = []
    with jax.transfer_guard_host_to_device("disallow"):
        for i in range(n_steps):
            rows = corpus.rows[i * n_rows : (i + 1) * n_rows]
            batch = make_batch(rows, n_rows=n_rows, length=24)
            state, metrics = step(state, params, teacher(batch))
            losses.append(float(jax.device_get(metrics["loss"])))
    return jax.device_get(state.params), losses


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut_target", [False, True])
def test_the_update_is_that_of_one_device(small, corpus, cut_target):
    """Also where the rows of a batch do not divide by the devices, and some have none to score."""
    want, want_losses = train(small, corpus, one_device(), small.target_params, 3, 4)
    devices = find_devices(4, cut_target, small.target_params)
    params = jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.NamedSharding(devices.mesh, spec)),
        small.target_params,
        devices.target_specs(small.target_params),
    )
    got, losses = train(small, corpus, devices, params, 3, 4)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want)


def test_a_cut_target_takes_its_share_of_each_device_and_comes_together(small):
    devices = find_devices(4, True, small.target_params)
    specs = devices.target_specs(small.target_params)
    placed = devices.place_target(dataclasses.make_dataclass("L", ["params"])(small.target_params))
    whole = sum(x.nbytes for x in jax.tree.leaves(small.target_params))
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed))
    assert held < 0.3 * whole

    def work(params):
        there = assemble(params, specs)
        return {**there, "layers": list(there["layers"])}

    got = jax.jit(devices.by_rows(work, (specs,), WHOLE))(placed)
    jax.tree.map(np.testing.assert_array_equal, got, small.target_params)


def test_rows_are_filled_up_and_spread():
    devices = find_devices(4, False, {})
    placed = devices.put_rows({"x": np.arange(5)[:, None] + 1})["x"]
    assert placed.sharding.spec == BY_ROW and placed.shape == (8, 1)
    np.testing.assert_array_equal(np.ravel(placed), [1, 2, 3, 4, 5, 0, 0, 0])


def test_a_large_target_is_cut_where_the_memory_is_known(monkeypatch):
    device = jax.devices()[0]
    params = {"w": jax.ShapeDtypeStruct((100, 100), np.float32)}

    class Reporting:
        def __getattr__(self, name):
            return getattr(device, name)

        def memory_stats(self):
            return {"bytes_limit": 60_000}

    monkeypatch.setattr(jax, "devices", lambda: [Reporting(), *[device] * 3])
    monkeypatch.setattr(jax, "make_mesh", lambda *args, **more: None)
    assert find_devices(4, None, params).cuts_target
    assert not find_devices(4, False, params).cuts_target
    assert not find_devices(1, None, params).cuts_target
    assert not find_devices(4, None, {"w": jax.ShapeDtypeStruct((60, 100), np.float32)}).cuts_target


def test_more_devices_than_there_are_is_one_line():
    with pytest.raises(ConfigError, match="devices must be at most 9, as there are, got 10"):
        find_devices(10, None, {})
    assert one_device().n == find_devices(None, None, {}).n == 1  # CPUs share their cores
