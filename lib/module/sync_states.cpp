#include "module/sync_states.hpp"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <limits>

#include "base/require.hpp"
#include "base/stable_hash.hpp"
#include "collectives/piece_layout.hpp"
#include "comm/watch/awaited_collectives.hpp"
#include "dispatch/residency.hpp"
#include "param/replace_tensor.hpp"
#include "tensor/broadcast_whole.hpp"
#include "tensor/shard_part.hpp"

namespace fsdp {

namespace {

constexpr int64_t kBucketBytes = int64_t{250} << 20;
constexpr auto kSubject = "sync_from_rank0";

void reduce_to_least(const at::Tensor& values, const MeshInfo& info) {
  awaited::all_reduce(*info.shard_group, values, ReduceOp::kMin, kSubject);
  if (info.replicate_group) awaited::all_reduce(*info.replicate_group, values, ReduceOp::kMin, kSubject);
}

/// The least of every rank's values, and the greatest: their complements' least.
struct Spread {
  std::vector<int64_t> least, greatest;
};

Spread spread(const std::vector<int64_t>& values, const MeshInfo& info) {
  auto both = at::empty({2, static_cast<int64_t>(values.size())}, at::kLong);
  auto* data = both.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    data[i] = values[i];
    data[values.size() + i] = ~values[i];
  }
  both = both.to(info.mesh.device());
  reduce_to_least(both, info);
  both = both.to(at::kCPU);
  Spread result;
  data = both.mutable_data_ptr<int64_t>();
  for (size_t i = 0; i < values.size(); ++i) {
    result.least.push_back(data[i]);
    result.greatest.push_back(~data[values.size() + i]);
  }
  return result;
}

int64_t hash(const std::string& text) { return static_cast<int64_t>(stable_hash(text)); }

std::string describe(const std::string& name, const at::Tensor& tensor) {
  return fmt::format("'{}' ({}; strides {}; {}{})", name, fmt::join(tensor.sizes(), "x"),
                     fmt::join(tensor.strides(), "x"), c10::toString(tensor.scalar_type()),
                     tensor.requires_grad() ? "" : "; frozen");
}

/// The group's ranks are the module's: its states are agreed on with the module's.
bool is_of(const PreparedGroup& group, const MeshInfo& own) { return group.mesh_info.mesh == own.mesh; }

std::vector<std::string> describe(const ManagedStates& states, const PreparedGroup& group) {
  std::vector<std::string> lines;
  for (const size_t i : group.params) lines.push_back(describe(states.params[i].name, states.params[i].unsharded_param));
  return lines;
}

/// What all ranks of the module's own mesh have.
std::vector<std::string> describe(const ManagedStates& states, std::span<const PreparedGroup> groups,
                                  const MeshInfo& own) {
  std::vector<std::string> lines;
  for (const auto& group : groups) {
    if (!is_of(group, own)) continue;
    const auto more = describe(states, group);
    lines.insert(lines.end(), more.begin(), more.end());
  }
  for (const auto& buffer : states.buffers) lines.push_back(describe(buffer.name, buffer.tensor));
  return lines;
}

/// Among a buffer's gradient hooks, which it never runs: it has been sent. The mark goes with the
/// tensor, so that modules that share a buffer, in whatever groups, send it once.
struct SentMark final : torch::autograd::FunctionPreHook {
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    return grads;
  }
};

bool was_sent(const at::Tensor& buffer) {
  if (torch::autograd::impl::get_autograd_meta(buffer) == nullptr) return false;  // no hooks at all
  for (const auto& hook : torch::autograd::impl::hooks(buffer))
    if (dynamic_cast<const SentMark*>(hook.get()) != nullptr) return true;
  return false;
}

/// One parameter or buffer in a bucket.
struct Sent {
  at::Tensor source;  ///< the whole, on the first rank; elsewhere only its sizes and dtype are used
  std::function<void(const at::Tensor& whole)> receive;
  int64_t offset = 0;

  int64_t bytes() const { return source.numel() * static_cast<int64_t>(source.element_size()); }
  at::Tensor whole(const at::Tensor& bucket) const {
    return bucket.narrow(0, offset, bytes()).view(source.scalar_type()).view(source.sizes());
  }
};

void send_bucket(std::vector<Sent>& bucket, const MeshInfo& info) {
  int64_t total = 0;
  for (auto& sent : bucket) {
    sent.offset = total;
    total += aligned(sent.bytes());  // any dtype may start there
  }
  const auto buffer =
      at::empty({total}, at::TensorOptions().dtype(at::kByte).device(info.mesh.device()));
  if (is_first_rank(info.mesh))
    for (const auto& sent : bucket) sent.whole(buffer).copy_(sent.source);
  awaited::broadcast(*info.shard_group, buffer, 0, kSubject);
  if (info.replicate_group) awaited::broadcast(*info.replicate_group, buffer, 0, kSubject);
  for (const auto& sent : bucket) sent.receive(sent.whole(buffer));
  bucket.clear();
}

void send(std::vector<Sent> all, const MeshInfo& info) {
  std::vector<Sent> bucket;
  int64_t bytes = 0;
  for (auto& sent : all) {
    if (sent.bytes() == 0) continue;
    if (!bucket.empty() && bytes + sent.bytes() > kBucketBytes) {
      send_bucket(bucket, info);
      bytes = 0;
    }
    bytes += sent.bytes();
    bucket.push_back(std::move(sent));
  }
  if (!bucket.empty()) send_bucket(bucket, info);
}

void take_value(const at::Tensor& buffer, const at::Tensor& value) {
  if (buffer.is_meta())
    replace_tensor(buffer, value);
  else
    buffer.detach().copy_(value);
}

}  // namespace

void check_source(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info) {
  for (const auto& group : groups)
    for (const size_t i : group.params)
      require(states.params[i].tied || !states.params[i].unsharded_param.is_meta() || !is_first_rank(group.mesh_info.mesh),
              "{}: is on the meta device on the first rank, whose values sync_from_rank0 would give to "
              "the others; give it values there, or leave sync_from_rank0 out and use fsdp::materialize",
              states.params[i].name);
  if (!is_first_rank(info.mesh)) return;
  for (const auto& buffer : states.buffers)
    require(!buffer.tensor.is_meta(),
            "{}: this buffer is on the meta device on the first rank, whose values sync_from_rank0 "
            "would give to the others; give it values there",
            buffer.name);
}

namespace {

/// Each place of a module that holds a parameter or a buffer counts: a tied one's several do.
size_t count_places(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& own) {
  size_t places = states.buffers.size();
  for (const auto& group : groups)
    if (is_of(group, own))
      for (const size_t i : group.params) places += states.params[i].registrations.size();
  return places;
}

/// Throws unless all ranks of the mesh have the same lines and nobody failed. Returns whether any rank has more
/// to compare. places: that the tensors of the lines stand in.
bool agree(const std::vector<std::string>& lines, const MeshInfo& info, std::exception_ptr failure,
           bool has_more = false, size_t places = 0) {
  constexpr auto kNobody = std::numeric_limits<int64_t>::max();
  const int64_t here = info.replicate_rank() * info.shard_size() + info.shard_rank();
  const auto found = spread({failure ? here : kNobody, static_cast<int64_t>(lines.size()),
                             hash(fmt::format("{}", fmt::join(lines, "\n"))), has_more ? 1 : 0,
                             static_cast<int64_t>(places)},
                            info);
  if (failure) std::rethrow_exception(failure);
  require(found.least[0] == kNobody,
          "fully_shard with sync_from_rank0: rank {} of the mesh could not shard its module, so "
          "nothing is sharded here either; its own error says why",
          found.least[0]);
  require(found.least[1] == found.greatest[1] || found.least[4] != found.greatest[4],
          "fully_shard with sync_from_rank0: the ranks' modules hold parameters and buffers in {} places each, but tie them "
          "differently: they are from {} to {} tensors (here {}). Tie the same on all ranks. In Python, Module.to(\"meta\") "
          "unties a module: make it under torch.device(\"meta\") instead, or tie it again",
          found.least[4], found.least[1], found.greatest[1], lines.size());
  require(found.least[1] == found.greatest[1],
          "fully_shard with sync_from_rank0: the ranks' modules have from {} to {} parameters and "
          "buffers "
          "(here {}); shard the same modules in the same order on all ranks",
          found.least[1], found.greatest[1], lines.size());
  if (found.least[2] == found.greatest[2]) return found.greatest[3] > 0;
  std::vector<int64_t> hashes;
  for (const auto& line : lines) hashes.push_back(hash(line));
  const auto each = spread(hashes, info);
  for (size_t i = 0; i < lines.size(); ++i)
    require(each.least[i] == each.greatest[i],
            "fully_shard with sync_from_rank0: the ranks' modules differ; the first difference is "
            "at {} "
            "here. Shard the same modules in the same order on all ranks",
            lines[i]);
  return found.greatest[3] > 0;
}

}  // namespace

void agree_on_progress(const MeshInfo& info, std::exception_ptr failure) {
  BelowResidency below;
  agree({}, info, failure);
}

void agree_on_states(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info,
                     std::exception_ptr failure) {
  BelowResidency below;
  const auto is_apart = [&](const PreparedGroup& group) { return !is_of(group, info); };
  const bool has_more = std::any_of(groups.begin(), groups.end(), is_apart);
  if (!agree(failure ? std::vector<std::string>() : describe(states, groups, info), info, failure, has_more,
             failure ? 0 : count_places(states, groups, info)))
    return;
  // The groups of one mesh may differ where those of another do not; then nobody goes on.
  try {
    for (const auto& group : groups)
      if (is_apart(group)) agree(describe(states, group), group.mesh_info, nullptr);
  } catch (const UsageError&) {
    failure = std::current_exception();
  }
  agree({}, info, failure);
}

namespace {

void add_params(const ManagedStates& states, const PreparedGroup& group, std::vector<Sent>& all) {
  for (size_t i = 0; i < group.params.size(); ++i) {
    // What another group held has had its values sent with that one, if it was to have them.
    if (states.params[group.params[i]].tied) continue;
    all.push_back({states.params[group.params[i]].unsharded_param, [&group, i](const at::Tensor& whole) {
                     const auto& param = group.group->params()[i];
                     param.local_tensor().copy_(part_of(param.layout(), whole, group.mesh_info.shard_rank()));
                   }});
  }
}

}  // namespace

void send_states(const ManagedStates& states, std::span<const PreparedGroup> groups, const MeshInfo& info) {
  BelowResidency below;
  std::vector<Sent> all;  // over the module's own mesh
  for (const auto& group : groups) {
    if (is_of(group, info)) {
      add_params(states, group, all);
      continue;
    }
    std::vector<Sent> apart;
    add_params(states, group, apart);
    if (group.mesh_info.data_parallel_size() > 1) send(std::move(apart), group.mesh_info);
  }
  if (info.data_parallel_size() == 1) return;
  std::vector<std::pair<at::Tensor, at::Tensor>> received;
  std::vector<at::Tensor> marked;
  for (const auto& [buffer, name, is_exempt] : states.buffers) {
    if (was_sent(buffer)) continue;
    marked.push_back(buffer);
    if (buffer.numel() == 0 && buffer.is_meta())
      received.emplace_back(buffer,
                            at::empty(buffer.sizes(), buffer.options().device(info.mesh.device())));
    all.push_back({buffer, [&, buffer = buffer](const at::Tensor& whole) {
                     received.emplace_back(buffer, whole.clone());
                   }});
  }
  send(std::move(all), info);
  for (const auto& [buffer, value] : received) take_value(buffer, value);
  for (const auto& buffer : marked)
    torch::autograd::impl::add_hook(buffer, std::make_unique<SentMark>());
}

}  // namespace fsdp
