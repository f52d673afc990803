#include <catch2/catch.hpp>

#include "support/models.hpp"

// A wrong call gives its error before anything is changed.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// All that a half-done call could have touched.
struct Snapshot {
  explicit Snapshot(const nn::Module& module) {
    for (auto& item : module.named_parameters()) {
      names.push_back(item.key());
      tensors.push_back(item.value());
      keys.push_back(item.value().key_set());
      sizes.push_back(item.value().sizes().vec());
    }
  }
  bool operator==(const Snapshot& other) const {
    if (names != other.names || sizes != other.sizes || keys != other.keys) return false;
    for (size_t i = 0; i < tensors.size(); ++i)
      if (!tensors[i].is_same(other.tensors[i])) return false;
    return true;
  }
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  std::vector<c10::DispatchKeySet> keys;
  std::vector<std::vector<int64_t>> sizes;
};

/// The call throws UsageError with these parts in its message, and leaves the module as it was.
void check_rejected(Rank& rank, nn::Module& module, const FullyShardOptions& options,
                    const std::vector<std::string>& parts, const std::string& what) {
  Snapshot before(module);
  bool known = find_fsdp_module(module).has_value();
  rank.check_throws<UsageError>([&] { fully_shard(module, options); }, parts, what);
  rank.check(Snapshot(module) == before, what + ": parameters changed");
  rank.check(find_fsdp_module(module).has_value() == known, what + ": left a state behind");
}

TEST_CASE("a second call on one module is an error", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::Linear net(3, 3);
    fully_shard(net, {.mesh = rank.mesh()});
    check_rejected(rank, *net, {.mesh = rank.mesh()}, {"torch::nn::LinearImpl", "sharded already", "once per module"},
                   "second call");
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check(net->parameters()[0].grad().defined(), "the first call still stands");
  });
}

struct BlockList : nn::ModuleListImpl {};

TEST_CASE("containers that have no forward are an error, their subclasses are not", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::ModuleList list(nn::Linear(3, 3));
    check_rejected(rank, *list, {.mesh = rank.mesh()}, {"ModuleList"}, "ModuleList");
    nn::ModuleDict dict;
    dict->update({{"a", nn::Linear(3, 3).ptr()}});
    check_rejected(rank, *dict, {.mesh = rank.mesh()}, {"ModuleDict"}, "ModuleDict");
    nn::ParameterList parameters(torch::ones({3}));
    check_rejected(rank, *parameters, {.mesh = rank.mesh()}, {"ParameterList"}, "ParameterList");
    nn::ParameterDict named;
    named->insert("a", torch::ones({3}));
    check_rejected(rank, *named, {.mesh = rank.mesh()}, {"ParameterDict"}, "ParameterDict");
    BlockList blocks;
    blocks.push_back(nn::Linear(3, 3));
    fully_shard(blocks, {.mesh = rank.mesh()});
    rank.check(find_fsdp_module(blocks).has_value(), "a subclass is fine");
  });
}

TEST_CASE("a parameter whose memory does not hold its values is an error that names it", "[runtime][rejected_calls]") {
  struct Lazy : nn::Module {
    Lazy() { weight = register_parameter("weight", torch::ones({4, 2}, at::kComplexFloat).conj()); }
    Tensor weight;
  };
  on_ranks(2, [](Rank& rank) {
    Lazy lazy;
    check_rejected(rank, lazy, {.mesh = rank.mesh()}, {"weight", "a lazy view of another's memory"}, "a conjugate");
  });
}

TEST_CASE("an error in a list of modules leaves all of them alone", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::Linear first(3, 3), second(3, 3);
    fully_shard(second, {.mesh = rank.mesh()});
    Snapshot before(*first);
    rank.check_throws<UsageError>([&] { fully_shard({first.ptr(), second.ptr()}, {.mesh = rank.mesh()}); },
                                  {"torch::nn::LinearImpl", "sharded already", "once per module"},
                                  "one is sharded already");
    rank.check(Snapshot(*first) == before && !find_fsdp_module(*first), "the other is untouched");
    nn::ModuleList list(nn::Linear(3, 3));
    rank.check_throws<UsageError>([&] { fully_shard({first.ptr(), list.ptr()}, {.mesh = rank.mesh()}); },
                                  {"ModuleList"}, "one is a ModuleList");
    rank.check(Snapshot(*first) == before && !find_fsdp_module(*first), "still untouched");
    fully_shard(first, {.mesh = rank.mesh()});
    first->forward(torch::ones({1, 3})).sum().backward();
    rank.check(first->parameters()[0].grad().defined(), "and can be sharded afterwards");
  });
}

TEST_CASE("sharding after the root has started is an error", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain();
    fully_shard(model->layers[0], {.mesh = rank.mesh()});
    fully_shard(model, {.mesh = rank.mesh()});
    Inputs inputs(0, 0);
    model->forward(inputs.normal({2, 6})).sum().backward();
    Snapshot before(*model);
    rank.check_throws<UsageError>(
        [&] { fully_shard(model->layers[1], {.mesh = rank.mesh()}); },
        {"weight", "belongs to the group of a module around this one", "inner modules before outer"}, "a child, too late");
    nn::Sequential around(model);
    check_rejected(rank, *around, {.mesh = rank.mesh()},
                   {"'0' has run a step as a root", "around it", "before the first forward"}, "a module around it, too late");
    rank.check(Snapshot(*model) == before, "nothing changed");
    model->forward(inputs.normal({2, 6})).sum().backward();
    rank.check(model->parameters()[0].grad().defined(), "training goes on");
  });
}

TEST_CASE("an integer reshard must divide the shard size; the message names it and the valid divisors",
          "[runtime][rejected_calls]") {
  on_ranks(4, [](Rank& rank) {
    nn::Linear net(3, 3);
    check_rejected(rank, *net, {.mesh = rank.mesh(), .reshard_after_forward = 3}, {"3", "4", "1", "2"}, "3 of 4");
    check_rejected(rank, *net, {.mesh = rank.mesh(), .reshard_after_forward = 0}, {"0", "4"}, "0 of 4");
    check_rejected(rank, *net, {.mesh = rank.mesh(), .reshard_after_forward = 8}, {"8", "4"}, "8 of 4");
    check_rejected(rank, *net, {.mesh = rank.mesh(), .reshard_after_forward = -1}, {"-1", "4"}, "-1 of 4");
    auto module = fully_shard(net, {.mesh = rank.mesh(), .reshard_after_forward = 2});
    rank.check_throws<UsageError>([&] { module.set_reshard_after_forward(3); }, {"3", "4"}, "by the control");
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check(net->parameters()[0].grad().defined(), "a divisor works");
  });
}

TEST_CASE("ignored modules must be in the tree, not the module itself and not a sharded unit",
          "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::Sequential net(nn::Linear(3, 3), nn::Linear(3, 3));
    nn::Linear outside(3, 3);
    fully_shard(*net->ptr(0), {.mesh = rank.mesh()});
    check_rejected(rank, *net, {.mesh = rank.mesh(), .ignored_modules = {net.ptr()}},
                   {"ignored_modules", "SequentialImpl", "is the module that fully_shard was called on"}, "itself");
    check_rejected(rank, *net, {.mesh = rank.mesh(), .ignored_modules = {net->ptr(0)}},
                   {"ignored_modules", "LinearImpl", "a sharded unit cannot be ignored"}, "a sharded unit");
    check_rejected(rank, *net, {.mesh = rank.mesh(), .ignored_modules = {outside.ptr()}},
                   {"ignored_modules", "LinearImpl", "not in the tree"}, "outside the tree");
    fully_shard(net, {.mesh = rank.mesh(), .ignored_modules = {net->ptr(1)}});
    rank.check(!is_fsdp_parameter(net[1]->as<nn::Linear>()->weight), "a right one is ignored");
  });
}

TEST_CASE("a mesh of three dimensions, or of two without HSDP's meaning, is an error", "[runtime][rejected_calls]") {
  on_ranks(4, [](Rank& rank) {
    nn::Linear net(3, 3);
    auto cube = init_device_mesh(rank.world(), {2, 2, 1}, {"a", "b", "c"});
    check_rejected(rank, *net, {.mesh = cube}, {"DeviceMesh(cpu, a=2, b=2, c=1)", "got 3", "dp_mesh_dims"},
                   "three dimensions");
    check_rejected(rank, *net, {.mesh = rank.hybrid(2, 2), .replicate_only = true},
                   {"DeviceMesh(cpu, replicate=2, shard=2)", "takes one dimension, got 2", "sub-mesh"},
                   "replicate-only of two");
    rank.check_throws<UsageError>([&] { init_device_mesh(rank.world(), {2, 2}); },
                                  {"device mesh", "2 dimension name(s)", "got 0"}, "two without names");
  });
}

TEST_CASE("ranks that are threads must pass a mesh", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::Linear net(3, 3);
    Snapshot before(*net);
    rank.check_throws<Error>([&] { fully_shard(net); }, {"mesh"}, "no mesh");
    rank.check(Snapshot(*net) == before && !find_fsdp_module(*net), "nothing changed");
  });
}

TEST_CASE("an empty list of modules is an error", "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    rank.check_throws<UsageError>(
        [&] { fully_shard(std::vector<std::shared_ptr<nn::Module>>{}, {.mesh = rank.mesh()}); },
        {"fully_shard", "at least one module", "an empty list"}, "empty list");
  });
}

TEST_CASE("an unsharded parameter among the ignored parameters that a unit below has sharded stays sharded, and is trained",
          "[runtime][rejected_calls]") {
  on_ranks(2, [](Rank& rank) {
    nn::Sequential net(nn::Linear(3, 3), nn::Linear(3, 3));
    fully_shard(*net->ptr(0), {.mesh = rank.mesh()});
    auto weight = net[0]->as<nn::Linear>()->weight;
    fully_shard(net, {.mesh = rank.mesh(), .ignored_params = {weight}});
    rank.check(is_fsdp_parameter(weight), "still sharded");
    rank.check(is_fsdp_parameter(net[1]->as<nn::Linear>()->weight), "and the others too");
    net->forward(torch::full({1, 3}, 1.F + rank.index())).sum().backward();
    rank.check_close(sharded(weight).grad(), rows_of(full_grad(weight), rank.index(), 2), "its rows of the gradient");
    rank.check_equal(weight.grad().sizes().vec(), weight.sizes().vec(), "the sizes of the gradient");
  });
}

}  // namespace
}  // namespace fsdp::test
