#pragma once

#include <ATen/core/Tensor.h>

#include "dispatch/stand_in/stand_in.hpp"

namespace fsdp {

/// Note [Gradients of stand-ins]
/// Autograd records an operator that has ordinary tensors beside a stand-in on the unsharded parameter. All else that
/// consumes the stand-in is recorded with an edge to the stand-in itself: operators on it alone, and what is no operator (a
/// torch.autograd.Function of a user's, a reentrant checkpoint). The latter compute with the unsharded parameter all the
/// same, and the gradient that they bring is an ordinary tensor, of this rank alone. So that edge leads to a fork: gradients of
/// the kind go on to the stand-in, ordinary ones to the unsharded parameter, with whose they are reduced.
///
/// The other way round, what takes a stand-in's place may have no history where the stand-in has one: a detached copy that a
/// checkpoint gave requires_grad, what a Function has returned. It gets one that leads to the stand-in.

/// Gives the leaf `tensor` the fork, as autograd is about to ask for its accumulator, to lead an edge there.
void lead_edge_to_fork(const at::Tensor& tensor, StandIn& stand_in);
/// Gives the leaf its own accumulator again, for whoever means the leaf itself.
void lead_edge_to_leaf(const at::Tensor& tensor, StandIn& stand_in);
/// Lets go of the fork: an edge that was asked for is there, or will never be.
void end_leading();

/// Returns `ordinary`, with the history of the stand-in `tensor` in whose place it comes.
at::Tensor with_history_of(const at::Tensor& tensor, const at::Tensor& ordinary);

}  // namespace fsdp
