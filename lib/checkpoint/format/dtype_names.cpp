#include "checkpoint/format/dtype_names.hpp"

#include <array>
#include <utility>

#include "base/require.hpp"

namespace fsdp {

namespace {

constexpr std::array<std::pair<std::string_view, at::ScalarType>, 16> kNames{{
    {"F64", at::kDouble},       {"F32", at::kFloat},          {"F16", at::kHalf},
    {"BF16", at::kBFloat16},    {"F8_E4M3", at::kFloat8_e4m3fn}, {"F8_E5M2", at::kFloat8_e5m2},
    {"I64", at::kLong},         {"I32", at::kInt},            {"I16", at::kShort},
    {"I8", at::kChar},          {"U64", at::kUInt64},         {"U32", at::kUInt32},
    {"U16", at::kUInt16},       {"U8", at::kByte},            {"BOOL", at::kBool},
    {"C64", at::kComplexFloat},
}};

}  // namespace

std::string safetensors_dtype(at::ScalarType dtype) {
  for (const auto& [name, known] : kNames)
    if (known == dtype) return std::string(name);
  throw UsageError(fmt::format("safetensors has no dtype for {}; convert the tensor first", c10::toString(dtype)));
}

std::optional<at::ScalarType> dtype_of_safetensors(std::string_view name) {
  for (const auto& [known, dtype] : kNames)
    if (known == name) return dtype;
  return std::nullopt;
}

}  // namespace fsdp
