#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "property/byte_formula.hpp"
#include "property/meshes.hpp"
#include "property/parts.hpp"

namespace fsdp::test {

/// A random model on one rank, before fully_shard.
struct Unsharded {
  RandomTree tree;
  DrawnMeshes meshes = {};
  std::vector<Slice> slices = {};  ///< that are cut already
  std::vector<at::Tensor> ignored = {};

  const Slice* find_slice(const at::Tensor& tensor) const;
  bool is_expert(const at::Tensor& tensor) const;
  /// What tensor_parallel_fn says of a parameter that is to be there.
  std::optional<TensorParallel> part_of_whole(const std::string& name, const at::Tensor& parameter, Where where) const;
};

/// Calls fully_shard where its draws say, and writes down the groups that this should make.
class Sharder {
 public:
  Sharder(const torch::nn::Module& model, std::shared_ptr<const Unsharded> unsharded, FullyShardOptions options);

  /// Inner modules first; `forced` where an unsharded root would leave parameters without an owner.
  void visit(torch::nn::Module& module, bool forced);
  void shard(torch::nn::Module& module);
  void prefetch_by_list();

  std::vector<PlainGroup> groups() const;

 private:
  /// What is spread alike makes one group of a module.
  struct Place {
    Where where = Where::kModule;
    bool is_replicated = false;
    auto operator<=>(const Place&) const = default;
  };
  struct Owned {
    const torch::nn::Module* owner;
    Place place;
    PlainGroup group;
  };
  using Groups = std::map<Place, PlainGroup>;

  std::vector<PlainParam> left_in(const torch::nn::Module& module, const FullyShardOptions& with) const;
  std::vector<Place> draw_places(const torch::nn::Module& module, const std::vector<PlainParam>& params,
                                 FullyShardOptions& with);
  void choose_meshes(const std::map<const c10::TensorImpl*, Where>& elsewhere, FullyShardOptions& with) const;
  PlainGroup new_group(const Place& place, const FullyShardOptions& with) const;
  PlainGroup& group_of(const Place& place, const FullyShardOptions& with, Groups& made) const;
  void take_ties(const torch::nn::Module& module, const FullyShardOptions& with, Groups& made);

  std::shared_ptr<const Unsharded> unsharded_;
  const RandomTree& tree_;
  FullyShardOptions options_;
  Draw draw_;
  std::set<const torch::nn::Module*> visited_;
  std::map<const c10::TensorImpl*, std::vector<const torch::nn::Module*>> registering_;  // before anything is sharded
  std::vector<Owned> owned_;
};

}  // namespace fsdp::test
