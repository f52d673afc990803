#include "tensor/gather_whole.hpp"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include "tensor/local_piece.hpp"
#include "tensor/shard_layout.hpp"

namespace fsdp {
namespace {

at::Tensor reduce_partial(const at::Tensor& local, ReduceOp op, Communicator& group,
                          const std::string& subject) {
  if (group.size() == 1 || local.numel() == 0) return local;
  if (local.scalar_type() == at::kBool) {
    // Backends do not add bools; a sum of truth values is an "or", as in LibTorch.
    const at::Tensor bytes = local.to(at::kByte, /*non_blocking=*/false, /*copy=*/true).contiguous();
    group.start_all_reduce(bytes, op == ReduceOp::kMin ? op : ReduceOp::kMax, subject)->wait();
    return bytes.to(at::kBool);
  }
  const at::Tensor reduced = local.clone(at::MemoryFormat::Contiguous);
  group.start_all_reduce(reduced, op, subject)->wait();
  return reduced;
}

/// Undoes one Shard(dim): `local` is this rank's piece of a tensor of `sizes` cut over `group`.
at::Tensor gather_shards(const at::Tensor& local, c10::IntArrayRef sizes, int64_t dim,
                         Communicator& group, const std::string& subject) {
  if (group.size() == 1) return local;
  // With the cut dimension in front, each piece is a run of memory and padding comes last.
  const at::Tensor rows = local.dim() == 0 ? local.reshape({1}) : local.movedim(dim, 0);
  std::vector<int64_t> row_first = rows.sizes().vec();
  row_first[0] = sizes.empty() ? 1 : sizes[dim];
  const ShardLayout layout(row_first, group.size());
  row_first[0] = layout.padded_rows();
  at::Tensor all = at::empty(row_first, local.options());

  if (layout.padded_numel() > 0) {
    const at::Tensor own = all.narrow(0, group.rank() * layout.rows_per_rank(), layout.rows_per_rank());
    own.narrow(0, 0, rows.size(0)).copy_(rows);
    own.narrow(0, rows.size(0), own.size(0) - rows.size(0)).zero_();
    group.start_all_gather(all, own, subject)->wait();
  }
  all = all.narrow(0, 0, layout.rows());
  return sizes.empty() ? all.reshape({}) : all.movedim(0, dim);
}

}  // namespace

at::Tensor gather_whole(at::Tensor local, c10::IntArrayRef sizes, const DeviceMesh& mesh,
                        const std::vector<Placement>& placements) {
  const std::string subject = fmt::format("full_tensor ({})", fmt::join(sizes, ", "));
  for (size_t m = 0; m < placements.size(); ++m)
    if (const auto* partial = std::get_if<Partial>(&placements[m]))
      local = reduce_partial(local, partial->op, *mesh.group(static_cast<int>(m)), subject);
  for (size_t m = placements.size(); m-- > 0;)
    if (const auto* shard = std::get_if<Shard>(&placements[m])) {
      // What this mesh dimension cut: the piece that the dimensions to its left had left over.
      const std::vector<Placement> to_the_left(placements.begin(), placements.begin() + m);
      const LocalPiece before = local_piece(sizes, mesh.shape(), mesh.coordinates(), to_the_left);
      local = gather_shards(local, before.sizes, shard->dim, *mesh.group(static_cast<int>(m)), subject);
    }
  return local;
}

at::Tensor broadcast_whole(const at::Tensor& tensor, const DeviceMesh& mesh) {
  const std::string subject = fmt::format("distribute_tensor ({})", fmt::join(tensor.sizes(), ", "));
  const at::Tensor whole = tensor.clone(at::MemoryFormat::Contiguous);
  if (whole.numel() == 0 || whole.is_meta()) return whole;
  // First every column takes its row 0, then every row its column 0.
  for (int m = 0; m < mesh.ndim(); ++m)
    if (mesh.size(m) > 1) mesh.group(m)->start_broadcast(whole, 0, subject)->wait();
  return whole;
}

}  // namespace fsdp
