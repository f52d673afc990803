#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fsdp/all_gather_extension.hpp"
#include "fsdp/policy.hpp"
#include "fsdp/sanitizer.hpp"
#include "group/group_layout.hpp"
#include "group/host_copies.hpp"
#include "mesh/mesh_info.hpp"
#include "tensor/tensor_part.hpp"

// What a ParamGroup is made from, and what is said of it later.
namespace fsdp {

/// What is fixed for a group's lifetime.
struct GroupConfig {
  c10::Device device;
  MixedPrecisionPolicy mp_policy = {};
  ParamLayout layout = ParamLayout::kPerParameter;
  std::optional<GroupLayout> cut_like = {};  ///< hold what this one holds, instead of planning a layout
  bool throws_outside_step = false;  ///< FaultOutsideStep::kThrow
  /// Where shards live, if that is other memory than `device`, where unsharded parameters are.
  std::optional<HostMemory> host_memory = {};
  int warn_after_reductions = 16;    ///< backwards without an optimizer that writes; 0: never
  std::optional<SanitizerOptions> sanitizer = {};  ///< none: the mode is off
};

/// A parameter that another group holds already. That one gives it up when the new one is attached.
struct TiedSource {
  std::shared_ptr<class ParamGroup> group;
  size_t index = 0;
};

/// One parameter that a group is made of.
struct GroupParam {
  std::string name;
  at::Tensor unsharded_param;            ///< as the module's member holds it
  at::ScalarType param_dtype;   ///< that it is gathered and computed in
  /// Operators that use it give their outputs in this dtype (exempt modules); none: as they are.
  std::optional<at::ScalarType> output_dtype = {};
  int64_t dim = 0;          ///< that is cut, in the per-parameter layout
  int64_t block_numel = 1;  ///< elements that stay together, in the flat layout
  std::shared_ptr<AllGatherExtension> extension = {};  ///< in which form it is gathered; none: as its values
  /// param_dtype was asked for: it stays when the parameter's own dtype changes.
  bool has_param_dtype = false;
  ParamReach reach = {};  ///< beyond the group's ranks
  std::optional<TiedSource> tied = {};
  bool is_dtensor = false;  ///< is registered as a DTensor, where the layout cuts a dimension
  /// Says in which it is kept.
  at::ScalarType dtype() const;
};

/// What `convert` changes (group_conversion.hpp); none: stays.
struct GroupConversion {
  std::optional<c10::Device> device = {};
  std::optional<at::ScalarType> dtype = {};  ///< of floating-point parameters
};

/// For the plan of its layout.
LayoutParam layout_param(const GroupParam& param);

}  // namespace fsdp
