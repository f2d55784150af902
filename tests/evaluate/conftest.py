"""The tests of judging use the tiny models of the model's tests, and the checkpoints of the checkpoints' tests."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / name) for name in ("model", "checkpoint")]
