#pragma once

#include <torch/serialize.h>

#include <concepts>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "fsdp/api.hpp"

namespace fsdp {

/// A file that comes to its path once it is whole. Until then it lies beside it under a name of its own, so that ranks may
/// write to one path at once, and what was there before stays if the writing fails. Where something other than a regular file
/// is at the path (a pipe, a device), that is written to directly.
class FSDP_API SavedFile {
 public:
  /// Throws StateError if the file cannot be opened, with the system's reason.
  explicit SavedFile(std::string path);
  ~SavedFile();
  SavedFile(const SavedFile&) = delete;
  SavedFile& operator=(const SavedFile&) = delete;

  std::ostream& stream() { return stream_; }
  /// All has been written. Throws StateError if that failed; the path is as it was then.
  void commit();

 private:
  std::string path_, written_;  // the same where it is written to directly
  std::ofstream stream_;
  bool is_committed_ = false;
};

}  // namespace fsdp

namespace torch {

/// `torch::save` of a sharded module or optimizer is called by all ranks, as it gathers. So that they may name one path, a file
/// gets its content at once (fsdp::SavedFile): the last rank's, each of which is whole. Otherwise as LibTorch's, which it
/// stands before wherever this header is included.
template <class Value, class Path>
  requires std::convertible_to<Path&&, std::string>
void save(const Value& value, Path&& path) {
  fsdp::SavedFile file(std::forward<Path>(path));
  save(value, file.stream());
  file.commit();
}

template <class Path>
  requires std::convertible_to<Path&&, std::string>
void save(const std::vector<Tensor>& tensors, Path&& path) {
  fsdp::SavedFile file(std::forward<Path>(path));
  save(tensors, file.stream());
  file.commit();
}

}  // namespace torch
