"""What happens to clients that no method decides: who takes part, how long it takes, what fails,
and what is sent.
"""

from fedjax_cfl.system import select
from fedjax_cfl.system.faults import Faults
from fedjax_cfl.system.system import System

__all__ = ["Faults", "System", "select"]
