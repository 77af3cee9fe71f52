"""What is sent: the numbers of FlexCFL's figure 6."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_cfl as cfl
from fedjax_cfl.algorithms.fedavg import fedavg
from fedjax_cfl.algorithms.flexcfl import fedgroup, flexcfl
from fedjax_cfl.algorithms.ifca import ifca
from fedjax_cfl.round import select, traffic

KEY = jax.random.key(11)


def units(algorithm, clients, rounds, swapped=lambda round: 0):
    """Returns the models sent in a whole run on `clients` clients of one sample and one
    feature each; `swapped` of them shift a round.
    """
    x = np.linspace(-1, 1, clients, dtype=np.float32)[:, None]
    each_one = cfl.Partition(np.arange(clients), np.arange(clients), np.zeros(clients, bool))
    data = cfl.federate(cfl.Pool(x, (x[:, 0] > 0).astype(np.int32), 2), each_one)

    def go(key):
        def one(t, state):
            return algorithm.round(
                key, state, data.replace(shifted=jnp.arange(clients) < swapped(t))
            )[0]

        return jax.lax.fori_loop(0, rounds, one, algorithm.init(key, data))

    spent = jax.jit(go)(KEY).traffic
    return int(spent.units_down + spent.units_up)


ROUND_ROBIN = select.rr_then_random(20)
QUICKLY = {"alpha": 20, "pretrain": "iters:1", "restarts": 1}


@pytest.mark.parametrize(
    ("clients", "method", "expected"),
    [
        (1000, lambda *parts: fedavg(*parts, select.uniform(20)), 12_000),
        (1000, lambda *parts: flexcfl(*parts, ROUND_ROBIN, m=3, **QUICKLY), 15_120),
        (1000, lambda *parts: ifca(*parts, ROUND_ROBIN, m=3), 24_000),
        (200, lambda *parts: fedgroup(*parts, ROUND_ROBIN, m=5, **QUICKLY), 13_200),
        (200, lambda *parts: fedgroup(*parts, ROUND_ROBIN, m=5, eta_g=0.1, **QUICKLY), 14_700),
    ],
    ids=["fedavg", "flexcfl", "ifca", "fedgroup", "fedgroup mixed"],
)
def test_models_sent_are_those_of_figure_6(clients, method, expected):
    """300 rounds of 20 clients (FlexCFL, Fig. 6): K + K a round, 2 alpha m at the
    start, m a client in its life, m a round for mixing.
    """
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    assert units(method(task, cfl.Local(0.1, 1, 10, 1, cfl.make_mesh(1))), clients, 300) == expected


def test_ifca_mig_charges_every_swapped_client_met():
    """FlexCFL, Fig. 6a: 24,000 + 3 x 13,920 = 65,760, with 60 swaps in each of 232
    rounds after everybody has been met.
    """
    task = cfl.as_task(cfl.models.MCLR(2), (1,), 2)
    method = ifca(
        task,
        cfl.Local(0.1, 1, 10, 1, cfl.make_mesh(1)),
        ROUND_ROBIN,
        m=3,
        migrate=True,
        charge="swapped",
    )
    assert units(method, 1000, 300, lambda t: jnp.where((t >= 50) & (t < 282), 60, 0)) == 65_760


def test_bytes_do_not_overflow():
    entry = traffic.add_traffic(
        traffic.make_traffic(units_down=2_000_000_000),
        traffic.make_traffic(units_up=3, words_down=7, words_up=5),
    )
    assert traffic.count_bytes(entry, 400_000) == (2_000_000_000 * 400_000 + 28, 3 * 400_000 + 20)
