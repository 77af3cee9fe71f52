"""Data of equal shapes, so that one compiled program trains on several data sets: the smaller ones
get samples that no client holds.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from fedjax_cfl.types import ClientIndex, FederatedData


class Room(NamedTuple):
    """How large the arrays of data are."""

    rows: int  # of x, where several holdings may have one row
    sides: dict[str, int]  # holdings of train, test and validation
    client_samples: int  # the most training samples that one client may ever hold
    indexed: bool  # holdings name their rows of x


def measure_room(data: FederatedData) -> Room:
    """Returns the room that data take."""
    views = {side: getattr(data, side) for side in ("train", "test", "validation")}
    sides = {side: view.order.size for side, view in views.items() if view is not None}
    return Room(len(data.x), sides, data.max_client_samples, data.sample is not None)


def merge_rooms(rooms: Sequence[Room]) -> Room:
    """Returns the smallest room that holds data of each of the rooms."""
    sides = {side: max(room.sides[side] for room in rooms) for side in rooms[0].sides}
    client_samples = max(room.client_samples for room in rooms)
    rows, indexed = max(room.rows for room in rooms), any(room.indexed for room in rooms)
    return Room(rows if indexed else sum(sides.values()), sides, client_samples, indexed)


def widen_room(room: Room) -> Room:
    """Returns a room that is likely to hold the data of further seeds, too."""
    sides = {side: size + size // 16 for side, size in room.sides.items()}
    rows = room.rows + room.rows // 16 if room.indexed else sum(sides.values())
    # a power of two, in which training in sample space counts, see `dual_sgd.bucket_sizes`
    return Room(rows, sides, 1 << (3 * room.client_samples // 2 - 1).bit_length(), room.indexed)


def pad_data(data: FederatedData, room: Room) -> FederatedData:
    """Returns data of the size of a room, on the host: what is added is behind the last sample, and
    no client's.
    """
    total = sum(room.sides.values())

    def fill(array: Any, value: int, length: int = total) -> np.ndarray:
        array = np.asarray(array)
        missing = np.full((length - len(array), *array.shape[1:]), value, array.dtype)
        return np.concatenate([array, missing])

    views, begin = {}, len(data.y)
    for side, count in room.sides.items():
        own: ClientIndex = getattr(data, side)
        spare = np.arange(begin, begin + count - own.order.size, dtype=np.int32)
        views[side] = own.replace(order=np.concatenate([np.asarray(own.order), spare]))
        begin += spare.size
    row = np.arange(len(data.y), dtype=np.int32) if data.sample is None else data.sample
    return data.replace(
        x=fill(data.x, 0, room.rows if room.indexed else total),
        y=fill(data.y, 0),
        owner=fill(data.owner, -1),
        sample=fill(row, 0) if room.indexed else None,
        turns=None if data.turns is None else fill(data.turns, 0),
        time=None if data.time is None else fill(data.time, 0),
        **views,
        max_client_samples=room.client_samples,
    )
