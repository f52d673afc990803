#pragma once

#include <functional>
#include <unordered_map>
#include <vector>

#include "api/params/module_tree.hpp"
#include "fsdp/materialize.hpp"

namespace fsdp {

/// For LibTorch's own classes: what their reset_parameters() do.
const std::vector<ModuleInitializer>& known_initializers();

/// Writes the values of elements [range.begin, range.end) of the tensor with this stream to
/// `values`. Called from several threads.
using DrawRange =
    std::function<void(ElementRange range, uint64_t seed, uint64_t stream, double* values)>;

/// One run of initialisers over a module. First it rehearses: the initialisers run and only what
/// they would write is noted, so that everything uncovered is known before anything changes.
class InitRun {
 public:
  enum class Targets { kMeta, kAll };

  InitRun(ModuleTree tree, const InitOptions& options, Targets targets, const char* caller);

  /// Throws UsageError if a target is not covered.
  void rehearse();
  void run();
  const ModuleTree& tree() const { return tree_; }

  // --- for Initializer
  /// What `tensor` is; null if there is nothing to do for it (undefined, no target, or a
  /// rehearsal).
  const TreeEntry* target(const at::Tensor& tensor);
  c10::IntArrayRef sizes(const at::Tensor& tensor) const;
  /// Which elements of it this rank holds.
  std::vector<ElementRange> ranges(const TreeEntry& entry) const;
  /// The values of these elements one after another: float64 if the tensor is, else float32.
  at::Tensor draw(const TreeEntry& entry, const std::vector<ElementRange>& ranges,
                  const DrawRange& function, uint64_t salt = 0) const;
  /// values: this rank's elements, in order.
  void write_local(const TreeEntry& entry, const at::Tensor& values) const;
  void write_whole(const TreeEntry& entry, const at::Tensor& whole) const;
  /// Another number for each parameter.
  uint64_t generator_seed(const TreeEntry& entry) const;

 private:
  const TreeEntry& entry(size_t i) const;
  void apply_all();
  size_t find(const at::Tensor& tensor) const;
  std::string uncovered(size_t owner) const;

  ModuleTree tree_;
  const InitOptions& options_;
  Targets targets_;
  const char* caller_;
  std::unordered_map<const c10::TensorImpl*, size_t> known_;  // unsharded parameters too
  std::vector<bool> is_target_, is_covered_;                  // parameters, then buffers
  bool rehearses_ = false;
};

}  // namespace fsdp
