#include "group/reduce/partial_sums.hpp"

#include <ATen/ATen.h>

#include "base/raw_view.hpp"
#include "group/param_group.hpp"

namespace fsdp {

namespace {

int64_t begin_of(const ParamGroup& group, const ReduceBucket& bucket, size_t i) {
  return reduced_offset(bucket.reduce_scatter, bucket.entries[i].segment) + group.parts().layout.local_start(bucket.indices[i]);
}

}  // namespace

at::Tensor local_piece(const ParamGroup& group, const ReduceBucket& bucket, size_t i) {
  const auto& spec = group.params()[bucket.indices[i]].spec;
  return raw_view(bucket.reduce_scatter.output, spec.local_sizes, spec.local_strides, begin_of(group, bucket, i));
}

at::Tensor gradient_piece(const ParamGroup& group, const ReduceBucket& bucket, size_t i) {
  const auto& param = group.params()[bucket.indices[i]];
  const auto& shared = param.sharded.shared();
  if (!shared) return local_piece(group, bucket, i);
  return shared->piece_on(bucket.reduce_scatter.output, param.spec.local_sizes, param.spec.local_strides,
                          begin_of(group, bucket, i));
}

void add_partial_sums(ParamGroup& group, ReduceBucket& bucket) {
  for (size_t i = 0; i < bucket.indices.size(); ++i) {
    auto& sum = group.gradients().store.partial_sum(bucket.indices[i]);
    if (sum.defined()) local_piece(group, bucket, i).add_(sum);
    sum.reset();
  }
}

void store_partial_sums(ParamGroup& group, ReduceBucket& bucket) {
  for (size_t i = 0; i < bucket.indices.size(); ++i) {
    auto& sum = group.gradients().store.partial_sum(bucket.indices[i]);
    const auto piece = local_piece(group, bucket, i);
    if (sum.defined() && sum.scalar_type() != piece.scalar_type()) sum = sum.to(piece.scalar_type());
    if (sum.defined())
      sum.add_(piece);
    else
      sum = piece;
  }
}

}  // namespace fsdp
