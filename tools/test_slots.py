"""How many test programs may run side by side: as many as there are processors, and more while these are idle, since
many tests wait for processes, timeouts or the network's clock."""

import os
import time
from pathlib import Path

IDLE_SHARE = 0.3  # of all processors' time, above which one more program may start
PAUSE_S = 0.5  # between two of those, so that the last one's work shows
FREE_MEMORY = 3 << 30  # bytes that are left for the programs that run


class Slots:
    def __init__(self, processors=None):
        self.processors = processors or len(os.sched_getaffinity(0))
        self._before = _processor_times()
        self._last_start = 0.0

    def may_start(self, running):
        """running: programs that have been started and have not ended."""
        if running < self.processors:
            return self._start()
        if running >= 4 * self.processors or time.monotonic() - self._last_start < PAUSE_S:
            return False
        idle, total = (now - before for now, before in zip(_processor_times(), self._before))
        if total == 0 or idle / total < IDLE_SHARE or _available_memory() < FREE_MEMORY:
            self._look_again()
            return False
        return self._start()

    def _start(self):
        self._last_start = time.monotonic()
        self._look_again()
        return True

    def _look_again(self):
        self._before = _processor_times()


def _processor_times():
    """(idle, all) of all processors, in the kernel's ticks."""
    fields = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return fields[3] + fields[4], sum(fields)


def _available_memory():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return FREE_MEMORY
