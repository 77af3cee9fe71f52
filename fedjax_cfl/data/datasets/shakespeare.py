"""Shakespeare by speaking role, as LEAF makes it: the next character after 80."""

import numpy as np

from fedjax_cfl.data.datasets.download import locate_first, missing_data_error
from fedjax_cfl.data.datasets.leaf_json import leaf
from fedjax_cfl.types import Pool

# what is looked for, and the folder that `leaf` then reads
PLACES = tuple((f"{home}/train", f"{home}/test") for home in ("shakespeare/data", "shakespeare"))
PLACES += (("shakespeare/data/all_data",), ("shakespeare",))
TRAIN = 0.8  # of a role's windows


def shakespeare() -> Pool:
    """Returns windows of 80 characters x [N, 80] and the character that follows, of 80, or of 81
    where some are not among LEAF's; `client` is the role, in one play.

    Windows follow each other in a play and overlap, so that where the files have no split the last
    fifth of a role's windows is for testing; those at the border share characters. Files: LEAF JSON
    under shakespeare/data/ or shakespeare/, in train/ and test/, or all_data/, or alone. There is
    no download. Raises InputError for missing or bad files. Source: github.com/TalwalkarLab/leaf.
    """
    found = locate_first(PLACES)
    if found is None:
        raise missing_data_error("shakespeare", "shakespeare/data/train")
    pool = leaf(found[0].parent if len(found) == 2 else found[0])
    if pool.test is not None or pool.client is None:
        return pool
    size = np.bincount(pool.client)
    place = np.empty(len(pool.y), np.int64)  # of a window among those of its role, from 0
    place[np.argsort(pool.client, kind="stable")] = np.concatenate([np.arange(n) for n in size])
    return pool._replace(test=place >= np.maximum(TRAIN * size[pool.client], 1))
