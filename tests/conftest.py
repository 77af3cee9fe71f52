"""Eight simulated devices, quick compilation, and one toy problem small enough to check by hand."""

import atexit
import functools
import gc
import importlib
import importlib.metadata
import operator
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

# On programs this small compiling takes nearly all the time. Unoptimised it is four times
# faster, here and in the processes that tests start; what is compiled twice is read from a
# folder that lives as long as the session, and nothing touches the user's own cache.
OPTIMIZED = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
# later versions have only one kind of emitter
if importlib.metadata.version("jaxlib").startswith("0.10."):
    OPTIMIZED["xla_cpu_use_fusion_emitters"] = True
if "PYTEST_XDIST_WORKER" not in os.environ:
    flags = [
        f"--{name}={0 if name.endswith('level') else not on}".lower()
        for name, on in OPTIMIZED.items()
    ]
    # a module each is too much for so little code
    flags.append("--xla_cpu_parallel_codegen_split_count=1")
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags])
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    # no line of the source at each operation: an eighth of the time of tracing and lowering
    os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"
    atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

import jax
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import fedjax_cfl as cfl
from fedjax_cfl.cli.main import main
from fedjax_cfl.errors import InputError
from fedjax_cfl.runs.checkpoint import load_arrays
from fedjax_cfl.runs.results import read_metrics
from fedjax_cfl.runs.resume import CHECKPOINTS
from fedjax_cfl.simulation.compiler import use_compile_cache
from fedjax_cfl.system.reports import add_to_ledger, count_to_int, no_traffic
from fedjax_cfl.types import Rows

importlib.import_module("fedjax_cfl.cli.launch")  # what a run needs, before tests patch it
# what is imported stays: tracing makes so many objects that looking through all of them takes a
# twentieth of the time
gc.freeze()
gc.set_threshold(50_000, 20, 50)
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_default_matmul_precision", "float32")

use_compile_cache()
jit_as_users_do = functools.partial(jax.jit, compiler_options=OPTIMIZED)

# What may differ between two runs that are the same, in metrics.jsonl and summary.json.
VARYING = {"wall_s", "compile_s", "train_s", "eval_s", "client_updates_per_s", "local_steps_per_s"}
VARYING |= {
    "peak_memory_bytes",
    "planned_memory_bytes",
    "overrides",
    "programs",
    "programs_from_cache",
}

# training samples: every bucket, one client without any, one with one
SIZES = (
    7,
    40,
    0,
    3,
    12,
    16,
    1,
    25,
    9,
    17,
    2,
    33,
    5,
    20,
)
TESTS = (4, 9, 3, 2, 0, 5, 1, 6, 3, 4, 2, 8, 2, 5)  # test samples: client 4 has none
FEATURES, CLASSES, CONCEPTS = 5, 4, 2


def at_once(function, *args, **kwargs):
    """Returns `function(*args, **kwargs)`, compiled as a whole: one operation after another, each
    is compiled alone, which takes longer.
    """
    return jax.jit(lambda: function(*args, **kwargs))()


def with_execution(local, **settings):
    """Returns `local` with other lanes, another executor or another mesh; on the same devices
    unless `mesh` is given.
    """
    return local.replace(
        execution=cfl.make_execution(**({"mesh": local.execution.mesh} | settings))
    )


@pytest.fixture(scope="session")
def toy_pool():
    """Well separated classes; in the odd clients, concept 1, classes 0 and 1 have changed names."""
    rng = np.random.default_rng(0)
    owner = np.concatenate(
        [np.repeat(np.arange(len(SIZES)), sizes) for sizes in (SIZES, TESTS)]
    ).astype(np.int32)
    test = np.arange(len(owner)) >= sum(SIZES)
    shape = rng.integers(CLASSES, size=len(owner))
    x = 2.0 * np.eye(CLASSES, FEATURES)[shape] + 0.3 * rng.normal(size=(len(owner), FEATURES))
    y = np.where((owner % CONCEPTS == 1) & (shape < 2), 1 - shape, shape)
    return cfl.Pool(x.astype(np.float32), y.astype(np.int32), CLASSES, owner, test)


@pytest.fixture(scope="session")
def toy(toy_pool):
    """14 clients of 0 to 40 training samples and two true groups."""

    def concept(x, y, owner, clients, num_classes):
        return x, y, np.arange(clients, dtype=np.int32) % CONCEPTS

    held = cfl.Partition(np.arange(len(toy_pool.y)), toy_pool.client, toy_pool.test)
    return cfl.federate(toy_pool, held, concept)


@pytest.fixture(scope="session")
def linear():
    """Softmax regression with an L2 penalty: 24 parameters."""
    return cfl.as_task(cfl.models.MCLR(CLASSES), (FEATURES,), CLASSES)


@pytest.fixture(scope="session")
def models(linear):
    """Three different linear models."""
    return jax.vmap(linear.init)(jax.random.split(jax.random.key(11), 3))


@pytest.fixture(scope="session")
def mlp():
    """A network of three hidden units: 34 parameters."""
    return cfl.as_task(cfl.models.MLP(CLASSES, hidden=(3,)), (FEATURES,), CLASSES)


@pytest.fixture(scope="session")
def local():
    """Two epochs, batches of 5 with a short last one, one client after another on one device."""
    return cfl.Local(
        lr=0.2, epochs=2, batch_size=5, execution=cfl.make_execution(cfl.make_mesh(1), 1)
    )


def nightly(*values, id=None):
    """Returns parameters of a test that the default run leaves out."""
    return pytest.param(*values, marks=pytest.mark.nightly, id=id)


def others_nightly(values, often):
    """Returns `values` as parameters of a test; those not in `often` are for the nightly run."""
    return [value if value in often else nightly(value) for value in values]


def build(factory, task, local, select, **settings):
    """Returns the method that a factory makes of flat settings, named as in conf/algorithm."""
    return factory(task, local, select, **settings)


def ledger(traffic):
    """Returns the traffic of a state as plain integers."""
    return jax.tree.map(count_to_int, add_to_ledger(traffic))


def charged(*bills):
    """Returns what all payers of bills sent together, as plain integers."""
    return ledger(add_to_ledger(no_traffic(), *bills))


def spent(before, after):
    """Returns what was sent between two states, as plain integers."""
    return jax.tree.map(operator.sub, ledger(after.traffic), ledger(before.traffic))


def matrix(tree):
    """Returns the leaves of `tree [S, ...]` as one matrix [S, P]."""
    return np.concatenate(
        [np.asarray(leaf).reshape(leaf.shape[0], -1) for leaf in jax.tree.leaves(tree)], axis=1
    )


def shuffled(words, count, epoch):
    """Returns the order [count] of a pass by swap-or-not, in Python's whole numbers: the twin of
    `keys.permute`.
    """

    def mix(x):
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    first, second = (int(word) for word in np.asarray(words))
    order = list(range(count))
    for number in range(16):
        seed = mix((first + epoch * 0x9E3779B9 + number * 0x7FEB352D) % 2**32)
        for place, x in enumerate(order):
            partner = (seed % count - x) % count
            bits = mix(max(x, partner) * 0x9E3779B9 % 2**32 ^ (seed + second) % 2**32)
            order[place] = partner if bits % 2 else x
    return np.array(order, int)


def refusal(function, *args, **kwargs):
    """Returns the one line of the InputError that refuses."""
    with pytest.raises(InputError) as caught:
        function(*args, **kwargs)
    error = str(caught.value)
    assert "\n" not in error
    return error


def one_line(says, function, *args, **kwargs):
    """Asserts an InputError of one line that says what is wrong, and returns it."""
    error = refusal(function, *args, **kwargs)
    assert says in error, error
    return error


def lasting_rows(folder):
    """Returns the rows of a run without what varies between two that are the same."""
    return [
        {name: value for name, value in row.items() if name not in VARYING}
        for row in read_metrics(folder)
    ]


def last_arrays(run_dir):
    """Returns the arrays of the last checkpoint of a run, by their place in it."""
    return load_arrays(Path(run_dir) / CHECKPOINTS)


def stop_and_go_on(fedjax_cfl, line):
    """Returns (stopped after two rounds and gone on with, never stopped), two runs of four rounds,
    read back; they are the same to the last bit.
    """
    assert fedjax_cfl(f"{line} rounds=2 run_dir=stopped")[0] == 0
    for run_dir in ("stopped", "whole"):
        status, _, err = fedjax_cfl(f"{line} rounds=4 run_dir={run_dir}")
        assert (status, err) == (0, "")
    assert lasting_rows("stopped") == lasting_rows("whole")
    stopped, whole = map(cfl.load_run, ("stopped", "whole"))
    jax.tree.map(np.testing.assert_array_equal, stopped.final.models, whole.final.models)
    return stopped, whole


def run_in_grid_and_alone(fedjax_cfl, line):
    """Returns the run of seed 1, as one of a grid of two and alone, read back; their models are
    close.
    """
    assert fedjax_cfl(f"{line} vectorize=[seed] seed=0,1 run_dir=grid")[0] == 0
    assert fedjax_cfl(f"{line} seed=1 run_dir=alone")[0] == 0
    member, alone = (cfl.load_run(folder) for folder in ("grid/1", "alone"))
    for a, b in zip(*(jax.tree.leaves(r.final.models) for r in (member, alone)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    return member, alone


@pytest.fixture
def fedjax_cfl(tmp_path, monkeypatch, capsys):
    """Returns f(line) -> (status, stdout, stderr): the command, run in an empty current
    directory on one device.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delenv("FEDJAX_CFL_DATA", raising=False)
    return lambda line: (call(monkeypatch, line, devices=1), *capsys.readouterr())


@pytest.fixture
def rendered():
    """Pictures are rendered, also where `unrendered` is asked for."""


@pytest.fixture
def unrendered(request, monkeypatch):
    """Pictures are drawn, but saved as empty files: laying out their texts takes longer than all
    else that compares runs.
    """
    if "rendered" not in request.fixturenames:
        for writer, name in ((FigureCanvasAgg, "print_png"), (Figure, "savefig")):
            monkeypatch.setattr(writer, name, lambda self, file, **_: Path(file).touch())


def call(monkeypatch, line: str, devices: int = 2) -> int:
    """Runs the command line in this process, without drawing; returns its exit status."""
    monkeypatch.setattr("fedjax_cfl.analysis.plot.plot_curves", lambda run_dir, summary: None)
    # other tests may have started JAX already
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", str(devices))
    monkeypatch.setattr("sys.argv", ["fedjax-cfl", *shlex.split(line)])
    try:
        return main()
    except SystemExit as ended:
        return ended.code


def run_in(folder: Path, line: str) -> None:
    """Runs a command line of one device in a folder; it must end well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert call(patch, line, devices=1) == 0


def kept(state):
    """Returns the `Rows` of a state with one layer; without any values where it keeps nothing."""
    layers = [rows for rows in state.rows.values() if isinstance(rows, Rows)]
    (rows,) = layers or (Rows((), None),)
    return rows


def list_entered(function, *arguments):
    """Returns the files of the package, in order, that tracing `function` enters."""
    home, entered = f"{Path(cfl.__file__).parent}/", {}

    def note(frame, event, argument):
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(home):
            entered.setdefault(path.removeprefix(home))

    sys.setprofile(note)
    try:
        jax.eval_shape(function, *arguments)
    finally:
        sys.setprofile(None)
    return list(entered)
