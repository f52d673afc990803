"""Runs a module's unittest cases and closes with the line that tools/test adds up."""

import sys
import unittest


def main():
    program = unittest.main(module="__main__", exit=False, verbosity=2)
    result = program.result
    failed = len({str(test) for test, _ in result.failures + result.errors})
    skipped = len(result.skipped)
    passed = result.testsRun - failed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    sys.exit(failed > 0)
