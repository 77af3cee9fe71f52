"""FlexCFL and FedGroup."""

from fedjax_cfl.algorithms.flexcfl.flexcfl import fedgroup, flexcfl

__all__ = ["fedgroup", "flexcfl"]
