"""Processes that are ranks, and the files of JSON lines that they write."""

import json
import time

GRACE_S = 5  # for the other ranks, once one has ended


def wait_for_all(processes, limit_s, look=lambda: None, still_s=float("inf")):
    """Ends those that are left when time is up, some time after one has failed, or when what `look` returns has stayed the same
    for so long. look: called all the while."""
    end, has_failed = time.monotonic() + limit_s, False
    seen, since = None, time.monotonic()
    while any(process.poll() is None for process in processes) and time.monotonic() < end:
        if not has_failed and any(process.poll() not in (None, 0) for process in processes):
            has_failed, end = True, min(end, time.monotonic() + GRACE_S)
        now_seen = look()
        if now_seen != seen:
            seen, since = now_seen, time.monotonic()
        if time.monotonic() - since > still_s:
            break
        time.sleep(0.1)
    for process in processes:
        process.kill()
        process.wait()


def read_lines(path):
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
