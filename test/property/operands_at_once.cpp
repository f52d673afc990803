#include "property/operands_at_once.hpp"

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/ivalue.h>

#include <algorithm>
#include <set>
#include <utility>

namespace fsdp::test {
namespace {

thread_local OperandsAtOnce* following = nullptr;

}  // namespace

OperandsAtOnce::OperandsAtOnce(std::vector<int64_t> bytes) : bytes_(std::move(bytes)) {
  following = this;
  handle_ = at::addThreadLocalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

OperandsAtOnce::~OperandsAtOnce() {
  at::removeCallback(handle_);
  following = nullptr;
}

int64_t OperandsAtOnce::take() { return std::exchange(most_, 0); }

std::unique_ptr<at::ObserverContext> OperandsAtOnce::on_operator(const at::RecordFunction& function) {
  if (following != nullptr) following->note(function);
  return nullptr;
}

void OperandsAtOnce::note(const at::RecordFunction& function) {
  std::set<size_t> used;
  const auto see = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    // Outside autograd a registered parameter is this rank's piece.
    const void* const itself = at::GradMode::is_enabled() ? tensor.unsafeGetTensorImpl() : nullptr;
    const void* const memory = tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
    for (const void* one : {itself, memory})
      if (const auto found = group_of_.find(one); found != group_of_.end()) used.insert(found->second);
  };
  for (const auto& input : function.inputs()) {
    if (input.isTensor()) see(input.toTensor());
    if (input.isTensorList())
      for (const at::Tensor& tensor : input.toTensorList()) see(tensor);
    if (input.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : input.toOptionalTensorList()) see(tensor.value_or(at::Tensor()));
  }
  int64_t bytes = 0;
  for (const size_t group : used) bytes += bytes_[group];
  most_ = std::max(most_, bytes);
}

}  // namespace fsdp::test
