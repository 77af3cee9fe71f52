"""What bills say is what clients do: every method, layer, poll and measure on eight small clients,
whose task counts what they infer, train and receive (`counting.py`).

Sizes are multiples of a mini-batch, so that a step is as many samples as it is billed for. In round
`EVENT` the labels of four clients change, and then a client gets its first samples.
"""

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, others_nightly
from counting import Watch, count_round, count_work, watch_bills, watch_programs, watch_task

import fedjax_cfl as cfl
from fedjax_cfl.cli import build as parts
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.clustering import measure as measures
from fedjax_cfl.system.clock import TRAIN_TO_INFERENCE, device_profiles
from fedjax_cfl.system.reports import count_to_int
from fedjax_cfl.types import Bill

SIZES = np.array([4, 10, 12, 14, 20, 4, 10, 0])  # training samples of each client
CLIENTS, BATCH, GROUPS, FEATURES, CLASSES, ALL = len(SIZES), 2, 2, 5, 4, slice(None)
WORDS = (FEATURES + 1) * CLASSES  # of a model
ROUNDS, EVENT, MOVED = 6, 2, (0, 1, 3, 4)
KEY = jax.random.key(0)
SETTINGS = {
    "dataset": "npz",
    "partition": "by_user",
    "model": "mclr",
    "devices": 1,
    "clients_per_round": 4,
    "dataset.groups": GROUPS,
    "dataset.alpha": 2,
    "local.epochs": 2,
    "local.batch_size": BATCH,
    "local.executor": "sequential",
}
# settings of methods that are made smaller, or more exact
OWN = {
    "feddane": ("algorithm.same_set=true",),  # else the cohort pays for other clients' gradients
    "fedfomo": ("algorithm.models=1",),  # from round 1 on there are so many: no place is empty
    "ifca_restarts": ("algorithm.restarts=2", "algorithm.restart_rounds=1"),
    "md_icfl": ("algorithm.search_steps=3",),
}
COLD = ("fedgroup", "fedgrouprox", "flexcfl", "rac", "rcc")
OWN |= dict.fromkeys(COLD, ("algorithm.pretrain=iters:2",))
FOUR = ("feddrift", "feddrift_eager", "fedgwc", "flux", "stocfl")
OWN |= dict.fromkeys(FOUR, ("algorithm.m=4",))
OWN["flux"] = ("algorithm.m=4", "algorithm.warm_up=1")
FIELDING = ("fielding", "fielding_global", "fielding_individual", "fielding_selected")
OWN |= dict.fromkeys((*FIELDING, "fielding_static"), ("algorithm.m=4",))
ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
OFTEN = ["fedem", "ifca"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Separated classes as a file; odd clients have classes 0 and 1 renamed."""
    rng, numbers = np.random.default_rng(0), np.arange(CLIENTS)
    client = np.concatenate([np.repeat(numbers, SIZES), np.repeat(numbers, 2)])
    shape = rng.integers(CLASSES, size=client.size)
    x = 2 * np.eye(CLASSES, FEATURES)[shape] + 0.3 * rng.normal(size=(client.size, FEATURES))
    y = np.where((client % 2 == 1) & (shape < 2), 1 - shape, shape)
    split = (np.arange(client.size) >= SIZES.sum()).astype(int)
    held = {"client": client, "split": split, "concept": numbers % 2}
    path = tmp_path_factory.mktemp("bills") / "clients.npz"
    np.savez(path, x=x.astype(np.float32), y=y.astype(np.int32), **held)
    return path


def give_samples(data):
    """Returns the data in which the last client, who has none, has got the last four training
    samples of the largest client.
    """
    giver, taker, train = int(SIZES.argmax()), CLIENTS - 1, data.train
    first = train.start[giver] + SIZES[giver] - 4
    size = train.size.at[giver].add(-4).at[taker].set(4)
    owner = data.owner.at[train.order[first + jnp.arange(4)]].set(taker)
    train = train.replace(start=train.start.at[taker].set(first), size=size)
    return data.replace(train=train, owner=owner)


def list_data(data):
    """Yields the data of each round."""
    labels = jnp.where(jnp.isin(data.owner, jnp.array(MOVED)), CLASSES - 1, data.y)
    shifted = jnp.isin(jnp.arange(CLIENTS), jnp.array(MOVED))
    for number in range(ROUNDS):
        if number == EVENT:
            data = data.replace(y=labels, shifted=shifted)
        elif number == EVENT + 1:
            data = give_samples(data.replace(shifted=jnp.zeros_like(shifted)))
        yield data


@pytest.fixture
def play(source, monkeypatch):
    """Plays rounds: play(overrides, factory or None, state -> state) -> what was done and billed at
    the start, and the `Counts` and the traffic of each round.
    """
    monkeypatch.setattr(parts, "use_cpu_cores", lambda count=None: None)  # JAX has started
    watch = Watch()
    watch_bills(watch, monkeypatch)

    def run(*given, factory=None, change=lambda state: state):
        watch_programs(watch, monkeypatch, server_tests="algorithm=md_icfl" in given)
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        config = resolve_settings([*settings, f"dataset.source.path={source}", *given])
        setup, _ = parts.build(config)
        task, data = watch_task(setup.task, watch), setup.data
        local = parts.build_local(config, task, data, setup.mesh)
        if factory is None:
            algorithm = parts.build_algorithm(config, task, data, local)
        else:
            algorithm = factory(task, local, cfl.select.uniform(4))
        state, one_round = jax.jit(algorithm.init)(KEY, data), jax.jit(algorithm.round)
        jax.effects_barrier()
        bills = [*watch.entered, *(bill for pair in watch.started for bill in pair)]
        bills = [bill for bill in bills if bill.samples.size]
        steps = sum(upload.steps.sum() for _, upload, *_ in watch.delivered)  # of whole rounds
        begun = SimpleNamespace(work=count_work(watch.work, CLIENTS), bills=bills, steps=steps)
        state, counts = change(state), []
        for now in list_data(data):
            watch.work.clear(), watch.delivered.clear(), watch.entered.clear()
            before, (state, _) = state, one_round(KEY, state, now)
            jax.effects_barrier()
            counts.append((count_round(watch, before, now), find_traffic(before, state)))
        return begun, counts

    return run


def find_traffic(before, after):
    """Returns what was sent between two states: models down, up, words down, up."""
    pairs = zip(*(jax.tree.leaves(state.traffic) for state in (before, after)), strict=True)
    return [count_to_int(new) - count_to_int(old) for old, new in pairs]


def assert_work_is_billed(c):
    """What a client infers and trains is in its bill or in its steps."""
    billed = c.bill.samples + TRAIN_TO_INFERENCE * BATCH * c.steps
    done = c.inferred + TRAIN_TO_INFERENCE * c.trained
    np.testing.assert_array_equal(billed, done, "samples")


def assert_sent(c, **more):
    """A client of the cohort gets the models that its programs begin with, at least its group's,
    and sends its update; what else goes up or down says `more`, by field of `Bill`.
    """
    expected = {
        "units_down": c.before + np.maximum(c.after, c.selected),
        "units_up": c.uploads,
        "words_down": 0,
        "words_up": c.extra,
    } | more
    for field, number in expected.items():
        given = getattr(c.bill, field)
        np.testing.assert_array_equal(given, np.broadcast_to(number, CLIENTS), field)


def held(c):
    return np.asarray(c.data.train.size)


def is_new(c):
    """Returns the clients [K] of the cohort that have samples and no group yet."""
    return c.selected & (held(c) > 0) & (np.asarray(c.state.assignment) < 0)


def late(c):
    """Returns the clients [K] that have got their first samples since the round before."""
    return (held(c) > 0) & ~np.asarray(c.state.rows["features"].known)


def count_vectors(c):
    """Returns how many singular vectors each client [K] has: of each class at most three, and at
    most as many as samples.
    """
    y, train = np.asarray(c.data.y), jax.tree.map(np.asarray, c.data.train)
    rows = [train.order[at : at + size] for at, size in zip(train.start, train.size, strict=True)]
    counts = np.array([np.bincount(y[own], minlength=CLASSES) for own in rows])
    return np.minimum(counts, 3).sum(1)


def each_way(c, models):
    return {"units_down": models, "units_up": models, "words_up": 0}


def send_choice(c):
    """Each client sends the number of the group that it has chosen."""
    return {"words_up": c.selected}


def train_aside(c):
    """A newcomer sends the model by which it finds its group, others a vector for the criterion."""
    joins = is_new(c) & (c.after > 1)
    return {"units_up": 1 * c.selected + joins, "words_up": WORDS * ((c.after > 1) & ~joins)}


def meet_common(c):
    """Two models each way, and one more for the first update."""
    new = c.selected & (held(c) > 0) & ~np.asarray(c.state.rows["known"])
    return each_way(c, 2 * c.selected + new)


def report_labels(c):
    """Clients that may report, and whose data have changed, send their label counts."""
    kept = c.state.rows["reports"]
    changed = np.asarray(kept.pending | c.data.shifted) & np.asarray(kept.may_report)
    return {"words_up": CLASSES * (changed & (held(c) > 0))}


def describe(c):
    """Newcomers describe their inputs, and in round 1 all clients all of their samples."""
    everybody = (c.state.round == 1) * (held(c) > 0)
    return {"words_up": 2 * CLASSES * c.before + 2 * CLASSES * (CLASSES + 1) * everybody}


def mix_all(c):
    """Every client of the round has all models, those asked before it already; these send the
    shares of each.
    """
    asked = c.before > 0
    return {"units_down": GROUPS * (asked | c.selected), "words_up": GROUPS * asked}


def send_to_peers(c):
    """The start in the first round, then a model of a peer; a word up for each of these."""
    others = np.asarray(c.state.rows["peer"].uploaded)
    peers = c.selected & (others.sum() - others > 0)
    start = c.selected & ~np.asarray(c.state.rows["peer"].started)
    return {"units_down": 1 * peers + start, "words_up": peers}


# what docstrings say is sent beside an update and the models that are used
SENT = {
    "adaptive_fedavg": lambda c: {"words_down": c.selected},  # the step size
    # who gets samples later sends the vectors of its classes, or its last layer, before the round
    "pacfl": lambda c: {"words_up": late(c) * count_vectors(c) * FEATURES},
    "fedclust": lambda c: {"words_up": late(c) * WORDS},
    "cfl": lambda c: {"units_up": np.maximum(c.after, c.selected)},  # each cut: down and up
    "cfl_gp": train_aside,
    "clove": lambda c: {"words_up": GROUPS * (c.inferred > 0)},  # the loss of each model
    "feddane": lambda c: each_way(c, 2 * c.selected),  # a gradient, and the mean gradient
    "feddrift": lambda c: {"words_up": c.before},  # the loss of each model
    "fedem": lambda c: {"words_up": 0},  # nothing but models
    "fedfomo": send_to_peers,
    "flux": describe,
    "fednova": lambda c: {"words_up": c.selected},  # without a pull the length alone
    "fedrc": lambda c: {"words_down": GROUPS * CLASSES * c.selected},  # R; A is in the update
    "fedsoft": mix_all,
    "fesem_ma": lambda c: {"words_up": CLASSES * c.selected},  # label counts
    "md_icfl": lambda c: {
        "words_up": CLASSES
        * (c.selected & (held(c) > 0) & ~np.asarray(c.state.rows["labels"].known))
    },
    "qfedavg": lambda c: {"words_up": c.inferred > 0},  # its loss
    "scaffold": lambda c: each_way(c, 2 * c.selected),  # the control variates
    "stocfl": meet_common,
}
SENT |= dict.fromkeys(
    ("hypocluster", "ifca", "ifca_gradient", "ifca_mig", "ifca_restarts"), send_choice
)
SENT |= dict.fromkeys(FIELDING, report_labels)
SENT["feddrift_eager"] = SENT["feddrift"]
# as figure 6 of FlexCFL counts: m directions to a newcomer; the initial model, and shifts, are free
SENT |= dict.fromkeys(COLD, lambda c: {"units_down": c.selected + GROUPS * is_new(c)})
SENT["rac"] = lambda c: {"units_down": c.selected}  # who joins a random group needs none
AT_HOME = ("centralised", "nonfed")  # nobody sends models


@pytest.mark.parametrize("name", others_nightly(ALGORITHMS, OFTEN))
def test_bills_of_methods(name, play):
    begun, rounds = play(f"algorithm={name}", *OWN.get(name, ()))
    for number, (c, traffic) in enumerate(rounds):
        if name == "fedfomo" and number == 0:  # all models are the common start: none is tested
            c = c._replace(inferred=np.zeros(CLIENTS))
        assert_work_is_billed(c)
        if name in AT_HOME:
            moved = name == "centralised" and number == EVENT  # the samples, again
            assert traffic == [0, 0, 0, moved * (FEATURES + 1) * SIZES[list(MOVED)].sum()]
            continue
        assert_sent(c, **SENT.get(name, lambda c: {})(c))
        billed = [getattr(c.bill, field).sum() for field in Bill.__dataclass_fields__][:4]
        assert traffic == billed
    assert_start_is_billed(begun)


def assert_start_is_billed(begun):
    inferred, trained, _, received = begun.work
    done = inferred + TRAIN_TO_INFERENCE * trained
    samples = sum(bill.samples.sum() for bill in begun.bills)
    assert samples + TRAIN_TO_INFERENCE * BATCH * begun.steps == done.sum()
    assert sum(bill.units_down.sum() for bill in begun.bills) >= received.sum()


@pytest.mark.parametrize("start", ["reject_unbalanced", nightly("kmeanspp_loss")])
def test_bills_of_starts_of_ifca(start, play):
    settings = "algorithm.share=0.3", "local.lr=0.5"  # with which no model is chosen twice
    begun, _ = play("algorithm=ifca", f"algorithm.start={start}", *settings)
    assert begun.work[0].sum() > 0
    assert_start_is_billed(begun)


LAYERS = sorted(path.stem for path in (CONF / "personal").glob("*.yaml"))
LAYERS = [name for name in LAYERS if name not in ("none", "fedbn")]  # a model of images alone
WHOLE = {"fedala": ("personal.share=1",)}  # it fits by whole mini-batches
SPLIT = ("fedala", "fedbabu", "fedper", "fedrep", "lg_fedavg", "moon")  # need a head and a body


@pytest.mark.parametrize("name", others_nightly(LAYERS, ["ditto", "scaffold"]))
def test_bills_of_layers(name, play):
    """A layer sends nothing, but for a correction that travels: one more each way."""
    model = "small_mlp" if name in SPLIT else "mclr"
    _, rounds = play("algorithm=fedavg", f"personal={name}", f"model={model}", *WHOLE.get(name, ()))
    for c, _ in rounds:
        if name == "moon":  # whose term is nothing until a client has a previous model
            c = c._replace(inferred=c.inferred * np.asarray(c.state.rows["MOON"].trained))
        assert_work_is_billed(c)
        each = (1 + (name == "scaffold")) * c.selected
        assert_sent(c, units_down=each, units_up=each)


@pytest.mark.parametrize("name", ["cpow_d", "pow_d", "rpow_d"])
@pytest.mark.nightly
def test_bills_of_polls(name, play):
    """Candidates get their group's model once, and send its loss."""
    _, rounds = play("algorithm=fedavg", f"selection={name}", "algorithm.select.candidates=6")
    for c, _ in rounds:
        assert_work_is_billed(c)
        assert_sent(c, words_up=c.inferred > 0)


def split_in_two(key, values, *rest):
    flat = values.reshape(len(values), -1)
    return (flat[:, 0] > jnp.median(flat[:, 0])).astype(jnp.int32)


def choose_first(values, old):
    return (values.reshape(len(values), -1)[:, 0] > 0).astype(jnp.int32)


WIDTH = {"losses": GROUPS, "gradients": WORDS, "embeddings": FEATURES, "label_counts": CLASSES}
WAYS = {"cluster": split_in_two, "choose": choose_first, "found": split_in_two}
MEASURED = [
    nightly("losses", "choose", False),
    nightly("losses", "cluster", True),
    nightly("gradients", "cluster", False),
    ("embeddings", "choose", True),
    nightly("embeddings", "found", False),
    nightly("gradients", "found", False),
    nightly("gradients", "choose", True),
    nightly("losses", "found", False),
    nightly("label_counts", "cluster", True),
    nightly("label_counts", "found", False),
]


@pytest.mark.parametrize(("measure", "way", "once"), MEASURED)
def test_bills_of_measures(measure, way, once, play):
    """Who chooses sends one word, else all that was measured; once: only newcomers are asked."""
    settings = {way: WAYS[way], "measure": getattr(measures, measure)} | (
        {"once": True} if once else {}
    )
    begun, rounds = play(factory=partial(cfl.clustered, m=GROUPS, **settings))
    words = 1 if way == "choose" else WIDTH[measure]
    for number, (c, _) in enumerate(rounds):
        asked = is_new(c) if once else c.selected
        if way == "found":  # before round 0; then the client that has got samples
            words = 1 if measure == "losses" else WIDTH[measure]
            asked = (number == EVENT + 1) * (np.arange(CLIENTS) == CLIENTS - 1)
        assert_work_is_billed(c)
        assert_sent(c, words_up=words * asked)
    if way == "found":
        (bill,), (inferred, trained, _, received) = begun.bills, begun.work
        done = inferred + TRAIN_TO_INFERENCE * trained
        assert bill.samples.tolist() == done.tolist()
        assert bill.units_down.tolist() == received.tolist()
        assert bill.words_up.tolist() == (words * (SIZES > 0)).tolist()


@pytest.mark.nightly
def test_fedgwc_sends_all_models_to_clients_without_a_group(play):
    """Two of four groups are in use, with different models, and nobody has a group."""

    def change(state):
        apart = jnp.arange(4.0)
        groups = jax.tree.map(
            lambda leaf: leaf + apart.reshape(-1, *[1] * (leaf.ndim - 1)), state.groups
        )
        nobody = jnp.full_like(state.assignment, -1)
        return state.replace(groups=groups, active=apart < GROUPS, assignment=nobody)

    _, rounds = play("algorithm=fedgwc", *OWN["fedgwc"], change=change)
    for c, _ in rounds:
        assert_work_is_billed(c)
        assert_sent(c, words_up=c.extra + is_new(c))  # and the group that it has chosen
    assert rounds[0][0].after.max() == GROUPS


@pytest.mark.nightly
def test_models_of_nonfed_take_no_time_to_send(linear, local, toy):
    """A byte takes a second, and steps take none."""
    clock = device_profiles(np.zeros(toy.num_clients), np.ones(toy.num_clients))
    system = cfl.System(cfl.select.full_participation(), clock=clock)
    algorithm = cfl.algorithms.nonfed(linear, local, system)

    @jax.jit
    def play():
        return algorithm.round(KEY, algorithm.init(KEY, toy), toy)[1].seconds

    assert play() == 0
