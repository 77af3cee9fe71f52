"""`fedjax-cfl study FILE --y label --client user`: from a table to a table: methods compared on a
file of your own, each tuned alike.

Looks at the data (`fedjax-cfl look`), tunes each method on validation samples, with as many trials
(`fedjax-cfl tune --methods`), tests what was chosen on other seeds, and writes a table
(`fedjax-cfl compare`) and a page (`fedjax-cfl report`). It prints the commands that it stands for,
and goes on where it stopped. A method may have layers, flexcfl+ditto, and may be a function of your
own, mine.sticky_ifca. KEY=VALUE as for a run.
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedjax_cfl.analysis.compare import compare
from fedjax_cfl.analysis.report import report
from fedjax_cfl.cli.look import add_arguments, look, name_data
from fedjax_cfl.cli.names import read_line
from fedjax_cfl.cli.tune import read_seeds, split_method, tune_methods
from fedjax_cfl.errors import InputError, parse_arguments

METHODS, SEEDS = "fedavg,ifca,flexcfl,flexcfl+ditto", (0, 1, 2, 3, 4)
RATES = "0.01", "0.03", "0.1"  # step sizes that are tried with each number of groups
GROUPS = "2", "4"  # where a look at the data suggests others, those and 2
MORE_RATES = "0.001", "0.003", *RATES, "0.3"  # by a method without groups: as many trials


def study(
    file: str | Path,
    y: str = "label",
    client: str | None = None,
    split: str | None = None,
    methods: Sequence[str] = tuple(METHODS.split(",")),
    settings: Sequence[str] = (),
    out: str | Path = "study",
    seeds: Sequence[int] = SEEDS,
) -> pd.DataFrame:
    """Compares methods on a file of your own, each tuned on validation samples with as many trials,
    and tested on other seeds; prints, and writes a table and a page in a folder. The same call
    goes on where it stopped.

    Args: `file` is a table, an .npz or a folder of images; `y`, `client` and `split` are columns of
    a table: labels, whose sample a row is, train or test; `methods` are names, or dotted names of
    functions of one's own, with layers as flexcfl+ditto; `settings` are as on the command line,
    KEY=VALUE: values that they give are not tuned; `out` is the folder; `seeds` are those of the
    tests. Returns what `compare` has in its table, a row per method. Raises InputError for what
    cannot be read or does not exist.
    """
    from fedjax_cfl.cli.main import open_hydra

    source = argparse.Namespace(
        file=str(file), y=y, client=client, split=split, settings=list(settings)
    )
    with open_hydra():  # a misspelt name is answered before the data are read
        tried = {method: list_tried(method, settings) for method in methods}
    common, groups = look(name_data(source))
    out = Path(out)
    if groups and str(groups) not in GROUPS:
        with open_hydra():
            both = "2", str(groups)
            tried = {method: list_tried(method, settings, both) for method in methods}
    folders = [out / method for method in methods]
    for method, values in tried.items():
        command = ["tune", "--out", str(out), "--methods", method, *common, *values]
        print("fedjax-cfl", shlex.join([*command, "--seeds", ",".join(map(str, seeds))]))
        tune_methods([method], [*common, *values], out, seeds=tuple(seeds), quiet=True)
    tested = [str(folder / "test") for folder in folders]
    shown = shlex.join(tested)
    print(f"fedjax-cfl compare {shown} --out {out} --pivot algorithm dataset --measure final")
    table = compare(tested, out, pivot=("algorithm", "dataset"), measure="final")
    print(f"fedjax-cfl report {shown} -o {out / 'report.html'}")
    report(tested, out / "report.html")
    return table


def list_tried(method: str, settings: Sequence[str], groups: Sequence[str] = GROUPS) -> list[str]:
    """Returns what is tried for a method, as settings of several values: step sizes and, of a
    method that has them, numbers of `groups`; but for what is given.
    """
    said = {text.lstrip("+").partition("=")[0] for text in settings}
    config = read_line([*split_method(method), "dataset.groups=7"], False, ()).configs[0]
    grouped = config["algorithm"].get("m") == 7 and not {"dataset.groups", "algorithm.m"} & said
    rates = RATES if grouped else MORE_RATES
    tried = {} if "local.lr" in said else {"local.lr": rates}
    tried |= {"dataset.groups": groups} if grouped else {}
    return [f"{name}={','.join(values)}" for name, values in tried.items()]


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl study FILE [--y COLUMN] [--client COLUMN] [--methods A,B] [KEY=VALUE]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl study", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--methods", default=METHODS, metavar="A,B+C", help=f"default: {METHODS}")
    parser.add_argument("--out", default="study", metavar="DIR", help="default: study")
    parser.add_argument("--seeds", type=read_seeds, default=SEEDS, metavar="N,N")
    asked = parse_arguments(parser, argv)
    columns = asked.file, asked.y, asked.client, asked.split
    methods = [name for name in asked.methods.split(",") if name]
    if not methods or len({*methods}) < len(methods):
        raise InputError(f"--methods {asked.methods}: give different methods, as fedavg,ifca")
    study(*columns, methods, asked.settings, asked.out, asked.seeds)
    return 0
