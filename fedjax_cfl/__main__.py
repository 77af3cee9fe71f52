"""`python -m fedjax_cfl`."""

import sys

from fedjax_cfl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
