"""MD-ICFL: the federated model distance, the two samplers, and rounds of the method."""

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FEATURES, matrix, spent
from sklearn.datasets import load_digits

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.md_icfl import STRONG, WEAK, md_icfl
from fedjax_cfl.clustering.model_distance import answer, class_distances, nearest_group
from fedjax_cfl.clustering.synthesis import back_search, class_labels, generator
from fedjax_cfl.data.federated import train_label_shares
from fedjax_cfl.errors import InputError
from fedjax_cfl.models.norms import BatchStatNorm
from fedjax_cfl.round.aggregate import uniform_mean
from fedjax_cfl.round.cohort import make_cohort
from fedjax_cfl.round.keys import REGROUP, derive_keys
from fedjax_cfl.round.objective import cross_entropy
from fedjax_cfl.round.select import full_participation, uniform
from fedjax_cfl.round.start import common_model
from fedjax_cfl.round.traffic import count_bytes
from fedjax_cfl.simulation.metrics import ari

KEY = jax.random.key(3)


class Normalized(nn.Module):
    """A convolution whose channels are normalised over each client's batch, and a dense layer."""

    num_classes: int

    @nn.compact
    def __call__(self, x, owner=None):
        x = nn.relu(BatchStatNorm()(nn.Conv(4, (3, 3))(x), owner))
        return nn.Dense(self.num_classes)(x.reshape(len(x), -1))


QUICK = {"samples": 4, "search_steps": 20}
TURNS = 4


@pytest.fixture(scope="module")
def rotated():
    """Sixteen clients of 150 digits, four for each quarter turn, all classes at each."""
    images, y = load_digits(return_X_y=True)
    x = (images.reshape(-1, 8, 8) / 8 - 1).astype(np.float32)
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.permutation(len(y))[:150] for _ in range(4 * TURNS)])
    owner = np.repeat(np.arange(4 * TURNS), 150).astype(np.int32)
    turned = np.stack(
        [np.rot90(x[row], client // 4) for row, client in zip(rows, owner, strict=True)]
    )
    pool = cfl.Pool(turned, y[rows].astype(np.int32), 10)
    held = cfl.Partition(np.arange(len(rows)), owner, np.arange(len(rows)) % 10 == 9)
    return cfl.federate(pool, held, None)


@pytest.fixture(scope="module")
def reader():
    return cfl.as_task(cfl.models.MLP(10, hidden=(32,)), (8, 8), 10, l2=0.0)


@pytest.fixture(scope="module")
def trained(rotated, reader):
    """A model [4, ...] for each quarter turn, trained on its clients' digits."""
    owner = np.asarray(rotated.owner)

    def train(turn):
        rows = np.flatnonzero((owner // 4 == turn) & (np.arange(owner.size) % 10 != 9))
        return fit(reader, KEY, rotated.x[rows], rotated.y[rows], 300, 0.2)

    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(train, range(TURNS)))


def fit(task, key, x, y, steps, lr):
    """Returns parameters after full-batch gradient steps."""

    def step(_, params):
        def loss(params):
            return jnp.mean(task.loss(params, x, y))

        return jax.tree.map(lambda p, g: p - lr * g, params, jax.grad(loss)(params))

    return jax.jit(lambda: jax.lax.fori_loop(0, steps, step, task.init(key)))()


def quick(task, local, m, privacy=WEAK, select=None, **settings):
    sampling = back_search(**QUICK | settings)
    return md_icfl(
        task, local, select or full_participation(), m=m, sampling=sampling, privacy=privacy
    )


# the distance


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.fixture(scope="module")
def measured(linear, toy, local, models):
    """Distances [S, m, C] of clients that moved from group id % 3, and all they come from."""
    cohort = make_cohort(jnp.arange(toy.num_clients), toy, local)
    start = (cohort.ids % 3).astype(jnp.int32)
    delta = jax.tree.map(
        lambda leaf: jax.random.normal(KEY, (cohort.ids.size, *leaf.shape[1:])), models
    )
    samples = jax.random.normal(KEY, (3, toy.num_classes, 5, FEATURES))
    measure = jax.jit(class_distances(linear, local))
    return measure, cohort, start, delta, samples


def test_distance_equals_a_numpy_loop(linear, toy, models, measured):
    measure, cohort, start, delta, samples = measured
    found = measure(cohort, toy, (models, samples), (start, delta))

    def answer(kernel, bias, x):
        return softmax(np.asarray(x, np.float64) @ kernel + bias)

    bias, kernel, bias_step, kernel_step = map(
        np.asarray, (*jax.tree.leaves(models), *jax.tree.leaves(delta))
    )
    for slot, origin in enumerate(np.asarray(start)):
        own = kernel[origin] + kernel_step[slot], bias[origin] + bias_step[slot]
        for j in range(3):
            for k in range(toy.num_classes):
                gaps = [
                    sum(abs(answer(*own, x) - answer(kernel[j], bias[j], x))) for x in samples[j, k]
                ]
                np.testing.assert_allclose(found[slot, j, k], np.mean(gaps), atol=1e-5)
    assert found.min() >= 0 and found.max() <= 2


def test_a_model_has_distance_0_from_itself_and_at_most_2_from_any(linear, toy, models, measured):
    measure, cohort, start, delta, samples = measured
    zero = jax.tree.map(jnp.zeros_like, delta)
    found = np.asarray(measure(cohort, toy, (models, samples), (start, zero)))
    own = found[np.arange(start.size), start]
    np.testing.assert_allclose(own, 0.0, atol=1e-6)
    assert found.max() > 0.1
    far = jax.tree.map(lambda leaf: 1e4 * leaf, delta)  # all answers are certain, many disagree
    found = np.asarray(measure(cohort, toy, (models, samples), (start, far)))
    assert 1.0 < found.max() <= 2 + 1e-6


def test_groups_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    share, distance = rng.dirichlet(np.ones(4), 9), rng.uniform(0, 2, (9, 3, 4))
    distance[0] = distance[0, :1]  # a tie goes to the lowest group
    distance[1, 0] = np.nan  # never chosen
    distance[2] = np.inf  # stays
    expected = []
    for i in range(9):
        total = [sum(share[i, k] * distance[i, j, k] for k in range(4)) for j in range(3)]
        finite = [t if np.isfinite(t) else np.inf for t in total]
        expected.append(2 if i == 2 else finite.index(min(finite)))
    assert expected[0] == 0 and expected[1] > 0
    found = nearest_group(jnp.asarray(share), jnp.asarray(distance), jnp.full(9, 2))
    assert found.tolist() == expected


# samplers


def confidence(task, models, samples, wrong=0):
    """Returns the mean cross-entropy of each model's samples at their labels + wrong."""
    label = (class_labels(samples.shape[1], samples.shape[2]) + wrong) % samples.shape[1]

    def one(model, own):
        return cross_entropy(task.predict(model, own.reshape(-1, *own.shape[2:])), label).mean()

    return np.asarray(jax.vmap(one)(models, samples))


def test_back_searched_samples_are_classified_by_a_trained_lenet(local):
    images, y = load_digits(return_X_y=True)
    x = np.pad(np.kron(images.reshape(-1, 8, 8), np.ones((3, 3))), ((0, 0), (2, 2), (2, 2)))
    x = (x[:100] / 8 - 1).astype(np.float32)
    task = cfl.as_task(cfl.models.LeNet(10, pytorch_init=False), (28, 28), 10, l2=0.0)
    model = fit(task, KEY, x, y[:100], 60, 0.1)
    assert np.mean(np.argmax(task.predict(model, x), -1) == y[:100]) > 0.8
    models = jax.tree.map(lambda leaf: leaf[None], model)
    data = cfl.federate(
        cfl.Pool(x, y[:100].astype(np.int32), 10),
        cfl.Partition(np.arange(100), np.zeros(100, np.int32), np.arange(100) > 80),
    )
    sampler = back_search(samples=1)(task, local.resolve())
    samples, _ = jax.jit(lambda: sampler.sample(KEY, (), models, data))()
    assert samples.shape == (1, 10, 1, 28, 28)
    assert confidence(task, models, samples)[0] < 0.1
    assert confidence(task, models, samples, wrong=1)[0] > 2


@pytest.mark.parametrize(
    "make",
    [back_search(samples=5), generator(samples=5, hidden=32, generator_steps=200)],
    ids=["back_search", "generator"],
)
def test_samples_do_not_depend_on_devices(make, reader, rotated, trained, local):
    three = jax.tree.map(lambda leaf: leaf[:3], trained)
    drawn = []
    for devices in (1, 4):
        sampler = make(reader, local._replace(mesh=cfl.make_mesh(devices)).resolve())
        samples, _ = jax.jit(lambda s=sampler: s.sample(KEY, (), three, rotated))()
        drawn.append(np.asarray(samples))
    assert drawn[0].shape == (3, 10, 5, 8, 8)
    np.testing.assert_allclose(drawn[0], drawn[1], atol=2e-2)
    assert (confidence(reader, three, drawn[1]) < 0.3).all()


@pytest.mark.parametrize("mean,squared", [(0.0, False), (0.5, True)])
def test_back_search_is_adam_on_each_sample(linear, toy, models, local, mean, squared):
    """Of a linear model, step by step in NumPy: samples know nothing of each other."""
    settings = {"samples": 3, "prior_mean": mean, "squared": squared, "search_lr": 0.1}
    start, found = (
        np.asarray(
            back_search(**settings, prior_weight=0.8, search_steps=steps)(
                linear, local.resolve()
            ).sample(KEY, (), models, toy)[0],
            np.float64,
        )
        for steps in (1, 12)
    )
    bias, kernel = (np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(models))

    def twin(x, model, label, steps):
        first = second = np.zeros_like(x)
        for step in range(1, steps + 1):
            error = softmax(x @ kernel[model] + bias[model]) - np.eye(toy.num_classes)[label]
            gap = x - mean
            pull = 0.8 * gap if squared else 0.4 * gap / np.linalg.norm(gap)
            slope = kernel[model] @ error + pull
            first, second = 0.9 * first + 0.1 * slope, 0.999 * second + 0.001 * slope**2
            scale = np.sqrt(second / (1 - 0.999**step)) + 1e-8
            x = x - 0.1 * first / (1 - 0.9**step) / scale
        return x

    noise = np.asarray(jax.random.normal(KEY, (toy.num_classes * 3, 3, FEATURES)), np.float64)
    noise = noise.swapaxes(0, 1).reshape(3, toy.num_classes, 3, FEATURES)
    for model, label, number in np.ndindex(noise.shape[:3]):
        for steps, got in ((1, start), (12, found)):
            expected = twin(noise[model, label, number], model, label, steps)
            np.testing.assert_allclose(got[model, label, number], expected, atol=1e-4)


def test_samples_side_by_side_are_those_one_after_another(reader, rotated, trained, local):
    drawn = []
    for width in (1, 3):
        sampler = back_search(samples=2)(reader, local._replace(width=width).resolve())
        samples, _ = jax.jit(lambda s=sampler: s.sample(KEY, (), trained, rotated))()
        drawn.append(np.asarray(samples))
    np.testing.assert_allclose(drawn[0], drawn[1], atol=2e-2)


def test_the_prior_pulls_samples_to_its_mean(reader, rotated, trained, local):
    def distance(**settings):
        sampler = back_search(samples=2, **settings)(reader, local.resolve())
        samples, _ = jax.jit(lambda: sampler.sample(KEY, (), trained, rotated))()
        return float(jnp.mean(jnp.square(samples - 0.5)))

    weak, plain, square = (
        distance(prior_weight=weight, prior_mean=0.5, squared=squared)
        for weight, squared in ((0.0, False), (2.0, False), (2.0, True))
    )
    assert square < weak and plain < weak


def test_a_generator_minds_its_prior_and_its_bound(reader, rotated, trained, local):
    def draw(**settings):
        make = generator(samples=3, hidden=32, generator_steps=200, prior_mean=3.0, **settings)
        sampler = make(reader, local.resolve())
        return np.asarray(jax.jit(lambda: sampler.sample(KEY, (), trained, rotated))()[0])

    pulled, plain = (
        np.abs(draw(bounded=False, squared=True, prior_weight=weight) - 3).mean()
        for weight in (10.0, 0.0)
    )
    assert pulled < 0.5 < 2 < plain
    assert np.abs(draw(squared=True, prior_weight=10.0)).max() <= 1


WARM = pytest.mark.parametrize(
    "make",
    [
        lambda warm: back_search(samples=3, search_steps=3, warm_start=warm),
        lambda warm: generator(samples=3, hidden=32, generator_steps=30, warm_start=warm),
    ],
    ids=["back_search", "generator"],
)


@WARM
def test_a_warm_sampler_goes_on_from_the_last_round(make, reader, rotated, trained, local):
    warm, cold = (make(each)(reader, local.resolve()) for each in (True, False))
    memory = warm.init(KEY, trained, rotated)
    step = jax.jit(lambda memory: warm.sample(KEY, memory, trained, rotated))
    first, memory = step(memory)
    for _ in range(5):
        last, memory = step(memory)
    again, kept = jax.jit(lambda: cold.sample(KEY, (), trained, rotated))()
    assert kept == () and cold.init(KEY, trained, rotated) == ()
    before, after = (confidence(reader, trained, samples).mean() for samples in (first, last))
    assert after < before and after < confidence(reader, trained, again).mean()


@WARM
def test_a_warm_sampler_recovers_from_a_model_that_was_not_finite(
    make, reader, rotated, trained, local
):
    warm = make(True)(reader, local.resolve())
    spoilt = jax.tree.map(lambda leaf: leaf.at[1].set(jnp.nan), trained)
    step = jax.jit(lambda memory, models: warm.sample(KEY, memory, models, rotated))
    samples, memory = step(warm.init(KEY, trained, rotated), spoilt)
    assert np.isfinite(samples[0]).all() and not np.isfinite(samples[1]).any()
    samples, _ = step(memory, trained)
    assert np.isfinite(samples).all()


def test_pseudo_samples_share_no_batch_statistics(toy, local):
    """Of a network that normalises over a client's batch: one device or four, alone or together."""
    task = cfl.as_task(Normalized(10), (8, 8, 1), 10)
    models = jax.tree.map(lambda leaf: leaf[None], task.init(KEY))
    data = toy.replace(x=jnp.zeros((len(toy.y), 8, 8, 1)), num_classes=10)
    drawn = []
    for devices in (1, 4):
        own = local._replace(mesh=cfl.make_mesh(devices)).resolve()
        sampler = back_search(samples=3, search_steps=5)(task, own)
        drawn.append(np.asarray(jax.jit(lambda s=sampler: s.sample(KEY, (), models, data))()[0]))
    np.testing.assert_allclose(drawn[0], drawn[1], atol=1e-4)
    model, samples = task.init(KEY), jnp.asarray(drawn[0][0])
    together, alone = answer(task, model, samples), answer(task, model, samples[:, :1])
    np.testing.assert_allclose(together[:, :1], alone, atol=1e-5)


@pytest.mark.parametrize(
    "make,settings",
    [(back_search, {"samples": 0}), (back_search, {"search_lr": -1.0}), (generator, {"hidden": 0})],
)
def test_settings_that_are_not_allowed(make, settings):
    name = next(iter(settings))
    with pytest.raises(InputError, match=f"algorithm.{name}=.*must be"):
        make(**settings)


# rounds


@pytest.mark.parametrize(
    "sampling",
    [back_search(samples=10), generator(samples=10, hidden=64, generator_steps=300)],
    ids=["back_search", "generator"],
)
def test_one_call_separates_disjoint_rotations(sampling, rotated, reader, trained):
    """From pre-trained group models of a common start, if clients train long enough to forget
    where they started.
    """
    local = cfl.Local(lr=0.1, epochs=200, batch_size=15, width=1, mesh=cfl.make_mesh(1))
    method = md_icfl(reader, local, full_participation(), m=TURNS, sampling=sampling)
    state = method.init(KEY, rotated).replace(groups=trained)
    truth = jnp.arange(4 * TURNS) // 4
    assert np.mean(state.assignment == truth) < 0.5
    state, _ = jax.jit(method.round)(KEY, state, rotated)
    assert state.assignment.tolist() == truth.tolist()


def test_new_groups_are_the_means_of_their_clients_models(linear, toy, local, models):
    """Clients that end in another group than they started from bring their model along."""
    local = local._replace(epochs=30)
    algorithm = quick(linear, local, 3)
    state = algorithm.init(KEY, toy).replace(groups=models)
    after, _ = jax.jit(algorithm.round)(KEY, state, toy)
    assert np.mean(after.assignment != state.assignment) > 0.2
    # each client alone, from the model of the group it was in
    alone = cfl.algorithms.nonfed(linear, local, full_participation())
    own = jax.tree.map(lambda leaf: leaf[state.assignment], models)
    trained, _ = jax.jit(alone.round)(KEY, alone.init(KEY, toy).replace(groups=own), toy)
    trained, weight = matrix(trained.groups), np.asarray(toy.train.size)
    expected = matrix(models)
    for j in range(3):
        members = [i for i in range(toy.num_clients) if after.assignment[i] == j and weight[i]]
        if members:
            expected[j] = trained[members].mean(axis=0)
    np.testing.assert_allclose(matrix(after.groups), expected, atol=2e-5)


@pytest.mark.parametrize("privacy", [WEAK, STRONG], ids=["weak", "strong"])
def test_a_round_moves_clients_by_the_labels_they_hold(linear, toy, local, models, privacy):
    """Every odd client has one label, so that others count for nothing (eq. 4)."""
    owner = np.asarray(toy.owner)
    y = np.where(owner % 2, owner // 2 % toy.num_classes, toy.y).astype(np.int32)
    skewed, local = toy.replace(y=jnp.asarray(y)), local._replace(epochs=30)
    algorithm = quick(linear, local, 3, privacy)
    state = algorithm.init(KEY, skewed).replace(groups=models)
    after, _ = jax.jit(algorithm.round)(KEY, state, skewed)
    own = jax.tree.map(lambda leaf: leaf[state.assignment], models)
    alone = cfl.algorithms.nonfed(linear, local, full_participation())
    trained, _ = jax.jit(alone.round)(KEY, alone.init(KEY, skewed).replace(groups=own), skewed)
    sampler = back_search(**QUICK)(linear, local.resolve())
    samples, _ = sampler.sample(derive_keys(KEY, 0)[REGROUP], (), models, skewed)
    cohort = make_cohort(jnp.arange(skewed.num_clients), skewed, local)
    ids = np.minimum(cohort.ids, skewed.num_clients - 1)
    delta = jax.tree.map(lambda new, old: (new - old)[ids], trained.groups, own)
    present = state.assignment[ids]
    distance = class_distances(linear, local)(cohort, skewed, (models, samples), (present, delta))
    share = train_label_shares(skewed)[ids]
    wanted = nearest_group(share, distance, present)
    real = (np.asarray(cohort.ids) < skewed.num_clients) & (share.sum(1) > 0)
    assert (after.assignment[ids] == wanted)[real].all()
    assert (wanted != nearest_group(jnp.ones_like(share), distance, present))[real].any()


def test_a_client_that_never_answers_stays(linear, toy, local):
    silent = local._replace(faults=cfl.Faults(dropout=1.0))
    algorithm = quick(linear, silent, 3)
    state = algorithm.init(KEY, toy)
    after, _ = jax.jit(algorithm.round)(KEY, state, toy)
    assert after.assignment.tolist() == state.assignment.tolist()
    assert not after.memory.labels.known.any()
    assert spent(state, after).words_up == 0
    chex.assert_trees_all_equal(after.groups, state.groups)


@pytest.mark.parametrize("cohort", [5, 14])
def test_privacy_changes_the_bill_and_nothing_else(linear, toy, local, cohort):
    """Weak: C words up, once a client. Strong: m C words down and 1 up, every time."""
    m, rounds, classes = 3, 4, toy.num_classes
    clients = int((toy.train.size > 0).sum())  # one has no samples, and never answers
    runs = []
    for privacy in (WEAK, STRONG):
        algorithm = quick(linear, local, m, privacy, uniform(cohort))
        states = [algorithm.init(KEY, toy)]
        step = jax.jit(algorithm.round)
        for _ in range(rounds):
            states.append(step(KEY, states[-1], toy)[0])
        runs.append(states)
    for weak, strong in zip(*runs, strict=True):
        assert weak.assignment.tolist() == strong.assignment.tolist()
        chex.assert_trees_all_equal(weak.groups, strong.groups)
    weak, strong = (spent(states[0], states[-1]) for states in runs)
    asked = int(runs[0][-1].memory.labels.known.sum())
    answers = strong.words_up
    assert (weak.units_down, weak.units_up) == (strong.units_down, strong.units_up)
    assert weak.units_down == rounds * cohort
    assert (weak.words_down, weak.words_up) == (0, asked * classes)
    assert strong.words_down == answers * m * classes
    if cohort == 14:
        assert (asked, answers) == (clients, rounds * clients)
    share = np.asarray(train_label_shares(toy))
    known = np.asarray(runs[0][-1].memory.labels.known)
    np.testing.assert_array_equal(
        runs[0][-1].memory.labels.share, np.where(known[:, None], share, 0)
    )


def test_bytes_of_the_baselines_are_those_of_closed_forms(linear, toy, local):
    """A participant receives one model of FedAvg, m of IFCA and none of Local, and sends the
    number of its group to IFCA alone; FedFomo's and ClusteredFL's are in their own tests.
    """
    size, others, selected = cfl.models.model_bytes(linear.init(KEY)), cfl.algorithms, 14
    for method, down, up in (
        (others.fedavg(linear, local, full_participation()), size, size),
        (others.ifca(linear, local, full_participation(), m=3), 3 * size, size + 4),
        (others.nonfed(linear, local, full_participation()), 0, 0),
    ):
        state, _ = jax.jit(method.round)(KEY, method.init(KEY, toy), toy)
        assert count_bytes(state.traffic, size) == (selected * down, selected * up)


def test_groups_start_from_different_models_unless_one_is_asked_for(linear, toy, local):
    def starts(**settings):
        method = md_icfl(
            linear, local, full_participation(), m=3, sampling=back_search(**QUICK), **settings
        )
        kernel = np.asarray(method.init(KEY, toy).groups["head"]["kernel"])
        assert kernel.shape == (3, 5, 4)
        return len({row.tobytes() for row in kernel})

    assert (starts(), starts(start=common_model)) == (3, 1)


def test_one_group_is_fedavg(linear, toy, local):
    method = quick(linear, local, 1)
    average = cfl.algorithms.fedavg(linear, local, full_participation(), aggregate=uniform_mean)
    state, other = method.init(KEY, toy), average.init(KEY, toy)
    chex.assert_trees_all_equal(state.groups, other.groups)
    for _ in range(3):
        state, other = (
            jax.jit(each.round)(KEY, at, toy)[0] for each, at in ((method, state), (average, other))
        )
    chex.assert_trees_all_close(state.groups, other.groups, rtol=1e-5, atol=1e-6)


def test_ari_at_fixed_points():
    """Four groups of 12: perfect, two merged, two pairs merged, three merged, all in one."""
    truth = np.repeat(np.arange(4), 12)
    for joined, value in (
        ([0, 1, 2, 3], 1.0),
        ([0, 0, 2, 3], 0.701),
        ([0, 0, 2, 2], 0.484),
        ([0, 0, 0, 3], 0.319),
        ([0, 0, 0, 0], 0.0),
    ):
        found = ari(np.array(joined)[truth], truth, np.ones(48, bool))
        assert found == pytest.approx(value, abs=5e-4)
