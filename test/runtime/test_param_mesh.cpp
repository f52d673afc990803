#include <catch2/catch.hpp>

#include "support/models.hpp"
#include "tensor/draw.hpp"

// Parameters on a mesh of their own, beside those of their module's mesh (M7), in the shape that they are for:
// experts that differ from one "ep" rank to the next and are sharded over "edp", between dense layers that are
// sharded over all ranks.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
using at::Tensor;

/// A dense layer and an expert. Plain: all experts, of which a rank's batch passes its own.
struct BlockImpl : nn::Cloneable<BlockImpl> {
  BlockImpl(int64_t width, std::vector<int64_t> hidden, bool is_plain) : width(width), hidden(std::move(hidden)), is_plain(is_plain) { reset(); }
  void reset() override {
    dense = register_module("dense", nn::Linear(width, width));
    experts.clear();
    for (size_t i = 0; i < hidden.size(); ++i) {
      const auto name = is_plain ? fmt::format("expert{}", i) : std::string("expert");
      experts.push_back(register_module(name, nn::Sequential(nn::Linear(width, hidden[i]), nn::Tanh(),
                                                            nn::Linear(hidden[i], width))));
    }
  }
  Tensor forward(const Tensor& x, size_t expert) {
    const auto y = torch::tanh(dense->forward(x));
    return y + experts[std::min(expert, experts.size() - 1)]->forward(y);
  }
  int64_t width;
  std::vector<int64_t> hidden;
  bool is_plain;
  nn::Linear dense{nullptr};
  std::vector<nn::Sequential> experts;
};
TORCH_MODULE(Block);

struct NetImpl : nn::Cloneable<NetImpl> {
  NetImpl(int64_t width, std::vector<int64_t> hidden, bool is_plain = false) : width(width), hidden(std::move(hidden)), is_plain(is_plain) { reset(); }
  void reset() override {
    blocks = register_module("blocks", nn::ModuleList());
    for (int i = 0; i < 2; ++i) blocks->push_back(Block(width, hidden, is_plain));
    head = register_module("head", nn::Linear(width, 2));
    steps = register_buffer("steps", torch::rand({2}));
  }
  Tensor forward(Tensor x, size_t expert) {
    for (const auto& block : *blocks) x = block->as<BlockImpl>()->forward(x, expert);
    return head->forward(x);
  }
  Tensor loss(int rank, int step, size_t expert) {
    Inputs in(rank, step);
    return forward(in.normal({4, width}), expert).square().mean();
  }
  int64_t width;
  std::vector<int64_t> hidden;
  bool is_plain;
  nn::ModuleList blocks{nullptr};
  nn::Linear head{nullptr};
  Tensor steps;
};
TORCH_MODULE(Net);

/// The name that the plain model has for a parameter of the net of expert `expert`.
std::string plain_name(std::string name, int64_t expert) {
  if (const auto at = name.find("expert."); at != std::string::npos) name.replace(at, 6, fmt::format("expert{}", expert));
  return name;
}

struct EpCase {
  int64_t ep = 2, edp = 2;
  int64_t replicas = 0;  ///< of the dense mesh; 0: one dimension
  ReshardAfterForward reshard = {};
  std::optional<int64_t> dim = {};  ///< along which experts are cut
  std::optional<double> max_norm = {};
  bool is_even = true;  ///< experts are of one size
  int prefetch_distance = 1;

  int ranks() const { return static_cast<int>(ep * edp); }
  int64_t hidden_of(int64_t expert) const { return is_even ? 6 : 5 + 2 * expert; }
  std::vector<int64_t> hidden() const {
    std::vector<int64_t> all;
    for (int64_t e = 0; e < ep; ++e) all.push_back(hidden_of(e));
    return all;
  }
  std::string text() const {
    return fmt::format("ep {} x edp {}, {} replicas, dim {}, even {}", ep, edp, replicas, dim.value_or(-9), is_even);
  }
};

/// One rank's model with its mesh.
struct EpModel {
  EpModel(const Rank& rank, const EpCase& c, uint64_t seed = 11)
      : mesh(init_device_mesh(rank.world(), {c.ep, c.edp}, {"ep", "edp"})),
        dense(c.replicas > 0 ? rank.hybrid(c.replicas, c.ranks() / c.replicas) : rank.mesh()),
        expert(mesh.coordinates()[0]),
        plain(seeded(seed, [&] { return Net(5, c.hidden(), /*is_plain=*/true); })),
        model(seeded(1, [&] { return Net(5, std::vector{c.hidden_of(expert)}); })) {
    at::NoGradGuard no_grad;
    const auto from = plain->named_parameters();
    for (auto& param : model->named_parameters()) param.value().copy_(from[plain_name(param.key(), expert)]);
    model->steps.copy_(plain->steps);
  }

  FullyShardOptions options(const EpCase& c) const {
    return {.mesh = dense,
            .reshard_after_forward = c.reshard,
            .shard_placement_fn = [edp = mesh["edp"], ep = mesh["ep"], dim = c.dim](
                                      const std::string& name, const Tensor& parameter) -> std::optional<ShardPlacementResult> {
              if (name.find("expert") == std::string::npos) return std::nullopt;
              return ShardPlacementResult{Shard{parameter.dim() > 1 ? dim.value_or(0) : 0}, edp, ep};
            }};
  }
  FSDPModule shard(const FullyShardOptions& options) const {
    for (auto& block : *model->blocks) fully_shard(*block, options);
    return fully_shard(model, options);
  }

  DeviceMesh mesh, dense;
  int64_t expert;
  Net plain, model;
};

/// The plain model's gradients as they have to be: dense ones averaged over all ranks, an expert's over the
/// ranks that have it. Returns each rank's loss.
std::vector<Tensor> plain_backward(Net& plain, const EpCase& c, int step) {
  std::vector<Tensor> losses;
  plain->zero_grad();
  for (int rank = 0; rank < c.ranks(); ++rank) {
    losses.push_back(plain->loss(rank, step, static_cast<size_t>(rank / c.edp)));
    losses.back().backward();
  }
  for (auto& param : plain->named_parameters())
    param.value().mutable_grad().div_(param.key().find("expert") != std::string::npos ? static_cast<double>(c.edp)
                                                                                    : static_cast<double>(c.ranks()));
  return losses;
}

double norm_of(const Net& plain) {
  double sum = 0;
  for (const auto& param : plain->parameters()) sum += param.grad().to(at::kDouble).square().sum().item<double>();
  return std::sqrt(sum);
}

void trains_like_plain(Rank& rank, const EpCase& c) {
  EpModel ep(rank, c);
  auto root = ep.shard(ep.options(c));
  root.set_prefetch_distance(c.prefetch_distance);
  const auto options = torch::optim::AdamWOptions(2e-2).eps(1e-2).weight_decay(0.1);
  torch::optim::AdamW optimizer(ep.model->parameters(), options), expected_optimizer(ep.plain->parameters(), options);
  const auto expected = ep.plain->named_parameters();
  for (int step = 0; step < 3; ++step) {
    const auto what = fmt::format("{}: step {}: ", c.text(), step);
    optimizer.zero_grad();
    const auto losses = plain_backward(ep.plain, c, step);
    const auto loss = ep.model->loss(rank.index(), step, 0);
    loss.backward();
    rank.check_close(loss.detach(), losses[static_cast<size_t>(rank.index())].detach(), what + "loss");
    for (const auto& param : ep.model->named_parameters())
      rank.check_close(full_grad(param.value()), expected[plain_name(param.key(), ep.expert)].grad(),
                       what + "gradient of " + param.key());
    if (c.max_norm) {
      const double norm = norm_of(ep.plain), found = clip_grad_norm_(ep.model->parameters(), *c.max_norm);
      rank.check(std::abs(norm - found) <= 1e-5 * norm, fmt::format("{}norm: expected {}, found {}", what, norm, found));
      torch::nn::utils::clip_grad_norm_(ep.plain->parameters(), *c.max_norm);
    }
    optimizer.step();
    expected_optimizer.step();
    for (const auto& param : ep.model->named_parameters())
      rank.check_close(full_tensor(param.value()), expected[plain_name(param.key(), ep.expert)].detach(),
                       what + "weight " + param.key());
  }
}

TEST_CASE("experts on a mesh of their own train like the plain model in which each rank's batch passes its experts",
          "[runtime][param_mesh]") {
  const uint64_t seed = draw_seed();
  INFO("FSDP_TEST_SEED=" << seed);
  Draw draw(seed);
  const std::vector<std::pair<int64_t, int64_t>> shapes{{2, 2}, {2, 1}, {1, 2}, {2, 3}, {3, 2}, {2, 4}, {4, 2}, {4, 1}};
  for (int i = 0; i < 16; ++i) {
    const auto& [ep, edp] = shapes[static_cast<size_t>(i) % shapes.size()];
    EpCase c{.ep = ep, .edp = edp, .is_even = draw.between(0, 1) == 0};
    if (c.ranks() % 2 == 0 && draw.between(0, 2) == 0) c.replicas = 2;
    if (draw.between(0, 1) == 0) c.dim = draw.between(-2, 1);
    if (draw.between(0, 1) == 0) c.max_norm = 0.05;
    c.reshard = draw.one_of<ReshardAfterForward>({{}, true, false, 1});
    c.prefetch_distance = static_cast<int>(draw.between(0, 2));
    CHECK(on_ranks(c.ranks(), [&](Rank& rank) { trains_like_plain(rank, c); }));
  }
}

TEST_CASE("micro-batches add up in every group, however they are reduced", "[runtime][param_mesh]") {
  const EpCase c{.replicas = 2};
  for (const auto accumulation : {Accumulation::kReduceEach, Accumulation::kSyncAtLast, Accumulation::kAllReduceLast, Accumulation::kLastBackward})
    on_ranks(4, [&](Rank& rank) {
      EpModel ep(rank, c);
      auto root = ep.shard(ep.options(c));
      std::vector<Tensor> expected;
      for (int micro = 0; micro < 3; ++micro) {
        const bool is_last = micro == 2;
        if (accumulation == Accumulation::kSyncAtLast) root.set_requires_gradient_sync(is_last);
        if (accumulation == Accumulation::kAllReduceLast) root.set_requires_all_reduce(is_last);
        if (accumulation == Accumulation::kLastBackward) root.set_is_last_backward(is_last);
        ep.model->loss(rank.index(), micro, 0).backward();
        plain_backward(ep.plain, c, micro);
        const auto parameters = ep.plain->parameters();
        for (size_t i = 0; i < parameters.size(); ++i)
          if (micro == 0)
            expected.push_back(parameters[i].grad().clone());
          else
            expected[i] += parameters[i].grad();
      }
      const auto names = ep.plain->named_parameters();
      for (const auto& param : ep.model->named_parameters())
        for (size_t i = 0; i < names.size(); ++i)
          if (names[i].key() == plain_name(param.key(), ep.expert))
            rank.check_close(full_grad(param.value()), expected[i], fmt::format("{}: {}", static_cast<int>(accumulation), param.key()));
    });
}

TEST_CASE("one module owns a group for each mesh, gathered and reduced apart, by names that differ",
          "[runtime][param_mesh]") {
  const EpCase c;
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    const auto block = *find_fsdp_module(*ep.model->blocks[1]);
    for (int step = 0; step < 3; ++step) {
      rank.log().clear();
      ep.model->loss(rank.index(), step, 0).backward();
      std::map<std::string, std::set<std::string>> groups;  // by subject
      for (const auto& call : rank.log().calls) groups[call.subject].insert(call.group);
      const std::set<std::string> all{rank.mesh().group()->name()}, edp{ep.mesh.group("edp")->name()};
      rank.check(groups["blocks.1"] == all, "the dense layer goes over all ranks");
      rank.check(groups["blocks.1 [edp]"] == edp, "the expert over its own");
      const auto reduced = rank.subjects_of("reduce_scatter");
      rank.check_equal(reduced.size(), size_t{5}, "two groups for each block, one for the root");
    }
    const auto shown = report(root);
    std::vector<std::string> names;
    for (const auto& group : shown.groups) names.push_back(group.name);
    rank.check_equal(names, std::vector<std::string>{"root", "blocks.0", "blocks.0 [edp]", "blocks.1", "blocks.1 [edp]"},
                     "groups in the report");
    rank.check(block.mesh() == rank.mesh() && block.placements() == std::vector<Placement>{Shard{0}}, "the module's own mesh");
    auto expert = ep.model->blocks[1]->as<BlockImpl>()->experts[0]->parameters()[0];
    rank.check(dtensor_of(expert).mesh() == ep.mesh["edp"], "the expert's mesh");
  });
}

TEST_CASE("the controls of a module act on all of its groups", "[runtime][param_mesh]") {
  const EpCase c{.reshard = true};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    auto first = *find_fsdp_module(*ep.model->blocks[0]), second = *find_fsdp_module(*ep.model->blocks[1]);
    rank.log().clear();
    second.unshard();
    rank.check_equal(rank.subjects_of("all_gather"), std::vector<std::string>{"blocks.1", "blocks.1 [edp]"}, "unshard");
    rank.check(second.is_unsharded() && !first.is_unsharded(), "is_unsharded");
    second.reshard();
    rank.check(!second.is_unsharded(), "reshard");
    auto handle = first.unshard_async();
    handle.wait();
    rank.check(first.is_unsharded(), "unshard_async");
    first.reshard();

    // Both groups are gathered when the module before is first used.
    first.set_modules_to_forward_prefetch({second});
    rank.log().clear();
    ep.model->loss(rank.index(), 0, 0).backward();
    const auto gathers = rank.subjects_of("all_gather");
    const auto position = [&](const std::string& name) { return std::find(gathers.begin(), gathers.end(), name) - gathers.begin(); };
    rank.check(position("blocks.1") < position("blocks.0 [edp]") && position("blocks.1 [edp]") < position("blocks.0 [edp]"),
               fmt::format("prefetched: {}", gathers));

    root.set_gradient_divide_factor(1);
    ep.model->zero_grad();
    plain_backward(ep.plain, c, 1);
    ep.model->loss(rank.index(), 1, 0).backward();
    for (const auto& param : ep.model->named_parameters()) {
      const double ranks = param.key().find("expert") != std::string::npos ? 2 : 4;
      rank.check_close(full_grad(param.value()), ep.plain->named_parameters()[plain_name(param.key(), ep.expert)].grad() * ranks,
                       "a divide factor is every group's: " + param.key());
    }
  });
}

TEST_CASE("an integer reshard has to fit every mesh, and the error names the one it does not", "[runtime][param_mesh]") {
  const EpCase c{.ep = 2, .edp = 4};
  on_ranks(8, [&](Rank& rank) {
    EpModel ep(rank, c);
    auto options = ep.options(c);
    options.reshard_after_forward = 8;
    const auto before = ep.model->blocks[0]->parameters();
    rank.check_throws<UsageError>([&] { fully_shard(*ep.model->blocks[0], options); }, {"8", "edp=4", "1, 2, 4"}, "at once");
    for (size_t i = 0; i < before.size(); ++i)
      rank.check(ep.model->blocks[0]->parameters()[i].is_same(before[i]), "nothing has changed");
    options.reshard_after_forward = 2;
    auto block = fully_shard(*ep.model->blocks[0], options);
    rank.check_throws<UsageError>([&] { block.set_reshard_after_forward(8); }, {"8", "edp=4"}, "by the control");
    block.set_reshard_after_forward(4);
  });
  for (int n : {2, 4})
    CHECK(on_ranks(8, [&](Rank& rank) { trains_like_plain(rank, {.ep = 2, .edp = 4, .reshard = n}); }));
}

TEST_CASE("sync_from_rank0 gives experts the values of their own mesh's first rank", "[runtime][param_mesh]") {
  for (bool is_even : {true, false}) {
    const EpCase c{.is_even = is_even};
    on_ranks(4, [&](Rank& rank) {
      EpModel ep(rank, c, 100 + static_cast<uint64_t>(rank.index())), dense(rank, c, 100);
      EpModel expert(rank, c, 100 + 2 * static_cast<uint64_t>(ep.expert));
      auto options = ep.options(c);
      options.sync_from_rank0 = true;
      ep.shard(options);
      for (const auto& param : ep.model->named_parameters()) {
        const auto& source = param.key().find("expert") != std::string::npos ? expert : dense;
        rank.check_identical(full_tensor(param.value()), source.model->named_parameters()[param.key()].detach(), param.key());
      }
      rank.check_identical(ep.model->steps, dense.model->steps, "a buffer");
    });
  }
  on_ranks(4, [](Rank& rank) {  // different experts within one mesh
    const EpCase c;
    auto net = seeded(1, [&] { return Net(5, std::vector<int64_t>{rank.index() < 3 ? 6 : 7}); });
    EpModel ep(rank, c);
    auto options = ep.options(c);
    options.sync_from_rank0 = true;
    const std::vector<std::string> parts =
        ep.expert == 1 ? std::vector<std::string>{"the ranks' modules differ", "expert"} : std::vector<std::string>{"rank 2 of the mesh"};
    rank.check_throws<UsageError>([&] { fully_shard(*net->blocks[0], options); }, parts, "refused on every rank");
    rank.check(!find_fsdp_module(*net->blocks[0]), "nothing has changed");
  });
}

TEST_CASE("state dicts hold a rank's experts, and load back", "[runtime][param_mesh]") {
  const EpCase c{.is_even = false};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c), other(rank, c, 77);
    ep.shard(ep.options(c));
    other.shard(other.options(c));
    const auto full = state_dict(ep.model);
    for (const auto& item : full.entries)
      if (item.key() != "steps")
        rank.check_identical(item.value().value, ep.plain->named_parameters()[plain_name(item.key(), ep.expert)].detach(), item.key());
    load_state_dict(other.model, full);
    const auto parameters = unique_parameters(*ep.model), others = unique_parameters(*other.model);
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_identical(others[i].second.detach(), parameters[i].second.detach(), "full: " + parameters[i].first);
    EpModel third(rank, c, 78);
    third.shard(third.options(c));
    load_state_dict(third.model, state_dict(ep.model, {.kind = StateDictKind::kSharded}));
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_identical(unique_parameters(*third.model)[i].second.detach(), parameters[i].second.detach(), "sharded");

    const auto first = state_dict(ep.model, {.rank0_only = true});
    const size_t kept = rank.index() == 0 ? full.entries.size() : rank.index() == 2 ? 8 : 0;
    rank.check_equal(first.entries.size(), kept, "the first rank of each mesh keeps what is its own");
    rank.check_throws<UsageError>([&] { load_state_dict(ep.model, first, {.broadcast_from_rank0 = true}); },
                                  {"blocks.0.expert.0.weight", "edp=2"}, "no rank has it for all");
  });
}

TEST_CASE("clones, full parameters, conversions and materialize keep several groups", "[runtime][param_mesh]") {
  const EpCase c{.dim = 1};
  on_ranks(4, [&](Rank& rank) {
    EpModel ep(rank, c);
    ep.shard(ep.options(c));
    ep.model->loss(rank.index(), 0, 0).backward();
    auto copy = seeded(3, [&] { return Net(fsdp::clone(ep.model)); });
    rank.check_equal(report(roots(*copy)[0]).groups.size(), size_t{5}, "groups of the copy");
    rank.log().clear();
    copy->loss(rank.index(), 0, 0).backward();
    const auto gathers = rank.subjects_of("all_gather");
    rank.check(std::find(gathers.begin(), gathers.end(), "blocks.0 [edp]") != gathers.end(), "named alike");
    const auto one = unique_parameters(*ep.model), two = unique_parameters(*copy);
    for (size_t i = 0; i < one.size(); ++i) {
      rank.check_identical(two[i].second.grad(), one[i].second.grad(), "gradient in the copy: " + one[i].first);
      rank.check(!two[i].second.is_alias_of(one[i].second), "its own memory");
    }
    {
      FullParameters scope(copy);
      at::NoGradGuard no_grad;
      for (const auto& param : copy->named_parameters()) {
        rank.check_identical(param.value().detach(), ep.plain->named_parameters()[plain_name(param.key(), ep.expert)].detach(),
                             "shown: " + param.key());
        param.value().mul_(2);
      }
    }
    for (size_t i = 0; i < one.size(); ++i)
      rank.check_identical(two[i].second.detach(), one[i].second.detach() * 2, "written back: " + one[i].first);
    fsdp::to(*copy, at::kDouble);
    for (size_t i = 0; i < one.size(); ++i)
      rank.check_identical(two[i].second.detach().to(at::kFloat), one[i].second.detach() * 2, "in double: " + one[i].first);

    auto meta = [&] { MetaDevice on_meta; return Net(5, std::vector{c.hidden_of(ep.expert)}); }();
    for (auto& block : *meta->blocks) fully_shard(*block, ep.options(c));
    fully_shard(meta, ep.options(c));
    materialize(meta, {.seed = 5, .initializers = {initializer<NetImpl>([](NetImpl& net, Initializer& init) {
                         init.constant_(net.steps, 0);
                       })}});
    auto whole = seeded(1, [&] { return Net(5, std::vector{c.hidden_of(ep.expert)}); });
    init_parameters(whole, {.seed = 5});
    for (const auto& param : meta->named_parameters())
      rank.check_identical(full_tensor(param.value()), whole->named_parameters()[param.key()].detach(), "materialized: " + param.key());
  });
}

TEST_CASE("ranks with other experts agree in the schedule check, also before every collective", "[runtime][param_mesh]") {
  on_ranks(4, [](Rank& rank) {
    const EpCase c{.is_even = false};
    EpModel ep(rank, c);
    auto root = ep.shard(ep.options(c));
    set_schedule_check(root, {.before_every_collective = true});
    for (int step = 0; step < 2; ++step) {
      ep.model->loss(rank.index(), step, 0).backward();
      rank.check(ep.model->head->bias.defined(), "no disagreement");
    }
  });
}

TEST_CASE("a mesh of its own may be of two dimensions, and replicates on the first", "[runtime][param_mesh]") {
  on_ranks(4, [](Rank& rank) {
    auto plain = plain_chain();
    auto model = plain_chain();
    const auto hybrid = rank.hybrid(2, 2);
    fully_shard(model, {.mesh = rank.mesh(), .shard_placement_fn = [&](auto& name, auto&) -> std::optional<ShardPlacementResult> {
                          if (name.starts_with("layer1")) return ShardPlacementResult{Shard{0}, hybrid};
                          return std::nullopt;
                        }});
    const auto expected = averaged_gradients(plain, 4);
    Inputs inputs(rank.index(), 0);
    rank.log().clear();
    model->forward(inputs.normal({4, 6})).square().mean().backward();
    rank.check_equal(rank.subjects_of("all_reduce"), std::vector<std::string>{"root [replicate, shard]"}, "replicas of one group");
    const auto parameters = unique_parameters(*model);
    for (size_t i = 0; i < parameters.size(); ++i)
      rank.check_close(grad_dtensor_of(parameters[i].second).full_tensor(), expected[i].second, parameters[i].first);
  });
}

}  // namespace
}  // namespace fsdp::test
