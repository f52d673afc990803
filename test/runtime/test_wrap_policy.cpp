#include <catch2/catch.hpp>

#include <mutex>

#include "fsdp/log.hpp"
#include "support/models.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;

/// Two levels: encoders in a list, an attention in each, a head.
struct EncoderImpl : nn::Module {
  nn::MultiheadAttention attention = register_module("attention", nn::MultiheadAttention(8, 2));
  nn::Linear up = register_module("up", nn::Linear(8, 16));
  nn::Linear down = register_module("down", nn::Linear(16, 8));
  at::Tensor forward(const at::Tensor& x) {
    const auto attended = x + std::get<0>(attention->forward(x, x, x));
    return attended + down->forward(torch::relu(up->forward(attended)));
  }
};
TORCH_MODULE(Encoder);

struct PolicyNetImpl : nn::Module {
  nn::ModuleList blocks = register_module("blocks", nn::ModuleList());
  nn::Linear head = register_module("head", nn::Linear(8, 3));
  PolicyNetImpl() {
    for (int i = 0; i < 2; ++i) blocks->push_back(Encoder());
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& block : *blocks) x = block->as<Encoder>()->forward(x);
    return head->forward(x);
  }
};
TORCH_MODULE(PolicyNet);

PolicyNet make_net() {
  return seeded(11, [] { return PolicyNet(); });
}

std::vector<std::string> names_of(const WrapPlan& plan) {
  std::vector<std::string> names;
  for (const auto& unit : plan.units) names.push_back(unit.name);
  return names;
}

using Names = std::vector<std::string>;

}  // namespace

TEST_CASE("a class policy makes units of its classes, inner before outer, the root last", "[wrap_policy]") {
  auto net = make_net();
  CHECK(names_of(plan_wrapping(*net, wrap_class<EncoderImpl>())) == Names{"blocks.0", "blocks.1", ""});
  CHECK(names_of(plan_wrapping(*net, wrap_class<EncoderImpl, nn::MultiheadAttentionImpl>())) ==
        Names{"blocks.0.attention", "blocks.0", "blocks.1.attention", "blocks.1", ""});
}

TEST_CASE("a predicate sees names, and elements that no inner unit has", "[wrap_policy]") {
  auto net = make_net();
  std::map<std::string, int64_t> numel;
  const auto policy = wrap_if([&](const WrapCandidate& candidate) {
    numel[candidate.name] = candidate.numel;
    return candidate.name.ends_with(".up");
  });
  CHECK(names_of(plan_wrapping(*net, policy)) == Names{"blocks.0.up", "blocks.1.up", ""});
  CHECK(numel["blocks.0.up"] == 8 * 16 + 16);
  CHECK(numel["blocks.0"] == 4 * (8 * 8 + 8) + 16 * 8 + 8);
}

TEST_CASE("by size: large enough, leaves stay with their parent as FSDP1's do, lists are never units", "[wrap_policy]") {
  auto net = make_net();
  // An encoder has 568 elements, its attention 288.
  CHECK(names_of(plan_wrapping(*net, wrap_by_size({.min_numel = 568}))) == Names{"blocks.0", "blocks.1", ""});
  CHECK(names_of(plan_wrapping(*net, wrap_by_size({.min_numel = 200}))) == Names{"blocks.0", "blocks.1", ""});
  CHECK(names_of(plan_wrapping(*net, wrap_by_size({.min_numel = 60}))) ==
        Names{"blocks.0.up", "blocks.0.down", "blocks.0", "blocks.1.up", "blocks.1.down", "blocks.1", ""});
  CHECK(names_of(plan_wrapping(*net, wrap_by_size({.min_numel = 60, .is_leaf = [](const nn::Module& module) {
                                                     return dynamic_cast<const EncoderImpl*>(&module) != nullptr;
                                                   }}))) == Names{""});
  CHECK(names_of(plan_wrapping(*net, wrap_by_size())) == Names{""});
}

TEST_CASE("by size: a container without a forward is never a unit, whatever is excluded", "[wrap_policy]") {
  struct HoldsParameters : nn::Module {
    nn::ParameterList rows = register_module("rows", nn::ParameterList());
    nn::ParameterDict named = register_module("named", nn::ParameterDict());
    nn::Linear head = register_module("head", nn::Linear(8, 8));
    HoldsParameters() {
      rows->append(torch::ones({8, 8}));
      named->insert("a", torch::ones({8, 8}));
    }
  };
  HoldsParameters holder;
  CHECK(names_of(plan_wrapping(holder, wrap_by_size({.min_numel = 60}))) == Names{"head", ""});
  CHECK(names_of(plan_wrapping(holder, wrap_by_size({.min_numel = 60, .is_excluded = [](const nn::Module&) {
                                                       return false;
                                                     }}))) == Names{"head", ""});
}

TEST_CASE("what the root's call ignores is no unit, and each unit's call leaves its own part of it", "[wrap_policy]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto trained = [&](const std::function<std::vector<std::shared_ptr<nn::Module>>(PolicyNet&)>& ignored, const Names& units,
                       const Names& left) {
      auto net = make_net();
      const FullyShardOptions options{.mesh = rank.mesh(), .ignored_modules = ignored(net)};
      const auto plan = plan_wrapping(*net, wrap_class<EncoderImpl, nn::LinearImpl>(), options);
      rank.check_equal(names_of(plan), units, "units");
      std::vector<std::string> listed, sharded, kept;
      for (const auto& unit : plan.units) listed.insert(listed.end(), unit.parameters.begin(), unit.parameters.end());
      apply_wrapping(plan);
      for (const auto& entry : net->named_parameters()) {
        const bool is_left = std::any_of(left.begin(), left.end(), [&](const auto& name) { return entry.key().starts_with(name + "."); });
        rank.check_equal(is_fsdp_parameter(entry.value()), !is_left, entry.key());
        if (!is_left) sharded.push_back(entry.key());
      }
      std::sort(listed.begin(), listed.end());
      std::sort(sharded.begin(), sharded.end());
      rank.check_equal(listed, sharded, "the plan lists what is sharded");
      Inputs in(rank.index(), 0);
      net->forward(in.normal({4, 2, 8})).square().mean().backward();
    };
    const Names all{"blocks.0.attention.out_proj", "blocks.0.up", "blocks.0.down", "blocks.0",
                    "blocks.1.attention.out_proj", "blocks.1.up", "blocks.1.down", "blocks.1", "head", ""};
    auto without = [&](const std::string& prefix) {
      Names names = all;
      std::erase_if(names, [&](const auto& name) { return name == prefix || name.starts_with(prefix + "."); });
      return names;
    };
    trained([](PolicyNet& net) { return std::vector{net->head.ptr()->shared_from_this()}; }, without("head"), {"head"});
    trained([](PolicyNet& net) { return std::vector{net->blocks->ptr(0)}; }, without("blocks.0"), {"blocks.0"});
    trained([](PolicyNet& net) { return std::vector{net->blocks[1]->as<Encoder>()->up.ptr()->shared_from_this(), net->blocks->ptr(0)}; },
            [&] {
              auto names = without("blocks.0");
              std::erase(names, "blocks.1.up");
              return names;
            }(),
            {"blocks.1.up", "blocks.0"});
  }));
}

TEST_CASE("a weight that an ignored module shares with a unit is ignored there too", "[wrap_policy]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    struct Holder : nn::Module {
      at::Tensor weight;
      explicit Holder(at::Tensor value) { weight = register_parameter("weight", std::move(value)); }
    };
    struct Tied : nn::Module {
      at::Tensor weight = torch::ones({4, 4});
      std::shared_ptr<Holder> a = register_module("a", std::make_shared<Holder>(weight));
      std::shared_ptr<Holder> b = register_module("b", std::make_shared<Holder>(weight));
      std::shared_ptr<Holder> c = register_module("c", std::make_shared<Holder>(torch::ones({2, 2})));
    };
    Tied tied;
    const auto plan = plan_wrapping(tied, wrap_class<Holder>(), {.mesh = rank.mesh(), .ignored_modules = {tied.b}});
    rank.check_equal(names_of(plan), Names{"a", "c", ""}, "units");
    rank.check(plan.units[0].parameters.empty(), "ignored in a, too");
    apply_wrapping(plan);
    rank.check(!is_fsdp_parameter(tied.a->parameters()[0]) && is_fsdp_parameter(tied.c->parameters()[0]), "sharded");
  }));
}

TEST_CASE("a custom function gives options", "[wrap_policy]") {
  auto net = make_net();
  const WrapPolicy policy{.wraps = [](const WrapCandidate& candidate, FullyShardOptions options) -> std::optional<FullyShardOptions> {
    if (!candidate.name.ends_with("attention")) return std::nullopt;
    options.reshard_after_forward = false;
    return options;
  }};
  const auto plan = plan_wrapping(*net, policy, {.reshard_after_forward = true});
  CHECK_FALSE(plan.units[0].options.reshard_after_forward.value());
  CHECK(plan.units.back().options.reshard_after_forward.value());
}

TEST_CASE("the dry run prints the tree with bytes and changes nothing", "[wrap_policy]") {
  auto net = make_net();
  net->blocks[0]->as<Encoder>()->up->weight.set_requires_grad(false);
  const auto plan = plan_wrapping(*net, wrap_class<EncoderImpl, nn::MultiheadAttentionImpl>());
  CHECK(plan.to_string() ==
        "(root): 2 parameters, 108 bytes\n"
        "  blocks.0: 4 parameters, 1120 bytes\n"
        "    note: 512 of these bytes are frozen; they are gathered with the others and take no part in the reduction\n"
        "    512 bytes are frozen (blocks.0.up.weight), 608 bytes are trainable (blocks.0.up.bias, blocks.0.down.weight, "
        "blocks.0.down.bias); 0 extra gradient bytes\n"
        "    blocks.0.attention: 4 parameters, 1152 bytes\n"
        "  blocks.1: 4 parameters, 1120 bytes\n"
        "    blocks.1.attention: 4 parameters, 1152 bytes\n");
  for (const auto& parameter : net->parameters()) CHECK_FALSE(is_fsdp_parameter(parameter));
}

TEST_CASE("a tree sharded by a policy trains like the plain one", "[wrap_policy]") {
  for (const auto& policy : {wrap_class<EncoderImpl>(), wrap_by_size({.min_numel = 60})})
    CHECK(trains_like_plain([&] {
      PolicyNet net;
      return Workload{.module = net.ptr(),
                      .shard = [net, policy](const FullyShardOptions& options) { fully_shard(net, policy, options); },
                      .loss = [net](Inputs& in) mutable { return net->forward(in.normal({4, 2, 8})).square().mean(); }};
    }));
}

TEST_CASE("a policy that chooses nothing is told", "[wrap_policy]") {
  std::mutex mutex;
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines += line;
  });
  CHECK(on_ranks(2, [](Rank& rank) {
    auto net = make_net();
    fully_shard(net, wrap_class<nn::Conv2dImpl>(), {.mesh = rank.mesh()});
    rank.check_equal(to_local(net->parameters().back()).numel(), int64_t{2 - rank.index()}, "rows of the head's bias");
  }));
  set_log_sink({});
  CHECK(lines.find("chose no module below the root") != std::string::npos);
}

TEST_CASE("what a policy cannot do is said before anything changes", "[wrap_policy]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    const FullyShardOptions options{.mesh = rank.mesh()};
    auto net = make_net();
    rank.check_throws<UsageError>([&] { fully_shard(net, wrap_class<nn::ModuleListImpl>(), options); },
                                  {"container", "elements"}, "a container");
    struct Holder : nn::Module {
      explicit Holder(at::Tensor weight) { register_parameter("weight", std::move(weight)); }
    };
    struct Tied : nn::Module {
      at::Tensor weight = torch::ones({4, 4});
      std::shared_ptr<Holder> a = register_module("a", std::make_shared<Holder>(weight));
      std::shared_ptr<Holder> b = register_module("b", std::make_shared<Holder>(weight));
    };
    Tied tied;
    const auto plan = plan_wrapping(tied, wrap_class<Holder>(), options);
    rank.check_equal(plan.units.size(), size_t{3}, "a, b and the root");
    rank.check(plan.units[0].parameters.empty() && plan.units[0].bytes == 0, "a parameter of two units is neither's");
    rank.check_equal(plan.units[2].parameters, std::vector<std::string>{"a.weight"}, "but that of the one around them");
    rank.check_equal(plan.units[2].bytes, int64_t{64}, "with its bytes");
    rank.check(!is_fsdp_parameter(tied.weight) && !find_fsdp_module(*tied.a), "nothing has changed");
    auto ignoring = [&](std::shared_ptr<nn::Module> module) {
      return [&net, module, options] {
        auto ignores = options;
        ignores.ignored_modules = {module};
        plan_wrapping(*net, wrap_class<EncoderImpl>(), ignores);
      };
    };
    rank.check_throws<UsageError>(ignoring(net.ptr()), {"ignored_modules", "was called on"}, "the root is ignored");
    rank.check_throws<UsageError>(ignoring(make_net().ptr()), {"ignored_modules", "not in the tree"}, "another tree's");
    rank.check_throws<UsageError>(ignoring(nullptr), {"ignored_modules", "null"}, "no module");
    fully_shard(*net->blocks[1], options);
    rank.check_throws<UsageError>([&] { fully_shard(net, wrap_class<EncoderImpl>(), options); }, {"'blocks.1'", "sharded already"},
                                  "a sharded module in the tree");
  }));
}

}  // namespace fsdp::test
