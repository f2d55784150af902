"""Makes the pictures of README anew: docs/report.png of a run's report, docs/estimate.svg of what a terminal shows.

python scripts/pictures.py output/quickstart_sft     (needs a Chromium, and Pillow, which matplotlib brings)
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from itertools import takewhile
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

from ds_encdec.estimate_memory import main as estimate_memory
from ds_encdec.report.write import write_report

DOCS = Path(__file__).resolve().parents[1] / "docs"
WIDTH, HEIGHT = 1320, 1190
"""Pixels of the report that are shown."""
COLUMNS = 100


def picture_report(run: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with tempfile.TemporaryDirectory() as folder:
        page, _ = write_report(run, out=Path(folder))
        shot = Path(folder) / "shot.png"
        options = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        options += [f"--window-size={WIDTH},{HEIGHT}", f"--screenshot={shot}"]
        subprocess.run([browser, *options, page.as_uri()], check=True, capture_output=True)
        with Image.open(shot) as image:
            few = image.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
            few.save(DOCS / "report.png", optimize=True)


def picture_estimate() -> None:
    os.environ["COLUMNS"] = str(COLUMNS)
    shown = Terminal()
    with redirect_stdout(shown):
        estimate_memory([])
    lines = takewhile(lambda line: not line.startswith("offload both"), shown.getvalue().splitlines())
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.from_ansi("\n".join(lines).rstrip()))
    console.save_svg(str(DOCS / "estimate.svg"), title="python -m ds_encdec.estimate_memory", theme=MONOKAI)


class Terminal(io.StringIO):
    """Takes text as a terminal does."""

    def isatty(self) -> bool:
        """True."""
        return True


if __name__ == "__main__":
    picture_report(Path(sys.argv[1]))
    picture_estimate()
