"""The first baseline of every personal method: a client trains on from its group's model, on its
own training samples, before it uses it. Nothing is kept, nothing more is sent.
"""

from fedjax_cfl.client.local import Local
from fedjax_cfl.method import Method
from fedjax_cfl.validation import NaturalInt, PositiveInt, checked


@checked("personal")
def fine_tune(*, epochs: NaturalInt = 1, steps: PositiveInt | None = None) -> Method:
    """Fine-tuning: trains as the method below, and tests clients on the group's model after
    `epochs` more passes, or `steps` mini-batch steps, of plain SGD as in their training, with the
    step size of the next round; 0 epochs: on the group's model. Raises InputError for a value that
    is not allowed.
    """

    def adapt(local: Local) -> Local:
        return local.replace(epochs=max(epochs, 1), steps=steps)

    return Method(name="fine_tune", adapt=adapt if epochs or steps else None)
