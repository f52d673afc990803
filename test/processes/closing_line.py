"""Runs a module's unittest cases and closes with the line that tools/test adds up."""

import sys
import unittest


def whole(test):
    """The test that a subTest is a part of."""
    return getattr(test, "test_case", test)


def closing_line(result):
    """A test with a part that fails has failed. One with a part that is skipped has passed, and the part is counted as
    skipped beside it."""
    failed = {whole(test).id(): whole(test) for test, _ in result.failures + result.errors}
    skipped = {test.id(): test for test, _ in result.skipped if test is whole(test) and test.id() not in failed}
    # A class that cannot be set up is no test that has run.
    ran = [test for test in [*failed.values(), *skipped.values()] if test.countTestCases() > 0]
    return f"{result.testsRun - len(ran)} passed, {len(failed)} failed, {len(result.skipped)} skipped"


def main():
    result = unittest.main(module="__main__", exit=False, verbosity=2).result
    print(closing_line(result), flush=True)
    sys.exit(not result.wasSuccessful())
