#include <c10/core/CachingDeviceAllocator.h>
#include <torch/torch.h>

#include <optional>

#include "bench_worker.hpp"
#include "fsdp/fsdp.hpp"
#include "layer_stack.hpp"
#include "stream_link.hpp"
#include "support/counting_allocator.hpp"

namespace fsdp::bench {
namespace {

using Transfers = std::vector<SimulatedTransfer>;

SimulatedNetwork network_of(const nlohmann::json& about) {
  return {.world_size = about.at("world"),
          .latency_us = about.at("latency_us"),
          .bandwidth_gb_per_s = about.at("bandwidth_gb_per_s"),
          .launch_us = about.at("launch_us"),
          .nodes = {.ranks = about.at("ranks_per_node"),
                    .latency_us = about.at("node_latency_us"),
                    .bandwidth_gb_per_s = about.at("node_bandwidth_gb_per_s")}};
}

/// Whose time passes on the machine's clock, or in a stream of its device.
std::shared_ptr<Communicator> make_network(const nlohmann::json& request, Machine& machine,
                                           const std::shared_ptr<Transfers>& log) {
  auto network = network_of(request.at("network"));
  network.log = log;
  if (!request.at("stream").is_null())
    return stream_link({.network = network, .device = machine.device(), .spin = [&](double us) { machine.occupy(us); }});
  network.clock = machine.shared_clock();
  network.moves_own_bytes = false;
  return simulated_network(network);
}

c10::Device device_of(const nlohmann::json& request, const std::shared_ptr<Communicator>& joined) {
  if (joined) return current_device(joined->device_type());
  if (request.at("stream").is_null()) return c10::Device(c10::kCPU);
  return current_device(c10::Device(request.at("stream").get<std::string>()).type());
}

Machine::Time time_of(const std::string& clock) {
  if (clock == "virtual") return Machine::Time::kVirtual;
  return clock == "waits" ? Machine::Time::kWaits : Machine::Time::kReal;
}

DeviceMesh make_mesh(const std::shared_ptr<Communicator>& world, int64_t replicas) {
  if (replicas == 1) return init_device_mesh(world, {world->size()}, {"shard"});
  return init_device_mesh(world, {replicas, world->size() / replicas}, {"replicate", "shard"});
}

nlohmann::json to_json(const Transfers& transfers, int64_t begin_ns) {
  auto result = nlohmann::json::array();
  for (const auto& transfer : transfers) {
    nlohmann::json about{{"operation", transfer.operation},
                         {"subject", transfer.subject},
                         {"group", transfer.group},
                         {"bytes", transfer.bytes},
                         {"alone_us", transfer.alone_us}};
    if (transfer.end_ns > 0)  // in a stream only the device knows when
      about.update({{"start_us", 1e-3 * static_cast<double>(transfer.start_ns - begin_ns)},
                    {"begin_us", 1e-3 * static_cast<double>(transfer.begin_ns - begin_ns)},
                    {"end_us", 1e-3 * static_cast<double>(transfer.end_ns - begin_ns)}});
    result.push_back(std::move(about));
  }
  return result;
}

nlohmann::json to_json(const std::vector<ComputeSlice>& slices, int64_t begin_ns) {
  auto result = nlohmann::json::array();
  for (const auto& slice : slices)
    result.push_back({{"layer", slice.layer},
                      {"pass", slice.is_backward ? "backward" : "forward"},
                      {"begin_us", 1e-3 * static_cast<double>(slice.begin_ns - begin_ns)},
                      {"end_us", 1e-3 * static_cast<double>(slice.end_ns - begin_ns)}});
  return result;
}

/// Steps of a stack of layers that take a chosen time.
class Overlap {
 public:
  explicit Overlap(const nlohmann::json& request)
      : joined_(request.at("network").is_null() ? join_world(request.at("backend")) : nullptr),
        machine_(time_of(request.at("clock")), device_of(request, joined_)),
        world_(joined_ ? joined_ : make_network(request, machine_, transfers_)),
        stack_(request.at("layers"), Sharding(request), make_mesh(world_, request.at("replicas")), machine_),
        parameters_(stack_->parameters()) {}

  nlohmann::json step() {
    for (const auto& parameter : parameters_) parameter.mutable_grad().reset();
    transfers_->clear();
    machine_.take_slices();
    if (joined_) barrier(*world_);
    synchronize(machine_.device());
    const auto before = statistics(stack_->root());
    test::start_recording();
    if (!machine_.device().is_cpu()) allocator().resetPeakStats(machine_.device().index());
    const int64_t begin = machine_.clock().now_ns();
    const auto x = stack_->forward(at::zeros({1}, machine_.device())).sum();
    const int64_t between = machine_.clock().now_ns();
    x.backward();
    const int64_t issued = machine_.clock().now_ns();
    synchronize(machine_.device());
    const int64_t end = machine_.clock().now_ns();
    const auto after = statistics(stack_->root());
    const auto bytes = parameter_bytes(stack_->root());
    return {{"total_us", 1e-3 * static_cast<double>(end - begin)},
            {"forward_us", 1e-3 * static_cast<double>(between - begin)},
            {"issued_us", 1e-3 * static_cast<double>(issued - begin)},
            {"compute", to_json(machine_.take_slices(), begin)},
            {"transfers", to_json(*transfers_, begin)},
            {"all_gathers", after.all_gathers - before.all_gathers},
            {"gathered_bytes", after.gathered_bytes - before.gathered_bytes},
            {"reduced_bytes", after.reduced_bytes - before.reduced_bytes},
            {"communicated_bytes", after.communicated_bytes - before.communicated_bytes},
            {"sharded_bytes", bytes.sharded},
            {"peak_unsharded_bytes", last_peak()},
            {"peak_live_bytes", machine_.device().is_cpu() ? test::peak_bytes() : peak_on_device()}};
  }

  /// Of one raw collective over the network of this stack, in turns, as the median of `repeats`.
  nlohmann::json time_alone(const nlohmann::json& request) {
    auto gathers = nlohmann::json::array(), reductions = nlohmann::json::array();
    for (const int64_t bytes : request.at("bytes").get<std::vector<int64_t>>()) {
      const auto whole = at::zeros({bytes / 4}, machine_.device());
      const auto piece = at::zeros({bytes / 4 / world_->size()}, machine_.device());
      const auto time = [&](const auto& start) {
        barrier(*world_);
        synchronize(machine_.device());
        return 1e6 * seconds([&] {
                 start()->wait();
                 synchronize(machine_.device());
               });
      };
      std::vector<double> gather_us, reduce_us;
      for (int i = 0; i < request.at("repeats"); ++i) {
        gather_us.push_back(time([&] { return world_->start_all_gather(whole, piece, "alone"); }));
        reduce_us.push_back(time([&] { return world_->start_reduce_scatter(piece, whole, ReduceOp::kSum, "alone"); }));
      }
      gathers.push_back(gather_us);
      reductions.push_back(reduce_us);
    }
    return {{"gather_us", gathers}, {"reduce_us", reductions}};
  }

  /// Of reductions, by the machine's clock.
  nlohmann::json choose_start(int rounds) {
    const auto chosen = stack_->root().choose_reduce_scatter_start([&] { return step().at("total_us").get<double>(); },
                                                                   rounds);
    return {{"start", name_of(chosen)}};
  }

 private:
  /// Of the last step.
  int64_t last_peak() const { return stack_->root().report().last_step_peak_bytes; }

  c10::DeviceAllocator& allocator() const { return *c10::getDeviceAllocator(machine_.device().type()); }
  int64_t peak_on_device() const {
    constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    return allocator().getDeviceStats(machine_.device().index()).allocated_bytes[kAll].peak;
  }

  std::shared_ptr<Transfers> transfers_ = std::make_shared<Transfers>();
  std::shared_ptr<Communicator> joined_;  // null for a simulated network
  Machine machine_;
  std::shared_ptr<Communicator> world_;
  LayerStack stack_;
  std::vector<at::Tensor> parameters_;
};

}  // namespace

void serve_overlap() {
  at::set_num_threads(1);
  test::install_counting_allocator();
  std::optional<Overlap> overlap;
  serve([&](const nlohmann::json& request) -> nlohmann::json {
    const auto what = request.at("do").get<std::string>();
    if (what == "setup") {
      overlap.reset();
      overlap.emplace(request);
      return {{"live_bytes", test::live_bytes()}};
    }
    if (what == "alone") return overlap->time_alone(request);
    if (what == "choose start") return overlap->choose_start(request.at("rounds"));
    auto steps = nlohmann::json::array();
    for (int i = 0; i < request.at("warmup").get<int>() + request.at("steps").get<int>(); ++i) {
      auto step = overlap->step();
      if (i >= request.at("warmup")) steps.push_back(std::move(step));
    }
    return {{"steps", steps}};
  });
}

}  // namespace fsdp::bench
