#include "root/module_pass.hpp"

#include <catch2/catch.hpp>

#include <atomic>
#include <functional>
#include <thread>

#include "module/handles.hpp"
#include "module/state/module_state.hpp"
#include "support/models.hpp"

// A model whose modules have hooks around forward, as Python's have, and views that note what they are told.

namespace fsdp::test {
namespace {

class NotingView final : public ModulePass::View {
 public:
  void show(Shows form) override {
    if (throws) throw UsageError("the view cannot");
    shown = form;
    ++shows;
  }
  void begin() override {
    if (throws) throw UsageError("the view cannot");
    ++begins;
  }
  void take_changes() override { ++changes; }
  void take_over() override { ++taken; }
  void show_gradients() override { ++gradients; }

  Shows shown = Shows::kSharded;
  int shows = 0, begins = 0, changes = 0, taken = 0, gradients = 0;
  bool throws = false;
};

/// One call of fully_shard with hooks: `call` is what they do around a forward.
struct Hooked {
  explicit Hooked(FSDPModule module, size_t modules = 1)
      : controls(std::move(module)), view(std::make_shared<NotingView>()), pass(std::make_shared<ModulePass>(view, modules)) {
    handles::state(controls).set_pass(pass);
  }
  RootContext& context() const { return *handles::state(controls).context(); }
  void follow(std::optional<Shows> form) const {
    if (form) view->show(*form);
  }
  at::Tensor call(const std::function<at::Tensor()>& forward, size_t module = 0) const {
    pass->try_to_enter(context(), module);
    follow(pass->enter(context(), module, at::GradMode::is_enabled()));
    at::Tensor output;
    try {
      output = forward();
    } catch (...) {
      leave(module);
      throw;
    }
    if (output.requires_grad())
      output.register_hook([this](const at::Tensor&) { pass->reach_backward(handles::state(controls).context(), false); });
    leave(module);
    return output;
  }
  void leave(size_t module) const {
    if (pass->ends_what_has_entered(context(), module)) follow(pass->leave(context(), keeps_post_forward_shard));
  }
  void tell(ShowsEvent event) const {
    const std::lock_guard lock(context().mutex());
    pass->show_behind(event);
  }

  FSDPModule controls;
  std::shared_ptr<NotingView> view;
  std::shared_ptr<ModulePass> pass;
  bool keeps_post_forward_shard = false;
};

/// A chain: hooks on each layer, and on the root. The last `idle` layers take no part.
struct HookedChain {
  explicit HookedChain(const DeviceMesh& mesh, size_t idle = 0)
      : chain(mesh, 2 + static_cast<int>(idle), 6), used(chain.layers.size() - idle) {
    for (auto& layer : chain.layers) layers.emplace_back(layer);
    root.emplace_back(chain.root[0]);
  }
  at::Tensor forward(const at::Tensor& input) {
    return root[0].call([&] {
      auto x = input;
      for (size_t i = 0; i < used; ++i) {
        x = layers[i].call([&] { return torch::tanh(chain.model->layers[i]->forward(x)); });
        if (behind_layer) behind_layer(i);
      }
      return chain.model->head->forward(x).square().mean();
    });
  }
  std::vector<const Hooked*> all() const {
    std::vector<const Hooked*> all;
    for (const auto& layer : layers) all.push_back(&layer);
    all.push_back(&root[0]);
    return all;
  }

  ShardedChain chain;
  size_t used;
  std::vector<Hooked> layers, root;
  std::function<void(size_t)> behind_layer;
};

at::Tensor input_of(const Rank& rank) { return Inputs(rank.index(), 0).normal({4, 6}); }

TEST_CASE("what modules show follows their forwards and the backward", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    model.layers[0].pass->begin(model.layers[0].context());
    for (const auto* each : model.all()) rank.check_equal(each->view->begins, 1, "begun");
    model.behind_layer = [&](size_t i) {
      rank.check(model.layers[i].view->shown == Shows::kSharded, "a layer is shown released behind its forward");
      rank.check(model.root[0].view->shown == Shows::kUnsharded, "the root, which goes on, is not");
    };
    const auto loss = model.forward(input_of(rank));
    rank.check(model.root[0].view->shown == Shows::kUnsharded, "the root keeps its parameters until backward");
    loss.backward();
    for (const auto* each : model.all()) {
      rank.check(each->view->shown == Shows::kSharded, "sharded behind the step");
      rank.check(each->view->gradients > 0, "gradients are shown");
      rank.check_equal(each->view->taken, 2, "taken over before forward and before backward");
      rank.check_equal(each->view->changes, 1, "other parameters: before forward alone");
      rank.check(!each->pass->is_inside(), "nothing is under way");
    }
    rank.check_equal(model.layers[0].view->shows, 4, "forward, behind it, backward, behind the step");
  }));
}

TEST_CASE("an evaluation ends with its outermost forward", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    const torch::NoGradGuard no_grad;
    model.forward(input_of(rank));
    rank.check(model.root[0].context().is_quiescent(), "the step is over");
    for (const auto* each : model.all()) rank.check(each->view->shown == Shows::kSharded, "sharded");
  }));
}

TEST_CASE("a larger shard that stays after forward is shown until backward", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    model.layers[0].keeps_post_forward_shard = true;
    const auto loss = model.forward(input_of(rank));
    rank.check(model.layers[0].view->shown == Shows::kPostForward, "behind forward");
    loss.backward();
    rank.check(model.layers[0].view->shown == Shows::kSharded, "behind backward");
  }));
}

TEST_CASE("what a user has unsharded is shown until it is resharded", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    layer.controls.unshard();
    layer.tell(ShowsEvent::kUserWaited);
    rank.check(layer.view->shown == Shows::kUnsharded, "behind unshard");
    layer.controls.reshard();
    layer.tell(ShowsEvent::kUserReshards);
    rank.check(layer.view->shown == Shows::kSharded, "behind reshard");
  }));
}

TEST_CASE("what a user asks for is shown again, as others may have put something else there", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    for (const auto event : {ShowsEvent::kUserReshards, ShowsEvent::kUserWaited, ShowsEvent::kUserWaited}) {
      const int before = layer.view->shows;
      layer.tell(event);
      rank.check_equal(layer.view->shows, before + 1, "shown");
    }
    const int before = layer.view->shows;
    model.root[0].controls.reset_iter_state();
    rank.check(layer.view->shows > before && layer.view->shown == Shows::kSharded, "given up");
    const int behind = layer.view->shows;
    model.root[0].controls.reset_iter_state();
    rank.check_equal(layer.view->shows, behind + 1, "and again");
  }));
}

TEST_CASE("a forward that is given up inside itself ends without a scope", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    layer.call([&] { return torch::ones({1}); });
    model.root[0].controls.reset_iter_state();
    layer.pass->try_to_enter(layer.context(), 0);
    layer.follow(layer.pass->enter(layer.context(), 0, true));
    rank.check(layer.pass->ends_what_has_entered(layer.context(), 0), "it has entered");
    model.root[0].controls.reset_iter_state();
    rank.check(!layer.pass->leave(layer.context(), false), "nothing is left to show");
    rank.check(!layer.context().step().is_in_scope(), "no scope");
    model.forward(input_of(rank)).backward();
  }));
}

TEST_CASE("a layer that stays unsharded behind backward is shown so", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    model.layers[1].controls.set_reshard_after_backward(false);
    model.forward(input_of(rank)).backward();
    rank.check(model.layers[1].view->shown == Shows::kUnsharded, "the one that stays");
    rank.check(model.layers[0].view->shown == Shows::kSharded, "not the other");
    model.root[0].controls.reset_iter_state();
    rank.check(model.layers[1].view->shown == Shows::kSharded, "given up");
  }));
}

TEST_CASE("a forward that failed is given up with its scopes", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    layer.pass->try_to_enter(layer.context(), 0);
    layer.follow(layer.pass->enter(layer.context(), 0, true));  // and never left, as by a hook that has died
    rank.check(layer.context().step().is_in_scope(), "a scope is open");
    model.root[0].controls.reset_iter_state();
    rank.check(!layer.context().step().is_in_scope(), "no longer");
    rank.check(!layer.pass->is_inside() && layer.view->shown == Shows::kSharded, "nothing is under way");
    model.forward(input_of(rank)).backward();
    rank.check(layer.view->shown == Shows::kSharded, "it goes on as before");
  }));
}

TEST_CASE("a forward inside another that fails before it begins leaves that one alone", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    layer.call([&] {
      layer.pass->try_to_enter(layer.context(), 0);  // its hook has thrown behind this
      layer.leave(0);
      rank.check(layer.pass->is_inside(), "the outer forward goes on");
      rank.check(layer.context().step().is_in_scope(), "in its scope");
      return torch::ones({1});
    });
    rank.check(!layer.pass->is_inside(), "and ends");
    model.root[0].controls.reset_iter_state();
  }));
}

TEST_CASE("views are told to begin again where one could not, and by another root", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    auto model = seeded(5, [] { return Chain(2, 6); });
    Hooked layer(fully_shard(model->layers[0], {.mesh = rank.mesh()}));
    layer.view->throws = true;
    rank.check_throws<UsageError>([&] { layer.pass->begin(layer.context()); }, {"cannot"}, "the view's error");
    layer.view->throws = false;
    layer.pass->begin(layer.context());
    layer.pass->begin(layer.context());
    rank.check_equal(layer.view->begins, 1, "once");
    fully_shard(model, {.mesh = rank.mesh()});
    layer.pass->begin(layer.context());
    rank.check_equal(layer.view->begins, 2, "once more for the root around it");
  }));
}

TEST_CASE("a backward of outputs that reach no parameter shows them sharded again", "[root][module_pass]") {
  CHECK(on_ranks(2, [](Rank& rank) {
    HookedChain model(rank.mesh());
    auto& layer = model.layers[0];
    const auto input = input_of(rank).requires_grad_();
    layer.call([&] { return input * 2; }).sum().backward();
    rank.check(layer.view->shown == Shows::kSharded, "behind the backward");
    rank.check(layer.context().is_quiescent(), "the step is over");
  }));
}

TEST_CASE("one thread trains while another unshards and reshards what that does not use", "[root][module_pass]") {
  CHECK(on_ranks(1, [](Rank& rank) {
    HookedChain model(rank.mesh(), /*idle=*/1);
    model.forward(input_of(rank)).backward();
    auto& layer = model.layers[2];
    std::atomic<bool> is_over = false;
    std::thread other([&] {
      while (!is_over) {
        layer.controls.unshard();
        layer.tell(ShowsEvent::kUserWaited);
        layer.controls.reshard();
        layer.tell(ShowsEvent::kUserReshards);
      }
    });
    for (int step = 0; step < 20; ++step) model.forward(input_of(rank)).backward();
    is_over = true;
    other.join();
    rank.check(layer.view->shown == Shows::kSharded, "sharded in the end");
  }));
}

}  // namespace
}  // namespace fsdp::test
