#pragma once

#include "fsdp/api.hpp"

namespace fsdp {

/// While an object of this class lives, tensors that this thread creates without a device are on the meta device: they have
/// sizes and no memory. A module of any size can be built so, sharded with `fully_shard`, and given this rank's part of the
/// memory by `fsdp::materialize`:
///
///     auto model = [&] { fsdp::MetaDevice meta; return Llama(config); }();
///
/// Tensors made from values (`torch::tensor({1., 2.})`), like another tensor (`zeros_like`) or for a given device are not
/// affected. Objects may be nested; each is destroyed on the thread that made it.
///
/// LibTorch alone cannot do this: `DeviceGuard` ignores kMeta, and `module->to(kMeta)` throws. `fsdp::to(module, at::kMeta)`
/// moves a module that exists.
class FSDP_API MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

 private:
  bool was_included_;
};

}  // namespace fsdp
