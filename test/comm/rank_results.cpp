#include "rank_results.hpp"

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <latch>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/c10d/c10d_communicator.hpp"
#include "comm/gloo/gloo_backend.hpp"
#include "fsdp/error.hpp"
#include "fsdp/process_group.hpp"
#ifdef FSDP_HAS_NCCL
#include "nccl_ranks.hpp"
#endif

namespace fsdp::test {
namespace {

std::shared_ptr<Communicator> gloo_world(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                         int world_size, std::chrono::milliseconds timeout) {
  const GlooOptions options{.timeout = timeout, .loopback = true};
  const auto make = [options](const auto& group_store, int group_rank, int size) {
    return make_gloo_backend(group_store, group_rank, size, options);
  };
  std::vector<int> ranks(world_size);
  std::iota(ranks.begin(), ranks.end(), 0);
  return c10d_communicator({.backend = make(store, rank, world_size),
                            .world_ranks = ranks,
                            .name = "world",
                            .store = store,
                            .make_backend = make,
                            .launches_batches = true});
}

/// Runs `body` and keeps the message of what it throws.
void keep_message(std::string& message, const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    message = error.what_without_backtrace();
  } catch (const std::exception& error) {
    message = error.what();
  }
}

}  // namespace

std::vector<std::string> errors_on_threads(int world_size, const RankMain& rank_main,
                                           std::chrono::milliseconds timeout,
                                           bool launches_batches) {
  std::vector<std::string> messages(world_size);
  run_ranks(world_size,
            [&](const std::shared_ptr<Communicator>& world) {
              keep_message(messages[world->rank()], [&] { rank_main(*world); });
            },
            {.timeout = timeout, .launches_batches = launches_batches});
  return messages;
}

std::vector<std::string> errors_on_gloo(int world_size, const RankMain& rank_main,
                                        std::chrono::milliseconds timeout) {
  std::vector<std::string> messages(world_size);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::latch connected(world_size);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < world_size; ++rank)
    threads.emplace_back([&, rank] {
      keep_message(messages[rank], [&] {
        std::shared_ptr<Communicator> world;
        try {
          world = gloo_world(store, rank, world_size, timeout);
        } catch (...) {
          connected.count_down();
          throw;
        }
        // Who leaves while another one still connects would end that one.
        connected.arrive_and_wait();
        rank_main(*world);
      });
    });
  for (std::thread& thread : threads) thread.join();
  return messages;
}

const std::vector<Backend>& value_backends() {
  static const std::vector<Backend> backends = {
      {"threads",
       [](int size, const RankMain& body) { return errors_on_threads(size, body, beyond_patience()); }},
      {"gloo", [](int size, const RankMain& body) { return errors_on_gloo(size, body, beyond_patience()); }},
#ifdef FSDP_HAS_NCCL
      {"nccl", [](int size, const RankMain& body) { return errors_on_nccl(size, body, beyond_patience()); }},
#endif
  };
  return backends;
}

std::vector<std::string> no_errors(int world_size) { return std::vector<std::string>(world_size); }

void all_gather(Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                const std::string& subject) {
  comm.start_all_gather(output, input, subject)->wait();
}

void reduce_scatter(Communicator& comm, const at::Tensor& output, const at::Tensor& input,
                    ReduceOp op, const std::string& subject) {
  comm.start_reduce_scatter(output, input, op, subject)->wait();
}

void all_reduce(Communicator& comm, const at::Tensor& tensor, ReduceOp op,
                const std::string& subject) {
  comm.start_all_reduce(tensor, op, subject)->wait();
}

void broadcast(Communicator& comm, const at::Tensor& tensor, int root, const std::string& subject) {
  comm.start_broadcast(tensor, root, subject)->wait();
}

std::string unused_path() {
  static std::atomic<int> count = 0;
  return std::filesystem::temp_directory_path() /
         ("fsdp_test_comm_" + std::to_string(::getpid()) + "_" + std::to_string(count++));
}

}  // namespace fsdp::test
