"""What the FlexCFL code (https://github.com/morningD/FlexCFL) does and no paper says: functions
that settings name, `_target_: papers.flexcfl_2021.NAME`. D.. are the ids of
docs/reference/disagreements.md.
"""

from fedjax_cfl.client.steps import Step
from fedjax_cfl.method import Method
from fedjax_cfl.personal.layer import layer
from fedjax_cfl.types import Params


def received() -> Method:
    """Tests each client on the model that it received when it last trained, and on its group's
    present one before (D9, since November 2022); a layer, as Ditto is.
    """

    def step(c: Step, model: Params, received: Params) -> tuple[Params, Params]:
        return c.sgd, c.received

    return layer("Received", own=lambda model: model, step=step, serve=lambda row, model: row)
