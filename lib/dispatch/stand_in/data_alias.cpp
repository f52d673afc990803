#include "dispatch/stand_in/data_alias.hpp"

#include "dispatch/param_storage.hpp"
#include "dispatch/residency.hpp"
#include "dispatch/stand_in/stand_in.hpp"

namespace fsdp {

namespace {

/// The `.data` of a stand-in: what is written to it has no version that autograd looks at.
class DataAlias final : public StandIn {
 public:
  explicit DataAlias(c10::intrusive_ptr<StandIn> of) : of_(std::move(of)) {}

  at::Tensor ordinary() override {
    auto ordinary = of_->ordinary();
    return ordinary.defined() ? ordinary.detach() : ordinary;
  }
  int64_t version() const override { return of_->version(); }
  bool is_of_scalar() const override { return of_->is_of_scalar(); }
  void note_write() override { of_->note_data_write(); }
  void note_data_write() override { of_->note_data_write(); }
  bool casts_operands() const override { return of_->casts_operands(); }
  bool is_refusal(const std::exception& error) const override { return of_->is_refusal(error); }

 private:
  c10::intrusive_ptr<StandIn> of_;
};

}  // namespace

void watch_writes_to_data(const at::Tensor& tensor, const at::Tensor& data) {
  if (!tensor.defined() || c10::impl::tls_is_dispatch_key_excluded(kResidencyKey)) return;
  const auto* impl = tensor.unsafeGetTensorImpl();
  if (impl->key_set().has(c10::DispatchKey::Python)) {
    if (auto stand_in = stand_in_of(tensor)) make_stand_in(data, c10::make_intrusive<DataAlias>(std::move(stand_in)));
    return;
  }
  // This rank's rows as an ordinary tensor: operators on that pass the owner by, as their writes move the parameter's version.
  const auto* storage = ParamStorage::of(impl);
  if (storage != nullptr && storage->kind() == ParamStorage::Kind::kSharded && !has_residency_key(impl))
    add_residency_key(data);
}

}  // namespace fsdp
