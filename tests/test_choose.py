"""Choosing the number of groups: three planted groups are found, and the drawn clients
keep their data.
"""

import jax
import numpy as np
import pytest
from test_fesem import planted

from fedjax_cfl.algorithms.fesem.fesem import fesem
from fedjax_cfl.data.federated import gather
from fedjax_cfl.errors import InputError
from fedjax_cfl.simulation import choose_k as cfl
from fedjax_cfl.simulation.choose_k import draw_clients, pick_best
from fedjax_cfl.system import select

KEY = jax.random.key(1)


@pytest.mark.nightly
def test_three_groups_of_permuted_labels_are_found(linear, local):
    """30 of 60 clients, three rounds. Accuracy is highest with three groups; distances
    bend there: a fourth hardly brings any nearer.
    """
    data = planted(concepts=3, clients=60)
    made = []

    def make(m):
        made.append(m)
        return fesem(linear, local, select.rr_then_random(10), m=m)

    choice = cfl(make, linear, data, KEY, (4, 1, 3, 2), clients=30, mesh=local.execution.mesh)
    assert choice.m == 3 and made == [row["m"] for row in choice.table] == [1, 2, 3, 4]
    accuracy, distance = ([row[name] for row in choice.table] for name in ("accuracy", "distance"))
    assert accuracy[2] > 0.95 > 0.8 > accuracy[1] > accuracy[0]
    gain = -np.diff(distance)
    assert (gain[:2] > 0.25 * distance[0]).all() and gain[2] < 0.25 * gain[:2].min()


def test_of_equal_candidates_the_least_is_best():
    table = [
        {"m": m, "accuracy": a, "distance": d}
        for m, a, d in ((1, 0.5, 3.0), (2, 0.9, 2.0), (3, 0.9, 1.0), (4, 0.7, 1.0))
    ]
    assert pick_best(table, "accuracy") == 2 and pick_best(table, "distance") == 3


def held(view, client):
    """Returns the numbers of a client's samples."""
    return view.order[view.start[client] :][: view.size[client]]


def test_drawn_clients_keep_their_samples(toy):
    toy = jax.tree.map(np.asarray, toy)
    few = jax.tree.map(np.asarray, draw_clients(KEY, toy, 6))
    drawn = np.sort(np.asarray(jax.random.permutation(KEY, toy.num_clients)[:6]))
    assert few.num_clients == 6 and few.concept.tolist() == toy.concept[drawn].tolist()
    assert few.max_client_samples == toy.train.size[drawn].max()
    for new, old in enumerate(drawn):
        for mine, theirs in ((few.train, toy.train), (few.test, toy.test)):
            rows, same = (held(view, client) for view, client in ((mine, new), (theirs, old)))
            for mine, theirs in zip(gather(few, rows), gather(toy, same), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            assert (few.owner[rows] == new).all()


def test_all_clients_if_there_are_no_more(toy):
    few = draw_clients(KEY, toy, 100)
    for name in ("x", "y", "owner", "concept"):
        np.testing.assert_array_equal(getattr(few, name), getattr(toy, name))
    np.testing.assert_array_equal(few.train.order, toy.train.order)


def test_unknown_choices_are_refused(linear, toy):
    with pytest.raises(
        InputError, match="by=speed: must be one of accuracy, rmse, micro_f1, distance"
    ):
        cfl(None, linear, toy, KEY, (1, 2), by="speed")
    with pytest.raises(InputError, match="at least one number"):
        cfl(None, linear, toy, KEY, ())
