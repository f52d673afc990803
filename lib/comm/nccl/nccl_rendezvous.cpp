#include "comm/nccl/nccl_rendezvous.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <exception>
#include <thread>
#include <vector>

#include "base/first_line.hpp"
#include "base/log.hpp"
#include "fsdp/error.hpp"

namespace fsdp {
namespace {

constexpr auto kStorePoll = std::chrono::milliseconds(5);

std::string rank_key(const std::string& channel, int rank) { return fmt::format("{}/rank_{}", channel, rank); }

ncclUniqueId make_id(const NcclApi& api) {
  ncclUniqueId id;
  if (const auto made = api.get_unique_id(&id); made != ncclSuccess) throw CommError(api.describe(made, nullptr));
  return id;
}

}  // namespace

ncclUniqueId exchange_id(const NcclGroupConfig& group, const std::string& channel, const Patience& patience) {
  const std::string key = fmt::format("{}/id", channel);
  ncclUniqueId id;
  if (group.rank == 0) {
    id = make_id(*group.api);
    const auto* bytes = reinterpret_cast<const uint8_t*>(&id);
    group.store->set(key, std::vector<uint8_t>(bytes, bytes + sizeof(id)));
  }
  group.store->set(rank_key(channel, group.rank), std::vector<uint8_t>{1});
  const std::string count = channel + "/ranks";
  for (int64_t come = group.store->add(count, 1); come < group.size; come = group.store->add(count, 0)) {
    patience();
    std::this_thread::sleep_for(kStorePoll);
  }
  if (group.rank == 0) return id;
  const auto bytes = group.store->get(key);
  if (bytes.size() != sizeof(id))
    throw CommError(fmt::format("expected {} bytes of NCCL's id in the store, found {}", sizeof(id), bytes.size()));
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

std::string missing_ranks(const NcclGroupConfig& group, const std::string& channel) {
  std::vector<int> missing;
  for (int rank = 0; rank < group.size; ++rank)
    if (!group.store->check({rank_key(channel, rank)})) missing.push_back(rank);
  return fmt::format("{}", fmt::join(missing, ", "));
}

std::string why_others_left(const NcclGroupConfig& group) {
  try {
    return group.notices->read("nccl/" + group.key).value_or(std::string());
  } catch (const std::exception&) {
    return {};
  }
}

void tell_why_left(const NcclGroupConfig& group, const std::string& reason) {
  try {
    group.notices->post_first("nccl/" + group.key, fmt::format("rank {}: {}", group.rank, reason));
  } catch (const std::exception& error) {
    log().info("group '{}' failed and the other ranks cannot be told: {}", group.name, first_line(error.what()));
  }
}

}  // namespace fsdp
