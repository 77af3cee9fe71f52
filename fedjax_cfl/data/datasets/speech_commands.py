"""Speech Commands by speaker: how many utterances of which word each speaker recorded, and
no audio (Warden, https://arxiv.org/abs/1804.03209; the speakers are FedScale's clients,
https://arxiv.org/abs/2105.11367).
"""

import numpy as np

from fedjax_cfl.data.datasets.download import require
from fedjax_cfl.data.datasets.pool import check_pool
from fedjax_cfl.data.tables import read_columns
from fedjax_cfl.errors import InputError
from fedjax_cfl.types import Pool

FILE = "speech_commands_clients/label_counts.csv.gz"
MAX_COUNT = 1_000_000  # utterances of a word; more are no counts


def speech_commands() -> Pool:
    """Returns the label counts of 2,187 speakers over 35 words as a pool of 103,171 samples:
    y is the word, `client` the speaker, x [N, 1] is 0 everywhere.

    So it serves experiments with label distributions alone, such as clustering by them; a
    model can learn nothing but how frequent words are. The file
    speech_commands_clients/label_counts.csv.gz under a data root is not downloaded. Raises
    InputError if it is missing or bad.
    """
    (path,) = require("speech_commands", FILE)
    table = read_columns(path)
    counts = table[:, 1:]
    bad = ~((counts >= 0) & (counts <= MAX_COUNT) & (counts == np.floor(counts)))
    if bad.any() or not counts.size or not counts.any():
        row = int(bad.any(axis=1).argmax()) if bad.size else 0
        raise InputError(
            f"{path}: line {row + 2} is not a speaker's counts, expected its number and whole"
            f" numbers from 0 to {MAX_COUNT}, some above 0"
        )
    counts = counts.astype(np.int64)
    cell = np.repeat(np.arange(counts.size), counts.reshape(-1))
    speaker, word = np.divmod(cell, counts.shape[1])
    names = tuple(int(name) for name in table[:, 0])
    pool = Pool(np.zeros((cell.size, 1), np.uint8), word, counts.shape[1], speaker)
    return check_pool(pool._replace(client_names=names), str(path))
