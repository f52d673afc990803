// What may be set, used or done amid training, on devices whose streams are threads.
#include <catch2/catch.hpp>

#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/require.hpp"
#include "late_training.hpp"
#include "support/sample.hpp"

namespace fsdp::test {
namespace {

using namespace std::chrono_literals;

struct Variant {
  std::string name;
  LateTraining training;
  int ranks = 2;
};

void gather_and_give_up(ShardedChain& chain) {
  for (auto& layer : chain.layers) {
    auto handle = layer.unshard_async();
    layer.reshard();
  }
}

/// Which waits for the optimizer, as the caller's streams have to.
void gather_on_another_stream(ShardedChain& chain) {
  const c10::impl::VirtualGuardImpl guard(kLate);
  const auto device = chain.root[0].mesh().device();
  const auto other = guard.getStreamFromGlobalPool(device);
  c10::Event event(kLate);
  event.record(guard.getStream(device));
  event.block(other);
  const c10::StreamGuard on_other(other);
  for (auto& layer : chain.layers) static_cast<void>(layer.unshard_async());
}

void unshard_all(ShardedChain& chain) {
  for (auto& layer : chain.layers) layer.unshard();
  for (auto& layer : chain.layers) layer.reshard();
}

std::vector<Variant> variants(int64_t width) {
  const auto on_root = [](std::function<void(FSDPModule&)> set) {
    return [set](ShardedChain& chain) { set(chain.root[0]); };
  };
  return {
      {"no prefetch", {.control = on_root([](auto& root) { root.set_prefetch_distance(0); })}},
      {"three reductions, none ahead of its gather", {.layers = 6, .control = on_root([](auto& root) {
         root.set_reduce_scatter_max_input_buffers(3);
         root.set_prefetch_distance(3);
       })}},
      {"reductions on a communicator of their own", {.control = on_root([](auto& root) {
         root.set_separate_reduce_scatter_group();
       })}},
      {"reductions behind the first gather", {.layers = 6, .control = on_root([](auto& root) {
         root.set_separate_reduce_scatter_group();
         root.set_reduce_scatter_max_input_buffers(2);
         root.set_reduce_scatter_start(ReduceScatterStart::kFirstAfterAllGather);
       })}},
      {"reductions behind the second backward, three groups ahead", {.layers = 6, .control = on_root([](auto& root) {
         root.set_separate_reduce_scatter_group();
         root.set_reduce_scatter_start(ReduceScatterStart::kFirstAfterNextBackward);
         root.set_prefetch_distance(3);
       })}},
      {"replicas, reductions behind the first gather", {.mesh = {2, 2}, .control = on_root([](auto& root) {
         root.set_separate_reduce_scatter_group();
         root.set_reduce_scatter_start(ReduceScatterStart::kFirstAfterAllGather);
       })}, 4},
      {"symmetric memory, two groups ahead", {.layers = 6, .control = [](ShardedChain& chain) {
         chain.root[0].set_prefetch_distance(2);
         for (auto& layer : chain.layers) layer.set_symm_mem_for_comm();
         chain.root[0].set_symm_mem_for_comm();
       }}},
      {"a byte budget", {.control = on_root([width](auto& root) {
         root.set_unsharded_byte_budget(4 * (width + 1) * width * 4);
       })}},
      {"parameters that stay after backward", {.micro_batches = 2, .control = on_root([](auto& root) {
         root.set_reshard_after_backward(false);
       })}},
      {"shards of two ranks between forward and backward", {.options = {.reshard_after_forward = 2}}, 4},
      {"all parameters in all reductions", {.control = on_root([](auto& root) {
         root.set_reduce_scatter_unused_params(true);
       })}},
      {"a finalization that is waited for later", {.control = on_root([](auto& root) {
         root.set_manual_backward_finalization(true);
       }), .after_backward = [](ShardedChain& chain) { chain.root[0].finalize_backward_async().wait(); }}},
      {"gathers that are given up", {.before_backward = [](ShardedChain& chain, int) { gather_and_give_up(chain); },
                                     .after_step = gather_and_give_up}},
      {"gathers by hand", {.after_step = unshard_all}},
      {"gradients in the reduced dtype", {.relative = 0.05, .options = {.mp_policy = {.param_dtype = at::kBFloat16,
                                                                          .reduce_dtype = at::kBFloat16}}}},
      {"replicas in the flat layout", {.mesh = {2, 2}, .options = {.layout = ParamLayout::kFlat}}, 4},
      {"replicas in low precision", {.relative = 0.05, .mesh = {2, 2}, .options = {.mp_policy = {
          .param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}}, 4},
      {"replicas and accumulation on a communicator of their own", {.micro_batches = 2, .mesh = {2, 2},
         .control = on_root([](auto& root) {
           root.set_separate_reduce_scatter_group();
           root.set_reduce_scatter_max_input_buffers(2);
         }),
         .before_backward = [](ShardedChain& chain, int micro) { chain.root[0].set_requires_all_reduce(micro == 1); }},
       4},
      {"offloading with accumulation", {.steps = 3, .micro_batches = 2, .options = {.offload_policy = CPUOffloadPolicy{}},
                                        .waits_in_steps = true}},
      {"offloading in low precision, two groups ahead", {.relative = 0.05, .options = {
          .mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat},
          .offload_policy = CPUOffloadPolicy{}}, .waits_in_steps = true,
          .control = on_root([](auto& root) { root.set_prefetch_distance(2); })}},
      {"offloading in the flat layout", {.options = {.offload_policy = CPUOffloadPolicy{}, .layout = ParamLayout::kFlat},
                                         .waits_in_steps = true}},
      {"offloading with replicas", {.mesh = {2, 2}, .options = {.offload_policy = CPUOffloadPolicy{}},
                                    .waits_in_steps = true}, 4},
      {"clipping that leaves gradients alone", {.waits_in_steps = true, .after_backward = [](ShardedChain& chain) {
         clip_grad_norm_(chain.model->parameters(), 1e6);
       }}},
      {"an all-reduce hook", {.relative = 0.05, .mesh = {2, 2}, .control = [](ShardedChain& chain) {
         for (auto& layer : chain.layers) layer.set_all_reduce_hook(bf16_compress);
       }}, 4},
      {"values that are read between steps", {.waits_in_steps = true, .after_step = [](ShardedChain& chain) {
         FullParameters scope(*chain.model);
         require(!chain.model->layers[1]->weight.cpu().isnan().any().item<bool>(), "a number");
       }}},
      {"the sanitizer, which poisons and delays", {.options = {.sanitizer = SanitizerOptions{.max_delay = 50us}},
                                                   .waits_in_steps = true}},
  };
}

}  // namespace

TEST_CASE("a chain trains on streams as the plain one does in every variant", "[late][variants]") {
  Sample sample(1);
  for (const int64_t width : {kNarrow, kWide})
    for (auto& variant : variants(width)) {
      if (!sample.takes_next()) continue;
      variant.training.width = width;
      INFO(variant.name << ", " << width << " wide");
      const uint64_t seed = width == kWide ? 5 : 4;
      CHECK(wrong_on_late(variant.training, {.world_size = variant.ranks,
                                             .streams = {.seed = seed, .max_delay = 200us, .has_own_paces = true}}) ==
            std::vector<std::string>{});
    }
}

TEST_CASE("gathers that are started on another stream are read where the parameters are used", "[late][variants]") {
  for (const int64_t width : {kNarrow, kWide}) {
    INFO(width << " wide");
    CHECK(wrong_on_late({.width = width, .after_step = gather_on_another_stream},
                        {.streams = {.seed = 4, .max_delay = 200us, .has_own_paces = true}}) ==
          std::vector<std::string>{});
  }
}

}  // namespace fsdp::test
