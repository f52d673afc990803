#include <catch2/catch.hpp>

#include <numeric>

#include "support/models.hpp"

// Which parameters and buffers a call of fully_shard takes.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;
using Names = std::vector<std::string>;

Names names_of(const nn::Module& module) {
  Names names;
  for (auto& item : module.named_parameters()) names.push_back(item.key());
  return names;
}

TEST_CASE("names, order, sizes and requires_grad of parameters() stay; each is a DTensor around this rank's rows",
          "[runtime][managed_states]") {
  on_ranks(3, [](Rank& rank) {
    auto plain = plain_chain(2, 5);
    auto sharded_twin = plain_chain(2, 5);
    sharded_twin->layers[0]->bias.set_requires_grad(false);
    auto names = names_of(*sharded_twin);
    fully_shard(sharded_twin->layers[0], {.mesh = rank.mesh()});
    fully_shard(sharded_twin, {.mesh = rank.mesh()});

    rank.check_equal(names_of(*sharded_twin), names, "names");
    auto full = plain->named_parameters();
    for (auto& item : sharded_twin->named_parameters()) {
      const auto& whole = full[item.key()];
      rank.check(is_dtensor(item.value()), item.key() + " is a DTensor");
      rank.check_equal(item.value().sizes().vec(), whole.sizes().vec(), item.key() + ": sizes");
      rank.check_equal(item.value().strides().vec(), whole.strides().vec(), item.key() + ": strides");
      rank.check_equal(item.value().numel(), whole.numel(), item.key() + ": numel");
      rank.check_identical(to_local(item.value()), rows_of(whole.detach(), rank.index(), 3), item.key());
      rank.check(item.value().requires_grad() == (item.key() != "layer0.bias"), item.key() + " requires_grad");
      rank.check(item.value().is_leaf(), item.key() + " is a leaf");
    }
    rank.check_equal(sharded_twin->layers[0]->weight.sizes().vec(), std::vector<int64_t>{5, 5}, "the member's shape");
    rank.check(rank.log().calls.empty(), "sharding communicates nothing");
  });
}

TEST_CASE("unsharded parameters, sharded parameters and DTensors know each other", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain(1, 5);
    ShardedChain chain(rank.mesh(), 1, 5);
    auto handle = chain.model->layers[0]->weight;
    auto parameter = chain.model->layers[0]->named_parameters()["weight"];
    rank.check(sharded(handle).is_same(parameter), "sharded(unsharded parameter)");
    rank.check(sharded(parameter).is_same(parameter), "sharded(parameter)");
    rank.check(fsdp::unsharded(parameter).is_same(handle), "fsdp::unsharded(parameter)");
    rank.check(fsdp::unsharded(handle).is_same(handle), "fsdp::unsharded(unsharded parameter)");
    rank.check(is_fsdp_parameter(handle) && is_fsdp_parameter(parameter), "both are known");
    auto other = torch::ones({2});
    rank.check(!is_fsdp_parameter(other), "another tensor is not");
    rank.check_throws<UsageError>([&] { sharded(other); }, {"sharded: expected a parameter", "sizes [2]"},
                                  "sharded(another tensor)");
    rank.check_throws<UsageError>([&] { fsdp::unsharded(other); }, {"unsharded: expected a parameter", "sizes [2]"},
                                  "fsdp::unsharded(another tensor)");

    auto whole = dtensor_of(parameter);
    rank.check_equal(whole.sizes().vec(), std::vector<int64_t>{5, 5}, "global sizes");
    rank.check(whole.placements() == std::vector<Placement>{Shard{0}}, "placements");
    rank.check(whole.to_local().data_ptr() == to_local(parameter).data_ptr(), "shares memory");
    rank.check_throws<c10::Error>([&] { parameter.data_ptr(); }, {"weight", "to_local", "full_tensor"}, "memory of the whole");
    rank.check_identical(whole.full_tensor().detach(), plain->layers[0]->weight.detach(), "full_tensor");
    rank.check_identical(dtensor_of(handle).full_tensor().detach(), plain->layers[0]->weight.detach(), "by unsharded parameter");
    rank.check(!grad_dtensor_of(parameter).defined(), "no gradient yet");
  });
}

TEST_CASE("a module takes what no sharded submodule has taken", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2);
    rank.check(chain.layers[0].is_unsharded() == false, "sharded from the start");
    chain.layers[0].unshard();
    rank.check(chain.layers[0].is_unsharded() && !chain.layers[1].is_unsharded() && !chain.root[0].is_unsharded(),
               "unshard gathers the module's own group only");
    rank.check_equal(rank.log().calls.size(), size_t{1}, "one all-gather");
    // 6 x 6 weights and 6 biases of 4 bytes
    rank.check(rank.log().calls[0].bytes >= 42 * 4 && rank.log().calls[0].bytes <= 42 * 4 + 128, "its bytes");
    chain.layers[0].reshard();
    rank.check(!chain.layers[0].is_unsharded(), "reshard releases");
    rank.check_equal(rank.log().calls.size(), size_t{1}, "reshard communicates nothing");
  });
}

TEST_CASE("a module object in two places of the tree is managed once", "[runtime][managed_states]") {
  auto make = [] {
    auto shared = nn::Linear(6, 6);
    nn::Sequential net(shared, nn::Tanh(), shared, nn::Linear(6, 2));
    return Workload{.module = net.ptr(),
                    .shard =
                        [net, shared](const FullyShardOptions& options) {
                          if (options.reshard_after_forward.is_set()) fully_shard(shared, options);
                          fully_shard(net, options);
                        },
                    .loss = [net](Inputs& in) mutable { return net->forward(in.normal({4, 6})).square().mean(); }};
  };
  trains_like_plain(make);
  trains_like_plain(make, {.reshard_after_forward = true});
}

TEST_CASE("a module without parameters of its own is legal and its controls do nothing", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    nn::Sequential net(nn::Tanh(), nn::Linear(3, 3));
    fully_shard(*net->ptr(1), {.mesh = rank.mesh()});
    auto empty = fully_shard(*net->ptr(0), {.mesh = rank.mesh()});
    auto root = fully_shard(net, {.mesh = rank.mesh()});
    for (auto module : {empty, root}) {
      module.unshard();
      rank.check(module.is_unsharded(), "counts as unsharded");
      module.unshard_async().wait();
      module.reshard();
      module.set_requires_gradient_sync(true);
      module.set_reshard_after_forward(false);
    }
    rank.check(rank.log().calls.empty(), "nothing was communicated");
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check(net->parameters()[0].grad().defined(), "training works");
    root.reset_iter_state();
  });
}

TEST_CASE("an ignored parameter keeps its tensor, its full shape and its local gradient", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(7, [] { return nn::Linear(4, 4); });
    auto bias = net->bias;
    fully_shard(net, {.mesh = rank.mesh(), .ignored_params = {bias}});
    rank.check(net->named_parameters()["bias"].is_same(bias) && net->bias.is_same(bias), "the same tensor");
    rank.check(!is_fsdp_parameter(bias) && is_fsdp_parameter(net->weight), "only the weight is managed");
    (net->forward(torch::ones({1, 4})) * (rank.index() + 1.0)).sum().backward();
    rank.check_close(bias.grad(), torch::full({4}, rank.index() + 1.0), "not reduced");
    rank.check_close(net->named_parameters()["weight"].grad(), torch::full({2, 4}, 1.5), "reduced");
  });
}

struct Pair : nn::Module {
  Pair() {
    first = register_module("first", nn::Linear(3, 3));
    second = register_module("second", nn::Linear(3, 3));
  }
  Tensor forward(Tensor x) { return second->forward(torch::tanh(first->forward(x))); }
  nn::Linear first{nullptr}, second{nullptr};
};

TEST_CASE("ignored modules are left alone with all below them, but units in them stay sharded",
          "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto inner = std::make_shared<Pair>();
    nn::Sequential net(inner, nn::Linear(3, 3));
    fully_shard(inner->first, {.mesh = rank.mesh()});
    fully_shard(net, {.mesh = rank.mesh(), .ignored_modules = {inner}});
    rank.check(is_fsdp_parameter(inner->first->weight), "the unit inside");
    rank.check(!is_fsdp_parameter(inner->second->weight), "the ignored one");
    rank.check(is_fsdp_parameter(net[1]->as<nn::Linear>()->weight), "the one beside");
  });
}

struct TwoNames : nn::Module {
  TwoNames() {
    inner = register_module("inner", nn::Linear(3, 3));
    tied = register_parameter("tied", inner->weight);
    own = register_parameter("own", torch::ones({3}));
  }
  nn::Linear inner{nullptr};
  Tensor tied, own;
};

TEST_CASE("a parent inherits what its nested units ignore", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    TwoNames net;
    fully_shard(net.inner, {.mesh = rank.mesh(), .ignored_params = {net.inner->weight}});
    fully_shard(net, {.mesh = rank.mesh()});
    rank.check(!is_fsdp_parameter(net.tied), "ignored below, so ignored above");
    rank.check(is_fsdp_parameter(net.own) && is_fsdp_parameter(net.inner->bias), "the others are managed");
  });
}

TEST_CASE("several modules of one call share a group", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    auto both = fully_shard({model->layers[0].ptr(), model->layers[1].ptr()}, {.mesh = rank.mesh()});
    fully_shard(model->layers[2], {.mesh = rank.mesh()});
    auto root = fully_shard(model, {.mesh = rank.mesh()});
    rank.check_equal(root.sharded_modules().size(), size_t{3}, "the root and two groups");
    auto found = find_fsdp_module(*model->layers[1]);
    rank.check(found && *found == both, "every listed module leads to the same state");
    Inputs inputs(rank.index(), 0);
    model->forward(inputs.normal({4, 6})).square().mean().backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{3}, "one reduce-scatter a group");
    check_gradients(rank, *model, averaged_gradients(plain, 2), "shared group");
  });
}

TEST_CASE("a listed module inside another counts once", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto inner = std::make_shared<Pair>();
    nn::Sequential net(inner, nn::Linear(3, 3));
    fully_shard({inner, inner->first.ptr()}, {.mesh = rank.mesh()});
    fully_shard(net, {.mesh = rank.mesh()});
    rank.check_equal(inner->parameters().size(), size_t{4}, "two weights and two biases, once each");
    net->forward(torch::ones({1, 3})).sum().backward();
    rank.check_equal(rank.subjects_of("reduce_scatter").size(), size_t{2}, "two groups");
    for (auto& parameter : net->parameters()) rank.check(parameter.grad().defined(), "has a gradient");
  });
}

struct OnMeta : nn::Module {
  OnMeta() {
    weight = register_parameter("weight", torch::empty({4, 3}, at::TensorOptions(at::kMeta)));
    bias = register_parameter("bias", torch::empty({3}, at::TensorOptions(at::kMeta)));
  }
  Tensor weight, bias;
};

TEST_CASE("meta parameters stay meta", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    OnMeta net;
    fully_shard(net, {.mesh = rank.mesh()});
    for (auto& parameter : net.parameters()) {
      rank.check(parameter.is_meta(), "still meta");
      rank.check_equal(parameter.size(0), parameter.dim() == 1 ? int64_t{3} : int64_t{4}, "the whole's sizes");
      rank.check(to_local(parameter).is_meta(), "its piece is meta, too");
      rank.check_equal(to_local(parameter).size(0), rank.index() == 1 && parameter.dim() == 1 ? int64_t{1} : int64_t{2}, "its rows");
    }
    rank.check(net.weight.is_meta() && net.weight.size(0) == 4, "the member keeps the full shape");
    rank.check_throws<Error>([&] { net.weight.sum(); }, {"meta"}, "a use says that there are no values yet");
  });
}

TEST_CASE("a gradient that exists is sharded with its parameter", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    nn::Linear net(4, 4);
    net->weight.mutable_grad() = torch::arange(16.).view({4, 4});
    fully_shard(net, {.mesh = rank.mesh()});
    auto parameters = net->named_parameters();
    rank.check_close(parameters["weight"].grad(), rows_of(torch::arange(16.).view({4, 4}), rank.index(), 2), "its rows");
    rank.check(!parameters["bias"].grad().defined(), "none where there was none");
    net->forward(torch::ones({1, 4})).sum().backward();
    rank.check_close(parameters["weight"].grad(), rows_of(torch::arange(16.).view({4, 4}) + 1, rank.index(), 2),
                     "the first backward adds to it once");
  });
}

TEST_CASE("buffers are neither sharded nor averaged, and keep their tensors", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    nn::BatchNorm1d net(4);
    auto mean = net->running_mean;
    fully_shard(net, {.mesh = rank.mesh()});
    rank.check(net->running_mean.is_same(mean) && net->named_buffers()["running_mean"].is_same(mean), "same tensor");
    rank.check_equal(mean.sizes().vec(), std::vector<int64_t>{4}, "full shape");
    net->forward(torch::full({3, 4}, 1.0 + rank.index())).sum().backward();
    rank.check_close(mean, torch::full({4}, 0.1 * (1.0 + rank.index())), "this rank's own statistics");
  });
}

TEST_CASE("parameters of modules that share a group have their own module's name", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    auto model = plain_chain(3);
    fully_shard({model->layers[0].ptr(), model->layers[2].ptr()}, {.mesh = rank.mesh()});
    fully_shard(model, {.mesh = rank.mesh()});
    const auto name_of = [&](const at::Tensor& handle) {
      try {
        sharded(handle).set_data(torch::zeros({99}));
      } catch (const UsageError& error) {
        return message_of(error);
      }
      return std::string();
    };
    rank.check(name_of(model->layers[0]->weight).find("layer0.weight: ") != std::string::npos, "the first module's");
    rank.check(name_of(model->layers[2]->bias).find("layer2.bias: ") != std::string::npos, "the second module's");
    rank.check(name_of(model->layers[1]->bias).find("layer1.bias: ") != std::string::npos, "the root's own");
  });
}

TEST_CASE("meta and real parameters in one group are refused by name", "[runtime][managed_states]") {
  on_ranks(2, [](Rank& rank) {
    struct Net : torch::nn::Module {
      at::Tensor real = register_parameter("real", torch::ones({4}));
      at::Tensor later = register_parameter("later", torch::empty({4}, at::kMeta));
    };
    Net net;
    rank.check_throws<UsageError>([&] { fully_shard(net, {.mesh = rank.mesh()}); }, {"later", "meta", "real", "cpu"},
                                  "half a module on meta");
    rank.check(!is_fsdp_parameter(net.real), "nothing has changed");
  });
}

/// What a program registers or replaces in a model that trains already.
struct GrowingImpl : nn::Module {
  GrowingImpl() {
    first = register_module("first", nn::Linear(4, 7));
    head = register_module("head", nn::Linear(7, 3));
    more = register_module("more", nn::Sequential());
    scales = register_module("scales", nn::ParameterList());
  }
  Tensor forward(const Tensor& x) {
    auto out = head(torch::tanh(first(x)));
    if (!more->is_empty()) out = more->forward(out);
    if (scale.defined()) out = out * scale;
    for (const auto& entry : *scales) out = out * entry.value();
    if (tied.defined()) out = out * tied.square().mean();
    return out.square().mean();
  }
  nn::Linear first{nullptr}, head{nullptr};
  nn::Sequential more{nullptr};
  nn::ParameterList scales{nullptr};
  Tensor scale, tied;
};
TORCH_MODULE(Growing);
struct Growth {
  std::string name;
  std::function<void(Growing&)> grow;
  double momentum = 0.9;
};

/// Trains on the batches together, before the model grows and after.
void train_growing(Growing& net, const std::vector<int>& batches, const Growth& growth) {
  for (const bool is_grown : {false, true}) {
    if (is_grown) growth.grow(net);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(growth.momentum));
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      auto loss = torch::zeros({});
      for (const int batch : batches) loss = loss + net->forward(torch::full({2, 4}, 0.3 + 0.4 * batch + 0.1 * step));
      (loss / static_cast<double>(batches.size())).backward();
      optimizer.step();
    }
  }
}

TEST_CASE("what is registered after fully_shard is sharded with the nearest module, and trains as in the plain model",
          "[runtime][managed_states]") {
  const auto linear = [](int64_t in, int64_t out) { return seeded(5, [=] { return nn::Linear(in, out); }); };
  const std::vector<Growth> ways = {
      {"push_back", [&](Growing& net) { net->more->push_back(linear(3, 2)); net->more->push_back(nn::Tanh()); }},
      {"replace_module", [&](Growing& net) { net->head = net->replace_module("head", linear(7, 5)); }},
      {"replace_module of a sharded one", [&](Growing& net) { net->first = net->replace_module("first", linear(4, 7)); }},
      {"register_parameter", [](Growing& net) { net->scale = net->register_parameter("scale", torch::full({3}, 1.5)); }},
      {"append", [](Growing& net) { net->scales->append(torch::full({3}, 1.5)); }},
      {"a tie", [](Growing& net) { net->tied = net->register_parameter("again", net->first->weight); }, 0}};
  for (const auto& way : ways)
    for (const auto& [world, has_inner] : {std::pair{1, true}, {2, true}, {2, false}})
      CHECK(on_ranks(world, [&, world = world, has_inner = has_inner](Rank& rank) {
        const auto& name = way.name;
        auto plain = seeded(3, [] { return Growing(); }), net = seeded(3, [] { return Growing(); });
        std::vector<int> all(static_cast<size_t>(world));
        std::iota(all.begin(), all.end(), 0);
        train_growing(plain, all, way);
        if (has_inner) fully_shard(net->first, {.mesh = rank.mesh()});
        fully_shard(net, {.mesh = rank.mesh()});
        train_growing(net, {rank.index()}, way);
        const auto found = net->named_parameters(), expected = plain->named_parameters();
        rank.check_equal(found.keys(), expected.keys(), name + ": names");
        for (const auto& item : found) {
          rank.check(is_fsdp_parameter(item.value()) && is_dtensor(item.value()), name + ": sharded: " + item.key());
          rank.check_close(full_tensor(item.value()), expected[item.key()], name + ": " + item.key());
        }
        auto copy = state_dict(*net);
        for (const auto& item : expected) rank.check(copy.find(item.key()) != nullptr, name + ": saved: " + item.key());
      }));
}

TEST_CASE("what cannot be sharded is refused by name at the first forward after it was registered, and what is ignored stays so",
          "[runtime][managed_states]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto net = seeded(3, [] { return Growing(); });
    fully_shard(net, {.mesh = rank.mesh(), .ignored_modules = {net->head.ptr()}});
    const auto x = torch::ones({2, 4});
    net->forward(x).backward();
    net->head->register_parameter("more", torch::ones({3}));
    net->forward(x).backward();
    rank.check(!is_fsdp_parameter(net->head->named_parameters()["more"]), "of an ignored module");
    net->register_parameter("sparse", torch::ones({3, 3}).to_sparse());
    rank.check_throws<UsageError>([&] { net->forward(x); }, {"sparse", "dense"}, "refused");
  }));
}

}  // namespace
}  // namespace fsdp::test
