#pragma once

#include <memory>
#include <vector>

#include "fsdp/fully_shard.hpp"
#include "mirror.hpp"
#include "root/module_pass.hpp"
#include "shown/shown_params.hpp"

namespace fsdp::python {

/// Puts the parameters of one call of fully_shard into its modules' tables, as the core says, and brings to the core what users
/// have put there.
///
/// Every function needs the interpreter's lock.
class ParamsView final : public ModulePass::View {
 public:
  ParamsView(FSDPModule controls, std::vector<std::shared_ptr<Mirror>> modules);

  ShownParams& params() { return params_; }
  /// As the core sees them.
  const std::vector<std::shared_ptr<Mirror>>& modules() const { return modules_; }
  /// Takes the parameters that users have put in the place of some, which show as the others do.
  void take_replaced();

  // --- ModulePass::View
  void show(Shows form) override { params_.show_as(form); }
  void begin() override;
  void take_changes() override;
  void take_over() override { params_.take_over(); }
  void show_gradients() override { params_.show_gradients(); }

 private:
  Shows shows() const;

  FSDPModule controls_;
  std::vector<std::shared_ptr<Mirror>> modules_;
  ShownParams params_;
  bool has_begun_ = false;
};

}  // namespace fsdp::python
