"""Elec2: the New South Wales electricity market, 45,312 half-hours in time order (Harries,
"SPLICE-2 Comparative Evaluation: Electricity Pricing", 1999), a real stream with drift.
"""

import numpy as np

from fedjax_cfl.data.datasets.download import require
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.datasets.table import csv
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool
from fedjax_cfl.validation import PositiveInt, checked

FILE = "elec2/elec.csv.gz"
FEATURES = ["period", "nswprice", "nswdemand", "vicprice", "vicdemand", "transfer"]


@checked("dataset.source")
def elec2(clients: PositiveInt = 48) -> Pool:
    """Returns Elec2: x [N, 6] float32 and y [N], the half-hours in order of time.

    The features are the time of day, two prices, two demands and the transfer, all from 0 to 1.
    y is 1 where the price in New South Wales is above its mean of the last 24 hours. `time` is
    the number of the half-hour.

    Half-hour n belongs to client n mod `clients`: 48 are the half-hours of the day, 336 those
    of the week. The file elec2/elec.csv.gz under a data root is not downloaded. Raises
    InputError if it is missing or bad, or has fewer half-hours than clients.
    """
    (path,) = require("elec2", FILE)
    pool = csv(path, y="class", x=[*FEATURES], num_classes=2)
    number = np.arange(len(pool.y))
    if clients > len(number):
        raise InputError(
            f"dataset.source.clients={clients}: at most {len(number)}, the number of half-hours"
        )
    pool = pool._replace(client=number % clients, time=number, columns=None)
    return check_pool(pool._replace(x=pool.x.astype(np.float32)), str(path))
