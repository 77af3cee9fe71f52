"""FL+HC, which clusters once: FedAvg before and in every group after, planted groups, bills."""

from itertools import pairwise

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import build, nightly, with_execution
from sklearn.metrics import adjusted_rand_score
from test_cfl import CLIENTS, KEY, TRUTH, concepts, sent
from test_fesem import play
from test_twins import Rule, follow, uneven

from fedjax_cfl.algorithms.fl_hc import fl_hc
from fedjax_cfl.errors import InputError
from fedjax_cfl.sharding import make_mesh
from fedjax_cfl.system import select
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.system.system import System

__all__ = ["concepts"]


@pytest.fixture(scope="module")
def clustered_once(concepts, linear, local):
    """Six rounds with everybody, the third of which is the clustering round."""
    return play(
        fl_hc(linear, local, select.full_participation(), m=3, warm_up=2, newcomers="nearest"),
        uneven(concepts),
        6,
    )


def test_fl_hc_is_fedavg_before_and_in_every_group_after(concepts, local, clustered_once):
    last = clustered_once[-1]
    clustered = clustered_once[3]
    assert adjusted_rand_score(TRUTH, clustered.assignment) == 1
    chex.assert_trees_all_equal(clustered.assignment, last.assignment)
    common = jax.tree.map(lambda leaf: leaf[:1], clustered_once[2].groups)
    chex.assert_trees_all_equal(
        clustered.groups, jax.tree.map(lambda leaf: jnp.repeat(leaf, 3, axis=0), common)
    )

    for number, (before, after) in enumerate(pairwise(clustered_once)):
        if number != 2:
            follow(before, after, uneven(concepts), local, range(CLIENTS), Rule(), KEY)


@pytest.mark.nightly
def test_fl_hc_uses_no_more_groups_than_it_found(concepts, linear, local):
    """Everybody is one group below a threshold this high; the other four hold nobody."""
    options = {"warm_up": 1, "newcomers": "nearest", "threshold": 1e9}
    last = play(
        build(fl_hc, linear, local, select.full_participation(), m=5, **options), concepts, 2
    )[-1]
    assert last.active.tolist() == [True, False, False, False, False]
    assert set(last.assignment.tolist()) == {0}


@pytest.mark.nightly
def test_fl_hc_sends_to_everybody_once_more(concepts, linear, local):
    algorithm = fl_hc(linear, local, select.uniform(6), m=3, warm_up=2)
    states = play(algorithm, concepts, 4)
    assert [sent(before, after) for before, after in pairwise(states)] == [
        (6, 6),
        (6, 6),
        (CLIENTS, CLIENTS),
        (6, 6),
    ]
    served = [algorithm.serve(state).model_index for state in states]
    assert (served[0] == 0).all() and (served[2] == 0).all(), (
        "everybody is served from the beginning"
    )
    assert adjusted_rand_score(TRUTH, served[3]) == 1
    one_round = jax.jit(algorithm.round)
    for state in states[:4]:
        one_round(KEY, state, concepts)
    assert one_round._cache_size() == 1


@pytest.mark.nightly
@pytest.mark.parametrize("metric", ["cosine", nightly("L2")])
def test_fl_hc_takes_newcomers_to_the_nearest_mean(concepts, linear, local, clustered_once, metric):
    """Clients 4 and 5 are made to have missed the clustering; each trains once more
    from the model that was clustered.
    """
    clustered = clustered_once[3]
    missed = clustered.replace(assignment=clustered.assignment.at[jnp.array([4, 5])].set(-1))
    pair = select.from_table(np.array([[3, 4, 5]]))
    options = {"warm_up": 2, "newcomers": "nearest", "metric": metric}
    before, after = play(build(fl_hc, linear, local, pair, m=3, **options), concepts, 1, missed)
    assert after.assignment.tolist() == clustered.assignment.tolist()
    assert sent(before, after) == (5, 5)


@pytest.mark.nightly
@pytest.mark.parametrize("newcomers", ["largest", "nearest"])
def test_fl_hc_copes_with_silent_clients(toy, linear, local, newcomers):
    """Toy client 2 has no data, and some answers are lost."""
    unsure = System(select.uniform(6), Faults(dropout=0.3))
    options = {"warm_up": 1, "newcomers": newcomers, "metric": "L1"}
    states = play(build(fl_hc, linear, local, unsure, m=3, **options), toy, 3)
    assert states[2].assignment[2] == -1
    assert (np.delete(states[2].assignment, 2) >= 0).all() == (newcomers == "largest")
    chex.assert_tree_all_finite(states[-1])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("metric:", {"linkage": "ward"}),
        ("metric=", {"metric": "no"}),
        ("aggregate=", {"aggregate": "no"}),
        ("linkage=", {"linkage": "no"}),
        ("newcomers=", {"newcomers": "no"}),
    ],
)
def test_unknown_choices_of_fl_hc_are_refused(linear, local, name, options):
    with pytest.raises(InputError, match=f"algorithm.{name}"):
        build(fl_hc, linear, local, select.full_participation(), m=2, **options)


@pytest.mark.nightly
def test_fl_hc_takes_newcomers_to_the_largest_group(concepts, linear, local, clustered_once):
    """The group of most founders need not be number 0; nothing more is sent."""
    clustered = clustered_once[3]
    memory = clustered.memory.replace(largest=jnp.int32(2))
    missed = clustered.replace(assignment=clustered.assignment.at[4].set(-1), memory=memory)
    pair = select.from_table(np.array([[3, 4, 5]]))
    before, after = play(fl_hc(linear, local, pair, m=3, warm_up=2), concepts, 1, missed)
    assert after.assignment.tolist() == clustered.assignment.at[4].set(2).tolist()
    assert sent(before, after) == (3, 3)
    sizes = np.bincount(np.asarray(clustered.assignment), minlength=3)
    assert sizes[clustered.memory.largest] == sizes.max()


@pytest.mark.nightly
def test_groups_do_not_depend_on_devices_or_slots(concepts, linear, local, clustered_once):
    spread = with_execution(local, mesh=make_mesh(4), width=2)
    method = fl_hc(linear, spread, select.full_participation(), m=3, warm_up=2, newcomers="nearest")
    many = play(method, uneven(concepts), 4)[-1]
    assert many.active.sum() == 3
    chex.assert_trees_all_close(many, clustered_once[4], rtol=1e-4, atol=1e-5)
