"""Estimates what a run holds in the memory of its GPUs and hosts, whether it fits, and which settings to choose.

    python -m ds_encdec.estimate_memory [--config X] [--model ID_OR_DIR] [--gpus 8] [--nodes 1] [--gpu h100-80gb]

Without arguments, the default run on 8 x a100-80gb. It is the verb `ds-encdec estimate-memory`; docs/estimate-memory.md
explains the table and its formulas. Neither torch nor the network is needed."""

import sys
from collections.abc import Sequence

from ds_encdec import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Estimate by the command line; return the process's exit code."""
    return cli.main(["estimate-memory", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
