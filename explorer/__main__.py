"""`python -m tl_megamoe.explorer`: the `tl-megamoe` command, as torchrun starts it."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
