#include "comm/threads/local_reduce.hpp"

#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace fsdp {
namespace {

// The largest size that ATen still handles in the calling thread: it would start a team of threads
// for every one of gloo's threads, and for every rank that is a thread. Blocks of it stay in the
// cache from one addition to the next, too.
constexpr int64_t kBlock = at::internal::GRAIN_SIZE;

void combine(at::Tensor output, const at::Tensor& left, const at::Tensor& right, ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
      at::add_out(output, left, right);
      return;
    case ReduceOp::kMax:
      at::maximum_out(output, left, right);
      return;
    case ReduceOp::kMin:
      at::minimum_out(output, left, right);
      return;
  }
}

/// True if writing the result of the first two pieces to `output` would destroy a later one.
bool overwrites_later(const at::Tensor& output, std::span<const at::Tensor> pieces) {
  const void* target = output.const_data_ptr();
  return pieces.size() > 2 && std::any_of(pieces.begin() + 2, pieces.end(), [&](const auto& piece) {
           return piece.const_data_ptr() == target;
         });
}

void reduce_block(const at::Tensor& output, std::span<const at::Tensor> pieces, ReduceOp op) {
  combine(output, pieces[0], pieces[1], op);
  for (const at::Tensor& piece : pieces.subspan(2)) combine(output, output, piece, op);
}

char* piece_address(const at::Tensor& whole, int index, const at::Tensor& piece) {
  return static_cast<char*>(whole.mutable_data_ptr()) + index * piece.nbytes();
}

}  // namespace

void reduce_in_order(const at::Tensor& output, std::span<const at::Tensor> pieces, ReduceOp op) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (output.numel() == 0) return;
  if (pieces.size() == 1) return copy_elements(output, pieces[0]);
  const bool needs_scratch = overwrites_later(output, pieces);
  std::vector<at::Tensor> blocks(pieces.size());
  for (int64_t start = 0; start < output.numel(); start += kBlock) {
    const int64_t numel = std::min(kBlock, output.numel() - start);
    const auto block_of = [&](const at::Tensor& tensor) {
      return tensor.view({-1}).narrow(0, start, numel);
    };
    std::transform(pieces.begin(), pieces.end(), blocks.begin(), block_of);
    const at::Tensor target = block_of(output);
    const at::Tensor total = needs_scratch ? at::empty_like(target) : target;
    reduce_block(total, blocks, op);
    copy_elements(target, total);
  }
}

void copy_elements(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() == 0) return;
  if (to.is_cpu() && from.is_cpu()) {
    void* target = to.mutable_data_ptr();
    const void* source = from.const_data_ptr();
    if (target != source) std::memmove(target, source, to.nbytes());
    return;
  }
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  if (to.const_data_ptr() != from.const_data_ptr())
    to.view({-1}).copy_(from.view({-1}), /*non_blocking=*/true);
}

void copy_to_piece(const at::Tensor& whole, int index, const at::Tensor& piece) {
  if (piece.numel() == 0) return;
  if (!whole.is_cpu() || !piece.is_cpu())
    return copy_elements(piece_of(whole, index, whole.numel() / piece.numel()), piece);
  char* target = piece_address(whole, index, piece);
  if (target != piece.const_data_ptr())
    std::memmove(target, piece.const_data_ptr(), piece.nbytes());
}

void copy_from_piece(const at::Tensor& piece, const at::Tensor& whole, int index) {
  if (piece.numel() == 0) return;
  if (!whole.is_cpu() || !piece.is_cpu())
    return copy_elements(piece, piece_of(whole, index, whole.numel() / piece.numel()));
  const char* source = piece_address(whole, index, piece);
  if (source != piece.const_data_ptr())
    std::memmove(piece.mutable_data_ptr(), source, piece.nbytes());
}

at::Tensor piece_of(const at::Tensor& whole, int index, int count) {
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  const int64_t numel = whole.numel() / count;
  return whole.view({-1}).narrow(0, index * numel, numel);
}

}  // namespace fsdp
