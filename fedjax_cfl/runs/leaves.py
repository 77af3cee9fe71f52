"""The leaves of a checkpoint: their names and shapes, as they are stored, and back on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def name_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a tree of arrays by their path."""
    leaves_with_path = jax.tree_util.tree_leaves_with_path(tree)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves_with_path}
    assert len(named) == len(leaves_with_path), "two leaves of one name"
    for name, leaf in named.items():
        assert hasattr(leaf, "dtype"), (
            f"{name} is a {type(leaf).__name__}: a checkpoint holds arrays, facts hold plain values"
        )
    return named


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf holds typed random keys."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def describe_leaf(leaf: Any) -> str:
    """Returns the type and the shape of a leaf, as a header has them."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def to_plain_array(name: str, leaf: Any) -> np.ndarray:
    """Returns a leaf as it is stored; of typed keys their words."""
    array = np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
    assert array.dtype.isnative and not array.dtype.hasobject, (
        f"{name}: {array.dtype} cannot be saved"
    )
    return array


def place_array(header: dict, stored: dict[str, np.ndarray], name: str, leaf: Any) -> Any:
    """Returns a stored array with the type and sharding of `leaf`."""
    raw = jax.eval_shape(jax.random.key_data, leaf) if is_key(leaf) else leaf
    value = stored[name] if name in stored else np.zeros(raw.shape, raw.dtype)
    assert value.shape == raw.shape and value.dtype == raw.dtype, name
    if isinstance(leaf, np.ndarray | np.generic):
        return value if isinstance(leaf, np.ndarray) else value[()]
    value = jax.device_put(value, leaf.sharding if getattr(leaf, "committed", True) else None)
    return jax.random.wrap_key_data(value, impl=header["keys"][name]) if is_key(leaf) else value
