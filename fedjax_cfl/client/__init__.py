"""What one client computes, and who runs it."""

from fedjax_cfl.client.execution import Execution, make_execution
from fedjax_cfl.client.local import Local

__all__ = ["Execution", "Local", "make_execution"]
