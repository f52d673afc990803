#include "trace/first_values.hpp"

#include <ATen/ATen.h>

#include <array>
#include <charconv>
#include <cstring>
#include <sstream>

#include "base/stable_hash.hpp"
#include "tensor/strides.hpp"

namespace fsdp {

namespace {

constexpr int64_t kElements = 16;

/// Hashes `count` elements that lie one after another.
uint32_t hash_of_elements(const char* elements, int64_t count, size_t itemsize) {
  uint64_t hash = static_cast<uint64_t>(count);
  for (int64_t i = 0; i < count; ++i)
    for (size_t byte = 0; byte < itemsize; byte += sizeof(uint64_t)) {
      uint64_t value = 0;
      std::memcpy(&value, elements + static_cast<size_t>(i) * itemsize + byte,
                  std::min(itemsize - byte, sizeof value));
      hash = mixed_hash(hash, value);
    }
  return static_cast<uint32_t>(hash ^ hash >> 32);
}

/// The i-th of `count` elements that are spread over all of them.
int64_t position_of(int64_t i, int64_t count, int64_t numel) {
  return count > 1 ? i * (numel - 1) / (count - 1) : 0;
}

/// Elements of storage in front of element `position` of the tensor, counted from its first.
int64_t offset_of(const at::Tensor& tensor, int64_t position) {
  int64_t offset = 0;
  for (int64_t dim = tensor.dim(); dim-- > 0;) {
    offset += position % tensor.size(dim) * tensor.stride(dim);
    position /= tensor.size(dim);
  }
  return offset;
}

uint32_t hash_on_host(const at::Tensor& tensor, int64_t count) {
  const size_t itemsize = tensor.element_size();
  const auto* first = static_cast<const char*>(tensor.const_data_ptr());
  std::vector<char> elements(static_cast<size_t>(count) * itemsize);
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(elements.data() + static_cast<size_t>(i) * itemsize,
                first + offset_of(tensor, position_of(i, count, tensor.numel())) *
                            static_cast<int64_t>(itemsize),
                itemsize);
  return hash_of_elements(elements.data(), count, itemsize);
}

std::string in_digits(uint64_t number) {
  std::array<char, 16> digits;
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), number, 16);
  return {digits.data(), end.ptr};
}

}  // namespace

void FirstValues::add(const at::Tensor& whole, int64_t version) {
  samples_.push_back({.version = version});
  if (!whole.defined() || whole.is_meta() || whole.numel() == 0) return;
  const int64_t count = std::min(whole.numel(), kElements);
  if (whole.is_cpu()) {
    samples_.back().hash = hash_on_host(whole, count);
  } else if (is_dense(whole.sizes(), whole.strides())) {
    const int64_t step = count > 1 ? (whole.numel() - 1) / (count - 1) : 1;
    const at::NoGradGuard no_grad;
    samples_.back().elements =
        whole.detach().as_strided({count}, {step}, whole.storage_offset()).clone();
  }
}

std::vector<std::vector<std::optional<uint32_t>>> FirstValues::hashes_of(
    std::span<const FirstValues* const> all) {
  std::vector<std::vector<std::optional<uint32_t>>> hashes;
  std::vector<at::Tensor> elements;  // on devices
  for (const auto* values : all) {
    hashes.emplace_back();
    for (const auto& sample : values->samples_) {
      hashes.back().push_back(sample.hash);
      if (sample.elements.defined()) elements.push_back(sample.elements);
    }
  }
  if (elements.empty()) return hashes;
  int64_t bytes = 0;
  for (const auto& one : elements) bytes += static_cast<int64_t>(one.nbytes());
  // One device: that of the root's mesh.
  const auto packed = at::empty({bytes}, elements.front().options().dtype(at::kByte));
  int64_t begin = 0;
  for (const auto& one : elements) {
    const auto size = static_cast<int64_t>(one.nbytes());
    packed.narrow(0, begin, size).copy_(one.view(at::kByte));
    begin += size;
  }
  const auto host = packed.cpu();
  const auto* next = static_cast<const char*>(host.const_data_ptr());
  for (size_t v = 0; v < all.size(); ++v)
    for (size_t i = 0; i < all[v]->samples_.size(); ++i)
      if (const auto& one = all[v]->samples_[i].elements; one.defined()) {
        hashes[v][i] = hash_of_elements(next, one.numel(), one.element_size());
        next += one.nbytes();
      }
  return hashes;
}

std::string encode(std::span<const Beginning> beginnings) {
  std::string note;
  for (const auto& beginning : beginnings) {
    note += in_digits(stable_hash(beginning.group));
    for (const auto& hash : beginning.hashes) note += ' ' + (hash ? in_digits(*hash) : "-");
    note += '\n';
  }
  return note;
}

std::optional<std::string> find_other_values(const Beginning& own, const std::string& note) {
  const auto group = in_digits(stable_hash(own.group));
  std::istringstream lines(note);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string word;
    if (!(words >> word) || word != group) continue;
    for (size_t i = 0; i < own.hashes.size() && words >> word; ++i)
      if (own.hashes[i] && word != "-" && word != in_digits(*own.hashes[i])) return own.params[i];
  }
  return std::nullopt;
}

}  // namespace fsdp
