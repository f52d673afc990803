#include "dtensor/function_scope.hpp"

#include <ATen/SequenceNumber.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <utility>

namespace fsdp {

std::atomic<bool> function_was_seen = false;

namespace {

/// Holds what is known of functions on one thread.
struct Functions {
  std::optional<uint64_t> none_at;  // autograd's count of nodes: each function is a new one
  bool has_begun = false, asks_for_dtensor = false;
};

Functions& functions() {
  thread_local Functions functions;
  return functions;
}

/// LibTorch's nodes of functions are a template, by the function. Hooks of other nodes, optimizers among them, mean the
/// DTensor.
bool is_function(const torch::autograd::Node& node) {
  return std::string_view(typeid(node).name()).find("8autograd7CppNodeI") != std::string_view::npos;
}

}  // namespace

void begin_function() {
  auto& all = functions();
  if (!at::GradMode::is_enabled() || all.none_at == at::sequence_number::peek()) return;
  all.has_begun = true;
  function_was_seen = true;
}

void expect_no_function() {
  auto& all = functions();
  all.has_begun = false;
  all.none_at = at::sequence_number::peek();
}

void end_functions() { functions().has_begun = false; }

bool runs_function() {
  if (functions().has_begun) {
    if (!at::GradMode::is_enabled()) return true;
    end_functions();
  }
  const auto node = torch::autograd::get_current_node();
  return node && is_function(*node);
}

AsksForDTensor::AsksForDTensor() : before_(std::exchange(functions().asks_for_dtensor, true)) {}
AsksForDTensor::~AsksForDTensor() { functions().asks_for_dtensor = before_; }
bool AsksForDTensor::is_on() { return functions().asks_for_dtensor; }

}  // namespace fsdp
