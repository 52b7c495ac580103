# SPDX-License-Identifier: Apache-2.0
"""python tests/fuzz scenarios|folders --cases 1000 --seed 1: fuzz for long; what breaks a rule is printed."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

from sandbox import warm_up


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests/fuzz", description=__doc__)
    parser.add_argument("what", choices=("scenarios", "folders"))
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    if chosen.what == "scenarios":
        from scenario_fuzzer import Tally, failures, write_base
    else:
        from folder_fuzzer import Tally, failures, write_base  # type: ignore[assignment]
    with tempfile.TemporaryDirectory(prefix="fedsim-fuzz-") as made:
        folder = Path(made)
        os.chdir(folder)
        write_base(folder)
        warm_up()
        tally, found, started = Tally(), 0, time.monotonic()
        for failure in failures(chosen.seed, range(chosen.first, chosen.first + chosen.cases), folder, tally):
            found += 1
            print(f"{failure}\n", flush=True)
        print(f"{chosen.what}, seed {chosen.seed}: {tally}, {found} failures, {time.monotonic() - started:.0f} s")
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main())
