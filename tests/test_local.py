"""Local work: steps of a share of it, and filled batches, the stream of the FlexCFL code's
pre-training.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, shuffled

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import over_clients
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.local import Local, full_work, plan_steps
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.types import Cohort

BATCH, STEPS = 10, 12


def reference_stream(count):
    """Yields (pass, place) of the samples of each step: every pass in an order of its own,
    its last batch followed by the first samples of the next pass.
    """
    per_pass = -(-count // BATCH)
    for step in range(STEPS):
        epoch, place = divmod(step, per_pass)
        batch = [(epoch, i) for i in range(place * BATCH, min(count, place * BATCH + BATCH))]
        if place == per_pass - 1:
            batch += [(epoch + 1, i) for i in range(per_pass * BATCH % count)]
        yield batch


@pytest.mark.parametrize(
    "count", [nightly(1), 3, nightly(6), nightly(9), nightly(10), nightly(22), nightly(40)]
)
def test_stream_of_batches(count):
    local = Local(0.1, 1, BATCH, steps=STEPS, fill_batches=True)
    words = jax.random.bits(jax.random.key(count), (2,))
    plan = plan_steps(local, jnp.int32(count), jnp.float32(1.0), words)
    assert int(plan.steps) == STEPS
    orders = [shuffled(words, count, number) for number in range(STEPS + 1)]
    passes = local.replace(steps=None, epochs=STEPS)
    table = plan.make_table(jnp.int32(count), passes, 40)
    assert table is not None and plan.make_table(jnp.int32(count), local, 40) is None
    for step, expected in enumerate(reference_stream(count)):
        for stored in (None, table):
            drawn, real = plan.draw_samples(jnp.int32(step), jnp.int32(count), local, stored)
            taken = np.asarray(drawn)[np.asarray(real)].tolist()
            assert taken == [orders[epoch][place] for epoch, place in expected]
            assert (0 <= drawn).all() and (drawn < count).all()


@pytest.mark.nightly
@pytest.mark.parametrize(("width", "other"), [(1, "dual"), (4, "direct")])
def test_same_models_however_they_are_trained(width, other):
    sizes = (3, 22, 9, 40, 10, 0)
    rng = np.random.default_rng(1)
    owner = np.repeat(np.arange(len(sizes)), sizes).astype(np.int32)
    x = rng.integers(0, 256, (owner.size, 6, 5), dtype=np.uint8)
    pool = cfl.Pool(x, rng.integers(0, 4, owner.size).astype(np.int32), 4)
    data = cfl.federate(
        pool, cfl.Partition(np.arange(owner.size), owner, np.zeros(owner.size, bool))
    )
    task = cfl.as_task(cfl.models.MLP(4, hidden=()), (6, 5), 4)
    clients = jnp.arange(len(sizes))
    models = jax.vmap(task.init)(jax.random.split(jax.random.key(3), 2))

    def trained(way, width, fill):
        local = Local(
            0.1,
            1,
            BATCH,
            steps=STEPS,
            fill_batches=fill,
            execution=make_execution(cfl.make_mesh(1), width, first_layer=way),
        )
        cohort, work = Cohort(ids=clients, rank=clients), full_work(clients % 2)
        solve = over_clients(sgd(task, local), local.execution)
        return jax.jit(lambda: solve(cohort, data, (jax.random.key(4), models), work))()

    filled = trained("direct", 1, True)
    chex.assert_trees_all_close(
        trained(other, width, True).delta, filled.delta, rtol=1e-4, atol=2e-6
    )
    short = trained("direct", 1, False)
    apart = jax.tree.map(lambda a, b: jnp.abs(a - b), filled.delta, short.delta)
    moved = [max(float(leaf[i].max()) for leaf in jax.tree.leaves(apart)) for i in range(6)]
    assert all(change > 1e-3 for change in moved[:3]) and moved[3] < 2e-6 and moved[5] == 0


@pytest.mark.parametrize(("fraction", "steps"), [(1.0, 4), (0.75, 3), (0.3, 2), (0.01, 1)])
def test_partial_work_is_rounded_up_to_whole_steps(fraction, steps):
    plan = plan_steps(
        Local(0.1, 1, BATCH), jnp.int32(40), jnp.float32(fraction), jnp.zeros(2, jnp.uint32)
    )
    assert int(plan.steps) == steps
