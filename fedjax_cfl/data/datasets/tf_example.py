"""Reader of `tf.train.Example` messages, by protobuf and without TensorFlow.

Format: tensorflow/core/example/example.proto, whose map is a list of entries in a file.
"""

import functools
from typing import Any

import numpy as np

EXAMPLE = """
name: "example.proto"
message_type {
  name: "Texts" field { name: "value" number: 1 type: TYPE_BYTES label: LABEL_REPEATED }
}
message_type {
  name: "Floats" field { name: "value" number: 1 type: TYPE_FLOAT label: LABEL_REPEATED }
}
message_type {
  name: "Integers" field { name: "value" number: 1 type: TYPE_INT64 label: LABEL_REPEATED }
}
message_type {
  name: "Feature"
  field { name: "texts" number: 1 type_name: "Texts" }
  field { name: "floats" number: 2 type_name: "Floats" }
  field { name: "integers" number: 3 type_name: "Integers" }
}
message_type {
  name: "Entry"
  field { name: "name" number: 1 type: TYPE_STRING }
  field { name: "value" number: 2 type_name: "Feature" }
}
message_type {
  name: "Features" field { name: "entries" number: 1 type_name: "Entry" label: LABEL_REPEATED }
}
message_type { name: "Example" field { name: "features" number: 1 type_name: "Features" } }
"""


@functools.cache
def make_message_type() -> Any:
    """Returns the class of messages."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

    pool = descriptor_pool.DescriptorPool()
    pool.Add(text_format.Parse(EXAMPLE, descriptor_pb2.FileDescriptorProto()))
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("Example"))


def read_example(message: bytes) -> dict[str, np.ndarray | list[bytes]]:
    """Returns the features of a message: text as a list of bytes, numbers as float32 [n] or
    int64 [n]. Raises ValueError for anything else.
    """
    from google.protobuf.message import DecodeError

    try:
        entries = make_message_type().FromString(message).features.entries
    except DecodeError as error:
        raise ValueError(str(error)) from None
    if not entries:
        raise ValueError("an example has no features")
    found: dict[str, np.ndarray | list[bytes]] = {}
    for entry in entries:
        lists = entry.value.ListFields()
        if not entry.HasField("name") or len(lists) != 1:
            raise ValueError("a feature has no name or no list of values, or several")
        if entry.name in found:
            raise ValueError(f"feature {entry.name!r:.80} is there twice")
        kind, values = lists[0][0].name, lists[0][1].value
        dtype = np.float32 if kind == "floats" else np.int64
        found[entry.name] = list(values) if kind == "texts" else np.array(values, dtype)
    return found
