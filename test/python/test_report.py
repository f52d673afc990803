"""What a user sees of a run is what happened: reports, pages, timelines, statistics, ranges and log lines, against figures
that are worked out here, from shapes and from the order of the modules."""

import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from html.parser import HTMLParser
from pathlib import Path

import rank_results
from closing_line import main

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@functools.lru_cache
def results(ranks):
    return rank_results.run_on(ranks, Path(__file__).with_name("report_checks.py"), timeout_s=300)


@functools.lru_cache
def page():
    """What rank 0 of two has written, and the figures that it must show."""
    (first, *_), ended = results(2)
    if "page" not in first:
        raise AssertionError(ended)
    return first["page"], first["figures"]


class Rows(HTMLParser):
    """The table rows of a page, by the table's id, as texts; the kinds of marks in its charts; its tiles by name."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.marks, self.tiles, self._cell = {}, [], {}, None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        if tag == "table":
            self._rows = self.tables.setdefault(attrs["id"], [])
        elif tag == "tr":
            self._rows.append([])
        elif tag == "td":
            self._cell = ""
        if "data-kind" in attrs:
            self.marks.append(attrs["data-kind"])
        if "data-name" in attrs:
            self.tiles[attrs["data-name"]] = attrs["data-value"]

    def handle_data(self, data):
        if self._cell is not None:
            self._cell += data

    def handle_endtag(self, tag):
        if tag == "td":
            self._rows[-1].append(self._cell)
            self._cell = None


class Report(unittest.TestCase):
    def expect(self, name, ranks):
        found, ended = results(ranks)
        for rank, of_rank in enumerate(found):
            self.assertIn(name, of_rank, f"rank {rank} of {ranks} did not get here: {ended}")
            self.assertTrue(of_rank[name] == "", f"rank {rank} of {ranks}: {of_rank[name]}")


class Page(unittest.TestCase):
    def check_figures(self, text):
        _, figures = page()
        rows = Rows(text)
        groups = [[row[0], row[2].replace(",", ""), row[3].replace(",", "")] for row in rows.tables["fsdp-groups"] if row]
        self.assertEqual(groups, figures["groups"])
        collectives = [[row[0], row[1], row[4].replace(",", "")] for row in rows.tables["fsdp-collectives"] if row]
        self.assertEqual(collectives, figures["collectives"])
        self.assertEqual(rows.tiles["bytes of this rank's shards"], figures["sharded_bytes"])
        self.assertEqual(rows.marks.count("gather"), sum(each[0] == "all_gather" for each in collectives))
        self.assertEqual(rows.marks.count("reduction"), sum(each[0] == "reduce_scatter" for each in collectives))
        for curve in ("live", "unsharded", "packed"):
            self.assertEqual(rows.marks.count(curve), 1)

    def test_it_has_the_figures_and_asks_no_network_for_anything(self):
        text, _ = page()
        self.check_figures(text)
        for word in ("<script", "src=", "@import", "url("):
            self.assertNotIn(word, text)

    def test_a_browser_loads_it_and_shows_the_figures(self):
        browser = next(filter(None, map(shutil.which, BROWSERS)), None)
        if browser is None:
            self.skipTest(f"no browser is installed: none of {', '.join(BROWSERS)}")
        text, _ = page()
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "page.html").write_text(text)
            ran = subprocess.run([browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile",
                                  "--dump-dom", f"file://{folder}/page.html"], capture_output=True, text=True, timeout=200,
                                 env={**os.environ, "HOME": folder})
        self.assertIn("fsdp report, rank 0", ran.stdout, ran.stderr[-2000:])
        self.check_figures(ran.stdout)


class Logs(unittest.TestCase):
    def run_alone(self, setup, **environment):
        """A step of one rank, behind `setup`; what it prints to standard error."""
        program = f"""
import logging, os, sys
{setup}
import torch, torch.distributed as dist, fsdp
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp.fully_shard(torch.nn.Linear(4, 4))
for _ in range(2):
    model(torch.ones(1, 4)).sum().backward()
"""
        inherited = {name: value for name, value in os.environ.items() if name != "FSDP_LOG_LEVEL"}
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200,
                             env={**inherited, **environment, "PYTHONPATH": str(rank_results.PACKAGE)})
        self.assertEqual(ran.returncode, 0, ran.stderr)
        return ran.stderr

    def test_the_first_step_is_one_line_of_the_logger(self):
        seen = self.run_alone("""
handler = logging.StreamHandler()
handler.setFormatter(logging.Formatter("%(name)s|%(levelname)s|%(fsdp_rank)d|%(message)s"))
logging.getLogger("fsdp").addHandler(handler)
logging.getLogger("fsdp").setLevel(logging.INFO)""")
        lines = [line for line in seen.splitlines() if line.startswith("fsdp|") and "first step" in line]
        # 4 x 4 weights and 4 biases of 4 bytes.
        self.assertEqual(lines, ["fsdp|INFO|0|first step: 1 groups, 80 bytes sharded on this rank, 80 unsharded; "
                                 "1 ranks over single"])

    def test_it_is_not_shown_unless_asked_for(self):
        self.assertNotIn("first step", self.run_alone(""))
        self.assertIn("[INFO] first step: 1 groups", self.run_alone("", FSDP_LOG_LEVEL="info"))

    def test_nvtx_is_a_warning_only_where_torch_is_built_without_cuda(self):
        import torch

        seen = self.run_alone("", FSDP_NVTX="1")
        self.assertEqual("FSDP_NVTX: this LibTorch has no CUDA" in seen, torch.version.cuda is None, seen)


if __name__ == "__main__":
    from report_checks import CHECKS

    for _name in CHECKS:
        for _ranks in (1, 2):
            setattr(Report, f"test_{_name}_on_{_ranks}", functools.partialmethod(Report.expect, _name, _ranks))
    main()
