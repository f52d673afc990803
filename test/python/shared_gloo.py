"""One gloo thread for all of torch's process groups: each has one else, which wakes a hundred times a second, and those of a
few hundred programs take as long as the programs.
"""

import functools

import torch.distributed.distributed_c10d as c10d


@functools.cache
def _device():
    return c10d.ProcessGroupGloo.create_default_device()


def gloo_over_one_thread(store, rank, size, timeout, **more):
    """A gloo group. more: of its options."""
    options = c10d.ProcessGroupGloo._Options()
    options._devices, options._timeout = [_device()], timeout
    for name, value in more.items():
        setattr(options, name, value)
    return c10d.ProcessGroupGloo(store, rank, size, options)


def share_gloo_thread():
    """From now on torch makes its gloo groups so. Where it does in another way than by this function, nothing changes."""
    if not hasattr(c10d, "_create_gloo_process_group"):
        return

    def create(asked, _backend_options):
        return gloo_over_one_thread(asked.store, asked.group_rank, asked.group_size, asked.timeout,
                                    enable_reconfigure=asked.enable_reconfigure,
                                    global_ranks_in_group=asked.global_ranks_in_group, group_name=asked.group_id)

    c10d._create_gloo_process_group = create
