#pragma once

#include "group/gather/prepared_extension.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// A HookedParameter as the core gathers it. Its functions are called without the interpreter's lock.
class HookedExtension final : public PreparedExtension {
 public:
  explicit HookedExtension(py::object hooked)
      : name_(py::str(hooked.attr("name")).cast<std::string>()), hooked_(std::move(hooked)) {}

  std::string name() const override { return name_; }
  bool accepts(at::ScalarType) const override { return true; }
  int64_t encoded_bytes(int64_t, at::ScalarType) const override { return bytes_; }
  void prepare() override;
  void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const override;
  void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype, const at::Tensor& values) const override;
  void release() noexcept override;

 private:
  std::string name_;
  PyRef hooked_;
  int64_t bytes_ = 0;
};

}  // namespace fsdp::python
