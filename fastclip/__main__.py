# SPDX-License-Identifier: BSD-3-Clause
"""`python -m fastclip`: the diagnosis of the installation, or a command as of `fastclip`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
