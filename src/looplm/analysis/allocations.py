"""Peak memory of a piece of code, counted from every tensor allocation (temporaries inside kernels included)."""

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(work: Callable[[], object]) -> int:
    """The highest total of bytes that `work()` held at once on the CPU, beyond what existed before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
