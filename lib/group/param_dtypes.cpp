#include "group/param_dtypes.hpp"

namespace fsdp {

namespace {

void add(ParamDtypes& made, at::ScalarType stored, at::ScalarType gathered) {
  made.stored.push_back(stored);
  made.gathered.push_back(gathered);
  made.itemsizes.push_back({.stored = static_cast<int64_t>(c10::elementSize(stored)),
                            .gathered = static_cast<int64_t>(c10::elementSize(gathered))});
  made.is_cast |= gathered != stored;
}

}  // namespace

ParamDtypes dtypes_of(const GroupParts& parts) {
  ParamDtypes made;
  for (const auto& param : parts.params) add(made, param.spec.dtype, param.spec.param_dtype);
  return made;
}

ParamDtypes dtypes_in(const GroupParts& parts, std::optional<at::ScalarType> floating, bool in_own_dtype) {
  ParamDtypes made;
  for (const auto& param : parts.params) {
    const auto stored = at::isFloatingType(param.spec.dtype) ? floating.value_or(param.spec.dtype) : param.spec.dtype;
    add(made, stored, in_own_dtype ? stored : param.spec.asked_param_dtype.value_or(stored));
  }
  return made;
}

}  // namespace fsdp
