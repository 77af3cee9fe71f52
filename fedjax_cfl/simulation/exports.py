"""Programs as `jax.export` writes them, in the user's cache beside the compiled ones: a run made of
the same as one before it, in another process, neither traces nor lowers them again.

Only runs of the package's own parts use them, in a process of the command: of somebody's own
functions no file tells what they depend on.
"""

import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export

from fedjax_cfl.simulation.compiler import find_compile_cache

HOME = Path(__file__).resolve().parents[1]
ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # in the text of an object that no program depends on
MOST_FILES = 300  # some 100 kB each
DIGEST = 32  # bytes before a program
REGISTERED: set[type] = set()


class Exports:
    """The exported programs of runs that are made of the same."""

    def __init__(self, made_of: Any):
        """`made_of` has as text all that programs are made of but the code and the devices."""
        register_nodes()
        devices = [(device.platform, device.device_kind) for device in jax.devices()]
        versions = sys.version, jax.__version__, flax.__version__, optax.__version__, np.__version__
        text = ADDRESS.sub("", repr((made_of, devices, versions, digest_code())))
        self._folder = find_compile_cache() / "exported"
        self._name = hashlib.sha256(text.encode()).hexdigest()[:32]

    def wrap(self, name: str, function: Callable, *arguments: Any) -> Callable:
        """Returns what does the same as `function` for arguments of these shapes: the exported
        program of this name, which is written unless it is there, or the function itself, where
        it cannot be exported.
        """
        path = self._folder / f"{self._name}-{name}"
        exported = read_program(path)
        if exported is None:
            leaves, structure = jax.tree.flatten(arguments)

            def flat(*leaves: Any) -> Any:
                return function(*jax.tree.unflatten(structure, leaves))

            flat.__name__ = name
            # a number is traced as one of Python, which gives way to the type of an array
            number = jax.ShapeDtypeStruct((), jnp.int32, weak_type=True)
            shapes = [number if isinstance(leaf, int) else leaf for leaf in leaves]
            try:
                exported = export.export(jax.jit(flat))(*shapes)
                write_program(path, exported)
            except (ValueError, NotImplementedError):  # it cannot be written, or says what is wrong
                return function

        def call(*arguments: Any) -> Any:
            return exported.call(*jax.tree.leaves(arguments))

        call.__name__ = name
        return call


def read_program(path: Path) -> export.Exported | None:
    """Returns the exported program of a file, None: there is none, or not as it was written."""
    try:
        text = path.read_bytes()
        os.utime(path)
    except OSError:
        return None
    whole = hashlib.sha256(text[DIGEST:]).digest() == text[:DIGEST]
    return export.deserialize(bytearray(text[DIGEST:])) if whole else None


def write_program(path: Path, exported: export.Exported) -> None:
    """Writes a program, and removes those that have not been read for longest, above `MOST_FILES`.
    Without a home, or room on the disk, it is exported every time.
    """
    text = bytes(exported.serialize())
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(exist_ok=True)
        temporary.write_bytes(hashlib.sha256(text).digest() + text)
        os.replace(temporary, path)
        files = sorted(path.parent.iterdir(), key=lambda file: file.stat().st_mtime)
        for oldest in files[:-MOST_FILES]:
            oldest.unlink(missing_ok=True)


@functools.cache
def digest_code() -> str:
    """Returns the SHA-256 of the package's source, in hex."""
    digest = hashlib.sha256()
    for path in sorted(HOME.rglob("*.py")):
        text = path.read_bytes()
        digest.update(f"{path.relative_to(HOME)} {len(text)} ".encode() + text)
    return digest.hexdigest()


def register_nodes() -> None:
    """Lets `jax.export` write what runs carry: tuples with names and dataclasses of flax."""
    for name, module in list(sys.modules.items()):
        if not name.startswith(("fedjax_cfl.", "optax.")):
            continue
        for kind in vars(module).values():
            if not inspect.isclass(kind) or kind.__module__ != name or kind in REGISTERED:
                continue
            REGISTERED.add(kind)
            full = f"{name}.{kind.__qualname__}"
            if issubclass(kind, tuple) and hasattr(kind, "_fields"):
                export.register_namedtuple_serialization(kind, serialized_name=full)
            elif dataclasses.is_dataclass(kind) and hasattr(kind, "_flax_dataclass"):
                export.register_pytree_node_serialization(
                    kind,
                    serialized_name=full,
                    serialize_auxdata=lambda static: json.dumps(static).encode(),
                    deserialize_auxdata=lambda text: tuple(json.loads(text)),
                )
