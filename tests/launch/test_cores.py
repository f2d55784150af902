"""How ranks on CPUs share the cores with others."""

from __future__ import annotations

import os

import pytest

from ds_encdec import train
from ds_encdec.launch.cores import wait_without_spinning


@pytest.mark.parametrize("theirs", [{}, {"OMP_WAIT_POLICY": "ACTIVE"}, {"GOMP_SPINCOUNT": "5"}, {"KMP_BLOCKTIME": "1"}])
def test_threads_do_not_spin_unless_the_user_decides(theirs: dict[str, str]) -> None:
    environ = dict(theirs)
    wait_without_spinning(environ)
    assert environ == (theirs or {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "0"})


def test_training_decides_before_it_loads_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(train, "_load", lambda *_: pytest.fail(os.environ.get("GOMP_SPINCOUNT", "unset")))
    with pytest.raises(pytest.fail.Exception, match=r"^1000$"):
        train.main(["--config", "ds_configs/quickstart.yaml", "--print-deepspeed-config"])
