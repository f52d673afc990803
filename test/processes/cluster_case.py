"""Test cases on a network of namespaces, which are skipped where those are not allowed."""

import sys
import unittest

import launch

sys.path.append(str(launch.ROOT / "tools"))
import cluster  # noqa: E402


def skip_if_refused():
    try:
        cluster.Cluster(1).close()
    except cluster.NotAllowed as error:
        raise unittest.SkipTest(str(error)) from None


def new_cluster(test, *arguments):
    """A cluster that goes with the test."""
    network = cluster.Cluster(*arguments)
    test.addCleanup(network.close)
    return network


class ClusterCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        skip_if_refused()

    def new_cluster(self, *arguments):
        return new_cluster(self, *arguments)
