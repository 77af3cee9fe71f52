"""Reader of `tf.train.Example` messages of Protocol Buffers, without TensorFlow.

Formats: tensorflow/core/example/example.proto, protobuf.dev/programming-guides/encoding.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5  # wire types
BYTES, FLOATS, INTEGERS = 1, 2, 3  # fields of a feature


def read_example(message: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """Returns the features of a message: text as a list of bytes, numbers as float32 [n] or
    int64 [n]. Raises ValueError for anything else.
    """
    found: dict[str, np.ndarray | list[bytes]] = {}
    for features in _inside(message, 1):
        for entry in _inside(features, 1):
            names = list(_inside(entry, 1))
            values = list(_inside(entry, 2))
            if len(names) != 1 or len(values) != 1:
                raise ValueError("a feature has no name or no value, or several")
            name = names[0].decode()
            if name in found:
                raise ValueError(f"feature {name!r:.80} is there twice")
            found[name] = _read_feature(values[0])
    return found


def _read_feature(message: bytes) -> np.ndarray | list[bytes]:
    """Returns the values of one feature."""
    kinds = list(_fields(message))
    if len(kinds) != 1 or kinds[0][0] not in (BYTES, FLOATS, INTEGERS) or kinds[0][1] != LENGTH:
        raise ValueError("a feature has no list of values, or several")
    kind, _, values = kinds[0]
    if kind == BYTES:
        return list(_inside(values, 1))
    parts = []
    for field, wire, value in _fields(values):
        if field != 1 or wire not in (LENGTH, FIXED32 if kind == FLOATS else VARINT):
            raise ValueError("a list of numbers has something else")
        if kind == FLOATS:
            parts.append(np.frombuffer(value, "<f4"))
        elif wire == LENGTH:
            parts.append(read_varints(value))
        else:
            parts.append(np.array([value], np.uint64).view(np.int64))
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def read_varints(content: bytes) -> np.ndarray:
    """Returns packed whole numbers [n] int64, in two's complement."""
    octets = np.frombuffer(content, np.uint8)
    if not octets.size:
        return np.empty(0, np.int64)
    ends = np.flatnonzero(octets < 128)
    if not ends.size or ends[-1] != octets.size - 1:
        raise ValueError("a number is cut off")
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths = ends - starts + 1
    if lengths.max() > 10:
        raise ValueError("a number has more than 64 bits")
    place = np.arange(octets.size) - np.repeat(starts, lengths)
    shifted = (octets & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.add.reduceat(shifted, starts).view(np.int64)


def _inside(message: bytes, field: int) -> Iterator[bytes]:
    """Yields the content of a field, which may be there several times."""
    for number, wire, value in _fields(message):
        if number == field:
            if wire != LENGTH:
                raise ValueError(f"field {number} has wire type {wire}, not {LENGTH}")
            yield value


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Yields (number, wire type, value) of the fields of a message."""
    place = 0
    while place < len(message):
        tag, place = _varint(message, place)
        number, wire = tag >> 3, tag & 7
        if wire == VARINT:
            value, place = _varint(message, place)
            yield number, wire, value
            continue
        if wire not in (FIXED64, LENGTH, FIXED32):
            raise ValueError(f"wire type {wire} is none of an Example")
        size, place = _varint(message, place) if wire == LENGTH else (8 if wire == 1 else 4, place)
        if size > len(message) - place:
            raise ValueError("a field is cut off")
        yield number, wire, message[place : place + size]
        place += size


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """Returns a whole number and where what follows it begins."""
    value = 0
    for i, octet in enumerate(message[place : place + 10]):
        value |= (octet & 127) << 7 * i
        if octet < 128:
            return value % 2**64, place + i + 1
    raise ValueError("a number is cut off")
