#include "fsdp/forward_scope.hpp"

#include "module/module_state.hpp"

namespace fsdp {

ForwardScope::ForwardScope(const FSDPModule& root) : state_(root.state().root()) {
  state_->context->enter_scope();
}

ForwardScope::~ForwardScope() { state_->context->leave_scope(); }

}  // namespace fsdp
