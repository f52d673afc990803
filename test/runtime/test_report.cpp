#include <catch2/catch.hpp>

#include "support/models.hpp"

namespace fsdp::test {
namespace {

constexpr int64_t kLinearWidth = 8;
constexpr int64_t kLinearBytes = (kLinearWidth * kLinearWidth + kLinearWidth) * 4;

TEST_CASE("a report shows the tree with its bytes before anything has run", "[runtime][report]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2, kLinearWidth, false);
    const auto found = report(chain.root[0]);
    rank.check_equal(found.groups.size(), size_t{3}, "groups");
    rank.check_equal(found.groups[0].name, "root", "the root comes first");
    rank.check_equal(found.groups[1].name, "layer0", "then what is in it");
    rank.check_equal(found.groups[1].depth, 1, "one below");
    rank.check_equal(found.groups[1].unsharded_bytes, kLinearBytes, "unsharded bytes");
    rank.check_equal(found.groups[1].sharded_bytes, kLinearBytes / 2, "sharded bytes");
    rank.check_equal(found.groups[1].layout, "Shard(0)", "placement");
    rank.check_equal(found.groups[1].reshard_after_forward, "false", "as asked for");
    rank.check_equal(found.groups[0].reshard_after_forward, "unset (false)", "what unset comes to");
    rank.check(found.outlook.empty() && found.forward_order.empty(), "no order yet");
    rank.check(found.to_string().find("no step has shown") != std::string::npos, found.to_string());
  });
}

TEST_CASE("there is no outlook where forwards repeat before a backward, as a plan is for one", "[runtime][report]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 3, kLinearWidth);
    const auto step = [&](int forwards) {
      auto loss = torch::zeros({});
      for (int i = 0; i < forwards; ++i) loss = loss + chain.model->forward(torch::ones({2, kLinearWidth})).sum();
      loss.backward();
    };
    for (int i = 0; i < 2; ++i) step(1);
    rank.check(!report(chain.root[0]).outlook.empty(), "one forward");
    step(3);
    rank.check(report(chain.root[0]).outlook.empty(), "three forwards");
    for (int i = 0; i < 2; ++i) step(1);
    rank.check(!report(chain.root[0]).outlook.empty(), "one again");
  });
}

TEST_CASE("after a step it shows the order, what was communicated, and what a larger budget would save",
          "[runtime][report]") {
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 4, kLinearWidth);
    for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
    rank.log().clear();
    chain.step(rank.index(), 2);
    const auto found = report(chain.layers[1]);  // of its root
    rank.check_equal(found.forward_order, std::vector<std::string>{"layer0", "layer1", "layer2", "layer3", "root"}, "forward");
    rank.check_equal(found.backward_order.front(), "root", "backward");
    rank.check_equal(size_t(found.last_step.all_gathers), rank.subjects_of("all_gather").size(), "gathers of the last step");
    rank.check_equal(size_t(found.last_step.reductions), rank.subjects_of("reduce_scatter").size(), "reductions");
    rank.check(found.outlook.size() > 1, "an outlook");
    for (size_t i = 1; i < found.outlook.size(); ++i)
      rank.check(found.outlook[i].gathered_bytes <= found.outlook[i - 1].gathered_bytes, "more memory, fewer gathers");
    int64_t once = 0;
    for (const auto& group : found.groups) once += group.unsharded_bytes;
    rank.check_equal(found.outlook.back().gathered_bytes, once, "everything once");
    // What the outlook promises, a budget keeps.
    rank.check_equal(found.outlook.back().all_gathers, int64_t{5}, "each group once");
    rank.check(found.last_step_peak_bytes > 0 && found.last_step_peak_bytes <= found.bytes.peak_unsharded, "its peak");
    const auto promised = found.outlook[found.outlook.size() / 2];
    chain.root[0].set_unsharded_byte_budget(promised.budget_bytes);
    for (int step = 0; step < 2; ++step) chain.step(rank.index(), step);
    const auto kept = chain.root[0].report();
    rank.check_equal(kept.last_step.gathered_bytes, promised.gathered_bytes, "bytes gathered");
    rank.check_equal(kept.planned_gathered_bytes, promised.gathered_bytes, "as planned");
    rank.check_equal(kept.last_step.all_gathers, promised.all_gathers, "so many gathers");
    rank.check(kept.planned_peak_bytes <= promised.budget_bytes, "within the budget");
    rank.check(kept.last_step_peak_bytes <= kept.planned_peak_bytes, "and no more than planned is held");
    rank.check(kept.to_string().find("layer3, root") != std::string::npos, kept.to_string());
  });
}

TEST_CASE("the last step of a report is the second backward alone where a graph was retained", "[runtime][report]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh());
    chain.step(rank.index());
    auto loss = chain.loss(rank.index(), 1);
    loss.backward({}, /*retain_graph=*/true);
    const auto first = report(chain.root[0]).last_step;
    rank.check_equal(first.all_gathers, int64_t{6}, "gathers of forward and backward");
    rank.log().clear();
    loss.backward();
    const auto second = report(chain.root[0]);
    rank.check_equal(size_t(second.last_step.all_gathers), rank.subjects_of("all_gather").size(), "gathers");
    rank.check_equal(size_t(second.last_step.reductions), rank.subjects_of("reduce_scatter").size(), "reductions");
    rank.check_equal(second.last_step.reductions, first.reductions, "as many as the first backward's");
  }));
}

TEST_CASE("a report lists what is frozen and what is trainable of a group that mixes them, and the extra gradient bytes",
          "[runtime][report]") {
  on_ranks(2, [](Rank& rank) {
    using Names = std::vector<std::string>;
    struct Pair : torch::nn::Module {
      at::Tensor a = register_parameter("a", torch::ones({8, 4}));
      at::Tensor b = register_parameter("b", torch::ones({8, 2}));
    };
    // Frozen before fully_shard or behind it, in either layout; what is reduced says whether it is true.
    for (const auto layout : {ParamLayout::kPerParameter, ParamLayout::kFlat})
      for (const bool is_before : {true, false}) {
        const auto what = fmt::format("{}, frozen {}", layout == ParamLayout::kFlat ? "flat" : "per parameter",
                                      is_before ? "before" : "behind");
        Pair pair;
        if (is_before) pair.b.set_requires_grad(false);
        const auto root = fully_shard(pair, {.mesh = rank.mesh(), .layout = layout});
        rank.check_equal(report(root).to_string().find("note:") == std::string::npos, !is_before, what + ": at first");
        if (!is_before) pair.parameters()[1].set_requires_grad(false);
        const auto before = statistics(root).reduced_bytes;
        const auto group = report(root).groups[0];
        rank.check_equal(group.trainable_parameters, Names{"a"}, what + ": trainable");
        rank.check_equal(group.frozen_parameters, Names{"b"}, what + ": frozen");
        rank.check_equal(group.trainable_bytes, int64_t{8 * 4 * 4}, what + ": trainable bytes");
        rank.check_equal(group.frozen_bytes, int64_t{8 * 2 * 4}, what + ": frozen bytes");
        ((pair.a.sum() + pair.b.sum()) * 1).backward();
        rank.check_equal(group.trainable_bytes + group.extra_gradient_bytes, statistics(root).reduced_bytes - before,
                         what + ": what is reduced");
        const bool is_extra = layout == ParamLayout::kFlat && !is_before;
        rank.check_equal(group.extra_gradient_bytes, is_extra ? group.frozen_bytes : 0, what + ": the extra bytes");
        const auto note = fmt::format("note: 64 bytes are frozen (b), 128 bytes are trainable (a); {} extra gradient bytes",
                                      is_extra ? 64 : 0);
        rank.check(report(root).to_string().find(note) != std::string::npos, report(root).to_string());
        pair.parameters()[1].set_requires_grad(true);
        rank.check(report(root).to_string().find("note:") == std::string::npos, what + ": thawed");
      }
  });
}

TEST_CASE("a report names flat groups and every dimension that is cut", "[runtime][report]") {
  on_ranks(4, [](Rank& rank) {
    torch::nn::Linear flat(4, 4), cut(4, 4);
    const auto found = fully_shard(flat, {.mesh = rank.mesh(), .reshard_after_forward = 2, .layout = ParamLayout::kFlat});
    rank.check_equal(report(found).groups[0].layout, "flat", "flat");
    rank.check_equal(report(found).groups[0].reshard_after_forward, "2", "integer");
    const auto other = fully_shard(cut, {.mesh = rank.hybrid(2, 2), .shard_placement_fn = [](auto&, auto&) { return Shard{-1}; }});
    rank.check_equal(report(other).groups[0].layout, "Replicate(), Shard(0) or Replicate(), Shard(1)", "cut");
  });
}

TEST_CASE("a report counts the calls of operators that gathered sharded tensors", "[runtime][report]") {
  Report given;
  CHECK(given.to_string().find("gathered sharded tensors") == std::string::npos);
  given.gathering_operators = {{"aten::mm", 3}, {"aten::qr", 1024}};
  CHECK(given.to_string().find("gathered sharded tensors to run on the whole: aten::qr 1,024, aten::mm 3\n") != std::string::npos);
  on_ranks(2, [](Rank& rank) {
    ShardedChain chain(rank.mesh(), 2, kLinearWidth);
    // They are counted for the process, whose threads the ranks are, and in which other cases have run.
    const auto calls_of = [&](const std::string& name) {
      rank.world()->start_all_reduce(torch::zeros({1}), ReduceOp::kSum, "all are here")->wait();
      const auto calls = report(chain.root[0]).gathering_operators;
      rank.world()->start_all_reduce(torch::zeros({1}), ReduceOp::kSum, "all have read")->wait();
      return calls.contains(name) ? calls.at(name) : 0;
    };
    const auto products = calls_of("aten::mm"), sums = calls_of("aten::add");
    {
      const at::NoGradGuard no_grad;
      const auto weight = chain.model->layers[0]->parameters()[0];
      for (int i = 0; i < 3; ++i) weight.mm(torch::ones({kLinearWidth, 2}));
      weight.add(weight);
    }
    chain.step(rank.index());
    rank.check_equal(calls_of("aten::mm") - products, int64_t{6}, "three calls on each of two ranks");
    rank.check_equal(calls_of("aten::add") - sums, int64_t{0}, "which runs on pieces");
    rank.check(report(chain.root[0]).to_string().find("aten::mm ") != std::string::npos, "in the text");
  });
}

}  // namespace
}  // namespace fsdp::test
