"""A model that normalises over a batch sees a client's own real samples and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import matrix
from test_layers import close, normal

import fedjax_cfl as cfl
from fedjax_cfl.clustering.assign import training_loss
from fedjax_cfl.models import CelebaCNN, GroupNorm
from fedjax_cfl.round.cohort import over_clients
from fedjax_cfl.round.local import full_work
from fedjax_cfl.round.sgd import gradient_step, sgd
from fedjax_cfl.simulation import evaluate
from fedjax_cfl.types import Cohort, Partition, Pool, ServedModels

SHAPE, BATCH, CLIENT = (4, 5, 3), 10, 1  # CLIENT is the one looked at
TRAIN, TEST = (6, 8, 70), (3, 4, 2)  # samples: CLIENT's one batch is padded by two
KEY = jax.random.key(3)


@pytest.fixture(params=["batch statistics", "groups"], scope="module")
def task(request):
    """FeSEM's CelebA CNN, small, in both forms."""
    own = {} if request.param == "batch statistics" else {"norm": GroupNorm}
    return cfl.as_task(CelebaCNN(2, **own), SHAPE, 2)


def faces(others: float):
    """Three clients; the pixels of all but CLIENT are multiplied by `others`."""
    owner = np.concatenate([np.repeat(np.arange(3), sizes) for sizes in (TRAIN, TEST)])
    x = normal(len(owner), *SHAPE)
    x[owner != CLIENT] *= others
    test = np.arange(len(owner)) >= sum(TRAIN)
    pool = Pool(x, (np.arange(len(owner)) % 2).astype(np.int32), 2)
    return cfl.federate(pool, Partition(np.arange(len(owner)), owner, test))


def measure(task, others: float):
    """Returns CLIENT's update by SGD and by one gradient, its training losses, and its
    test losses.
    """
    data = faces(others)
    local = cfl.Local(0.1, 1, BATCH, 1, cfl.make_mesh(1))
    models = jax.vmap(task.init)(jax.random.split(KEY, 2))
    cohort = Cohort(jnp.arange(3, dtype=jnp.int32), jnp.arange(3, dtype=jnp.int32))

    @jax.jit
    def run(data):
        work = full_work(jnp.zeros(3, jnp.int32))
        uploads = [
            over_clients(way, local)(cohort, data, (KEY, models), work)
            for way in (sgd(task, local), gradient_step(task, local))
        ]
        losses = [
            over_clients(training_loss(task, with_l2), local)(cohort, data, models)
            for with_l2 in (False, True)
        ]
        served = ServedModels(models, jnp.zeros(3, jnp.int32))
        return uploads, losses, evaluate.predict_test_samples(task, local.mesh, served, data)[1]

    uploads, losses, tested = run(data)
    own = np.asarray(data.owner)[np.asarray(data.test.order)] == CLIENT
    steps = [(matrix(upload.delta)[CLIENT], upload.loss[CLIENT]) for upload in uploads]
    return steps, [loss[CLIENT] for loss in losses], tested[own]


@pytest.mark.parametrize("others", [30.0, np.nan])
def test_nothing_of_a_client_changes_with_other_clients_pixels(task, others):
    expected = measure(task, 1.0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    jax.tree.map(np.testing.assert_array_equal, measure(task, others), expected)


def test_padding_is_not_there(task):
    """Against the client's own samples, cut out by hand."""
    steps, (loss, _), tested = measure(task, 1.0)
    data = jax.device_get(faces(1.0))
    model = jax.tree.map(lambda leaf: leaf[0], jax.vmap(task.init)(jax.random.split(KEY, 2)))
    own = [
        view.order[view.start[CLIENT] :][: view.size[CLIENT]] for view in (data.train, data.test)
    ]
    train, test = (task.loss(model, data.x[rows], data.y[rows]) for rows in own)
    close([loss[0], steps[0][1], steps[1][1]], [train.mean()] * 3)
    close(tested, test)
    grad = jax.grad(lambda model: task.loss(model, data.x[own[0]], data.y[own[0]]).mean())(model)
    for delta, _ in steps:
        close(delta, -0.1 * matrix(jax.tree.map(lambda leaf: leaf[None], grad))[0], 1e-4)
