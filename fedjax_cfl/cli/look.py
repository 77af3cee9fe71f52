"""`fedjax-cfl look FILE --y label --client user`: what a run would see of a file, before any runs.

Clients, samples, who has which labels, scales of features, how many groups clients seem to fall
into, and the settings that follow from them. FILE may be a folder of images. KEY=VALUE behind it as
for a run.
"""

import argparse
import shlex
from pathlib import Path
from textwrap import shorten

import numpy as np

from fedjax_cfl.analysis.suggest import suggest_groups
from fedjax_cfl.analysis.tables import print_table
from fedjax_cfl.cli.build import assemble
from fedjax_cfl.cli.names import FILES, find_reader
from fedjax_cfl.data.federated import format_description
from fedjax_cfl.data.scaling import Scaling, standardize
from fedjax_cfl.errors import InputError, parse_arguments
from fedjax_cfl.formatting import escape_markup
from fedjax_cfl.runs.finish import count_labels
from fedjax_cfl.types import FederatedData

UNLIKE = 3  # features whose deviation is as far from 1, or whose mean from 0, are standardised
MOST_SHOWN = 20  # clients, classes and features of a picture
BARS = " ▁▂▃▄▅▆▇█"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that say what is in a file."""
    parser.add_argument(
        "file", metavar="FILE", help="a table, as .csv, .npz, or images in a folder"
    )
    parser.add_argument("--y", metavar="COLUMN", default="label", help="labels; default: label")
    parser.add_argument("--client", metavar="COLUMN", help="whose sample a row is")
    parser.add_argument("--split", metavar="COLUMN", help="train or test")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for a run")


def name_data(options: argparse.Namespace) -> list[str]:
    """Returns the settings of a run by which a file is read. Raises InputError for a file of no
    known kind.
    """
    kind = "image_folder" if Path(options.file).is_dir() else find_reader(options.file)
    if kind is None:
        raise InputError(
            f"{options.file}: ends in none of .{', .'.join(FILES)}, and is no folder of images; of"
            " other data name settings, as fedjax-cfl tune --methods fedavg,ifca"
            " dataset=huggingface dataset.source.path=..."
        )
    name = Path(options.file).resolve().name.partition(".")[0]
    settings = [f"dataset={kind}", f"dataset.source.path={quote(options.file)}"]
    settings += [f"dataset.name={quote(name)}"]
    roles = {"y": options.y, "client": options.client, "split": options.split}
    named = {role: name for role, name in roles.items() if FILES.get(kind) and name is not None}
    settings += [f"dataset.source.{role}={quote(name)}" for role, name in named.items()]
    return [*settings, *options.settings]


def quote(text: str) -> str:
    """Returns a text as a value of the command line, in quotes where it needs them."""
    plain = all(sign.isalnum() or sign in "_-./" for sign in text) and text.isascii()
    return text if plain else '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def look(settings: list[str]) -> tuple[list[str], int | None]:
    """Prints what a run of these settings would see of its data; returns them with those that
    follow, and the number of groups that clients seem to fall into, None: unknown. Raises
    InputError for data that cannot be read.
    """
    config, _, data, _ = assemble(settings)
    print(f"{config['dataset']['name']}: {format_description(data)}")
    if data.columns and data.x.ndim == 2:
        print(
            shorten(f"features: {', '.join(map(str, data.columns.names))}", 300, placeholder=" ...")
        )
    if data.num_classes:
        show_labels(data)
    return [*settings, *suggest_scaling(config, data)], show_groups(data)


def show_groups(data: FederatedData) -> int | None:
    """Prints by what clients seem to fall into groups; returns the number of the clearest."""
    found = suggest_groups(data)
    for by, groups, silhouette, chance in found:
        print(f"groups: by their {by} clients fall into {groups}", end=" ")
        print(f"(silhouette {silhouette:.2f}, by chance at most {chance:.2f})")
    if not found:
        print("groups: neither labels nor features say that clients fall into some")
    return found[0].groups if found else None


def show_labels(data: FederatedData) -> None:
    """Prints a picture of the labels: a line per client, a bar for its share of each class."""
    counts = count_labels(data)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    names = data.client_names.names if data.client_names else range(data.num_clients)
    classes = data.class_names or tuple(map(str, range(data.num_classes)))
    lines = [
        [escape_markup(name), f"{count.sum():,}", *(BARS[round(8 * share)] * 3 for share in row)]
        for name, count, row in zip(names, counts, shares[:, :MOST_SHOWN], strict=True)
    ]
    title = "training samples and labels by client: a bar is the share of a class"
    if len(lines) > MOST_SHOWN:
        title += f"; the first {MOST_SHOWN} of {len(lines)}"
    shown = list(map(escape_markup, classes[:MOST_SHOWN]))
    print_table(title, ["client", "samples", *shown], *lines[:MOST_SHOWN])


def suggest_scaling(config: dict, data: FederatedData) -> list[str]:
    """Prints how unlike the scales of features in columns are; returns the setting that makes them
    alike, where they are not and the user has not said how.
    """
    if config["dataset"]["standardize"] != "none" or data.x.ndim != 2 or data.x.dtype == np.uint8:
        return []
    scaling = standardize(data, "pool")[1]
    assert isinstance(scaling, Scaling)
    names = data.columns.names if data.columns else range(data.x.shape[1])
    spread = dict(zip(map(str, names), scaling.deviation[0].tolist(), strict=True))
    low, high = min(spread, key=spread.__getitem__), max(spread, key=spread.__getitem__)
    far = np.abs(scaling.mean).max()
    print(f"scales: {len(spread)} features, deviations {spread[low]:.3g} ({low}) to", end=" ")
    print(f"{spread[high]:.3g} ({high}), means up to {far:.3g}", end="; ")
    if 1 / UNLIKE < spread[low] <= spread[high] < UNLIKE and far <= UNLIKE:
        print("taken as they are")
        return []
    print("dataset.standardize=pool makes each of them 1, by the training samples of all clients")
    return ["dataset.standardize=pool"]


def main(argv: list[str]) -> int:
    """Runs `fedjax-cfl look FILE [--y COLUMN] [--client COLUMN] [KEY=VALUE ...]`."""
    parser = argparse.ArgumentParser(prog="fedjax-cfl look", description=__doc__)
    add_arguments(parser)
    options = parse_arguments(parser, argv)
    settings, groups = look(name_data(options))
    given = groups is None or any(text.startswith("dataset.groups=") for text in settings)
    print("fedjax-cfl", shlex.join(settings if given else [*settings, f"dataset.groups={groups}"]))
    return 0
