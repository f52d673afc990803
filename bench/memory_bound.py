"""A lower bound of the memory that a step of fully sharded training takes, from what each operator of the unsharded
model's own step finds alive.

Whoever shards has at every operator at least: what the plain model has alive there besides its parameters and their
gradients; this rank's shards, and those of the gradients that are reduced; the whole parameters of the groups that
the operator reads, and of those that an option keeps; in backward the whole gradients so far of a group that lacks some
yet. Buffers to pack in, and groups gathered ahead, are not among what is needed.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """Parameters that are gathered together; bytes."""

    whole: int
    local: int  # of this rank
    is_kept: bool = False  # from its first use to its last gradient


@dataclass(frozen=True)
class Operator:
    alive: int  # bytes, the most during it, besides whole parameters and their gradients
    reads: tuple  # groups, by number
    gradients: tuple  # (group, bytes) of each gradient that it makes


def lower_bound(operators, groups):
    """Of the peak, in bytes. All parameters are trainable."""
    to_come = [0] * len(groups)
    for operator in operators:
        for group, _ in operator.gradients:
            to_come[group] += 1
    kept, unreduced = set(), [0] * len(groups)
    local, reduced, most = sum(group.local for group in groups), 0, 0
    for operator in operators:
        kept.update(group for group in operator.reads if groups[group].is_kept)
        for group, size in operator.gradients:
            unreduced[group] += size
            to_come[group] -= 1
        gathered = sum(groups[group].whole for group in kept.union(operator.reads))
        most = max(most, operator.alive + local + reduced + gathered + sum(unreduced))
        for group in {group for group, _ in operator.gradients if to_come[group] == 0}:
            unreduced[group] = 0
            reduced += groups[group].local
            kept.discard(group)
    return most
