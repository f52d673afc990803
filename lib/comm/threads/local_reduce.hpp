#pragma once

#include <span>

#include "fsdp/communicator.hpp"

namespace fsdp {

/// output = pieces[0] op pieces[1] op ..., strictly in that order, so that every run gives the same
/// bits; each step rounds to the dtype. CPU tensors, contiguous, of one dtype and size; `output`
/// may be any of the pieces. Works in the calling thread alone. Nothing is recorded and no version
/// moves: callers may stand inside a backward.
void reduce_in_order(const at::Tensor& output, std::span<const at::Tensor> pieces, ReduceOp op);

/// Copies the elements of `from` over those of `to` unless they are the same memory. Not recorded.
void copy_elements(const at::Tensor& to, const at::Tensor& from);

/// Copies `piece` over the `index`-th piece of `whole`, and the other way round. Not recorded.
void copy_to_piece(const at::Tensor& whole, int index, const at::Tensor& piece);
void copy_from_piece(const at::Tensor& piece, const at::Tensor& whole, int index);

/// The `index`-th of `count` equal pieces of a contiguous tensor, as a 1-D view. Not recorded.
at::Tensor piece_of(const at::Tensor& whole, int index, int count);

}  // namespace fsdp
