"""Measured steps, against sizes known by hand."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import pytest
import torch
from torch import Tensor, nn
from tracked import Tracked, tracking

CPU = torch.device("cpu")
ROWS, WIDTH = 512, 256
WEIGHT_BYTES = WIDTH * WIDTH * 4
STATE_BYTES = ROWS * WIDTH * 4


def nearly(num_bytes: int) -> object:
    """Scalars beside: losses, and the optimizer's counters."""
    return pytest.approx(num_bytes, abs=256)


def test_each_phase_holds_what_it_should() -> None:
    with tracking(nn.Module(), None, CPU) as before:
        pass
    left_over = before.resting_bytes  # by other tests of this process
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, WIDTH, bias=False))
    optimizer, inputs = torch.optim.AdamW(model.parameters(), foreach=False), torch.ones(ROWS, WIDTH)
    model(inputs).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    with tracking(model, optimizer, CPU) as found:
        loss = model(inputs).sum()
        found.end_phase("forward")
        loss.backward()
        del loss
        found.end_phase("backward")
        optimizer.step()
        optimizer.zero_grad()
        found.end_phase("step")
    forward, backward, step = (found.phases[name] for name in ("forward", "backward", "step"))
    # Two weights, two moments each, and the inputs.
    assert found.resting_bytes - left_over == nearly(6 * WEIGHT_BYTES + STATE_BYTES)
    assert step.held_bytes == nearly(found.resting_bytes)
    # The output of the tanh, which its backward pass needs, beside that of one of the layers, which goes.
    assert forward.at_peak["rest"] == nearly(2 * STATE_BYTES)
    assert forward.held_bytes - found.resting_bytes == nearly(STATE_BYTES)
    assert backward.held_bytes - found.resting_bytes == nearly(2 * WEIGHT_BYTES)  # gradients
    # Adam, one parameter after the other: the first one's denominator is there until the second one's is.
    assert step.at_peak["parameters"] == step.at_peak["gradients"] == 2 * WEIGHT_BYTES
    assert step.at_peak["optimizer"] == nearly(4 * WEIGHT_BYTES)
    assert step.at_peak["engine"] - left_over == nearly(STATE_BYTES)
    assert step.at_peak["rest"] == nearly(3 * WEIGHT_BYTES)
    highest = max(found.phases.values(), key=lambda phase: phase.peak_bytes)
    assert found.peak_bytes == sum(highest.at_peak.values())


def resized_storage() -> Tensor:
    tensor = torch.empty(2**20)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "held_bytes"),
    [
        (lambda: torch.empty(2**20).view(2, -1), 2**22),
        (resized_storage, 0),
        (lambda: torch.from_numpy(torch.ones(2**20).numpy().copy()) + 0, 2**22),
        (lambda: torch.empty(2**20, device="meta"), 0),
    ],
    ids=["view", "resized", "from numpy", "meta"],
)
def test_what_is_held(make: Callable[[], Tensor], held_bytes: int) -> None:
    original = torch.UntypedStorage.resize_
    with tracking(nn.Module(), None, CPU) as tracked:
        large = torch.empty(2**23)
        del large
        tracked.end_phase("all")
        kept = make()
        tracked.end_phase("all")  # a phase that ends again keeps its highest peak
    assert kept is not None
    assert tracked.phases["all"].held_bytes - tracked.resting_bytes == held_bytes
    assert tracked.phases["all"].peak_bytes - tracked.resting_bytes == 2**25
    assert torch.UntypedStorage.resize_ is original


def test_agrees_with_the_allocator() -> None:
    """Bytes above its beginning, by the events of torch's CPU allocator, those inside operators included.

    The profiler forgets what was there before it: so everything is new to it.
    """

    def step(tracked: Tracked | None = None) -> None:
        model = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
        loss = model(torch.ones(4, 128, 128)).square().sum()
        loss.backward()
        if tracked:
            tracked.end_phase("all")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    expected = max(accumulate(change for _, change in changes))
    with tracking(nn.Module(), None, CPU) as tracked:
        step(tracked)
    assert tracked.peak_bytes - tracked.resting_bytes == pytest.approx(expected, rel=0.02)
