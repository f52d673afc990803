#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "fsdp/api.hpp"
#include "fsdp/fully_shard.hpp"

namespace fsdp {

class FullParameterScope;  // lib/api: what is shown, and how it goes back

struct FSDP_API FullParametersOptions {
  /// kNo: without the parameters of sharded modules below this one.
  Recurse recurse = Recurse::kYes;
  /// True: what was written in the scope is written to the shards at its end. False: it is dropped.
  bool writeback = true;
  /// Only the first rank of the mesh gets full parameters; the others take part in the all-gather and keep their shards. Needs
  /// `writeback = false`.
  bool rank0_only = false;
  /// Full parameters are on the CPU; the accelerator holds one at a time.
  bool offload_to_cpu = false;
  /// Also full gradients, read and written like the parameters.
  bool with_grads = false;
};

/// While an object of this class lives, the module is as it was before `fully_shard` (FSDP1's summon_full_params): its members
/// and its `parameters()` are whole, ordinary tensors in their original dtype, which any code may read and write. Afterwards
/// the module has its sharded parameters again, the same tensors, with this rank's elements of the whole ones.
///
/// A tensor-parallel parameter is the module's local tensor, and the first rank is that of the data-parallel mesh.
///
/// The constructor is a collective call. All ranks write the same values: each rank's writes count for the elements that it
/// owns, and each replica (HSDP) keeps its own. The destructor communicates nothing, so an exception leaves no other rank
/// waiting.
///
/// Inside the scope a forward without autograd may run; it computes with the full parameters in their original dtype. No other
/// step can begin. Writes of an optimizer to shards are overwritten. Without `with_grads`, parameters have no gradient. Peak
/// memory: the full parameters, and one more.
///
/// Throws, with nothing changed: UsageError for rank0_only with writeback; StateError inside a step or scope of the module's
/// root (also between a forward and its backward), inside another FullParameters of one of these parameters, on the meta
/// device, and for gradients that only some ranks have.
class FSDP_API FullParameters {
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
  std::unique_ptr<FullParameterScope> shown_;
};

/// `torch::nn::Module::apply` with full parameters. Calls `function` for the module and every module below it, in LibTorch's
/// order. During a call that module's own parameters are whole, as with FullParameters; then they are written back. A
/// collective call.
FSDP_API void apply(torch::nn::Module& module, const std::function<void(torch::nn::Module&)>& function);
/// Calls `function` as the other `apply` does, also with the name of each module, "" for the first.
FSDP_API void apply(torch::nn::Module& module,
                    const std::function<void(const std::string&, torch::nn::Module&)>& function);

template <class Impl, class Function>
void apply(const torch::nn::ModuleHolder<Impl>& holder, Function&& function) {
  fsdp::apply(static_cast<torch::nn::Module&>(*holder.ptr()), std::forward<Function>(function));
}

}  // namespace fsdp
