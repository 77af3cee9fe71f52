"""What the names in conf/algorithm/*.yaml mean: methods take functions, and these are the
functions that a setting can name.
"""

import inspect
import types
import typing
from collections.abc import Callable
from typing import Any, NamedTuple

from fedjax_cfl import algorithms
from fedjax_cfl.algorithms import fedopt
from fedjax_cfl.algorithms.auxo import split_adaptively, split_at
from fedjax_cfl.algorithms.fedfomo import l1_norm, l2_norm, serve_mixed, serve_trained
from fedjax_cfl.algorithms.fesem.fesem import (
    e_step_of_all,
    full_distance,
    last_layer_distance,
    pull_by_size,
    pull_plainly,
    stored_mean,
)
from fedjax_cfl.algorithms.fesem.fesem_ma import mean_over_cohort, weigh_classes, weigh_plainly
from fedjax_cfl.algorithms.fesem.start import cluster_local_models, random_models
from fedjax_cfl.algorithms.fielding import represent
from fedjax_cfl.algorithms.fielding.fielding import all_report, cohort_reports
from fedjax_cfl.algorithms.flexcfl.founding import (
    cluster_by_edc,
    cluster_by_madc,
    cluster_by_randomized_edc,
    join_random,
    one_founder_each,
    parse_pretrain,
    start_from_founders,
    start_from_initial,
)
from fedjax_cfl.algorithms.ifca.start import independent_models, reject_unbalanced, spread_models
from fedjax_cfl.algorithms.md_icfl.md_icfl import STRONG, WEAK, copy_largest, new_models
from fedjax_cfl.algorithms.md_icfl.synthesis import back_search, generator
from fedjax_cfl.client import sgd
from fedjax_cfl.clustering import distances, metric_kmeans, migrate, recluster
from fedjax_cfl.clustering.assign import nearest_direction
from fedjax_cfl.clustering.migrate import charge_detected, charge_swapped
from fedjax_cfl.round import aggregate
from fedjax_cfl.round.start import common_model, random_groups
from fedjax_cfl.validation import Rule, check_value, one_of, or_none, parameter_rules

# no settings of a method: the model, how clients train, what happens to them, what is returned
FIXED = ("task", "local", "system", "sizes", "return")


class Maker(NamedTuple):
    """Makes a function from further settings of the same method, which are its parameters."""

    make: Callable[..., Any]
    fixed: tuple[str, ...] = ()  # parameters that are no settings

    @property
    def settings(self) -> list[str]:
        """Returns the names of the settings, those in its tuples of options included."""
        tuples = option_tuples(self.make)
        return [
            field
            for name in inspect.signature(self.make).parameters
            if name not in self.fixed
            for field in (tuples[name]._fields if name in tuples else (name,))
        ]


MEANS = {"uniform": aggregate.uniform_mean, "samples": aggregate.weighted_mean}
DETECTORS = {
    "tv": migrate.tv,
    "any_change": migrate.any_change,
    "label_w1": migrate.label_w1,
    "counts_as_samples": migrate.counts_as_samples,
}
IFCA = {
    "start": {
        "random": independent_models,
        "reject_unbalanced": Maker(reject_unbalanced),
        "kmeanspp_loss": spread_models,
    },
    "solve": {"sgd": sgd.sgd, "gradient_step": sgd.gradient_step},
    "aggregate": MEANS
    | {"first_client": aggregate.first_client, "all_participants": aggregate.cohort_mean},
    "detector": DETECTORS,
    "charge": {"detected": charge_detected, "swapped": charge_swapped},
}
FLEXCFL = {
    "measure": {
        "edc": Maker(cluster_by_edc),
        "edc_randomized": Maker(cluster_by_randomized_edc),
        "madc": cluster_by_madc,
        "none": one_founder_each,
    },
    "group_start": {"pretrained": start_from_founders, "initial": start_from_initial},
    "newcomers": {"nearest": nearest_direction, "random": join_random},
    "mix": {"normalized": aggregate.inter_group, "paper": aggregate.add_inter_group},
    "detector": DETECTORS,
}
FIELDING = {
    "represent": {
        "labels": represent.label_shares,
        "embedding": Maker(represent.embedding),
        "gradient": Maker(represent.gradient),
    },
    "metric": {
        "l1": distances.l1,
        "jensen_shannon": distances.jensen_shannon,
        "squared_euclidean": distances.squared_euclidean,
    },
    "cluster": {
        "silhouette": Maker(metric_kmeans.by_silhouette),
        "k_center": metric_kmeans.k_center,
    },
    "trigger": {
        "center_shift": Maker(recluster.center_shift),
        "since_clustering": Maker(recluster.center_shift_since_clustering),
        "pairwise": Maker(recluster.pairwise),
        "pairwise_fixed": Maker(recluster.pairwise_fixed),
        "always": Maker(recluster.always),
        "never": Maker(recluster.never),
    },
    "hear": {"all": all_report, "cohort": cohort_reports, "nobody": None},
    "aggregate": MEANS,
    "server": {"none": None, "yogi": Maker(fedopt.yogi, fixed=("tau",))},
}
# by method and parameter, the functions that can be named
CHOICES: dict[Callable, dict[str, dict[str, Any]]] = {
    algorithms.auxo: {"split": {"fixed": Maker(split_at), "adaptive": Maker(split_adaptively)}},
    algorithms.cfl: {"aggregate": MEANS},
    algorithms.cfl_gp: {"aggregate": MEANS},
    algorithms.clove: {"aggregate": MEANS},
    algorithms.fedfomo: {
        "norm": {"L1": l1_norm, "L2": l2_norm},
        "test": {"mixed": serve_mixed, "trained": serve_trained},
    },
    algorithms.fesem: {
        "form": {"prox": pull_plainly, "eq8": pull_by_size},
        "start": {
            "local": Maker(cluster_local_models, fixed=("by_samples",)),
            "random_models": random_models,
        },
        "estep": {"all": e_step_of_all, "selected": None},
        "aggregate": MEANS
        | {
            "stored": stored_mean,
            "cohort": aggregate.uniform_mean,
            "first_client": aggregate.first_client,
        },
        "distance": {"full": full_distance, "last_layer": last_layer_distance},
        "detector": DETECTORS,
    },
    algorithms.fesem_ma: {
        "mean_over": {"stored": None, "cohort": mean_over_cohort},
        "head": {"classes": weigh_classes, "plain": weigh_plainly},
    },
    algorithms.fielding: FIELDING,
    algorithms.fl_hc: {
        "metric": {
            "L1": distances.manhattan,
            "L2": distances.euclidean,
            "cosine": distances.cosine_distance,
        },
        "aggregate": MEANS,
    },
    algorithms.flexcfl: FLEXCFL,
    algorithms.ifca: IFCA,
    algorithms.ifca_restarts: IFCA,
    algorithms.stocfl: {"aggregate": MEANS},
    algorithms.wecfl: {"distance": {"full": full_distance, "last_layer": last_layer_distance}},
    algorithms.md_icfl: {
        "sampling": {"back_search": Maker(back_search), "generator": Maker(generator)},
        "start": {"common": common_model, "random": random_groups},
        "privacy": {"weak": WEAK, "strong": STRONG},
        "aggregate": MEANS,
        "empty": {"keep": None, "copy": copy_largest, "new": new_models},
    },
}


def name_arguments(factory: Callable, settings: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a method from its settings: names become the functions they
    name, and settings that are fields of a tuple of options are put into it.

    Raises InputError for a name that is not known.
    """
    settings, named = dict(settings), {}
    for name, options in CHOICES.get(factory, {}).items():
        value = settings.pop(name, inspect.Parameter.empty)
        if isinstance(value, str):
            check_value(f"algorithm.{name}", value, one_of(*options))
            named[name] = options[value]
        elif value is not inspect.Parameter.empty:
            named[name] = value
    if isinstance(named.get("pretrain", settings.get("pretrain")), str):
        named["pretrain"] = parse_pretrain(settings.pop("pretrain"))
    spare = {key for maker in _makers(factory) for key in maker.settings}
    for name, value in named.items():
        if isinstance(value, Maker):
            given = {key: settings[key] for key in value.settings if key in settings}
            named[name] = value.make(**name_arguments(value.make, given))
    settings = {key: value for key, value in settings.items() if key not in spare} | named
    for name, options in option_tuples(factory).items():
        own = {field: settings.pop(field) for field in options._fields if field in settings}
        required = set(options._fields) - set(options._field_defaults)
        if own and all(own.get(field) is not None for field in required):
            default = find_default(factory, name)
            settings[name] = (
                default._replace(**own) if isinstance(default, options) else options(**own)
            )
    return settings


def find_default(function: Callable, name: str) -> Any:
    """Returns the default of a function's parameter, None where it has none. Its signature has
    texts in the place of defaults, see `signatures`.
    """
    code, given = function.__code__, function.__defaults__ or ()
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return (dict(zip(names, given, strict=True)) | (function.__kwdefaults__ or {})).get(name)


def setting_rules(factory: Callable) -> dict[str, Rule]:
    """Returns what each setting of a function of the package may be: the ranges of its
    parameters, of its tuples of options and of what makes its functions, and the names that can
    be given.
    """
    rules: dict[str, Rule] = {}
    for owner in (*(maker.make for maker in _makers(factory)), factory):
        for options in option_tuples(owner).values():
            rules |= parameter_rules(options)
        rules |= parameter_rules(owner)
    nullable = find_nullable(factory)
    tables = CHOICES.get(factory, {})
    return rules | {name: name_rule(table, name in nullable) for name, table in tables.items()}


def name_rule(table: dict[str, Any], nullable: bool) -> Rule:
    """Allows the names of a table, functions, and None where it is `nullable`."""

    def holds(value: Any) -> bool:
        return callable(value) or (isinstance(value, str) and value in table)

    rule = one_of(*table)._replace(holds=holds)
    return or_none(rule) if nullable else rule


def find_nullable(factory: Callable) -> set[str]:
    """Returns the settings of a method whose annotation allows None."""
    owners = (factory, *option_tuples(factory).values())
    hints = [hint for owner in owners for hint in typing.get_type_hints(owner).items()]
    return {name for name, hint in hints if type(None) in typing.get_args(hint)}


def option_tuples(factory: Callable) -> dict[str, type]:
    """Returns the parameters of a method that are tuples of options, and their types."""
    found = {}
    for name, hint in typing.get_type_hints(factory).items():
        for kind in typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,):
            if hasattr(kind, "_field_defaults") and name not in FIXED:
                found[name] = kind
    return found


def _makers(factory: Callable) -> list[Maker]:
    named = [value for table in CHOICES.get(factory, {}).values() for value in table.values()]
    return [value for value in named if isinstance(value, Maker)]
