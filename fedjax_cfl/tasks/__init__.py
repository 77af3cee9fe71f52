"""The tasks, one a file: what y are, the loss, what outputs say, the score and which way it is
better. What else the package knows of the kind of y it asks here.
"""

from typing import Any

from fedjax_cfl.tasks.classification import CLASSIFICATION, ClientMetrics
from fedjax_cfl.tasks.multilabel import MULTILABEL, LabelMetrics
from fedjax_cfl.tasks.regression import REGRESSION, ErrorMetrics
from fedjax_cfl.tasks.targets import Targets

ClientTable = ClientMetrics | ErrorMetrics | LabelMetrics


def kind_of(data: Any) -> Targets:
    """Returns the task of y of a pool, or of clients' data, with its usual loss."""
    if data.num_classes:
        return CLASSIFICATION
    return REGRESSION if data.y.ndim == 1 else MULTILABEL


def count_outputs(data: Any) -> int:
    """Returns how many outputs a model of a pool, or of clients' data, has."""
    return data.num_classes or kind_of(data).outputs or data.y.shape[1]
