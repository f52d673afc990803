#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/fsdp.hpp>

namespace fsdp::test {

/// A parameter as it was before its group was made.
struct PlainParam {
  std::string name;  ///< in the module
  at::Tensor tensor;  ///< what the module's member holds, before and after
  int64_t dim = 0;    ///< that is cut
  int64_t block = 1;  ///< flat: elements that stay together
  int64_t itemsize = 4;  ///< gathered
  int64_t stored_itemsize = 4;
  bool is_trainable = true;  ///< when its group was made: flat, the others lie apart
  bool is_gone = false;  ///< to the group of a module around all that register it
};

/// One group, as the formula sees it: from sizes alone, nothing of it is asked of the library.
struct PlainGroup {
  std::optional<FSDPModule> module = {};
  std::string suffix = {};      ///< to the module's name, where its mesh is not the module's
  std::string gathered_over = {};  ///< the communicator's name
  bool is_flat = false;
  std::vector<PlainParam> params = {};
  int64_t ranks = 1;                ///< that shard
  int64_t replicas = 1;
  int64_t ranks_after_forward = 0;  ///< an integer reshard_after_forward; 0: none
  bool launches_batches = false;
  int64_t packs_below = 0;
  bool is_offloaded = false;
};

/// What moves in one gather or reduction of `ranks` ranks.
struct Moved {
  int64_t padded = 0;    ///< bytes of all ranks' pieces, with what aligns them
  int64_t launched = 0;  ///< of the tensors given to the communicator: without the gaps between tensors
  bool operator==(const Moved&) const = default;
};

/// Of all parameters.
Moved gathered_by(const PlainGroup& group);

/// What all ranks hold between steps, with what aligns it.
int64_t stored_by(const PlainGroup& group);

/// Of the parameters for which `takes_part`, at least one, in one dtype. Flat: of the run, whichever of it they are.
Moved reduced_by(const PlainGroup& group, const std::function<bool(size_t)>& takes_part, at::ScalarType dtype);

/// What of `whole`, sized like the parameter, rank `rank` of those that shard holds; 1-D, in its tensor's order.
at::Tensor held_by(const PlainGroup& group, const PlainParam& param, int64_t rank, const at::Tensor& whole);

}  // namespace fsdp::test
