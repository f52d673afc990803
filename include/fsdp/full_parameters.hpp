#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "fsdp/fully_shard.hpp"

namespace fsdp {

class ShownParameters;  // lib/api: what is shown, and how it goes back

struct FullParametersOptions {
  /// kNo: not the parameters of sharded modules below this one.
  Recurse recurse = Recurse::kYes;
  /// What was written in the scope goes to the shards at its end; false: it is dropped.
  bool writeback = true;
  /// Only the first rank of the mesh shows full parameters; the others, which take part in the gather,
  /// go on with their shards. Needs `writeback = false`.
  bool rank0_only = false;
  /// Full parameters are on the CPU, so that the accelerator holds one at a time.
  bool offload_to_cpu = false;
  /// Full gradients too, read and written like the parameters.
  bool with_grads = false;
};

/// While it lives, the module is as it was before `fully_shard` (FSDP1's summon_full_params): its
/// members and its `parameters()` are the same ordinary tensors, each holding a whole parameter in its
/// original dtype, to be read and written by any code. At the end the sharded parameters are back, the same
/// tensors as before, with the elements that this rank owns taken from the whole ones.
///
/// A tensor-parallel parameter is shown as the local tensor that the module holds, and "first rank" is that of
/// the data-parallel mesh.
///
/// All ranks open it together and write the same values: each rank's writes count for the elements it
/// owns, and replicas (HSDP) each keep their own. The end communicates nothing, so leaving by an
/// exception hangs nobody; it waits for no one either.
///
/// Inside the scope no step of the module can begin: a forward without autograd may run, and computes
/// with the full values in their original dtype. What an optimizer writes to shards inside it is
/// overwritten. Without `with_grads` parameters show no gradient. Peak memory: the parameters shown, and one more.
///
/// Throws UsageError for rank0_only with writeback, StateError inside a step or scope of the module's
/// root (a forward whose backward has not run is one), inside another scope that shows one of its
/// parameters, or on the meta device, and for gradients that only some ranks have; nothing is changed then.
class FullParameters {
 public:
  explicit FullParameters(torch::nn::Module& module, const FullParametersOptions& options = {});
  template <class Impl>
  explicit FullParameters(const torch::nn::ModuleHolder<Impl>& holder,
                          const FullParametersOptions& options = {})
      : FullParameters(static_cast<torch::nn::Module&>(*holder.ptr()), options) {}
  ~FullParameters();
  FullParameters(const FullParameters&) = delete;
  FullParameters& operator=(const FullParameters&) = delete;

 private:
  std::unique_ptr<ShownParameters> shown_;
};

/// `torch::nn::Module::apply` with full parameters: calls `function` for the module and every module below
/// it, in LibTorch's order, each with its own parameters (not its children's) shown as by FullParameters
/// and written back. One module's parameters are whole at a time. A collective call.
void apply(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& function);
/// The same with the module's name, "" for the first.
void apply(torch::nn::Module& module,
           const std::function<void(const std::string&, torch::nn::Module&)>& function);

template <class Impl, class Function>
void apply(const torch::nn::ModuleHolder<Impl>& holder, Function&& function) {
  fsdp::apply(static_cast<torch::nn::Module&>(*holder.ptr()), std::forward<Function>(function));
}

}  // namespace fsdp
