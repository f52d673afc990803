#pragma once

#include <vector>

#include "api/params/find_param.hpp"
#include "fsdp/full_parameters.hpp"

namespace fsdp {

/// Whose parameters are shown.
enum class ShowWhich {
  kTree,  ///< of all modules below
  kUnit,  ///< without those of sharded modules below
  kOwn,   ///< of the module itself
};

/// Unsharded parameters turned into ordinary tensors with whole values, and put into the parameter tables in the
/// place of the sharded parameters; the destructor takes it all back. See FullParameters.
class FullParameterScope {
 public:
  FullParameterScope(torch::nn::Module& module, ShowWhich which, const FullParametersOptions& options);
  ~FullParameterScope();
  FullParameterScope(const FullParameterScope&) = delete;
  FullParameterScope& operator=(const FullParameterScope&) = delete;

 private:
  struct TableEntry {  // an entry of a parameter table
    torch::nn::Module* module;
    std::shared_ptr<torch::nn::Module> keep_alive;  // null: no shared_ptr owns the module
    size_t slot;
  };
  struct FullParam {
    FoundParam found;
    std::vector<TableEntry> entries;
    at::Tensor local_tensor, sharded_param, unsharded_param;
    at::Tensor whole, whole_gradient;      // between gather and show
    at::Tensor unreduced_gradient;         // the unsharded parameter's own, put away
    c10::Storage storage;                  // defined while it is shown
    int64_t version = 0;                   // of the sharded parameter then
  };
  void collect(torch::nn::Module& module, ShowWhich which, bool is_start);
  void add(FoundParam found, TableEntry entry);
  void hold_roots();
  void check_gradients() const;
  void gather(bool keeps);
  static void show(FullParam& shown, bool with_gradient);
  void write_back(FullParam& shown) const;
  static void write_back_gradient(FullParam& shown);
  static void restore(FullParam& shown);

  FullParametersOptions options_;
  /// Roots in which no step may begin, and what keeps them so; gone only after `shown_`.
  std::map<std::shared_ptr<RootContext>, std::shared_ptr<void>> held_roots_;
  std::vector<FullParam> shown_;
};

}  // namespace fsdp
