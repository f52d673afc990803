"""Each class and function of the public headers that is defined in the library is marked, so that a library which hides its
other symbols still has it. `.ci/weekly public_symbols` builds programs with such a library."""

import re
import shutil
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "test" / "processes")]
import docs_headers  # noqa: E402
from closing_line import main  # noqa: E402

HEADERS = ROOT / docs_headers.HEADERS
# Defined in the header itself.
HERE = re.compile(r"\b(inline|constexpr|template|using|enum)\b")


def declaration(header, line):
    """From `template <...>` above it to where it ends or its body begins."""
    path = HEADERS / header
    lines = (path if path.exists() else path.with_name(header + docs_headers.MADE)).read_text().splitlines()
    first = line - 1
    while lines[first - 1].strip() and not lines[first - 1].startswith(("//", "#", "}")) and lines[first - 1][-1] not in ";{":
        first -= 1
    return re.split(r"[;{]", "\n".join(lines[first:line + 20]))[0]


def names_of_the_library():
    with tempfile.TemporaryDirectory() as folder:
        by_header = docs_headers.read_names(docs_headers.run_doxygen(ROOT, Path(folder)))
    for names in by_header.values():
        for name in names:
            if name.kind in ("function", "class", "struct"):
                text = declaration(name.header, name.line)
                if not HERE.search(text):
                    yield name.name, text


@unittest.skipIf(shutil.which("doxygen") is None, "needs doxygen; tools/docs installs it")
class PublicSymbols(unittest.TestCase):
    def test_each_is_marked(self):
        found = dict(names_of_the_library())
        self.assertGreater(len(found), 100)
        self.assertEqual([name for name, text in found.items() if "FSDP_API" not in text], [])


if __name__ == "__main__":
    main()
