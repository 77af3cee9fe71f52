"""Every file of conf/algorithm is built the way the command line builds it and put
through the same checks.
"""

import functools
from itertools import pairwise
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import nightly, others_nightly, spent
from omegaconf import OmegaConf

import fedjax_cfl as cfl
from fedjax_cfl.cli import build as parts
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.settings import resolve_settings
from fedjax_cfl.data import stream
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation.check import Trial, find_broken_rules, in_any_order, try_rounds
from fedjax_cfl.simulation.rounds import make_init, run_round
from fedjax_cfl.types import Rows

ALGORITHMS = sorted(path.stem for path in (CONF / "algorithm").glob("*.yaml"))
# Fielding with another trigger or ear, which test_fielding.py compares: the whole contract by hand
ABLATIONS = [name for name in ALGORITHMS if name.startswith("fielding_")]
# one of every kind of method; the rounds of all others have twins or reductions in files of their
# own
OFTEN = ["cfl", "fedem", "flexcfl", "ifca"]
NOT_SLOW = [name for name in ALGORITHMS if name not in ABLATIONS]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ABLATIONS]
METHODS = others_nightly(NOT_SLOW, OFTEN) + SLOW
PRESETS = sorted(path.stem for path in (CONF / "preset").glob("*.yaml"))
COHORT, GROUPS, ROUNDS = 6, 2, 15
# its steps are 1 / tau times as long where updates grow, as those of six of 14 clients do
GENTLE = {"flash": ("algorithm.server_lr=0.01",)}
EVERYBODY = ("cfl", "cfl_gp", "nonfed")  # methods whose every client takes part in every round
POOLED = ("centralised",)  # methods of one place, which counts as a client
SOFT = ("fedsoft",)  # methods whose every client counts for all groups, and has a model of its own
ALONE = ("fedfomo", "nonfed")  # methods whose clients have models of their own, and no group has
PEERS = ("fedfomo",)  # methods whose clients receive models of others, several a round
PLACING = ("fedgwc", "flux")  # methods that group all clients at once, in one round
MIXTURES = ("fedem", "fedrc")  # methods whose clients receive, train and send all models
# methods whose first groups are trained, and which keep nothing of what they trained from
# methods whose clients send one more model when they are met, and whose groups unite
UNITING = ("stocfl",)
STARTS_TRAINED = ("fesem", "fesem_ma", "fesem_mig", "ifca_restarts", "tkm", "wecfl")
# one of every kind, for what takes long to compile
KINDS = ("cfl", "fesem", "flexcfl", "ifca", "qfedavg")
# whose lanes are compared in every run: one whose clients train otherwise
SIDE_BY_SIDE = ("local.executor=lanes", "local.width=3")

# models down and up per client of the cohort, where it is not one each
SENT = {
    "feddane": (3, 2),
    "nonfed": (0, 0),
    "scaffold": (2, 2),
    "stocfl": (2, 2),
    "centralised": (0, 0),
}
SENT |= dict.fromkeys(MIXTURES, (GROUPS, GROUPS))
# methods whose groups have quotas, so that slots of the cohort may stay empty
QUOTAS = tuple(name for name in ALGORITHMS if name.startswith(("auxo", "fielding")))


SETTINGS = {
    "dataset": "npz",
    "partition": "by_user",
    "model": "mclr",
    "devices": 1,
    "rounds": ROUNDS,
    "clients_per_round": COHORT,
    "dataset.groups": GROUPS,
    "dataset.alpha": 3,
    "local.lr": 0.2,
    "local.epochs": 2,
    "local.batch_size": 5,
}


class Case(NamedTuple):
    """One algorithm, and 15 rounds of it on the toy problem."""

    name: str
    algorithm: cfl.Algorithm
    task: cfl.Task
    data: cfl.FederatedData
    mesh: Any
    init: Any  # compiled
    round: Any  # compiled
    states: list  # [ROUNDS + 1]
    infos: list  # [ROUNDS]
    trial: Trial


def make_in_any_order(field, *given, make=parts.instantiate_target, **options):
    """Makes a part of a configuration as the command line does, a selection with a switch."""
    made = make(field, *given, **options)
    return in_any_order(made) if field == "algorithm.select" else made


@pytest.fixture(scope="module")
def build(toy_pool, tmp_path_factory):
    """Composes a configuration on the toy data: build(algorithm, preset, given) -> (algorithm,
    task, data, mesh), with the overrides `given`; with `members` instead of the algorithm what
    makes one of a grid, and the values that it is made of.
    """
    path = tmp_path_factory.mktemp("toy") / "toy.npz"
    clients = np.arange(toy_pool.client.max() + 1)
    np.savez(
        path,
        x=toy_pool.x,
        y=toy_pool.y,
        client=toy_pool.client,
        split=toy_pool.test.astype(int),
        concept=clients % GROUPS,
    )
    settings = [f"{name}={value}" for name, value in SETTINGS.items()] + [
        f"dataset.source.path={path}"
    ]

    @functools.cache
    def build(algorithm, preset="clean", members=False, given=()):
        named = f"algorithm={algorithm}", f"preset={preset}"
        resolved = resolve_settings([*settings, *named, *given])
        assert resolved["algorithm"]["name"] == algorithm
        setup, local = parts.build(resolved)
        algorithm, task, data, _, mesh, _ = setup
        if members:
            made_of = resolved, task, data, local
            make = functools.partial(parts.build_algorithm, *made_of, runs_as_one=True)
            algorithm = make, parts.find_inputs(resolved, setup, local).values
        return algorithm, task, data, mesh

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "instantiate_target", make_in_any_order)
        patch.setattr(parts, "use_cpu_cores", lambda count=None: None)  # JAX has started long ago
        yield build


@pytest.fixture(scope="module", params=METHODS)
def case(request, build):
    algorithm, task, data, mesh = build(request.param, given=GENTLE.get(request.param, ()))
    trial = try_rounds(algorithm, task, data, ROUNDS)
    ran = trial.init, trial.round, trial.states, trial.infos
    assert np.sum(data.train.size == 0) == 1  # a rule is about such a client
    return Case(request.param, algorithm, task, data, mesh, *ran, trial)


def test_catalogue():
    """Every method that Python exports has a file, which calls it; a file is named as what it
    configures.
    """
    assert PRESETS == ["clean", "fedscale", "paper", "plain", "ref"]
    exported = set(cfl.algorithms.__all__)
    assert exported <= set(ALGORITHMS)
    for name in ALGORITHMS:
        written = OmegaConf.load(CONF / "algorithm" / f"{name}.yaml")
        assert written.name == name
        base = written.get("defaults", [name])[0]  # the file that it is a setting of
        assert base in ALGORITHMS
        if base == name:
            function = {"fedgroup": "flexcfl"}.get(name, name)  # flexcfl's settings extend it
            assert written._target_ == f"fedjax_cfl.algorithms.{function}" and name in exported


def add_client(data):
    """Returns the data with one more client, which has no samples."""

    def grow(index):
        start = jnp.append(index.start, index.order.size)
        return index.replace(start=start, size=jnp.append(index.size, 0))

    return data.replace(
        train=grow(data.train),
        test=grow(data.test),
        concept=jnp.append(data.concept, -1),
        shifted=jnp.append(data.shifted, False),
        client_names=None,
    )


@pytest.mark.parametrize("name", others_nightly(ALGORITHMS, [*OFTEN, "pacfl", "scaffold"]))
def test_only_rows_of_clients_grow_with_their_number(name, build):
    """So that new clients are known from the table, and no axis is taken for theirs."""
    algorithm, _, data, _ = build(name)
    init = functools.partial(jax.eval_shape, algorithm.init, jax.random.key(0))
    few, many = (init(each) for each in (data, add_client(data)))
    for rows, count in ((few.rows, data.num_clients), (many.rows, data.num_clients + 1)):
        assert {leaf.shape[0] for leaf in jax.tree.leaves(rows)} <= {count}
    tables = {"assignment": (), "rows": {}, "selection": ()}
    chex.assert_trees_all_equal_shapes(few.replace(**tables), many.replace(**tables))


def test_keeps_the_rules_of_a_round(case):
    """What a method of one's own is tried for, see `check`."""
    assert list(find_broken_rules(case.trial)) == []


def test_finite(case):
    chex.assert_tree_all_finite(case.states)
    chex.assert_tree_all_finite(
        [info.replace(group_discrepancy=jnp.zeros(())) for info in case.infos]
    )


@pytest.fixture(scope="module")
def first_model(build):
    """The model that FedAvg begins with."""
    algorithm, _, data, _ = build("fedavg")
    return jax.jit(algorithm.init)(jax.random.key(0), data).groups


def test_methods_of_one_seed_begin_with_one_random_model(case, first_model):
    """FedAvg's model is that of the first group, or what founders are trained from."""
    if case.name in STARTS_TRAINED:
        pytest.skip("its first groups are trained")
    state = case.states[0]
    founded = hasattr(state.memory, "has_founders")
    initial = state.memory.initial if founded else state.groups
    chex.assert_trees_all_equal(jax.tree.map(lambda leaf: leaf[:1], initial), first_model)


def list_rounds(case):
    """Yields (state before, state after, report) of each round but those in which clients are
    grouped at once.
    """
    for (before, after), info in zip(pairwise(case.states), case.infos, strict=True):
        at_once = case.name in PLACING or case.name in UNITING
        if not at_once or before.active.sum() == after.active.sum():
            yield before, after, info


def test_group_discrepancy_is_nan_only_for_groups_without_participants(case):
    for before, after, info in list_rounds(case):
        nan = np.isnan(info.group_discrepancy)
        assert nan.all() == (case.name in ALONE)
        if case.name in SOFT:
            continue
        idle = jax.tree.map(lambda leaf, nan=nan: leaf[nan], (before.groups, after.groups))
        if case.name.startswith(("fesem", "wecfl")):  # means of stored models, taken again
            chex.assert_trees_all_close(*idle, rtol=1e-6, atol=1e-7)
        else:
            chex.assert_trees_all_equal(*idle)


@pytest.mark.nightly
@pytest.mark.parametrize("case", NOT_SLOW + SLOW, indirect=True)
def test_side_by_side_is_one_after_another(case, build):
    lanes, *_ = build(case.name, given=(*SIDE_BY_SIDE, *GENTLE.get(case.name, ())))

    @jax.jit
    def play(key, data):
        return lanes.round(key, lanes.init(key, data), data)

    state, info = play(jax.random.key(0), case.data)
    for found, expected in ((state, case.states[1]), (info, case.infos[0])):
        for (path, one), other in zip(
            jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True
        ):
            text = jax.tree_util.keystr(path)
            if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
                continue
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5, err_msg=text)


def test_loss_falls(case):
    losses = [float(info.loss) for info in case.infos]
    assert np.mean(losses[-4:]) < 0.85 * np.mean(losses[:2]), losses


def test_training_helps_within_a_round(case):
    # a step along others' gradients need not lower a small client's objective; the last loss
    # has the pull back to the received model, which the first has not
    slack = {"feddane": 1.1, "fedprox": 1.01, "fedgrouprox": 1.05, "scaffold": 1.15}.get(
        case.name, 1.0
    )
    losses = np.array([(info.loss, info.last_loss) for info in case.infos])
    assert np.all(losses[:, 1] <= slack * losses[:, 0]), losses


DRIFT = stream.gradual(intervals=6, period=1, retained=2)


def begin_and_go_on(algorithm, key, data):
    """Returns (state, data state) before and after a round on a stream."""
    begun = make_init(algorithm, DRIFT, on_host=False)(key, data)
    return begun, run_round(algorithm, DRIFT, key, *begun, data)[:2]


@pytest.mark.parametrize("name", others_nightly(ALGORITHMS, ["ifca"]))
def test_shapes_stay_in_a_grid_on_a_stream(name, build):
    """One trace for what the three tests below see one by one: the values of all settings that
    a grid or a program can be given, data that move, and a preset.
    """
    (make, values), _, data, _ = build(name, "ref", members=True)
    assert values["local.lr"] == SETTINGS["local.lr"]

    def member(key, values):
        return begin_and_go_on(make(values=values), key, data)

    grid = {name: value * jnp.array([0.5, 1.0, 2.0]) for name, value in values.items()}
    keys = jax.random.split(jax.random.key(0), 3)
    before, after = jax.eval_shape(jax.vmap(member), keys, grid)
    chex.assert_tree_shape_prefix(after, (3,))
    chex.assert_trees_all_equal_shapes_and_dtypes(before, after)


@pytest.mark.nightly
@pytest.mark.parametrize("name", METHODS)
def test_runs_can_be_mapped(name, build):
    """Over keys, and over the values of all settings that a grid or a program can be given."""
    (make, values), _, data, _ = build(name, members=True)

    def begun(key, values):
        algorithm = make(values=values)
        return algorithm.round(key, algorithm.init(key, data), data)

    grid = {name: value * jnp.array([0.5, 1.0, 2.0]) for name, value in values.items()}
    mapped = jax.vmap(jax.vmap(begun, (None, 0)), (0, None))
    state, _ = jax.eval_shape(mapped, jax.random.split(jax.random.key(0), 2), grid)
    chex.assert_tree_shape_prefix(state, (2, 3))


@pytest.mark.nightly
@pytest.mark.parametrize("name", METHODS)
def test_data_may_stream(name, build):
    """Nothing changes shape, whatever a stream edits: samples, labels and who holds them."""
    algorithm, _, data, _ = build(name)
    go = functools.partial(begin_and_go_on, algorithm)
    chex.assert_trees_all_equal_shapes_and_dtypes(*jax.eval_shape(go, jax.random.key(0), data))


@pytest.mark.nightly
@pytest.mark.parametrize("case", others_nightly(KINDS, ["ifca"]), indirect=True)
def test_jit_equals_no_jit(case):
    eager = case.algorithm.round(jax.random.key(0), case.states[2], case.data)
    chex.assert_trees_all_close(eager, (case.states[3], case.infos[2]), rtol=1e-4, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("case", KINDS, indirect=True)
def test_scan_equals_python_loop(case):
    def scanned(key, state, data):
        return jax.lax.scan(
            lambda state, _: case.algorithm.round(key, state, data), state, length=4
        )

    state, infos = jax.jit(scanned)(jax.random.key(0), case.states[0], case.data)
    chex.assert_trees_all_close(state, case.states[4], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(
        infos,
        jax.tree.map(lambda *leaves: jnp.stack(leaves), *case.infos[:4]),
        rtol=1e-5,
        atol=1e-6,
    )


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fedavg", "ifca"])
def test_whole_equals_run(name, build):
    algorithm, task, data, mesh = build(name)
    key = jax.random.key(0)
    state, (infos, metrics) = jax.jit(
        cfl.make_run_fn(algorithm, task, mesh, rounds=4, eval_every=2)
    )(key, data)
    ran = cfl.run(algorithm, task, data, key, rounds=4, eval_every=2, discard="none", mesh=mesh)
    chex.assert_trees_all_close(state, ran.state, rtol=1e-5, atol=1e-6)
    assert [row["round"] for row in ran.rows] == [2, 4]
    for column in ("accuracy", "macro_accuracy", "test_loss", "auxiliary_accuracy", "group_sizes"):
        np.testing.assert_allclose(metrics[column], [row[column] for row in ran.rows], rtol=1e-5)
    for column, value in (
        ("train_loss", infos.loss[:, -1]),
        ("discrepancy", infos.discrepancy.mean(1)),
    ):
        np.testing.assert_allclose(value, [row[column] for row in ran.rows], rtol=1e-5)


def cohort_size(case):
    if case.name in POOLED:
        return 1
    return case.data.num_clients if case.name in EVERYBODY else COHORT


def models_of(case, state):
    """Leaves of the models of groups, or of those that clients have for themselves."""
    if case.name not in ALONE:
        return jax.tree.leaves(state.groups)
    rows = state.rows
    return jax.tree.leaves(rows["NonFed"].values if case.name == "nonfed" else rows["trained"])


def test_a_round_changes_the_model_and_only_the_cohort_changes_groups(case):
    cohort = cohort_size(case)
    for before, after, info in list_rounds(case):
        assert any(
            np.any(old != new)
            for old, new in zip(models_of(case, before), models_of(case, after), strict=True)
        )
        assert 0 < info.clients <= cohort
        if case.name in SOFT:
            continue
        # one client has no samples: it has the only group there is, or none
        able = case.data.train.size > 0
        assert np.sum(able & (before.assignment != after.assignment)) <= cohort
        found = np.sum(able & (before.assignment < 0) & (after.assignment >= 0))
        assert found <= info.cold <= found + case.algorithm.clustered


def test_traffic_is_sane(case):
    cohort = cohort_size(case)
    for (before, after), info in zip(pairwise(case.states), case.infos, strict=True):
        assert cohort / 2 < info.selected <= cohort
        assert info.selected == cohort or case.name in QUOTAS
        down, up = (int(info.selected) * each for each in SENT.get(case.name, (1, 1)))
        sent = spent(before, after)
        assert sent.units_up == up or (sent.units_up > up and case.name in UNITING)
        assert sent.units_down >= down
        assert min(sent.words_down, sent.words_up) >= 0
        if not case.algorithm.clustered and case.name not in PEERS:
            assert sent.units_down == down


def test_meets_all_clients(case):
    """In 15 rounds of 6, all that have samples."""
    index = case.algorithm.serve(case.states[-1]).model_index
    assert (index[case.data.train.size > 0] >= 0).all()


def test_same_key_same_result_another_key_another(case):
    again, other = (
        case.round(key, case.init(key, case.data), case.data) for key in map(jax.random.key, (0, 1))
    )
    chex.assert_trees_all_equal(again, (case.states[1], case.infos[0]))
    assert all(
        np.any(a != b)
        for a, b in zip(models_of(case, again[0]), models_of(case, other[0]), strict=True)
    )


@pytest.mark.parametrize(
    ("algorithm", "preset"),
    [
        (name, preset) if (name, preset) == ("flexcfl", "paper") else nightly(name, preset)
        for name in ALGORITHMS
        for preset in ("paper", "ref")  # others: how to train; all of the above but one is clean
    ],
)
def test_builds_under_every_preset(build, algorithm, preset):
    built, _, data, _ = build(algorithm, preset)
    key = jax.random.key(0)
    state = jax.eval_shape(built.init, key, data)
    after, _ = jax.eval_shape(built.round, key, state, data)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)


@pytest.mark.parametrize("name", others_nightly(ALGORITHMS, ("flexcfl", "fedem", "nonfed")))
def test_clients_may_keep_a_model_of_their_own(name, build):
    """Ditto over every method whose clients have none already: a round leaves the shapes of the
    state, with a model of each client in it.
    """
    given = ("personal=ditto",)
    if name in ("nonfed", *PEERS, *POOLED, *SOFT):
        why = "no clients train" if name in POOLED else "a model of its own already"
        with pytest.raises(InputError, match=why):
            build(name, given=given)
        return
    if name in MIXTURES:
        with pytest.raises(InputError, match=r"personal: .* receive and train all m models"):
            build(name, given=given)
        return
    algorithm, task, data, _ = build(name, given=given)
    key = jax.random.key(0)
    state = jax.eval_shape(algorithm.init, key, data)
    after, _ = jax.eval_shape(algorithm.round, key, state, data)
    assert after == state
    one = jax.eval_shape(task.init, key)
    models = jax.tree.map(lambda leaf: (data.num_clients, *leaf.shape), one)
    # FedDyn and SCAFFOLD keep rows of their own below it
    values = [rows.values for rows in state.rows.values() if isinstance(rows, Rows)]
    assert jax.tree.map(lambda leaf: leaf.shape, values[-1]) == models
    jax.eval_shape(algorithm.personal_models, state, data)
