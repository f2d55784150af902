"""Makes docs/estimate.svg, the picture of README that shows what a terminal does: python scripts/dev/pictures.py

docs/report.png is a screenshot of `ds-encdec report output/quickstart_sft`, 1,320 pixels wide.
"""

import io
import os
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from ds_encdec.estimate_memory import main as estimate_memory

DOCS = Path(__file__).resolve().parents[2] / "docs"
COLUMNS = 100


class Terminal(io.StringIO):
    """Takes text as a terminal does."""

    def isatty(self) -> bool:
        """True."""
        return True


if __name__ == "__main__":
    os.environ["COLUMNS"] = str(COLUMNS)
    with redirect_stdout(Terminal()) as shown:
        estimate_memory([])
    lines = takewhile(lambda line: not line.startswith("offload both"), shown.getvalue().splitlines())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines).rstrip()))
    console.save_svg(str(DOCS / "estimate.svg"), title="python -m ds_encdec.estimate_memory", theme=MONOKAI)
