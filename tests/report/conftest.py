"""One of the runs reported on is a real one: the helpers of tests/launch are found from here."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
