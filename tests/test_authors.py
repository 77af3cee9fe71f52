"""What a stranger writes: a method of eight lines, layers of five and six; they equal their full
forms. What each measure is and costs, by hand; what `clustered`, `layer` and `chain` refuse.
"""

import inspect
import itertools
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import CLASSES, SIZES, ledger, nightly, one_line, spent, with_execution
from test_inference_time import EVERYBODY, slowest, timed  # noqa: F401
from test_reference import cross_entropy, gradient, mean, models_of, samples

import fedjax_cfl as cfl
from fedjax_cfl.client.cohort import make_cohort, over_clients
from fedjax_cfl.client.objective import training_loss
from fedjax_cfl.client.sgd import sgd
from fedjax_cfl.clustering.measure import Question, average_over_samples
from fedjax_cfl.clustering.migrate import any_change
from fedjax_cfl.errors import InputError
from fedjax_cfl.round.start import random_groups
from fedjax_cfl.system import select
from fedjax_cfl.system.clock import CohortSizes
from fedjax_cfl.system.devices import fedscale_clock
from fedjax_cfl.system.reports import count_to_int, make_bill, make_report
from fedjax_cfl.system.select import current_groups

KEY = jax.random.key(5)
SIZE, LATE = np.array(SIZES), [1, 4, 9]
SIX = select.uniform(6)
README = (Path(__file__).parents[1] / "README.md").read_text()


def read_block(name):
    """Returns the block of README that defines a function."""
    blocks = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
    return next(block for block in blocks if f"def {name}(" in block)


NAMES = {"jax": jax}
for number in ("sticky_ifca", "ditto"):
    exec(compile(read_block(number), "README.md", "exec"), NAMES)


def sticky_in_full(task, local, system, *, m, gain=0.1):
    """README's method, from the parts of the package."""
    losses = over_clients(training_loss(task), local.execution)

    def choose(r):
        loss = losses(r.cohort, r.data, r.state.groups)
        best, old = jnp.argmin(loss, axis=1), current_groups(r.state, r.cohort)
        kept = jnp.take_along_axis(loss, jnp.maximum(old, 0)[:, None], axis=1)[:, 0]
        stay = (old >= 0) & (loss.min(axis=1) > (1 - gain) * kept)
        size, real = r.cohort.take(r.data.train.size), r.cohort.ids < r.data.num_clients
        bill = make_bill(real * (m - 1), words_up=real, samples=real * m * size)
        return jnp.where(stay, old, best), make_report(bill)

    method = cfl.Method(sgd(task, local), random_groups(task, m), assign=choose)
    return cfl.federated(task, local, system, method)


def apfl(alpha=0.5):
    def mix(v, w):
        return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, v, w)

    def step(c, w, v):  # fmt: skip
        return c.sgd, c.descend(v, jax.tree.map(lambda g: alpha * g, c.grad(mix(v, w))))

    return cfl.layer("APFL", own=lambda w: w, step=step, serve=mix)  # fmt: skip


def lines_of(source):
    return [line for line in source.splitlines() if line.strip()]


def play(algorithm, datas):
    """Returns the states before the first and after each round, with the data of each, and the
    seconds of the rounds.
    """
    states, one_round = [jax.jit(algorithm.init)(KEY, datas[0])], jax.jit(algorithm.round)
    seconds = []
    for data in datas:
        state, info = one_round(KEY, states[-1], data)
        states.append(state)
        seconds.append(float(info.seconds))
    return states, seconds


def score(algorithm, data):
    """Returns the accuracy after three rounds, on the models that clients use, and the groups and
    what was sent.
    """
    state, right = play(algorithm, [data] * 3)[0][-1], 0
    models = models_of(jax.jit(algorithm.personal_models)(state, data))
    order, start, size = (
        np.asarray(each) for each in (data.test.order, data.test.start, data.test.size)
    )
    for client, model in enumerate(models):
        rows = order[start[client] :][: size[client]]
        logits = np.asarray(data.x)[rows] @ model.kernel + model.bias
        right += (logits.argmax(1) == np.asarray(data.y)[rows]).sum()
    return right / size.sum(), state.assignment.tolist(), ledger(state.traffic)


# a stranger's method and layers


def test_they_are_short():
    """README's method has eight lines with its imports; layers have five and six."""
    method = lines_of(read_block("sticky_ifca"))
    assert len(method) <= 8 and sum("import" in line for line in method) <= 3
    layer = read_block("ditto").partition("\nboth = ")[0]
    assert len(lines_of(layer)) <= 5 and "import" not in layer
    assert len(lines_of(inspect.getsource(apfl))) <= 6


def test_the_method_equals_its_full_form(toy, linear, local):
    """Under a clock, so that also what clients infer is the same."""
    system = cfl.System(SIX, clock=fedscale_clock(CohortSizes(14, 5, 6)))
    makers = NAMES["sticky_ifca"], sticky_in_full
    found, full = (play(make(linear, local, system, m=3), [toy] * 3) for make in makers)
    jax.tree.map(np.testing.assert_array_equal, found[0][-1], full[0][-1])
    assert found[1] == full[1] and min(found[1]) > 0


@pytest.mark.parametrize(
    ("mine", "catalogue"), [(NAMES["ditto"], cfl.personal.ditto), nightly(apfl, cfl.personal.apfl)]
)
def test_the_layers_equal_those_of_the_catalogue(mine, catalogue, toy, linear, local):
    ifca = cfl.algorithms.ifca
    chains = [cfl.chain(ifca, layer())(linear, local, SIX, m=2) for layer in (mine, catalogue)]
    found, wanted = (score(each, toy) for each in chains)
    assert found == wanted and found[0] > 0.5


def test_chain_puts_layers_on_a_method(toy, linear, local):
    """README's line is the method with two layers, whose rows have their names."""
    state = jax.eval_shape(NAMES["both"](linear, local, SIX, m=2).init, KEY, toy)
    assert {*state.rows} == {"SCAFFOLD", "Ditto"}
    layers = [cfl.personal.scaffold(), NAMES["ditto"]()]
    listed = NAMES["sticky_ifca"](linear, local.replace(personal=layers), SIX, m=2)
    assert str(state) == str(jax.eval_shape(listed.init, KEY, toy))
    for rows in state.rows.values():
        assert all(leaf.shape[0] == 14 for leaf in jax.tree.leaves(rows.values))


# measures


def ask(measure, task, local, data, models, active=None):
    """Returns what each client with samples measures, [K, ...], and the `Measure`."""
    made = measure(task, local)
    active = jnp.ones(3, bool) if active is None else jnp.array(active)
    cohort = make_cohort(jnp.arange(14, dtype=jnp.int32), data, local.execution)
    values = jax.jit(made.ask)(Question(KEY, models, active, data, cohort, {}))
    found = np.zeros((14, *values.shape[1:]))
    found[np.asarray(cohort.ids)] = values
    return found, made


def held_by(data, client):
    rows = samples(data, client)
    return np.asarray(data.x, np.float64)[rows], np.asarray(data.y)[rows]


WITH_SAMPLES = np.flatnonzero(SIZE)


def test_losses(toy, linear, local, models):
    found, made = ask(cfl.losses, linear, local, toy, models, [True, False, True])
    for client in WITH_SAMPLES:
        x, y = held_by(toy, client)
        wanted = [cross_entropy(model, x, y) for model in models_of(models)]
        np.testing.assert_allclose(found[client, [0, 2]], np.array(wanted)[[0, 2]], rtol=1e-4)
    assert np.isinf(found[:, 1]).all() and made.models(3) == 3 and made.samples(1) == 1


def test_gradients(toy, linear, local, models):
    found, made = ask(cfl.gradients, linear, local, toy, models, [True, False, True])
    middle = mean([models_of(models)[at] for at in (0, 2)])
    for client in WITH_SAMPLES:
        slope = gradient(middle, *held_by(toy, client))
        wanted = np.concatenate([slope.bias, slope.kernel.ravel()])
        np.testing.assert_allclose(found[client], wanted, rtol=1e-3, atol=1e-5)
    assert made.models(3) == 1 and made.samples(1) == 3 and not made.of_groups


def test_embeddings(toy, mlp, local):
    models = jax.vmap(mlp.init)(jax.random.split(KEY, 3))
    found, made = ask(cfl.embeddings, mlp, local, toy, models)
    first = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).mean(0), models)["hidden_0"]
    for client in WITH_SAMPLES:
        hidden = np.maximum(held_by(toy, client)[0] @ first["kernel"] + first["bias"], 0)
        np.testing.assert_allclose(found[client], hidden.mean(0), rtol=1e-4, atol=1e-5)
    assert made.models(3) == 1 and made.samples(1) == 1
    unknown = partial(cfl.embeddings, layer="tail")
    one_line("layer='tail': the model has no module", ask, unknown, mlp, local, toy, models)


def test_label_counts(toy, linear, local, models):
    found, made = ask(cfl.label_counts, linear, local, toy, models)
    for client in range(14):
        wanted = np.bincount(held_by(toy, client)[1], minlength=CLASSES)
        np.testing.assert_array_equal(found[client], wanted)
    assert made.models(3) == 0


def test_a_measure_of_ones_own(toy, linear, local, models):
    """The mean sample, which is that of the samples alone, not of what fills a block."""

    def add_up(model, x, y, real):
        return jnp.sum(jnp.where(real[:, None], x, 0.0), axis=0)

    def measure(task, local):
        return average_over_samples(add_up, local, 1)

    found, _ = ask(measure, linear, local, toy, models)
    for client in WITH_SAMPLES:
        np.testing.assert_allclose(found[client], held_by(toy, client)[0].mean(0), atol=1e-5)


# of a client, in a round of m = 3: what it chooses by, models down beside the one that it trains,
# words up, and inferences of a sample
BILLS = [
    nightly("choose", cfl.losses, 2, 1, 3),
    nightly("cluster", cfl.losses, 2, 3, 3),
    nightly("choose", cfl.gradients, 1, 1, 3),
    ("cluster", cfl.gradients, 1, 24, 3),
    nightly("cluster", cfl.embeddings, 1, 5, 1),
    nightly("choose", cfl.label_counts, 0, 1, 0),
    ("cluster", cfl.label_counts, 0, CLASSES, 0),
]


@pytest.mark.parametrize(("how", "measure", "models", "words", "inferences"), BILLS)
def test_the_round_bills_a_measure(how, measure, models, words, inferences, toy, timed):  # noqa: F811
    """All 14 clients receive, infer and send, by hand; a client that chooses sends one word."""

    def cluster(key, values, old, who):
        return jnp.arange(len(who)) % 3

    def choose(values, old):
        return old.clip(0)

    settings = {"measure": measure, how: cluster if how == "cluster" else choose}

    def make(task, local, system):
        return cfl.clustered(task, local, system, m=3, **settings)

    seconds, states = timed(make, [toy], EVERYBODY)
    sent = spent(*states)
    assert (sent.units_down, sent.units_up) == (14 * (1 + models), 14)
    assert (sent.words_down, sent.words_up) == (0, 14 * words)
    assert seconds[0] == slowest(inferences * SIZE)


# who is asked, and when


@pytest.mark.parametrize("alone", [False, nightly(True)])
def test_the_server_clusters_whatever_the_slots(alone, toy, linear, local):
    """Rows are in the order of clients, and those with samples are in `who`: on one device, and on
    four with empty slots and the cohort in another order.
    """

    def pick(turned):
        def draw(key, round, size):
            ids = SIX.draw(key, round, size)
            return ids[::-1] if turned else ids

        return select.drawn_ahead(draw)

    def cluster(key, gradient, old, who):
        along = gradient @ jax.random.normal(key, (24,))
        above = along > jnp.sum(jnp.where(who, along, 0)) / jnp.sum(who)
        return jnp.where(who, 2 * above + jnp.cumsum(who) % 2, 0)

    found, settings = [], {"m": 4, "cluster": cluster, "measure": cfl.gradients}
    for turned, devices in ((True, 4), (False, 1))[: 1 + alone]:
        where = with_execution(local, mesh=cfl.make_mesh(devices))
        states, _ = play(cfl.clustered(linear, where, pick(turned), **settings), [toy])
        found.append(states[-1])
    if alone:
        four, one = found
        np.testing.assert_array_equal(one.assignment, four.assignment)
        for a, b in zip(*map(jax.tree.leaves, (one.groups, four.groups)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5)
    group = np.asarray(found[0].assignment)
    taken = group[group >= 0]
    np.testing.assert_array_equal(taken % 2, np.arange(1, len(taken) + 1) % 2)
    assert len({*taken.tolist()}) > 2


def test_once(toy, linear, local):
    """A client is asked when it first takes part, or first has samples: then it keeps its group."""
    absent = toy.replace(train=toy.train.replace(size=toy.train.size.at[jnp.array(LATE)].set(0)))
    algorithm = cfl.clustered(linear, local, EVERYBODY, m=3, once=True)
    states, _ = play(algorithm, [absent, toy, toy])
    first, second, third = (np.asarray(state.assignment) for state in states[1:])
    assert (first[LATE] == -1).all() and (second[LATE] >= 0).all()
    kept = np.setdiff1d(WITH_SAMPLES, LATE)
    np.testing.assert_array_equal(first[kept], second[kept])
    np.testing.assert_array_equal(second, third)
    asked = [spent(*pair) for pair in itertools.pairwise(states)]
    assert [each.words_up for each in asked] == [len(kept), len(LATE), 0]
    assert [each.units_down - 14 for each in asked] == [2 * len(kept), 2 * len(LATE), 0]


def test_found(toy, linear, local):
    """All clients with samples are clustered before round 0; later ones join the nearest group."""
    seen = []

    def found(key, counts, who):
        seen.append(counts.shape)
        return jnp.where(who, jnp.argmax(counts, axis=1) % 2, 0)

    absent = toy.replace(train=toy.train.replace(size=toy.train.size.at[jnp.array(LATE)].set(0)))
    settings = {"m": 2, "found": found, "measure": cfl.label_counts}
    states, _ = play(cfl.clustered(linear, local, SIX, **settings), [absent, toy])
    counts = np.array([np.bincount(held_by(toy, k)[1], minlength=CLASSES) for k in range(14)])
    there = np.setdiff1d(WITH_SAMPLES, LATE)
    group = np.full(14, -1)
    group[there] = counts[there].argmax(1) % 2
    np.testing.assert_array_equal(states[0].assignment, group)
    assert {*seen} == {(14, CLASSES)}
    first = ledger(states[0].traffic)
    assert (first.words_up, first.units_down) == (CLASSES * len(there), 0)
    for client in LATE:  # one after another, each a member for the next
        far = [np.linalg.norm(counts[group == g] - counts[client], axis=1).mean() for g in range(2)]
        group[client] = np.argmin(far)
    np.testing.assert_array_equal(states[2].assignment, group)
    assert spent(*states[1:]).words_up == CLASSES * len(LATE)


def test_regroup_may_return_groups_alone(toy, linear, local):
    """Clients of even number go to group 0, whatever they trained."""

    def move(r):
        return jnp.where(r.cohort.ids % 2 == 0, 0, r.group)

    states, _ = play(cfl.clustered(linear, local, EVERYBODY, m=3, regroup=move), [toy])
    group = np.asarray(states[-1].assignment)
    assert not group[WITH_SAMPLES][WITH_SAMPLES % 2 == 0].any() and group[1::2].any()


def test_detector(toy, linear, local):
    """Clients whose labels changed choose again before the round, though they take no part in it:
    each receives all three models, and so does the one client that takes part.
    """
    chosen = np.isin(np.asarray(toy.owner), [1, 7])
    y = jnp.asarray(np.where(chosen, 3, np.asarray(toy.y)).astype(np.int32))
    moved = toy.replace(y=y, shifted=jnp.asarray(np.isin(np.arange(14), [1, 7])))

    def start(key, data):
        begun = random_groups(linear, 3)(key, data)
        return begun._replace(assignment=jnp.full(data.num_clients, 2, jnp.int32))

    def choose(loss, old):
        return jnp.zeros_like(old)

    first = select.from_table(np.array([[0]]))
    settings = {"m": 3, "choose": choose, "detector": any_change, "start": start}
    states, _ = play(cfl.clustered(linear, local, first, **settings), [toy, moved])
    before, after = (np.asarray(state.assignment) for state in states[1:])
    assert before[0] == after[0] == 0
    np.testing.assert_array_equal(np.flatnonzero(before != after), [1, 7])
    assert spent(*states[:2]).units_down == 3 and spent(*states[1:]).units_down == 2 * 3 + 3


def test_a_start_says_which_groups_are_in_use(toy, linear, local):
    def start(key, data):
        return random_groups(linear, 3)(key, data)._replace(active=jnp.array([True, False, True]))

    state = jax.jit(cfl.clustered(linear, local, SIX, m=3, start=start).init)(KEY, toy)
    assert state.active.tolist() == [True, False, True]


# refusals


def one(*arguments):
    """Any function."""


def start(key, data): ...


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"choose": one, "cluster": one}, "one of choose, cluster and found, not ['choose'"),
        ({"cluster": one, "found": one}, "not ['cluster', 'found']"),
        ({"found": one, "once": True}, "found asks each client once, before round 0"),
        ({"found": one, "start": start, "max_m": 5}, "leave out max_m and start"),
        ({"found": one, "memory": one}, "leave out memory"),
        ({"detector": any_change, "found": one}, "leave out found"),
        ({"detector": any_change, "cluster": one}, "leave out cluster"),
        ({"measure": cfl.gradients}, "only losses name the model of least loss"),
        ({"max_m": 2}, "algorithm.max_m=2: must be at least algorithm.m=3"),
        ({"m": jnp.int32(3)}, "algorithm.m: may be an array only with algorithm.max_m"),
    ],
)
def test_clustered_refuses(settings, says, linear, local):
    one_line(says, cfl.clustered, linear, local, SIX, **{"m": 3} | settings)


def keep(name, **more):
    return cfl.layer(name, own=lambda w: w, step=lambda c, w, v: (c.sgd, v), **more)


def test_layer_refuses(linear, local):
    beside = {"own": one, "own_step": one}
    one_line("layer 'X': takes step or own_step", cfl.layer, "X", own=one)
    one_line("layer 'X': takes step or own_step", cfl.layer, "X", step=one, **beside)
    one_line("layer 'X': epochs are those of own_step", keep, "X", epochs=2)
    one_line("local.personal: takes what functions", local.replace, personal=[one])


PERSONAL = cfl.personal


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "chain: None is no method; the first part is a method"),
        ([PERSONAL.ditto()], "chain: 'Ditto' is no method"),
        ([cfl.algorithms.ifca, PERSONAL.ditto], "call it, ditto(); the first part is a method"),
        ([cfl.algorithms.ifca, cfl.algorithms.ifca], "is no layer"),
    ],
)
def test_chain_refuses(parts, says):
    one_line(says, cfl.chain, *parts)


@pytest.mark.parametrize(
    ("layers", "says"),
    [
        ([PERSONAL.ditto(), PERSONAL.apfl()], "personal=[ditto,apfl]: both say which model"),
        ([PERSONAL.fine_tune(), PERSONAL.fedper()], "both say which model a client is tested on"),
        ([PERSONAL.scaffold(), PERSONAL.feddyn()], "personal=[scaffold,feddyn]: both correct"),
        ([PERSONAL.fedper(), PERSONAL.scaffold()], "for models that are sent as a whole"),
        ([keep("One"), keep("Two")], "personal=[one,two]: both say what a step of a client is"),
        ([PERSONAL.moon(), PERSONAL.moon()], "personal: moon is given twice"),
        ([PERSONAL.ditto(), PERSONAL.scaffold()], "personal=scaffold: changes the steps of the"),
    ],
)
def test_layers_that_do_not_fit_are_refused(layers, says, mlp, local):
    one_line(says, cfl.chain(cfl.algorithms.ifca, *layers), mlp, local, SIX, m=2)


# wrong uses that a person makes


WRONG = {
    "all losses": ({"choose": lambda loss, old: loss}, r"choose: returned float32\[6, 2\]"),
    "a float": ({"choose": lambda loss, old: 0.0 * old}, r"choose: returned float32\[6\]"),
    "nothing": ({"choose": lambda loss, old: None}, "choose: returned NoneType; return one whole"),
    "one group": ({"cluster": lambda *given: jnp.int32(0)}, r"cluster: returned int32\[\]"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_group_is_refused(case, toy, linear, local):
    given, says = WRONG[case]
    algorithm = cfl.clustered(linear, local, SIX, m=2, **given)
    state = jax.eval_shape(algorithm.init, KEY, toy)
    with pytest.raises(InputError, match=says):
        jax.eval_shape(algorithm.round, KEY, state, toy)


@pytest.mark.parametrize(
    ("wrong", "near"), [("agregate", "aggregate"), ("chose", "choose"), ("xyz", None)]
)
def test_a_part_of_another_name_is_refused(wrong, near, linear, local):
    hint = f" (did you mean {near!r}?)" if near else ""
    says = f"clustered: has no {wrong!r}{hint}; it takes solve, prepare,"
    with pytest.raises(InputError, match=re.escape(says)):
        cfl.clustered(linear, local, SIX, m=2, **{wrong: None})


STEPS = {
    "one value": (lambda c, w, v: c.sgd, "step: must return two values"),
    "no step": (lambda c, w, v: (w, v), "step: returns the group's model as it was; return c.sgd"),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_is_no_step_is_refused(case, toy, linear, local):
    step, says = STEPS[case]
    one = local.replace(personal=cfl.layer("mine", own=lambda w: w, step=step))
    algorithm = cfl.algorithms.fedavg(linear, one, SIX)
    state = jax.eval_shape(algorithm.init, KEY, toy)
    with pytest.raises(InputError, match=says):
        jax.eval_shape(algorithm.round, KEY, state, toy)


@pytest.mark.parametrize(
    ("serve", "says"),
    [(lambda v, w: v["head"], "must return a model"), (lambda v, w: v["body"], "fails: 'body'")],
)
def test_what_is_no_model_is_not_served(serve, says, linear, local):
    mine = cfl.layer("mine", own=lambda w: w, own_step=lambda c, v: v, serve=serve)
    with pytest.raises(InputError, match=f"layer 'mine': serve.*{says}"):
        cfl.algorithms.fedavg(linear, local.replace(personal=mine), SIX)


@pytest.mark.nightly
def test_gradients_of_a_step_are_billed(toy, linear, local):
    """A stranger's Ditto, as a step or beside the group's model, takes the catalogue's steps."""

    def steps_of(layer):
        algorithm = cfl.algorithms.fedavg(linear, local.replace(personal=layer), SIX)
        state = jax.jit(algorithm.init)(KEY, toy)
        return count_to_int(jax.jit(algorithm.round)(KEY, state, toy)[1].steps)

    alone = steps_of(None)
    assert steps_of(NAMES["ditto"]()) == steps_of(cfl.personal.ditto()) == 2 * alone
    assert steps_of(cfl.personal.apfl()) == 2 * alone
    assert steps_of(cfl.personal.pfedme(lam=1.0, inner_steps=3)) == 3 * alone
    assert steps_of(cfl.personal.scaffold()) == alone
