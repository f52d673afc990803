// Where a group's parameters lie: what the ranks' shards say, put together as an all-gather does, is the parameters.
#include <ATen/ATen.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>

#include "comm/forwarding.hpp"
#include "group/group_layout.hpp"
#include "tensor/shard_part.hpp"
#include "support/split_log.hpp"
#include "tensor/strides.hpp"

namespace fsdp::test {
namespace {

/// A rank that never communicates, packs small pieces as some backends do, and says that it is on that device.
class PackingRank final : public ForwardingCommunicator {
 public:
  PackingRank(int rank, int size, std::optional<int64_t> packs_below, c10::DeviceType device)
      : ForwardingCommunicator(SplitLog::world(rank, size)), packs_below_(packs_below), device_(device) {}

  c10::DeviceType device_type() const override { return device_; }

  bool launches_batches() const override { return packs_below_.has_value(); }
  int64_t packs_below() const override { return packs_below_.value_or(0); }
  std::shared_ptr<Communicator> split(std::span<const int> members, const std::string& name) override {
    return inner().split(members, name);
  }

 private:
  std::optional<int64_t> packs_below_;
  c10::DeviceType device_;
};

/// One group as all of its ranks see it.
struct DrawnGroup {
  std::vector<LayoutParam> params;
  std::vector<std::shared_ptr<PackingRank>> ranks;
  std::vector<GroupLayout> layouts;  // by rank
  at::ScalarType dtype = at::kLong;

  std::vector<at::Tensor> wholes() const {
    std::vector<at::Tensor> all;
    int64_t first = 1;  // 0 is padding
    for (const auto& param : params) {
      const int64_t numel = c10::multiply_integers(param.sizes);
      all.push_back(at::arange(first, first + numel, at::TensorOptions().dtype(dtype)).view(param.sizes));
      first += numel;
    }
    return all;
  }
};

DrawnGroup draw_group(std::mt19937_64& draw, ParamLayout kind) {
  const auto below = [&](uint64_t bound) { return static_cast<int64_t>(draw() % bound); };
  DrawnGroup group;
  const int64_t count = 1 + below(6);
  for (int64_t i = 0; i < count; ++i) {
    std::vector<int64_t> sizes;
    for (int64_t d = below(4); d > 0; --d) sizes.push_back(1 + below(7));
    group.params.push_back({.sizes = sizes,
                            .strides = row_major_strides(sizes),
                            .stored_itemsize = 8,
                            .gathered_itemsize = 8,
                            .block_numel = kind == ParamLayout::kFlat ? 1 + below(4) : 1,
                            .run_key = below(2)});
  }
  const int size = static_cast<int>(1 + below(5));
  std::optional<int64_t> packs_below;
  if (below(2) == 0) packs_below = below(200);
  const auto device = below(2) == 0 ? c10::DeviceType::CUDA : c10::DeviceType::CPU;
  for (int r = 0; r < size; ++r) {
    group.ranks.push_back(std::make_shared<PackingRank>(r, size, packs_below, device));
    group.layouts.emplace_back(group.params, kind, *group.ranks.back());
  }
  return group;
}

int64_t itemsize(const DrawnGroup& group) { return static_cast<int64_t>(c10::elementSize(group.dtype)); }

/// What rank r keeps; no two of its parameters share a byte.
at::Tensor shard_of(const DrawnGroup& group, const std::vector<at::Tensor>& wholes, size_t rank) {
  const auto& layout = group.layouts[rank];
  const int64_t bytes = itemsize(group);
  const auto shard = at::zeros({layout.stored().rank_bytes() / bytes}, group.dtype);
  for (size_t i = 0; i < wholes.size(); ++i) {
    if (layout.stored_bytes(i) == 0) continue;
    auto place = shard.narrow(0, layout.stored_offset(i) / bytes, layout.stored_bytes(i) / bytes);
    CHECK_FALSE(place.any().item<bool>());
    const auto part = part_of(layout.shard(i), wholes[i], static_cast<int>(rank)).reshape({-1});
    REQUIRE(part.numel() <= place.numel());
    place.narrow(0, 0, part.numel()).copy_(part);
  }
  return shard;
}

/// The shards' pieces side by side, segment by segment.
at::Tensor gathered(const DrawnGroup& group, const std::vector<at::Tensor>& shards) {
  const int64_t bytes = itemsize(group);
  const auto& to = group.layouts[0].gathered();
  const auto unsharded = at::zeros({to.total_bytes() / bytes}, group.dtype);
  for (size_t rank = 0; rank < shards.size(); ++rank)
    for (size_t segment = 0; segment < to.count(); ++segment) {
      const int64_t numel = to.piece_bytes(segment) / bytes;
      const int64_t begin = to.tensor_offset(segment) / bytes + static_cast<int64_t>(rank) * numel;
      unsharded.narrow(0, begin, numel)
          .copy_(shards[rank].narrow(0, group.layouts[rank].stored().offset(segment) / bytes, numel));
    }
  return unsharded;
}

void check_whole(const DrawnGroup& group, const std::vector<size_t>& but = {}) {
  const auto wholes = group.wholes();
  std::vector<at::Tensor> shards;
  for (size_t rank = 0; rank < group.layouts.size(); ++rank) shards.push_back(shard_of(group, wholes, rank));
  const auto unsharded = gathered(group, shards);
  for (size_t i = 0; i < wholes.size(); ++i) {
    CAPTURE(i);
    if (std::find(but.begin(), but.end(), i) != but.end()) continue;
    for (const auto& layout : group.layouts) CHECK(layout.unsharded_offset(i) == group.layouts[0].unsharded_offset(i));
    const auto shown = unsharded.narrow(0, group.layouts[0].unsharded_offset(i) / itemsize(group), wholes[i].numel());
    CHECK(at::equal(shown, wholes[i].reshape({-1})));
  }
}

constexpr int kDraws = 300;

}  // namespace

TEST_CASE("what the ranks keep, put side by side, is the parameters", "[group][group_layout]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    check_whole(draw_group(draw, seed % 2 == 0 ? ParamLayout::kPerParameter : ParamLayout::kFlat));
  }
}

TEST_CASE("so it is in another dtype", "[group][group_layout]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    auto group = draw_group(draw, seed % 2 == 0 ? ParamLayout::kPerParameter : ParamLayout::kFlat);
    group.dtype = at::kInt;
    const std::vector<GroupLayout::Itemsizes> itemsizes(group.params.size(), {4, 4});
    for (size_t r = 0; r < group.ranks.size(); ++r) {
      const auto other = group.layouts[r].with_itemsizes(itemsizes, *group.ranks[r]);
      group.layouts[r] = other;
    }
    check_whole(group);
  }
}

TEST_CASE("so it is in another order, and without some of them", "[group][group_layout]") {
  for (uint64_t seed = 0; seed < kDraws; ++seed) {
    CAPTURE(seed);
    std::mt19937_64 draw(seed);
    auto group = draw_group(draw, ParamLayout::kPerParameter);
    std::vector<size_t> order(group.params.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::shuffle(order.begin(), order.end(), draw);
    for (size_t r = 0; r < group.ranks.size(); ++r) {
      auto& layout = group.layouts[r];
      layout = layout.reordered(order, *group.ranks[r]);
      for (size_t i = 1; i < order.size(); ++i) CHECK(layout.stored_offset(order[i - 1]) < layout.stored_offset(order[i]));
    }
    check_whole(group);
    const std::vector<size_t> gone(order.begin(), order.begin() + static_cast<ptrdiff_t>(order.size() / 2));
    for (size_t r = 0; r < group.ranks.size(); ++r) {
      auto& layout = group.layouts[r];
      layout = layout.without(gone, *group.ranks[r]);
      for (const size_t i : gone) CHECK(layout.stored_bytes(i) == 0);
    }
    check_whole(group, gone);
  }
}

}  // namespace fsdp::test
