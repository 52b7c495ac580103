# SPDX-License-Identifier: Apache-2.0
"""`python -m fedsim` is `fedsim`."""

from __future__ import annotations

import sys

from fedsim.cli import main

if __name__ == "__main__":
    sys.exit(main())
