"""`fedjax-cfl download`: fetches public data sets."""

import argparse

from fedjax_cfl.data.datasets.download import download, list_public
from fedjax_cfl.errors import parse_arguments


def main(argv: list[str]) -> int:
    """`fedjax-cfl download NAME...`: fetches public data sets and says where they are."""
    parser = argparse.ArgumentParser(
        prog="fedjax-cfl download", description="Fetch public data sets and verify them by SHA-256."
    )
    parser.add_argument(
        "names", nargs="+", metavar="NAME", help=f"one of {', '.join(list_public())}"
    )
    for name, paths in download(parse_arguments(parser, argv).names).items():
        print(f"{name}: {', '.join(map(str, paths))}")
    return 0
