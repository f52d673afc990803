"""Meshes that tests share, so that gloo's threads do not pile up."""

import threading

from torch.distributed.device_mesh import init_device_mesh

_MESHES = threading.local()  # of this rank, which may be a thread


def shared_mesh(*shape, names=None):
    """The mesh of this shape and these names, one for all programs and both sides: over gloo each group has a thread that
    wakes a hundred times a second, and those of a few hundred programs took as long as the programs.
    """
    known = _MESHES.__dict__
    if (shape, names) not in known:
        known[shape, names] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return known[shape, names]
