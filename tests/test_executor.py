"""Who runs the clients changes nothing: one after another, side by side in any number of lanes,
or a Python loop.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import matrix, nightly, others_nightly, shuffled, with_execution

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import over_clients, run_clients
from fedjax_cfl.client.execution import make_execution
from fedjax_cfl.client.executor import Cases, Loop, constant, map_result
from fedjax_cfl.client.local import Local, full_work
from fedjax_cfl.client.objective import erm, proximal
from fedjax_cfl.client.sgd import gradient_step, sgd
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Cohort

STEPS = {
    "all kinds": (0, 3, 1, 50, 7, 0, 2, 7),
    "one long": (1, 1, 400, 1, 2),
    "equal": (6,) * 9,
    "one client": (5,),
    "nobody has steps": (0, 0, 0),
}
WAYS = [("debug", None), ("sequential", None), ("lanes", 3)]
WAYS += [nightly("lanes", 1), nightly("lanes", 16), nightly("lanes", 1000)]


def run(solve, real, executor, width=None):
    execution = make_execution(cfl.make_mesh(1), width, executor)
    assert execution.executor == executor
    go = run_clients if executor == "debug" else jax.jit(run_clients, static_argnums=(0, 2))
    return go(solve, real, execution)


def count_up(steps):
    """Returns clients whose result has their number, their steps and a sum that each step
    changes by its own number.
    """

    def solve(slot):
        matrix = jnp.sin(slot + jnp.arange(4.0)).reshape(2, 2)
        key = jax.random.key(slot)

        def step(i, carry):
            x, taken = carry
            noise = jax.random.uniform(jax.random.fold_in(key, i))
            return 0.5 * matrix @ x + i + noise, taken + 1

        def end(carry):
            x = carry[0] + matrix[0]
            return {"slot": slot, "x": x, "taken": carry[1], "even": slot % 2 == 0}

        return Loop(jnp.asarray(steps)[slot], (jnp.ones(2), jnp.int32(0)), step, end)

    return solve


def expected(steps, real):
    rows = []
    for slot, count in enumerate(steps):
        weights, x = np.sin(slot + np.arange(4.0)).reshape(2, 2), np.ones(2)
        for i in range(count):
            key = jax.random.fold_in(jax.random.key(slot), i)
            x = 0.5 * weights @ x + i + float(jax.random.uniform(key))
        rows.append([slot, *(x + weights[0]), count] if real[slot] else [0, 0, 0, 0])
    return np.array(rows)


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize(("executor", "width"), WAYS)
def test_every_client_takes_its_own_steps(steps, executor, width):
    real = np.arange(len(steps)) % 4 != 3  # with empty slots
    found = run(count_up(steps), jnp.asarray(real), executor, width)
    np.testing.assert_allclose(
        np.column_stack([found["slot"], found["x"], found["taken"]]),
        expected(steps, real),
        rtol=1e-5,
    )
    np.testing.assert_array_equal(found["even"], real & (np.arange(len(steps)) % 2 == 0))


@pytest.mark.parametrize(("executor", "width"), WAYS)
def test_cases_and_results_without_steps(executor, width):
    """Carries of two shapes in one cohort, a changed result, and results at once."""

    def solve(slot):
        def short():
            return Loop(slot, jnp.zeros(2), lambda i, x: x + 1, lambda x: x.sum())

        def long():
            return Loop(slot, jnp.zeros(()), lambda i, x: x + i, lambda x: x)

        return map_result(Cases(slot % 2, [short, long]), lambda total: total + 100)

    found = run(solve, jnp.ones(6, bool), executor, width)
    np.testing.assert_array_equal(found, [100, 100, 104, 103, 108, 110])
    at_once = run(lambda slot: constant(slot * 2), jnp.arange(6) != 1, executor, width)
    np.testing.assert_array_equal(at_once, [0, 0, 4, 6, 8, 10])
    plain = run(lambda slot: slot * 2, jnp.arange(6) != 1, executor, width)
    np.testing.assert_array_equal(plain, at_once)


@pytest.mark.parametrize(("executor", "width"), WAYS)
def test_nobody_at_all(executor, width):
    found = run(count_up((3, 4)), jnp.zeros(2, bool), executor, width)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize("width", [1, 2, 3, 8])
def test_lanes_that_are_done_reach_no_number(width):
    """A client divides by 0 in every step after its last, and one is NaN from the start."""

    def solve(slot):
        count = jnp.array([1, 9, 3, 2])[slot]
        start = jnp.where(slot == 2, jnp.nan, 1.0)
        return Loop(count, start, lambda i, x: x + 1 / (count - i), lambda x: x)

    found = np.asarray(run(solve, jnp.ones(4, bool), "lanes", width))
    sums = [1 + sum(1 / n for n in range(1, count + 1)) for count in (1, 9, 3, 2)]
    np.testing.assert_allclose(found[[0, 1, 3]], np.array(sums)[[0, 1, 3]], rtol=1e-6)
    assert np.isnan(found[2])


def steps_of_lanes(steps, width):
    """Returns how many steps the lanes take together, those for nothing included."""
    taken = []

    def solve(slot):
        def step(i, x):
            jax.debug.callback(lambda _: taken.append(1), x)
            return x + 1

        return Loop(jnp.asarray(steps)[slot], 0.0, step, lambda x: x)

    jax.block_until_ready(run(solve, jnp.ones(len(steps), bool), "lanes", width))
    jax.effects_barrier()
    return len(taken)


@pytest.mark.nightly
def test_lanes_lose_little():
    """Side by side as often as the longest client, or an even share, asks for, and little more."""
    rng = np.random.default_rng(1)
    steps = rng.lognormal(2.5, 1, 40).astype(np.int32)
    for width in (2, 5, 8):
        least = max(steps.max(), -(-steps.sum() // width)) * width
        assert least <= steps_of_lanes(steps, width) < 1.15 * least
    assert steps_of_lanes(np.full(9, 4), 3) == 36  # equal clients lose nothing
    assert steps_of_lanes(np.full(9, 4), 9) == 36


# Real solvers: clients of 0, 1, 2 and 900 samples, the last with 88 % of all steps

SIZES = (0, 1, 1, 2, 900, 60, 7, 31)


@pytest.fixture(scope="module")
def skewed():
    rng = np.random.default_rng(2)
    owner = np.repeat(np.arange(len(SIZES)), SIZES).astype(np.int32)
    pool = cfl.Pool(
        rng.integers(0, 256, (owner.size, 6, 5), dtype=np.uint8),
        rng.integers(0, 4, owner.size).astype(np.int32),
        4,
    )
    test = np.zeros(owner.size, bool)
    return cfl.federate(pool, cfl.Partition(np.arange(owner.size), owner, test))


MLP = cfl.as_task(cfl.models.MLP(4, hidden=(5,)), (6, 5), 4)
SOLVERS = {
    "sgd": lambda local: sgd(MLP, local),
    "proximal": lambda local: sgd(MLP, local, proximal(0.3, erm(MLP))),
    "an objective of one's own": lambda local: sgd(
        MLP,
        local,
        lambda params, start, extra, *samples: MLP.loss(params, *samples) + 0.1,
    ),
    "a linear term": lambda local: sgd(
        MLP,
        local,
        erm(MLP).replace(direction=lambda extra: jax.tree.map(jnp.ones_like, MODEL)),
    ),
    "momentum and decay": lambda local: sgd(
        MLP, local.replace(momentum=0.7, weight_decay=0.01, lr=0.02)
    ),
    "steps and filled batches": lambda local: sgd(MLP, local.replace(steps=37, fill_batches=True)),
    "sample space": lambda local: sgd(
        MLP,
        with_execution(local, first_layer="dual"),
    ),
    "full gradient": lambda local: gradient_step(MLP, local),
}
MODEL = MLP.init(jax.random.key(5))


@functools.cache
def program(name, executor, width, devices):
    """Returns f(data) -> Upload, compiled once for all data of a shape."""
    local = Local(
        0.1, 2, 10, execution=make_execution(cfl.make_mesh(devices), width, executor=executor)
    )
    slots = 9 + -9 % devices  # with an empty one
    ids = jnp.minimum(jnp.arange(slots), len(SIZES)).astype(jnp.int32)
    work = full_work(ids % 2, 0.5)._replace(step_fraction=jnp.where(ids == 5, 0.4, 1.0))
    models = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), MODEL)
    solve = over_clients(SOLVERS[name](local), local.execution)
    shared = jax.random.key(4), models
    cohort = Cohort(ids=ids, rank=ids)

    def go(data):
        return solve(cohort, data, shared, work)

    return go if executor == "debug" else jax.jit(go)


def train(name, data, executor, width=None, devices=1):
    return program(name, executor, width, devices)(data)


@pytest.fixture(scope="module")
def one_by_one(skewed):
    return functools.cache(lambda name: train(name, skewed, "sequential"))


# (width, devices); in every run one way of a solver that carries state, and one of SGD
SPREAD = ((1, 1), (3, 1), (16, 1), (2, 4), (4096, 4))
OFTEN = (2, 4)
OFTEN_SOLVED = ("momentum and decay",)


@pytest.mark.parametrize(
    ("name", "width", "devices"),
    [
        (name, *way)
        if (name in OFTEN_SOLVED and way == OFTEN) or (name, *way) == ("sgd", 3, 1)
        else nightly(name, *way)
        for name in SOLVERS
        for way in SPREAD
    ],
)
def test_lanes_train_as_one_after_another(one_by_one, name, skewed, width, devices):
    found = train(name, skewed, "lanes", width, devices)
    want = jax.tree.map(np.asarray, one_by_one(name))
    scale = np.abs(matrix(want.delta)).max()
    assert np.abs(matrix(found.delta)[:9] - matrix(want.delta)).max() < 2e-6 * scale
    np.testing.assert_array_equal(found.steps[:9], want.steps)
    np.testing.assert_array_equal(found.weight[:9], want.weight)
    np.testing.assert_allclose(found.loss[:9], want.loss, rtol=1e-5)
    np.testing.assert_allclose(found.last_loss[:9], want.last_loss, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["sgd", nightly("sample space")])
def test_a_python_loop_trains_as_one_after_another(name, skewed):
    few = skewed.replace(train=skewed.train.replace(size=jnp.minimum(skewed.train.size, 31)))
    found, want = train(name, few, "debug"), train(name, few, "sequential")
    np.testing.assert_allclose(matrix(found.delta), matrix(want.delta), atol=1e-6)
    np.testing.assert_allclose(found.loss, want.loss, rtol=1e-5)


@pytest.mark.parametrize("width", [nightly(1), 3, nightly(16)])
def test_what_is_not_a_number_stays_with_its_client(skewed, width):
    x = jnp.asarray(skewed.x, jnp.float32) / 255
    broken = skewed.replace(x=x.at[skewed.train.order[skewed.train.start[6]]].set(jnp.nan))
    clean = matrix(train("sgd", skewed.replace(x=x), "lanes", width).delta)
    found = matrix(train("sgd", broken, "lanes", width).delta)
    assert np.isnan(found[6]).any()
    np.testing.assert_array_equal(np.delete(found, 6, 0), np.delete(clean, 6, 0))


@pytest.mark.nightly
@pytest.mark.parametrize("epochs", [nightly(1), 2])
def test_reported_losses_have_the_penalty_of_the_start_and_of_the_end(skewed, epochs):
    """One batch for the whole client: its first loss is that of the received model."""
    local = Local(0.1, epochs, 40, execution=make_execution(cfl.make_mesh(1), 1))
    ids = jnp.array([7], jnp.int32)
    solve = jax.jit(over_clients(sgd(MLP, local, proximal(0.3, erm(MLP))), local.execution))
    models = jax.tree.map(lambda leaf: leaf[None], MODEL)
    upload = solve(Cohort(ids, ids * 0), skewed, (jax.random.key(0), models), full_work(ids * 0))
    held = skewed.train.order[skewed.train.start[7] :][:31]
    each = MLP.sample_loss(MODEL, skewed.x[held], skewed.y[held])
    trained = jax.tree.map(lambda a, b: a + b[0], MODEL, upload.delta)
    moved = 0.15 * np.square(matrix(upload.delta)).sum()
    np.testing.assert_allclose(upload.loss[0], each.mean() + MLP.penalty(MODEL), rtol=1e-6)
    if epochs == 1:
        assert upload.last_loss[0] == upload.loss[0]
        return
    step = jax.grad(lambda p: MLP.loss(p, skewed.x[held], skewed.y[held]).mean())(MODEL)
    halfway = jax.tree.map(lambda p, g: p - 0.1 * g, MODEL, step)
    each = MLP.sample_loss(halfway, skewed.x[held], skewed.y[held])
    np.testing.assert_allclose(
        upload.last_loss[0], each.mean() + MLP.penalty(trained) + moved, rtol=1e-5
    )


@pytest.mark.nightly
def test_a_full_gradient_is_that_of_all_samples_of_a_client(skewed, one_by_one):
    """Of 900, 60 and no samples, in blocks of 64, at half the step size of 0.1."""
    upload = one_by_one("full gradient")
    models = [MODEL, jax.tree.map(lambda leaf: 0.5 * leaf, MODEL)]
    for client in (4, 5):
        held = np.asarray(skewed.owner) == client
        loss = jax.value_and_grad(lambda p, held=held: MLP.loss(p, *sample(skewed, held)).mean())
        value, gradient = loss(models[client % 2])
        ours = jax.tree.map(lambda leaf, client=client: leaf[client][None], upload.delta)
        wanted = jax.tree.map(lambda leaf: -0.1 * 0.5 * leaf[None], gradient)
        np.testing.assert_allclose(matrix(ours), matrix(wanted), rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(upload.loss[client], value, rtol=1e-5)
    assert upload.steps.tolist() == [0, *[1] * 7, 0]


@pytest.mark.parametrize("name", ["sgd", "full gradient"])
def test_a_client_without_samples_and_an_empty_slot_send_zeros(one_by_one, name):
    upload = one_by_one(name)
    for leaf in jax.tree.leaves(upload):
        assert not leaf[0].any() and not leaf[-1].any()
    assert upload.loss[5] > 0 and upload.start_group[5] == 1


def sample(data, held):
    """Returns images and labels of the samples `held` [N] bool."""
    return data.x[held], data.y[held]


@pytest.mark.nightly
def test_steps_take_the_samples_of_the_shuffle(skewed):
    """A step sees B samples of the pass, as the twin of the shuffle draws them."""
    seen = []

    def objective(params, start, client_extra, x, y, key, owner):
        seen.append(np.asarray(x)[np.asarray(owner) >= 0])
        return MLP.loss(params, x, y)

    local = Local(0.1, 2, 20, execution=make_execution(cfl.make_mesh(1), executor="debug"))
    ids, key = jnp.array([7], jnp.int32), jax.random.key(3)
    solve = over_clients(sgd(MLP, local, objective), local.execution)
    models = jax.tree.map(lambda leaf: leaf[None], MODEL)
    with jax.disable_jit():  # what the objective sees are numbers, but for those of the gradient
        solve(Cohort(ids, ids * 0), skewed, (key, models), full_work(ids * 0))
    words = jax.random.bits(jax.random.fold_in(key, 7), (2,))
    held = np.asarray(skewed.train.order[skewed.train.start[7] :][:31])
    want = [
        skewed.x[held[shuffled(words, 31, epoch)[first : first + 20]]]
        for epoch in (0, 1)
        for first in (0, 20)
    ]
    assert len(seen) == len(want)
    for found, batch in zip(seen, want, strict=True):
        np.testing.assert_array_equal(found, batch)


# Bad input


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"executor": "debug", "mesh": 2}, "local.executor=debug: needs one device, there are 2"),
        ({"executor": "sequential", "width": 4}, "local.width=4: executor=sequential runs one"),
        ({"executor": "debug", "width": 2}, "local.width=2: executor=debug runs one client"),
        ({"executor": "lane"}, "local.executor=lane: "),
        ({"width": 0}, "local.width=0: "),
    ],
)
def test_settings_that_contradict_each_other(settings, line):
    mesh = cfl.make_mesh(settings.pop("mesh", 1))
    with pytest.raises(InputError) as refused:
        make_execution(mesh, **settings)
    assert str(refused.value).startswith(line)


def test_a_python_loop_is_refused_within_jit(toy, linear):
    local = Local(0.1, 1, 5, execution=make_execution(cfl.make_mesh(1), executor="debug"))
    algorithm = cfl.algorithms.fedavg(linear, local, cfl.select.uniform(3))
    with pytest.raises(InputError, match="runs outside of jit only; call"):
        cfl.run(algorithm, linear, toy, jax.random.key(0), rounds=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "method", others_nightly(["fedavg", "ifca", "flexcfl", "fesem"], ["fedavg"])
)
def test_rounds_in_a_python_loop(toy, linear, method):
    """A method's own init and round, outside of `jit`, as its tutorial says."""
    settings = {} if method == "fedavg" else {"m": 2}

    def play(executor):
        local = Local(0.2, 1, 10, execution=make_execution(cfl.make_mesh(1), executor=executor))
        factory = getattr(cfl.algorithms, method)
        algorithm = factory(linear, local, cfl.select.uniform(4), **settings)
        key = jax.random.key(1)
        begin, go = (algorithm.init, algorithm.round)
        if executor != "debug":
            begin, go = jax.jit(begin), jax.jit(go)
        with jax.disable_jit(executor == "debug"):
            return go(key, begin(key, toy), toy)[0]

    found, want = play("debug"), play("sequential")
    np.testing.assert_allclose(matrix(found.groups), matrix(want.groups), atol=2e-6)
    np.testing.assert_array_equal(found.assignment, want.assignment)
