#pragma once

#include "fsdp/all_gather_extension.hpp"
#include "py_ref.hpp"

namespace fsdp::python {

/// An object of the package's class AllGatherExtension as the core calls it, without the interpreter's lock.
class PythonExtension final : public AllGatherExtension {
 public:
  explicit PythonExtension(py::object extension) : extension_(std::move(extension)) {}

  std::string name() const override;
  bool accepts(at::ScalarType dtype) const override;
  int64_t encoded_bytes(int64_t numel, at::ScalarType dtype) const override;
  void pre_all_gather(const at::Tensor& piece, const at::Tensor& encoded) const override;
  void post_all_gather(const at::Tensor& encoded, at::ScalarType dtype, const at::Tensor& values) const override;

 private:
  PyRef extension_;
};

/// What a user's all_gather_extension_fn gave: null for None; the core's own (int8_all_gather) as it is.
std::shared_ptr<AllGatherExtension> extension_of(const py::object& given);

void define_extensions(py::module_& module);

}  // namespace fsdp::python
