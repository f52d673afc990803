"""The counts that each module of tests closes with."""

import unittest

from closing_line import closing_line, main


def line_of(*tests):
    """What a module with these tests would close with."""
    case = type("Case", (unittest.TestCase,), {f"test_{test.__name__}": test for test in tests})
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return closing_line(result)


def passes(_):
    pass


def fails(case):
    case.fail()


def is_skipped(case):
    case.skipTest("whole")


def skips_two_of_three_rows(case):
    for row in range(3):
        with case.subTest(row=row):
            if row > 0:
                case.skipTest("a part")


def fails_in_two_of_three_rows(case):
    for row in range(3):
        with case.subTest(row=row):
            case.assertEqual(row, 0)


class ClosingLine(unittest.TestCase):
    def test_tests_are_counted_as_what_they_came_to(self):
        self.assertEqual(line_of(passes, fails, is_skipped), "1 passed, 1 failed, 1 skipped")

    def test_rows_that_are_skipped_count_as_skipped_and_their_test_as_passed(self):
        self.assertEqual(line_of(skips_two_of_three_rows), "1 passed, 0 failed, 2 skipped")

    def test_a_test_with_several_rows_that_fail_has_failed_once(self):
        self.assertEqual(line_of(passes, fails_in_two_of_three_rows), "1 passed, 1 failed, 0 skipped")

    def test_a_class_that_cannot_be_set_up_takes_nothing_from_what_has_passed(self):
        for error, expected in ((ValueError, "0 passed, 1 failed, 0 skipped"),
                                (unittest.SkipTest, "0 passed, 0 failed, 1 skipped")):
            with self.subTest(error=error.__name__):
                def set_up(_, error=error):
                    raise error("no world")

                case = type("Case", (unittest.TestCase,), {"test_it": passes, "setUpClass": classmethod(set_up)})
                result = unittest.TestResult()
                unittest.TestSuite([unittest.defaultTestLoader.loadTestsFromTestCase(case)]).run(result)
                self.assertEqual(closing_line(result), expected)


if __name__ == "__main__":
    main()
