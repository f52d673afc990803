#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "support/scoped_environment.hpp"

// One contiguous local shard for each class of a group's parameters.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// Weights decay, biases and norms do not; one parameter is frozen.
struct NetImpl : nn::Module {
  NetImpl() {
    frozen->weight.set_requires_grad(false);
    late->bias.set_requires_grad(true);
  }
  at::Tensor forward(const at::Tensor& x) {
    auto h = torch::tanh(first(x));
    h = norm(h) + frozen(h);
    return uses_late ? late(h) : h;
  }
  nn::Linear first = register_module("first", nn::Linear(5, 7));
  nn::LayerNorm norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({7})));
  nn::Linear frozen = register_module("frozen", nn::Linear(7, 7));
  nn::Linear late = register_module("late", nn::Linear(7, 3));
  bool uses_late = true;
};
TORCH_MODULE(Net);

Net sharded_net(const DeviceMesh& mesh, const FullyShardOptions& more = {}) {
  auto model = seeded(4, [] { return Net(); });
  auto options = more;
  options.mesh = mesh;
  fully_shard(model->first, options);
  fully_shard(model, options);
  return model;
}

std::string by_name(const std::string& name, const at::Tensor&) { return name.ends_with("weight") ? "decay" : "none"; }

at::Tensor loss_of(Net& model, int rank, int step) {
  return model->forward(Inputs(rank, step).normal({4, 5}).to(model->norm->weight.scalar_type())).square().mean();
}

std::vector<at::Tensor> tensors_of(const std::vector<LocalShard>& shards) {
  std::vector<at::Tensor> tensors;
  for (const auto& local : shards) tensors.push_back(local.shard);
  return tensors;
}

/// AdamW with weight decay for one label alone, over 1-D shards or over parameters.
torch::optim::AdamW adamw(const std::vector<at::Tensor>& decayed, const std::vector<at::Tensor>& others) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(decayed, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2).weight_decay(0.1)));
  groups.emplace_back(others, std::make_unique<torch::optim::AdamWOptions>(torch::optim::AdamWOptions(1e-2).weight_decay(0)));
  return torch::optim::AdamW(std::move(groups));
}

struct Case {
  std::string name;
  int ranks = 2;
  FullyShardOptions options = {};
  bool copies_home = false;
  bool is_hybrid = false;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const int ranks : {1, 2, 3, 5}) all.push_back({fmt::format("{} ranks", ranks), ranks});
  all.push_back({"two replicas of two shards", 4, {}, false, true});
  all.push_back({"computed in bfloat16", 2, {.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat}}});
  all.push_back({"computed in bfloat16 on one rank", 1, {.mp_policy = {.param_dtype = at::kBFloat16}}});
  all.push_back({"offloaded", 2, {.offload_policy = CPUOffloadPolicy{}}, true});
  all.push_back({"cut along the last dimension", 2, {.shard_placement_fn = [](auto&, const at::Tensor& parameter) {
                   return std::optional(Shard(parameter.dim() - 1));
                 }}});
  return all;
}

}  // namespace

TEST_CASE("AdamW over local shards is AdamW over the parameters, bit for bit", "[local_shards]") {
  for (const auto& [name, ranks, options, copies_home, is_hybrid] : cases()) {
    CAPTURE(name);
    const ScopedEnvironment environment(copies_home ? Variables{{"FSDP_COPY_ON_CPU", "1"}} : Variables{});
    CHECK(on_ranks(ranks, [&](Rank& rank) {
      const auto mesh = is_hybrid ? rank.hybrid(2, 2) : rank.mesh();
      auto model = sharded_net(mesh, options), other = sharded_net(mesh, options);
      const auto shards = local_shards(*model, by_name);
      std::map<std::string, std::vector<at::Tensor>> ours, theirs;
      for (const auto& local : shards)
        if (local.shard.requires_grad()) ours[local.label].push_back(local.shard);
      for (auto& [param_name, parameter] : other->named_parameters().pairs())
        if (parameter.requires_grad()) theirs[by_name(param_name, parameter)].push_back(parameter);
      auto mine = adamw(ours["decay"], ours["none"]), plain = adamw(theirs["decay"], theirs["none"]);
      for (int step = 0; step < 4; ++step) {
        mine.zero_grad();
        plain.zero_grad();
        for (int micro = 0; micro < 2; ++micro) {
          loss_of(model, rank.index(), 2 * step + micro).backward();
          loss_of(other, rank.index(), 2 * step + micro).backward();
        }
        for (size_t i = 0; i < model->parameters().size(); ++i)
          rank.check_identical(model->parameters()[i].grad(), other->parameters()[i].grad(), "a parameter's gradient");
        const double norm = clip_grad_norm_(tensors_of(shards), 0.05), expected = clip_grad_norm_(other->parameters(), 0.05);
        rank.check(std::abs(norm - expected) <= 1e-6 * expected, "the norms agree");
        // Both were clipped by their own norm, which may differ in the last place.
        for (size_t i = 0; i < model->parameters().size(); ++i)
          if (other->parameters()[i].grad().defined()) model->parameters()[i].grad().copy_(other->parameters()[i].grad());
        mine.step();
        plain.step();
        for (size_t i = 0; i < model->parameters().size(); ++i)
          rank.check_identical(model->parameters()[i].detach(), other->parameters()[i].detach(), "a weight");
        rank.check_identical(full_tensor(model->late->weight), full_tensor(other->late->weight), "a whole one");
      }
    }));
  }
}

TEST_CASE("a local shard is its parameters' memory, and zero between them", "[local_shards]") {
  CHECK(on_ranks(3, [](Rank& rank) {
    auto model = sharded_net(rank.mesh());
    const auto before = state_dict(*model);
    const auto shards = local_shards(*model, by_name);
    // first: weight, bias; the root's group: frozen weight and bias, trainable weights, trainable biases.
    rank.check_equal(shards.size(), size_t{5}, "classes");
    size_t parts = 0;
    for (const auto& local : shards) {
      auto rest = local.shard.detach().clone();
      for (const auto& part : local.parts) {
        ++parts;
        const auto flat = local.shard.detach().narrow(0, part.offset, part.numel);
        rank.check(part.parameter.is_same(model->named_parameters()[part.name]), "the parameter: " + part.name);
        const auto piece = to_local(part.parameter).detach();
        rank.check_identical(flat, piece.reshape({-1}), "the values of " + part.name);
        rank.check(part.numel == 0 || flat.const_data_ptr() == piece.const_data_ptr(), "the memory of " + part.name);
        rest.narrow(0, part.offset, part.numel).zero_();
        rank.check_equal(part.parameter.requires_grad(), local.shard.requires_grad(), "requires_grad of " + part.name);
      }
      rank.check(rest.eq(0).all().item<bool>(), "zeros between");
      rank.check(local.shard.is_leaf() && local.shard.dim() == 1, "a 1-D leaf");
      rank.check(local.numel() <= local.shard.numel(), "padding");
    }
    rank.check_equal(parts, model->parameters().size(), "every parameter is in one");
    for (const auto& entry : before.entries)
      rank.check_identical(full_tensor(model->named_parameters()[entry.key()]), entry.value().value, entry.key());
    const auto again = local_shards(*model, by_name);
    for (size_t i = 0; i < shards.size(); ++i) rank.check(again[i].shard.is_same(shards[i].shard), "the same tensors");
  }));
}

TEST_CASE("gradients of local shards follow whoever resets them", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_net(rank.mesh()), other = sharded_net(rank.mesh());
    const auto shards = local_shards(*model, by_name);
    const auto check = [&](const std::string& what) {
      for (size_t i = 0; i < model->parameters().size(); ++i)
        rank.check_identical(model->parameters()[i].grad(), other->parameters()[i].grad(), what + ": a parameter's");
      for (const auto& local : shards) {
        if (!local.shard.requires_grad()) continue;
        auto rest = local.shard.grad().clone();
        for (const auto& part : local.parts) {
          const auto flat = local.shard.grad().narrow(0, part.offset, part.numel);
          if (!part.parameter.grad().defined()) continue;
          const auto piece = to_local(part.parameter.grad());
          rank.check_identical(flat, piece.reshape({-1}), what + ": the shard's");
          rank.check(part.numel == 0 || piece.const_data_ptr() == flat.const_data_ptr(), what + ": a view");
          rest.narrow(0, part.offset, part.numel).zero_();
        }
        rank.check(rest.eq(0).all().item<bool>(), what + ": zeros elsewhere");
      }
    };
    const auto backward = [&](int step) {
      loss_of(model, rank.index(), step).backward();
      loss_of(other, rank.index(), step).backward();
    };
    backward(0);
    check("first");
    backward(1);
    check("accumulated");
    for (auto& tensor : tensors_of(shards)) tensor.mutable_grad().reset();
    other->zero_grad();
    backward(2);
    check("after the optimizer's zero_grad");
    model->zero_grad();
    other->zero_grad();
    model->uses_late = other->uses_late = false;
    backward(3);
    check("after the module's zero_grad, some unused");
    for (auto& tensor : tensors_of(shards))
      if (tensor.grad().defined()) tensor.grad().zero_();
    other->zero_grad();
    model->uses_late = other->uses_late = true;
    backward(4);
    check("after zeros were written");
    to(*model, at::kDouble);
    to(*other, at::kDouble);
    check("after a conversion");
    backward(5);
    check("accumulated in double");
  }));
}

TEST_CASE("gradients that were there before are in the local shards", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_net(rank.mesh());
    loss_of(model, rank.index(), 0).backward();
    const auto expected = get_total_norm(model->parameters());
    const auto shards = local_shards(*model, by_name);
    const auto norm = get_total_norm(tensors_of(shards));
    rank.check(std::abs(norm - expected) < 1e-6 * expected, "the same norm");
  }));
}

TEST_CASE("writes to a local shard are seen by the next forward, and refused by a stale backward", "[local_shards]") {
  for (const int ranks : {1, 2})
    CHECK(on_ranks(ranks, [](Rank& rank) {
      auto model = sharded_net(rank.mesh());
      auto root = *find_fsdp_module(*model);
      const auto shards = local_shards(*model);
      root.set_reshard_after_backward(false);
      loss_of(model, rank.index(), 0).backward();
      torch::NoGradGuard no_grad;
      for (auto local : shards) local.shard.fill_(0.25);
      rank.check_identical(model->late->weight.detach(), torch::full({3, 7}, 0.25F), "through the unsharded parameter");
      torch::AutoGradMode with_grad(true);
      auto loss = loss_of(model, rank.index(), 0);
      {
        torch::NoGradGuard none;
        shards.front().shard.data().mul_(2);  // the root's trainable ones
      }
      rank.check_throws<std::exception>([&] { loss.backward(); }, {"modified by an inplace operation"}, "a stale backward");
      root.reset_iter_state();
    }));
}

TEST_CASE("collectives keep their number and bytes", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_net(rank.mesh()), other = sharded_net(rank.mesh());
    local_shards(*model, by_name);
    std::vector<std::pair<std::string, int64_t>> calls[2];
    for (int which : {0, 1}) {
      rank.log().clear();
      loss_of(which == 0 ? model : other, rank.index(), 0).backward();
      for (const auto& call : rank.log().calls) calls[which].emplace_back(call.operation + call.subject, call.bytes);
    }
    rank.check(calls[0] == calls[1], "the collectives of a step");
  }));
}

TEST_CASE("backends that send large pieces apart train local shards too", "[local_shards]") {
  for (const int64_t packs_below : {0, 60, 1000}) {
    CAPTURE(packs_below);
    CHECK(on_ranks(
        2,
        [](Rank& rank) {
          auto model = sharded_net(rank.mesh()), other = sharded_net(rank.mesh());
          const auto shards = local_shards(*model, by_name);
          for (int step = 0; step < 2; ++step) {
            loss_of(model, rank.index(), step).backward();
            loss_of(other, rank.index(), step).backward();
          }
          for (size_t i = 0; i < model->parameters().size(); ++i)
            rank.check_identical(model->parameters()[i].grad(), other->parameters()[i].grad(), "a gradient");
        },
        {.timeout = patience(), .launches_batches = true, .packs_below = packs_below}));
  }
}

TEST_CASE("the flat layout hands out its runs, and refuses what they do not hold", "[local_shards]") {
  CHECK(on_ranks(3, [](Rank& rank) {
    auto model = sharded_net(rank.mesh(), {.layout = ParamLayout::kFlat}), other = sharded_net(rank.mesh(), {.layout = ParamLayout::kFlat});
    rank.check_throws<UsageError>([&] { local_shards(*model, by_name); }, {"flat layout", "do not follow each other"}, "mixed labels");
    const auto shards = local_shards(*model);
    torch::optim::SGD ours(tensors_of(shards), 0.5), theirs(other->parameters(), 0.5);
    for (int step = 0; step < 3; ++step) {
      ours.zero_grad();
      theirs.zero_grad();
      loss_of(model, rank.index(), step).backward();
      loss_of(other, rank.index(), step).backward();
      ours.step();
      theirs.step();
      for (auto& [name, parameter] : other->named_parameters().pairs())
        rank.check_identical(full_tensor(model->named_parameters()[name]), full_tensor(parameter), name);
    }
  }));
}

TEST_CASE("what was handed out is fixed", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_net(rank.mesh());
    local_shards(*model, by_name);
    rank.check_throws<UsageError>([&] { local_shards(*model); }, {"other labels"}, "other labels");
    model->late->weight.set_requires_grad(false);
    rank.check_throws<StateError>([&] { loss_of(model, rank.index(), 0).backward(); },
                                  {"late.weight", "requires_grad", "local_shards"}, "toggled");
    model->late->weight.set_requires_grad(true);
    auto loss = loss_of(model, rank.index(), 0);
    loss.backward();
    local_shards(*model, by_name);  // asked for again
    auto fresh = sharded_net(rank.mesh());
    auto pending = loss_of(fresh, rank.index(), 0);
    rank.check_throws<StateError>([&] { local_shards(*fresh); }, {"in the middle of a step"}, "inside a step");
    pending.backward();
  }));
}

TEST_CASE("local shards handed out on the meta device get memory and values with their parameters", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto make = [&] {
      MetaDevice meta;
      return Net();
    };
    auto model = make(), other = make();
    fully_shard(model, {.mesh = rank.mesh()});
    fully_shard(other, {.mesh = rank.mesh()});
    const auto shards = local_shards(*model, by_name);
    rank.check(shards[0].shard.is_meta(), "on meta before");
    materialize(*model, {.seed = 2});
    materialize(*other, {.seed = 2});
    for (const auto& local : shards)
      for (const auto& part : local.parts)
        rank.check_identical(local.shard.detach().narrow(0, part.offset, part.numel), to_local(part.parameter).detach().reshape({-1}), part.name);
    for (auto& [name, parameter] : other->named_parameters().pairs())
      rank.check_identical(full_tensor(model->named_parameters()[name]), full_tensor(parameter), name);
    loss_of(model, rank.index(), 0).backward();
    rank.check(shards[0].shard.grad().defined(), "a gradient");
  }));
}

TEST_CASE("local shards' gradients may stay in the reduce dtype", "[local_shards]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = sharded_net(rank.mesh(), {.mp_policy = {.param_dtype = at::kBFloat16, .keep_low_precision_grads = true}});
    const auto shards = local_shards(*model);
    loss_of(model, rank.index(), 0).backward();
    for (const auto& local : shards) {
      if (!local.shard.requires_grad()) continue;
      rank.check(local.shard.grad().scalar_type() == at::kBFloat16, "the dtype");
      for (const auto& part : local.parts)
        rank.check_identical(local.shard.grad().narrow(0, part.offset, part.numel), to_local(part.parameter.grad()).reshape({-1}), part.name);
    }
  }));
}

}  // namespace fsdp::test
