"""`python -m fedjax_cfl`. Python puts the current folder first on its path then; unless
the package itself is there, nothing is to be imported from it unasked.
"""

import os
import sys

import fedjax_cfl

if __name__ == "__main__":
    here = os.getcwd()
    if sys.path[0] == here and not fedjax_cfl.__file__.startswith(os.path.join(here, "")):
        del sys.path[0]
    from fedjax_cfl.cli.main import enter  # only now: it imports other packages

    enter()
