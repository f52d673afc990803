#include "api/recompute/saved_tensors.hpp"

#include <torch/csrc/autograd/engine.h>

#include <atomic>
#include <mutex>

namespace fsdp {

namespace {

using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;
// A shared_ptr in LibTorch 2.11, an intrusive_ptr in 2.15.
using NodePointer = decltype(torch::autograd::Edge::function);

thread_local SavePacker* current_packer = nullptr;

/// Answers which hooks saved tensors get; `below` does the work. It starts no threads of its own.
class PackingEngine final : public Engine {
 public:
  explicit PackingEngine(Engine& below) : below_(below) {}

  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph,
                        bool create_graph, bool accumulate_grad,
                        const edge_list& outputs) override {
    return below_.execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }
  c10::intrusive_ptr<at::ivalue::Future> execute_with_graph_task(
      const std::shared_ptr<torch::autograd::GraphTask>& task, NodePointer root,
      torch::autograd::InputBuffer&& input) override {
    return below_.execute_with_graph_task(task, std::move(root), std::move(input));
  }
  std::unique_ptr<torch::autograd::AnomalyMetadata> make_anomaly_metadata() override {
    return below_.make_anomaly_metadata();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return current_packer != nullptr ? current_packer->make_hooks()
                                     : below_.get_default_saved_variable_hooks();
  }
#if __has_include(<torch/csrc/autograd/node_creation_hook.h>)
  std::vector<std::unique_ptr<torch::autograd::NodeCreationHook>> get_node_creation_hooks()
      override {
    return below_.get_node_creation_hooks();
  }
#endif

 private:
  Engine& below_;
};

std::atomic<PackingEngine*> installed{nullptr};

// Asked anew each time: Python, loaded after us, puts its own engine in our place.
void ensure_installed() {
  if (&Engine::get_default_engine() == installed.load(std::memory_order_acquire)) return;
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  auto& present = Engine::get_default_engine();
  if (&present == installed.load(std::memory_order_relaxed)) return;
  // Never destroyed: an engine is asked until the process has ended.
  installed.store(new PackingEngine(present), std::memory_order_release);
  torch::autograd::set_default_engine_stub(
      []() -> Engine& { return *installed.load(std::memory_order_acquire); });
}

}  // namespace

PackSavedTensors::PackSavedTensors(SavePacker& packer) : outer_(current_packer) {
  ensure_installed();
  current_packer = &packer;
}

PackSavedTensors::~PackSavedTensors() { current_packer = outer_; }

}  // namespace fsdp
