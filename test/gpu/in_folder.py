"""What the tests of tools/gpu_check's parts share."""

import tempfile
import unittest
from pathlib import Path

from record import Record


class InFolder(unittest.TestCase):
    """A test with a folder of its own, and a record in it."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.record = Record(self.folder / "out")
