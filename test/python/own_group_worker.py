"""One rank of the parity suite over process groups of a user's own (own_group.py), which count: per group of
parameters, ours launch as many collectives as FSDP2's.

Usage: own_group_worker.py [PROGRAM...] RESULTS_FOLDER
"""

from collections import Counter

import torch.distributed.fsdp

import fsdp
import programs
from own_group import OwnGroup
from parity_worker import compare, run_all

MODULES = ("arguments", "controls", "gradients", "registered", "states")
PROGRAMS = {name: program for name, program in programs.PROGRAMS.items()
            if program.function.__module__.removeprefix("programs.") in MODULES}

# Where the numbers differ, and why.
FEWER = {
    "reshard_after_forward": "the group that backward begins with stays gathered at the end of forward",
    "registered_at_every_moment_True": "the same",
    "list_of_modules": "the same",
    "registered_around_evaluation": "the same",
    "registered_over_fewer_ranks": "the same",
    "hybrid_1": "nothing is sent among one replica",
    "chunked_loss": "a group in use is gathered and reduced once for all chunks",
    "accumulation_whose_last_backward_needs_no_parameter": "a backward that needs none of the parameters gathers none",
    "backwards_that_need_a_parameter_on_some_ranks": "the same",
}
MORE = {
    "manual_finalization": "every backward that synchronizes reduces; FSDP2 leaves groups whose inputs need no "
                           "gradient",
    "a_group_unused_in_the_last_micro_batch": "one step prefetches along the order it has learned",
    "partial_sums_of_other_parameters": "the same",
    "unsharded_gradients_are_seen": "set_reshard_after_backward(True) before a forward releases what is there",
}


class Counting:
    """One side, with what it launched."""

    def __init__(self, program):
        self.program, self.tolerance, self.launched = program, program.tolerance, []

    def run(self, api, ranks):
        OwnGroup.launched.clear()
        found = self.program.run(api, ranks)
        self.launched.append(counted(OwnGroup.launched))
        return found


def counted(launched):
    """How often, for each group of parameters: by kind and ranks, in ascending order, as sizes differ by padding."""
    times = {}
    for each, number in Counter(launched).items():
        times.setdefault(each.split(":")[0], []).append(number)
    return {kind: sorted(numbers) for kind, numbers in sorted(times.items())}


def total(counts):
    return sum(sum(numbers) for numbers in counts.values())


def reason(name, table):
    return next((text for prefix, text in table.items() if name.startswith(prefix)), None)


def compare_counts(program, ranks):
    counting = Counting(program)
    found = compare(counting, ranks)
    if len(counting.launched) != 2:
        return found
    theirs, ours = counting.launched
    name = program.function.__name__ + "".join(f"_{argument}" for argument in program.arguments)
    difference = total(ours) - total(theirs)
    is_expected = (reason(name, FEWER) and difference <= 0) or (reason(name, MORE) and difference >= 0)
    if ours != theirs and not is_expected:
        found.append(f"launched {ours}, FSDP2 {theirs}")
    return found


if __name__ == "__main__":
    run_all(compare_counts, PROGRAMS, backend="own")
