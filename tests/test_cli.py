"""The command line as its user meets it: bad input ends in one clear line, and every
choice composes.
"""

import os
import re
import shlex
import subprocess
import sys

import hydra
import numpy as np
import pytest
from conftest import nightly, others_nightly, refusal
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.types import RunMode
from omegaconf import OmegaConf

from fedjax_cfl.cli import names, sweep
from fedjax_cfl.cli.build import build
from fedjax_cfl.cli.conf import CONF
from fedjax_cfl.cli.main import COMMANDS, open_hydra, parse_flags
from fedjax_cfl.cli.names import read_line, text_of
from fedjax_cfl.cli.settings import check_line, resolve_settings

# what is typed -> words of the one line that answers, from the composed configuration
REFUSED = {
    # names
    "algorithm=flexcf": "algorithm=flexcf unknown 'flexcfl'",
    "algorithm=zzz": "algorithm=zzz allowed: fedadagrad",
    "dataset=digit": "dataset=digit 'digits'",
    "model=mlpp": "model=mlpp 'mlp'",
    "partition=dirichle": "partition=dirichle 'dirichlet'",
    "partition=null": "partition=null unknown partition",
    "preset=papers": "preset=papers 'paper'",
    "concept=rotat": "concept=rotat 'rotate'",
    "~model": "model allowed: fedgroup_lstm",
    "round=3": "round=3 unknown 'rounds'",
    "lr=0.1": "lr=0.1 'local.lr'",
    "m=3": "m=3 'algorithm.m'",
    "local.epoch=3": "local.epoch=3 'local.epochs'",
    "lokal.lr=3": "lokal.lr=3 'local.lr'",
    "algorithm.momentun=0.5 algorithm=fedavgm": "'algorithm.momentum'",
    "algorithm.mu=0.1": "algorithm.mu=0.1 unknown",
    "algorithm.xyz=1": "algorithm.xyz=1 algorithm has alpha",
    "dataset.source.pat=x dataset=npz": "dataset.source.pat=x 'dataset.source.path'",
    "+rounds=3": "rounds",
    "clock.path=x.csv": "clock.path=x.csv: clock, no settings",
    "+local.lrr=3": "+local.lrr=3: unknown 'local.lr'",
    "++ronds=3": "++ronds=3: unknown 'rounds'",
    "+algoritm.gain=3": "+algoritm.gain=3: unknown",
    "q.w=1": "q.w=1: --help",
    "~rounds": "~rounds: is needed rounds=VALUE",
    "~local": "~local: is needed",
    "~algorithm._target_": "~algorithm._target_: is needed",
    "~algorithm.name": "~algorithm.name: is needed",
    "algorithm=fedavg algorithm.m=3": "algorithm.m=3: no groups dataset.groups=3",
    "personal=[ditto,dito]": "personal=dito: 'ditto'",
    "personal=[ditto,ditto]": "ditto twice",
    "-m personal=[ditto,dito],apfl": "personal=dito: 'ditto'",
    "dataset.path=my.csv": "dataset=csv dataset.source.path=my.csv dataset.source.y=COLUMN",
    "dataset.path=my_folder": "dataset=KIND dataset.source.path=my_folder csv",
    "dataset.file=my.npz": "dataset=npz dataset.source.path=my.npz",
    "data=my.csv": "data=my.csv: dataset=csv dataset.source.path=my.csv",
    "dataset=my.parquet": "dataset=my.parquet: unknown dataset=parquet",
    "dataset=csv dataset.path=my.csv": "dataset.path=my.csv: 'dataset.source.path'",
    "processes=2 process=1": "processes=2: coordinator",
    "model=mlp model.module.hidden=[0]": "model.module.hidden=[0]: list >= 1",
    "run_dir=ü": "run_dir=ü: unaccented quotes",
    "compar runs": "compar: verbs 'compare'",
    "rounds": "rounds: KEY=VALUE",
    "--rounds=3": "--rounds=3: without dashes",
    "-x": "-x: no such flag",
    "-m --cfg job": "exclude",
    # kinds
    "rounds={a:1}": "rounds={'a': 1}: whole number",
    "local=3": "local=3: is a group local.lr=VALUE",
    "curves=no_": "curves=no_: true or false",
    "dataset.lr=fast": "dataset.lr=fast: number > 0",
    "vectorize=seed": "vectorize=seed: list",
    "vectorize=[algorithm] algorithm=fedavg,ifca": "vectorize=[algorithm]: -m algorithm=A,B",
    "rounds=ten": "rounds=ten: whole number",
    "rounds=2.5": "rounds=2.5: whole number",
    "rounds=null": "rounds=null: whole number",
    "rounds=[1]": "rounds=[1]: whole number",
    "seed=1.5": "seed=1.5: whole number",
    "seed=-1": "seed=-1: from 0",
    "seed=4294967296": "seed=4294967296: from 0 to",
    "local.lr=fast": "local.lr=fast: number > 0",
    "local.lr=null": "local.lr=null: number > 0",
    "eval_every=true": "eval_every=true: whole number",
    "eval_auxiliary=maybe": "eval_auxiliary=maybe: true or false",
    "offline=1": "offline=1: true or false",
    "concept=rotate concept.shuffle=no_": "concept.shuffle=no_: true or false",
    "dataset=synthetic dataset.source.iid=maybe": "dataset.source.iid=maybe: true or false",
    "dataset.rounds=many": "dataset.rounds=many: number",
    "model=mlp model.module.hidden=64": "model.module.hidden=64: list",
    "model=mlp model.module.hidden=[a]": "model.module.hidden=['a']: list >= 1",
    "model=mlp model.module.hidden=[-1]": "model.module.hidden=[-1]: list >= 1",
    "local={lr:1,epochs:x,batch_size:3}": "local.epochs=x",
    # ranges
    "algorithm.m=0": "algorithm.m=0: >= 1",
    "local.epochs=9999999999": "local.epochs=9999999999: from 1 to 100000",
    "algorithm.m=2147483648": "algorithm.m=2147483648: >= 1 2147483647",
    "algorithm=cfl algorithm.warm_up=99999999999": "algorithm.warm_up=99999999999: >= 0 int32",
    "algorithm=md_icfl algorithm.samples=99999999": "samples=99999999: from 1 to 10000000",
    "algorithm.m=61": "algorithm.m=61: at most 60",
    "algorithm.alpha=0": "algorithm.alpha=0: >= 1",
    "algorithm.restarts=0": "algorithm.restarts=0: >= 1",
    "algorithm.eta_g=-1": "algorithm.eta_g=-1: >= 0",
    "algorithm.eta_g=inf": "algorithm.eta_g=inf: finite",
    "algorithm.eta_g=1e39": "algorithm.eta_g=1e+39: finite float32 infinite",
    "algorithm=fedadam algorithm.server_lr=1e39": "server_lr=1e+39: finite float32 infinite",
    "algorithm=fedadam algorithm.tau=1e-50": "algorithm.tau=1e-50: finite float32 0",
    "-m algorithm.eta_g=0,1e39": "algorithm.eta_g=1e+39: float32",
    "vectorize=[algorithm.eta_g] algorithm.eta_g=0,1e39": "algorithm.eta_g=1e+39: float32",
    "drift=swap_all drift.p=2": "drift.p=2: between 0 and 1",
    "concept=rotate concept.seed=-1": "concept.seed=-1: from 0",
    "paper.title=x": "paper.title=x: unknown setting",
    "experiment=flexcfl_table3 paper.title=x": "paper.title=x: unknown setting",
    "algorithm=fedprox algorithm.mu=-0.1": "algorithm.mu=-0.1: >= 0",
    "algorithm=fedprox algorithm.drop_fraction=1.5": "algorithm.drop_fraction=1.5: between 0 and 1",
    "algorithm=qfedavg algorithm.q=-1": "algorithm.q=-1: >= 0",
    "algorithm=fedavgm algorithm.momentum=1": "algorithm.momentum=1: below 1",
    "algorithm=fedadam algorithm.tau=0": "algorithm.tau=0: > 0",
    "algorithm=ifca algorithm.share=2": "algorithm.share=2: between 0 and 1",
    "clients_per_round=0": "clients_per_round=0: >= 1",
    "clients_per_round=61": "clients_per_round=61: at most 60",
    "preset=ref clients_per_round=61": "clients_per_round=61: at most 60",
    "local.lr=0": "local.lr=0: > 0",
    "local.lr=-1": "local.lr=-1: > 0",
    "local.lr=nan": "local.lr=nan: finite",
    "local.lr=inf": "local.lr=inf: finite",
    "local.batch_size=0": "local.batch_size=0: >= 1",
    "local.epochs=0": "local.epochs=0: from 1",
    "local.width=0": "local.width=0: auto",
    "rounds=0": "rounds=0: >= 1",
    "eval_every=0": "eval_every=0: >= 1",
    "devices=0": "devices=0: >= 1",
    "devices=999": "devices=999: between 1 and",
    "preset.l2=-1": "preset.l2=-1: >= 0",
    "partition.clients=0": "partition.clients=0: from 1 to 10000000",
    "partition.test_fraction=1": "partition.test_fraction=1: below 1",
    "partition=dirichlet partition.alpha=0": "partition.alpha=0: > 0",
    "concept=rotate concept.groups=3": "concept.groups=3: 1, 2 or 4",
    "concept=permute_labels concept.groups=61": "concept.groups=61: 60",
    # choices
    "algorithm.measure=edd": "algorithm.measure=edd: 'edc'",
    "algorithm.measure=null": "algorithm.measure=null: edc, edc_randomized",
    "algorithm=md_icfl algorithm.sampling=null": "algorithm.sampling=null: back_search, generator",
    "algorithm=md_icfl algorithm.aggregate=null": "algorithm.aggregate=null: uniform, samples",
    "algorithm=fielding algorithm.metric=l3": "algorithm.metric=l3: null 'l1'",
    "algorithm.mix=norm": "algorithm.mix=norm: 'normalized'",
    "algorithm.group_start=x": "algorithm.group_start=x: pretrained",
    "algorithm.pretrain=iters:x": "algorithm.pretrain=iters:x: epochs:E",
    "algorithm.pretrain=50": "algorithm.pretrain=50: iters:N",
    "algorithm=ifca algorithm.start=warm": "algorithm.start=warm: random",
    "algorithm=ifca algorithm.aggregate=median": "algorithm.aggregate=median: uniform, samples",
    "algorithm.detector=eq9": "algorithm.detector=eq9: tv, counts_as_samples",
    "algorithm.pretrain=iters": "algorithm.pretrain=iters: iters:N",
    "discard=foo": "discard=foo: rounds, met, none",
    "precision=tensorfloat32": "precision=tensorfloat32: CPUs always use float32",
    "local.executor=debug": "local.executor=debug: runs in Python only",
    "local.executor=sequential local.width=4": "local.width=4: executor=sequential runs one client",
    "local.executor=fast": "local.executor=fast: auto, sequential, lanes or debug",
    "precision=float16": "precision=float16: one of float32, tensorfloat32, bfloat16",
    "dataset=femnist dataset.source.classes=foo": "dataset.source.classes=foo: one of all, digits",
    # the grammar
    "rounds==3": "rounds==3: KEY=VALUE",
    "a=[1": "a=[1: KEY=VALUE",
    "rounds=3,": "rounds=3,: KEY=VALUE",
    "=3": "=3: KEY=VALUE",
    "run_dir=a=b": "run_dir=a=b: quotes",
    "rounds=${nope}": "rounds=${nope}: 'nope' not found",
    "rounds=${rounds}": "rounds=${rounds}: Recursive",
    "rounds=${oc.env:NO_SUCH_VARIABLE}": "rounds=${oc.env:NO_SUCH_VARIABLE}: not found",
    "rounds=${nope:3}": "rounds=${nope:3}: nope",
    "algorithm=fedavg,ifca": "algorithm=fedavg,ifca: -m",
    "seed=range(0,3)": "seed=range(0,3): -m",
    "-m seed=0,x": "seed=x: whole number",
    "-m algorithm=fedavg,ifka": "algorithm=ifka 'ifca'",
    "-m algorithm=flexcfl,fedavg algorithm.m=2,3": "algorithm.m=2: unknown",
    "-m 'algorithm=glob(x*)'": "algorithm=glob(x*): no values",
    "-m run_dir=a,b": "run_dir=a,b: not allowed",
    "local.lr=": "local.lr=: number > 0",
    "~local.lr": "local.lr",
    # where a run goes
    "run_dir=": "run_dir=: directory",
    "run_dir={files}/taken": "taken: not empty",
    "run_dir={files}/text.npz": "text.npz: not a directory",
    "-m seed=0,1 run_dir={files}/taken": "taken: not empty",
    "-m seed=0,1 run_dir=/proc/no/such": "run_dir=/proc/no/such: cannot be made",
    # data
    "dataset=npz": "dataset.source.path: must be given",
    "dataset=npz dataset.source.path={files}/none.npz": "none.npz: cannot be read",
    "dataset=npz dataset.source.path={files}": "cannot be read",
    "dataset=npz dataset.source.path={files}/text.npz": "text.npz: complete npz archive",
    "dataset=npz dataset.source.path={files}/cut.npz": "cut.npz: a complete npz archive",
    "dataset=npz dataset.source.path={files}/no_y.npz": "no_y.npz: 'y' is missing",
    "dataset=npz dataset.source.path={files}/nan.npz": "nan.npz: x is NaN or infinite sample 3",
    "dataset=npz dataset.source.path={files}/inf.npz": "inf.npz: x is NaN or infinite sample 3",
    "dataset=npz dataset.source.path={files}/half.npz": "half.npz: y has numbers that are",
    "dataset=npz dataset.source.path={files}/negative.npz": "negative.npz: y is -1",
    "dataset=npz dataset.source.path={files}/huge.npz": "huge.npz: y is",
    "dataset=npz dataset.source.path={files}/good.npz dataset.source.num_classes=2": (
        "good.npz: num_classes=2"
    ),
    "dataset=npz dataset.source.path={files}/good.npz dataset.source.num_classes=0": (
        "task=classification: needs a class use task=regression"
    ),
    "dataset=npz dataset.source.path={files}/object.npz": "object.npz: 'y' cannot be read",
    "dataset=npz dataset.source.path={files}/text_x.npz": "text_x.npz: x expected numbers",
    "dataset=npz dataset.source.path={files}/short.npz": "short.npz: y has shape (39,)",
    "dataset=npz dataset.source.path={files}/empty.npz": "empty.npz: 0 samples",
    "dataset=npz dataset.source.path={files}/flat.npz": "flat.npz: at least one feature",
    "dataset=npz dataset.source.path={files}/owners.npz": "owners.npz: client has shape",
    "dataset=npz dataset.source.path={files}/split.npz": "split.npz: split",
    "dataset=npz dataset.source.path={files}/all_test.npz": "training sample",
    "dataset=npz dataset.source.path={files}/good.npz": "partition.clients=100: at most 4",
    "dataset=npz dataset.source.path={files}/owned.npz algorithm=ifca algorithm.m=6 "
    "clients_per_round=2": "algorithm.m=6: at most 4",
    "dataset=npz dataset.source.path={files}/good.npz partition=by_user": (
        "partition=by_user: no clients"
    ),
    "dataset=leaf dataset.source.path={files}/none": "none: cannot be read",
    "dataset=leaf dataset.source.path={files}/good.npz": "good.npz: zip archive unpack",
    "dataset=mnist offline=true": "mnist (offline): not found",
    "dataset=femnist offline=true": "femnist (offline): not found",
    # what does not fit together
    "evaluate.new_clients=0.2 drift=swap_all": "evaluate.new_clients=0.2: needs drift=none",
    "evaluate.finetune=1 resident=host": "evaluate.finetune=1: needs resident=device",
    "evaluate.new_clients=1": "evaluate.new_clients=1: from 0 to below 1",
    "evaluate.choose=best_validation": "evaluate.choose=best_validation: evaluate.validation=0.2",
    "evaluate.patience=2": "evaluate.patience=2: needs evaluate.validation=0.2",
    "evaluate.patience=-1": "evaluate.patience=-1: whole number",
    "evaluate.choose=best_validation evaluate.validation=0.2 drift=swap_all": "needs drift=none",
    "evaluate.choose=best_validation evaluate.validation=0.2 resident=host": "resident=device",
    "evaluate.choose=best_validation evaluate.validation=0.2 evaluate.finetune=1": (
        "evaluate.choose=best_validation: evaluate.finetune=0"
    ),
    "dataset.standardize=client drift=swap_all": "dataset.standardize=client: drift=none pool",
    "dataset.standardize=pool resident=host algorithm=fedavg": "use resident=device",
    "preset=ref algorithm=fesem algorithm.estep=some": "algorithm.estep=some: must be",
    "preset=ref algorithm=ifca algorithm.measure=some": "algorithm.measure=some: must be",
    "logger=[tensorboard,wanb]": "logger=wanb: 'wandb'",
    "model=mnist_cnn dataset=synthetic": "model=mnist_cnn (60,)",
    "partition.test_fraction=0": "no client holds a test sample",
    "model=gru dataset=synthetic": "model=gru (60,)",
    "model=fedgroup_lstm": "model=fedgroup_lstm (2, 10)",
    "concept=rotate dataset=synthetic": "concept=rotate: square images",
    "partition=by_user": "partition=by_user: no clients",
    "partition=ditto": "partition=ditto: test split",
    "dataset.clients=5000": "partition.clients=5000: at most 172",
    "partition=iid dataset.clients=2000": "partition.clients=2000: at most 1797",
    "partition=shards dataset.clients=1000": "partition.clients=1000: at most 898",
    "partition=dirichlet dataset.clients=180": "partition.clients=180: at most 179",
    "partition=quantity_skew dataset.clients=180": "partition.clients=180: at most 179",
    "partition=dirichlet partition.alpha=0.001": "partition.min_samples=10: not met",
    "partition.classes_per_client=11": "partition.classes_per_client=11: from 1 to 10",
    "model.module._target_=no_such.Model": (
        "model.module._target_=no_such.Model: cannot be imported"
    ),
    "model.module._target_=fedjax_cfl.models.None_": "fedjax_cfl.models.None_: cannot be imported",
    "model.module._target_=builtins.dict": "builtins.dict",
    "+model.module.depth=3": "model.module 'depth'",
    "algorithm._target_=no.such": "algorithm._target_=no.such: cannot be imported",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Input files, most of them with one fault each."""
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 5)).astype(np.float32), np.arange(40) % 3
    holes = {name: x.copy() for name in ("nan", "inf")}
    for name, array in holes.items():
        array[3, 1] = float(name)
    client = np.repeat([0, 1, 2, 4], 10)  # nobody is client 3
    split = np.tile([0, 0, 0, 0, 1], 8)
    # client 4 never trains, client 2 has no test samples
    some = np.where(client == 4, 1, np.where(client == 2, 0, split))
    arrays = {
        "good": {"x": x, "y": y},
        "owned": {"x": x, "y": y, "client": client, "split": some},
        "no_y": {"x": x},
        **{name: {"x": array, "y": y} for name, array in holes.items()},
        "half": {"x": x, "y": y + 0.5},
        "negative": {"x": x, "y": y - 1},
        "huge": {"x": x, "y": y * 10**9},
        "object": {"x": x, "y": np.array([{}] * 40, object)},
        "words": {"x": x, "y": np.array(["cat"] * 40)},
        "text_x": {"x": x.astype(str), "y": y},
        "short": {"x": x, "y": y[:39]},
        "empty": {"x": x[:0], "y": y[:0]},
        "flat": {"x": x[:, 0], "y": y},
        "owners": {"x": x, "y": y, "client": client[:5]},
        "split": {"x": x, "y": y, "split": split + 1},
        "all_test": {"x": x, "y": y, "client": client, "split": split * 0 + 1},
    }
    for name, content in arrays.items():
        np.savez(folder / f"{name}.npz", **content)
    (folder / "cut.npz").write_bytes((folder / "good.npz").read_bytes()[:-200])
    (folder / "text.npz").write_text("hello")
    (folder / "taken").mkdir()
    (folder / "taken" / "keep.txt").write_text("precious")
    return folder


# What a file may not hold is said by the reader, whose own tests go through it: one line in four.
OFTEN = [line for place, line in enumerate(REFUSED) if "path={files}" not in line or not place % 4]


def answer(line: str) -> None:
    """Checks a command line, and builds its run, as the command does before it trains."""
    _, given = parse_flags(shlex.split(line))
    with open_hydra():
        asked = read_line(given.overrides, given.multirun, COMMANDS)
    check_line(asked)
    if given.multirun:
        sweep.begin_sweep(asked)
    else:
        sweep.check_folders(asked.configs[0])
    build(asked.configs[0])


def test_a_sweep_takes_further_seeds_and_no_others(tmp_path):
    folders = []
    with open_hydra():
        for seeds in ("0,1", "0,1,2", "0,1,2", "5,0"):
            asked = read_line([f"seed={seeds}", f"run_dir={tmp_path}/s"], True, COMMANDS)
            if seeds == "5,0":
                assert "already exists" in refusal(sweep.begin_sweep, asked)
            else:
                folders.append(sweep.begin_sweep(asked)[0])
    assert folders == 3 * [tmp_path / "s"]
    assert (tmp_path / "s" / "index.csv").read_text() == "run,seed\n0,0\n1,1\n2,2\n"


@pytest.mark.parametrize("line", others_nightly(REFUSED, OFTEN))
def test_bad_input_is_refused_in_one_line(line, files, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "1")  # other tests have started JAX already
    monkeypatch.delenv("FEDJAX_CFL_DATA", raising=False)
    error = refusal(answer, line.replace("{files}", str(files)))
    assert not [word for word in REFUSED[line].split() if word not in error], error
    assert not list(tmp_path.iterdir())
    assert [path.name for path in (files / "taken").iterdir()] == ["keep.txt"]


# of each kind one, and what only the command itself says
ANSWERED = {
    "round=3": "round=3: unknown setting (did you mean 'rounds'?)",
    "rounds=ten": "rounds=ten: must be a whole number >= 1",
    "seeds=2 algorithm.m=61": "algorithm.m=61: must be at most 60",
    "-m seed=0,1 dataset=npz dataset.source.path=none.npz": "none.npz: file cannot be read",
    "run_dir=/proc/no/such": "run_dir=/proc/no/such: cannot be made",
    "-m seed=0,1 run_dir=/proc/no/such": "run_dir=/proc/no/such: cannot be made",
    "run_dir={files}/text.npz/inside": "inside: cannot",
    "report {files}/taken -o {files}/taken": "taken: is a folder",
}


def one_line(error: str) -> None:
    """Asserts that what went to stderr is one line of our own."""
    assert error.startswith("fedjax-cfl: ") and error.count("\n") == 1 and error.endswith("\n"), (
        error
    )


@pytest.mark.parametrize("line", ANSWERED)
def test_the_command_prints_one_line_and_writes_nothing(line, fedjax_cfl, files, tmp_path):
    status, _, error = fedjax_cfl(line.replace("{files}", str(files)))
    assert status == 2 and ANSWERED[line] in error
    one_line(error)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in (files / "taken").iterdir()] == ["keep.txt"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JAX_DISABLE_JIT", "maybe"),
        nightly("JAX_DEBUG_NANS", "perhaps"),
        nightly("JAX_PLATFORMS", "quantum"),
    ],
)
def test_variables_that_jax_cannot_read_are_one_line(name, value, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_cfl", "rounds=1"],
        cwd=tmp_path,
        env=os.environ | {name: value},
        capture_output=True,
        text=True,
    )
    one_line(done.stderr)
    assert done.returncode == 2 and f"{name}={value}: JAX cannot use it: " in done.stderr


@pytest.mark.parametrize("line", ["dataset=mnist", "dataset=femnist"])
def test_a_data_folder_that_does_not_exist_is_refused(line, fedjax_cfl, monkeypatch):
    monkeypatch.setenv("FEDJAX_CFL_DATA", "/no/such/folder")
    status, _, error = fedjax_cfl(line)
    assert status == 2 and "FEDJAX_CFL_DATA: no folder /no/such/folder" in error
    one_line(error)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_refused(fedjax_cfl, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    status, _, error = fedjax_cfl("run_dir=locked/run")
    assert status == 2 and "cannot be made" in error


def test_a_module_that_cannot_be_imported_is_refused(fedjax_cfl, tmp_path):
    (tmp_path / "broken_module.py").write_text("import no_such_package")
    status, _, error = fedjax_cfl("model.module._target_=broken_module.Model")
    assert (
        status == 2
        and "broken_module.Model: cannot be imported: No module named 'no_such_package'" in error
    )
    one_line(error)


# composition


@pytest.fixture
def compositions(monkeypatch):
    """Returns a list of the overrides of every configuration that Hydra composes meanwhile."""
    composed, load = [], ConfigLoaderImpl.load_configuration
    names.compose_options.cache_clear()

    def count(loader, config_name, overrides, **options):
        composed.append(overrides)
        return load(loader, config_name, overrides, **options)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", count)
    monkeypatch.setattr("fedjax_cfl.cli.main.run_config", lambda config: 0)
    return composed


def test_runs_of_a_sweep_have_what_hydra_itself_composes():
    """Settings and Hydra's own node, of runs that differ in a number, an option and a layer."""
    with open_hydra() as app:
        sweep = ["algorithm=ifca,flexcfl", "local.lr=0.1,0.2", "hydra.sweep.dir=there", "rounds=3"]
        master = app.compose_config(
            "config", sweep, run_mode=RunMode.MULTIRUN, with_log_configuration=False
        )
        for run in (
            ["algorithm=ifca", "local.lr=0.1", "rounds=3"],
            ["algorithm=flexcfl", "personal=ditto", "local.lr=0.2", "rounds=3"],
        ):
            theirs = app.config_loader.load_sweep_config(master, run)
            ours = names.compose_run(master, run)
            assert OmegaConf.to_container(ours) == OmegaConf.to_container(theirs)
            # resolved once a sweep, not once a run
            assert ours.hydra.sweep.dir == theirs.hydra.sweep.dir == "there"


def test_hydra_composes_a_run_once(fedjax_cfl, compositions):
    line = "algorithm=ifca dataset.clients=12 algorithm.m=2 local.lr=0.1 rounds=2 seed=3"
    assert fedjax_cfl(line)[0] == 0
    assert len(compositions) == 1


def test_a_sweep_is_composed_no_more_often_the_more_runs_it_has(
    fedjax_cfl, compositions, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    counts = []
    for rates in ("0.1,0.2", "0.1,0.2,0.3,0.4"):
        before = len(compositions)
        assert fedjax_cfl(f"-m algorithm=ifca local.lr={rates} curves=false")[0] == 0
        counts.append(len(compositions) - before)
    assert counts[1] <= counts[0] <= 3  # for the checks, and as Hydra's sweep


def test_a_node_of_a_function_can_be_added_with_its_arguments_in_any_order():
    texts = ["+logger.mine.size=3", "+logger.mine._target_=my_tracker.Accuracies"]
    with open_hydra():
        for given in (texts, texts[::-1]):
            mine = {"_target_": "my_tracker.Accuracies", "size": 3}
            assert read_line(given, False, ()).configs[0]["logger"] == {"mine": mine}


def test_values_of_a_sweep_are_checked_by_one_composition(compositions):
    texts = ["algorithm=ifca", "local.lr=0.1,0.2,0.3", "algorithm.m=2,3", "seed=0,1"]
    with open_hydra():
        line = read_line(texts, True, ())
    assert len(compositions) == 1
    assert [config["local"]["lr"] for config in line.configs] == [0.1, 0.2, 0.3, 0.1, 0.1]
    assert [config["algorithm"]["m"] for config in line.configs] == [2, 2, 2, 3, 2]


def test_a_sweep_over_lists_of_layers_is_one_over_options():
    with open_hydra():
        line = read_line(["personal=[scaffold, 'ditto'],apfl", "seed=0,1"], True, ())
        asked = [text_of(each) for each in line.asked]
        assert asked == ["personal=scaffold+ditto,apfl", "seed=0,1"]
        assert [list(config["personal"]) for config in line.configs][::2] == [
            ["scaffold", "ditto"]
        ] * 2
        assert line.configs[1]["personal"]["_target_"] == "fedjax_cfl.personal.apfl"
        line = read_line(["personal=[scaffold,ditto]", "personal.ditto.lam=3"], False, ())
        assert line.configs[0]["personal"]["ditto"]["lam"] == 3


@pytest.fixture(scope="module")
def composed():
    """Returns f(line) -> (resolved configuration, chosen options), as a run would see them."""

    def compose(line: str, checked: bool = True):
        if checked:
            resolve_settings(line.split())
        with open_hydra():
            config = hydra.compose("config", line.split(), return_hydra_config=True)
            chosen = config.hydra.runtime.choices
            return (
                OmegaConf.to_container(
                    OmegaConf.masked_copy(
                        config, ["algorithm", "partition", "model", "rounds", "local"]
                    )
                ),
                chosen,
            )

    return compose


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (CONF / group).glob("*.yaml"))


# with partitions and models of their own, with a path and columns to give, and without
COMPOSED = ("csv", "digits", "sent140", "npz")


@pytest.mark.parametrize("dataset", others_nightly(options("dataset"), COMPOSED))
def test_every_data_set_composes_and_the_command_line_beats_its_choice(dataset, composed):
    text = (CONF / "dataset" / f"{dataset}.yaml").read_text()
    path = " dataset.source.path=x" if "path: ???" in text else ""
    path += " dataset.source.y=y" if "y: ???" in text else ""
    _, chosen = composed(f"dataset={dataset}{path}")
    assert chosen["partition"] in options("partition") and chosen["model"] in options("model")
    for line in (
        f"dataset={dataset} partition=iid model=lenet{path}",
        f"model=lenet partition=iid dataset={dataset}{path}",
    ):
        config, chosen = composed(line, checked=False)
        assert (chosen["partition"], chosen["model"]) == ("iid", "lenet")
        assert (
            config["partition"]["_target_"].endswith(".iid") and config["model"]["name"] == "lenet"
        )


@pytest.mark.parametrize(
    "group", ["concept", "drift", nightly("model"), nightly("partition")]
)  # algorithm: test_contract, experiment: test_paper
def test_every_option_composes(group, composed):
    for option in options(group):
        path = " partition.path=x" if option == "from_file" else ""
        assert composed(f"{group}={option}{path}")[1][group] == option


def test_help_and_the_whole_configuration(fedjax_cfl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    status, out, _ = fedjax_cfl("--help")
    assert status in (0, None)
    words = " ".join(out.split())
    named = re.search(r"algorithm=(\w+), (\w+), (\w+), (\w+) or (\w+)\. (\d+) more", words)
    assert named and {*named.groups()[:5]} < {*options("algorithm")}
    assert 5 + int(named[6]) == len(options("algorithm"))
    assert fedjax_cfl("lst --help")[:2] == (status, out) and "Traceback" not in out
    assert {name for name in COMMANDS if f"fedjax-cfl {name} " not in out} == set()
    for name in ("", *COMMANDS):
        shown = fedjax_cfl(f"{name} --help")[1]
        assert shown or name == "paper", name  # which says on stderr where no checkout is
        assert all(len(text) < 80 for text in shown.splitlines()), name
    status, out, _ = fedjax_cfl("algorithm=ifca --cfg job")
    assert status == 0 and "fedjax_cfl.algorithms.ifca" in out
    assert fedjax_cfl("--version")[1].startswith("fedjax-cfl ")


def test_a_list_says_what_can_be_chosen_and_what_it_is(fedjax_cfl):
    status, out, _ = fedjax_cfl("list")
    assert status == 0
    listed = dict(line.split(": ") for line in out.replace("\n  ", " ").splitlines())
    for group in ("algorithm", "dataset", "partition", "model", "concept", "preset"):
        assert sorted(listed[group].split(", ")) == sorted(options(group))
    status, out, _ = fedjax_cfl("list algorithm preset")
    methods, bounds, presets = re.split(r"^bounds, .*\n|(?=^clean: )", out, flags=re.M)
    assert "\nifca: Ghosh et al., NeurIPS 2020: each client trains" in methods
    assert re.findall(r"^\w+(?=: )", bounds, re.M) == ["centralised", "known_groups", "nonfed"]
    assert re.findall(r"^\w+(?=: .)", presets, re.M) == sorted(options("preset"))
    assert max(map(len, out.splitlines())) < 80
    status, _, error = fedjax_cfl("list algorithms")
    assert status == 2 and "algorithms: unknown choice (did you mean 'algorithm'?)" in error


def test_doctor_and_download(fedjax_cfl):
    assert fedjax_cfl("doctor")[0] == 0
    status, _, error = fedjax_cfl("download mnits")
    assert status == 2 and "'mnist'" in error
    one_line(error)
    assert fedjax_cfl("compare no_such_folder")[0] == 2


# the real thing, from a folder of its own


@pytest.mark.parametrize(
    "line", ["clients_per_round=61", nightly("-m clients_per_round=61 algorithm=fedavg,ifca")]
)
def test_the_process_ends_with_2_and_no_traceback(line, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "fedjax_cfl", *line.split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stdout == ""
    one_line(done.stderr)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


WITHOUT_JAX = """
import sys
sys.modules["jax"] = None  # importing it fails
from fedjax_cfl.cli.main import main
for line in ("algoritm=ifca", "-m algorithm=ifca,ifcaa", "local.lrr=3 model=mlp", "compar x"):
    sys.argv = ["fedjax-cfl", *line.split()]
    assert main() == 2, line
"""


def test_names_are_checked_before_anything_slow_is_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_JAX], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for word in ("did you mean 'algorithm'", "'ifca'", "'local.lr'", "'compare'"):
        assert word in done.stderr
