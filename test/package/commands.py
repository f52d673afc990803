"""Runs what a user would type."""

import os
import subprocess


def run(*command, environment=None, fails=False, **options):
    """Runs a command and returns its output; one that ends otherwise than expected shows what it printed."""
    result = subprocess.run([str(part) for part in command], text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})},
                            **options)
    if (result.returncode != 0) != fails:
        raise AssertionError(f"{' '.join(map(str, command))}\nexit code {result.returncode}\n{result.stdout}")
    return result.stdout
