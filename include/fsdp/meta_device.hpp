#pragma once

namespace fsdp {

/// While it lives, tensors that this thread makes without naming a device are on the meta device:
/// they have sizes and no memory. So a module of any size can be built, sharded with `fully_shard`,
/// and given only this rank's part of the memory by `fsdp::materialize`:
///
///     auto model = [&] { fsdp::MetaDevice meta; return Llama(config); }();
///
/// (LibTorch has no such thing: `DeviceGuard` with kMeta changes nothing, and `module->to(kMeta)`
/// throws. A module that exists already goes there by `fsdp::to(module, at::kMeta)`.)
///
/// Tensors made of values (`torch::tensor({1., 2.})`), from an existing tensor (`zeros_like`) or
/// for a named device are what they are without it. May be nested. Leave it on the thread that
/// entered it.
class MetaDevice {
 public:
  MetaDevice();
  ~MetaDevice();
  MetaDevice(const MetaDevice&) = delete;
  MetaDevice& operator=(const MetaDevice&) = delete;

 private:
  bool was_included_;
};

}  // namespace fsdp
