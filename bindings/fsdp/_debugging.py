"""What finds mistakes: the sanitizer's options, and how ranks check that they agree."""

from dataclasses import dataclass
from datetime import timedelta

from . import _checks
from ._module import FSDPModule


@dataclass(frozen=True, kw_only=True)
class SanitizerOptions:
    """A mode of `fully_shard` that finds what is wrong with memory and order, at the price of both: buffers are poisoned
    with NaN when they are made and given back, collectives deliver late, and writes past the library are found. The end
    of the backward, the next step, or `reshard` raises RuntimeError with what was found on this rank. Results are those
    without it; it may be on for some ranks only.

    seed: of the delays. quarantine_bytes: of released memory that is kept poisoned, in the whole process. max_delay: that a
    wait may take longer. Unset for a call of fully_shard: what FSDP_SANITIZE and FSDP_SANITIZE_SEED say.
    """

    is_enabled: bool = True
    seed: int = 1
    quarantine_bytes: int = 64 * 2**20
    max_delay: timedelta = timedelta(microseconds=500)


def set_schedule_check(
    root: FSDPModule,
    *,
    is_enabled: bool = True,
    late_after: timedelta | None = None,
    compare_after: timedelta | None = None,
    before_every_collective: bool | None = None,
) -> None:
    """On a root, before its first collective, the same on all ranks: how its ranks check that they launch the same
    collectives in the same order; where they do not, all raise ScheduleError, which names what each did. No communication.

    is_enabled: also FSDP_SCHEDULE_CHECK=0. late_after: a host that has waited this long for a collective reports what each
    rank is doing (half of the timeout, at most 30 s). compare_after: it looks whether the ranks disagree (a quarter of
    that, at most 1 s). before_every_collective: compares then, too, which is slow (if TORCH_DISTRIBUTED_DEBUG is DETAIL).

    Raises RuntimeError for a module that is no root or has communicated already; ValueError for times that are not
    positive, or a module that is not sharded; TypeError for what is no time.
    """
    module, = _checks.fsdp_modules([root], FSDPModule)
    for name, value in (("late_after", late_after), ("compare_after", compare_after)):
        if value is not None and not isinstance(value, timedelta):
            raise TypeError(f"set_schedule_check: expected {name} to be a datetime.timedelta or None, found {value!r}")
    if before_every_collective is not None:
        before_every_collective = _checks.flag(before_every_collective, "before_every_collective")
    module._core().set_schedule_check(_checks.flag(is_enabled, "is_enabled"), late_after, compare_after,
                                      before_every_collective)
