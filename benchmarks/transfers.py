"""What the link between host and device gives: copies of several sizes, each way alone and both at once.

    python benchmarks/transfers.py

The copies are the engine's own: registered anonymous memory, the device's copy lanes, one large contiguous copy each.
"""

from __future__ import annotations

import argparse
import json

from megatrain.devices import open_device
from megatrain.rates import transfer_seconds


def main() -> None:
    """One line of JSON a size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64, 256, 1024])
    parser.add_argument("--total-mib", type=int, default=8192, help="copied each way for each size")
    args = parser.parse_args()
    device = open_device(args.device)
    counts = {"h2d": 0, "d2h": 0}
    for mib in args.mib:
        nbytes, repeats = mib << 20, max(1, args.total_mib // mib)
        row: dict[str, float] = {"mib": mib}
        for name, lanes in (("h2d", ["h2d"]), ("d2h", ["d2h"]), ("both_each_way", ["h2d", "d2h"])):
            transfer_seconds(device, lanes, nbytes, 1, counts)
            row[f"{name}_gb_per_s"] = nbytes * repeats / transfer_seconds(device, lanes, nbytes, repeats, counts) / 1e9
        print(json.dumps(row), flush=True)
    device.close()


if __name__ == "__main__":
    main()
