#include "group/shard_rows.hpp"

#include <ATen/ATen.h>

#include <algorithm>
#include <utility>
#include <vector>

#include "group/param_group.hpp"
#include "param/param_rows.hpp"

namespace fsdp {

void make_rows(GroupParts& parts, std::span<const TiedParam> tied) {
  const auto& config = parts.config;
  const auto& layout = parts.layout;
  std::vector<at::Tensor> pieces;
  for (const auto& param : parts.params)
    pieces.push_back(config.host_memory ? at::Tensor() : own_memory(param.spec, param.unsharded_param(), config.device));
  for (const auto& one : tied) pieces[one.index] = piece_of(parts, one);
  const bool all_alias = std::ranges::all_of(pieces, [](const at::Tensor& piece) { return piece.defined(); });
  const auto bytes = all_alias ? at::Tensor() : parts.shard.make(layout.stored().rank_bytes(), config.device);
  for (size_t i = 0; i < pieces.size(); ++i) {
    auto& param = parts.params[i];
    const bool is_new = !pieces[i].defined();
    if (is_new) pieces[i] = bytes.narrow(0, layout.stored_offset(i), layout.stored_bytes(i));
    if (param.sharded.is_taken()) continue;  // its sharded parameter is another group's still
    if (is_new && !param.unsharded_param().is_meta()) copy_rows(param.spec, param.unsharded_param().detach(), pieces[i]);
    param.make_sharded_param(parts.link, i, pieces[i]);
  }
  parts.shard.set(bytes, std::move(pieces));
  copy_tied_rows(parts, tied);
}

}  // namespace fsdp
