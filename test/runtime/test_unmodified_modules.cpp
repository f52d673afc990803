#include <catch2/catch.hpp>

#include "support/twin.hpp"

// Modules as LibTorch ships them and as people write them, none of which knows of sharding.

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

void trains_in_worlds_of_2_and_3(const MakeWorkload& make, Training training = {}) {
  for (int world_size : {2, 3}) {
    training.world_size = world_size;
    trains_like_plain(make, training);
  }
}

TEST_CASE("a Sequential trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    nn::Sequential net(nn::Linear(5, 7), nn::Tanh(), nn::Linear(7, 3));
    return Workload{.module = net.ptr(),
                    .shard = shard_each({net->ptr(0), net.ptr()}),
                    .loss = [net](Inputs& in) mutable { return net->forward(in.normal({4, 5})).square().mean(); }};
  });
}

struct Blocks : nn::Module {
  Blocks() {
    for (int i = 0; i < 3; ++i) blocks->push_back(nn::Linear(6, 6));
    register_module("blocks", blocks);
    out = register_module("out", nn::Linear(6, 1));
  }
  Tensor forward(Tensor x) {
    for (auto& block : *blocks) x = torch::tanh(block->as<nn::Linear>()->forward(x)) + x;
    return out->forward(x);
  }
  nn::ModuleList blocks;
  nn::Linear out{nullptr};
};

TEST_CASE("a ModuleList of blocks trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<Blocks>();
    return Workload{.module = net,
                    .shard = shard_each(net->blocks, net),
                    .loss = [net](Inputs& in) { return net->forward(in.normal({4, 6})).square().mean(); }};
  });
}

TEST_CASE("a TransformerEncoder trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    nn::TransformerEncoder net(nn::TransformerEncoderOptions(
        nn::TransformerEncoderLayerOptions(8, 2).dim_feedforward(12).dropout(0).activation(torch::kGELU), 2));
    return Workload{.module = net.ptr(),
                    .shard = shard_each(net->layers, net.ptr()),
                    .loss = [net](Inputs& in) mutable {
                      return (net->forward(in.normal({5, 2, 8})) * in.normal({5, 2, 8})).mean();
                    }};
  });
}

struct Tagger : nn::Module {
  Tagger() {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(5, 4).num_layers(2).bidirectional(true)));
    out = register_module("out", nn::Linear(8, 3));
  }
  Tensor forward(Tensor x) { return out->forward(std::get<0>(lstm->forward(x))); }
  nn::LSTM lstm{nullptr};
  nn::Linear out{nullptr};
};

TEST_CASE("a bidirectional LSTM of two layers trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<Tagger>();
    return Workload{.module = net,
                    .shard = shard_each({net->lstm.ptr(), net}),
                    .loss = [net](Inputs& in) { return net->forward(in.normal({4, 2, 5})).square().mean(); }};
  });
}

TEST_CASE("Conv2d with BatchNorm2d trains like plain, every rank with its own running statistics",
          "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    nn::Sequential net(nn::Conv2d(2, 5, 3), nn::BatchNorm2d(5), nn::GELU(), nn::Conv2d(5, 3, 2), nn::BatchNorm2d(3));
    return Workload{.module = net.ptr(),
                    .shard = shard_each({net->ptr(0), net->ptr(1), net.ptr()}),
                    .loss = [net](Inputs& in) mutable {
                      return (net->forward(in.normal({3, 2, 6, 6})) * in.normal({3, 3, 3, 3})).mean();
                    }};
  });
}

struct Words : nn::Module {
  explicit Words(const nn::EmbeddingOptions& options) {
    words = register_module("words", nn::Embedding(options));
    out = register_module("out", nn::Linear(options.embedding_dim(), 2));
  }
  Tensor forward(Tensor indices) { return out->forward(words->forward(indices)); }
  nn::Embedding words{nullptr};
  nn::Linear out{nullptr};
};

Workload words(const nn::EmbeddingOptions& options) {
  auto net = std::make_shared<Words>(options);
  return {.module = net,
          .shard = shard_each({net->words.ptr(), net}),
          .loss = [net, rows = options.num_embeddings()](Inputs& in) {
            // every row in every batch, so that what max_norm writes does not depend on the rank
            auto indices = torch::cat({torch::arange(rows), in.integers(rows, {5})});
            return (net->forward(indices) * in.normal({rows + 5, 2})).square().mean();
          }};
}

TEST_CASE("an Embedding trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] { return words(nn::EmbeddingOptions(7, 4).padding_idx(0)); });
}

TEST_CASE("an Embedding with max_norm, which writes its weight in every forward, trains like plain",
          "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] { return words(nn::EmbeddingOptions(7, 4).max_norm(0.7)); });
}

struct Borrower : nn::Module {
  Borrower() {
    words = register_module("words", nn::Embedding(7, 4));
    mixer = register_module("mixer", nn::Linear(4, 4));
  }
  Tensor forward(Tensor indices) {
    return F::linear(torch::tanh(mixer->forward(words->forward(indices))), words->weight);
  }
  nn::Embedding words{nullptr};
  nn::Linear mixer{nullptr};
};

TEST_CASE("a weight that another module borrows trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<Borrower>();
    return Workload{.module = net,
                    .shard = shard_each({net->words.ptr(), net->mixer.ptr(), net}),
                    .loss = [net](Inputs& in) {
                      auto indices = in.integers(7, {6});
                      return F::cross_entropy(net->forward(indices), in.integers(7, {6}));
                    }};
  });
}

struct AutoEncoder : nn::Module {
  AutoEncoder() {
    down = register_module("down", nn::Linear(6, 3));
    up = register_module("up", nn::Linear(3, 6));
  }
  Tensor encode(Tensor x) { return torch::tanh(down->forward(x)); }
  Tensor decode(Tensor z) { return up->forward(z); }
  nn::Linear down{nullptr}, up{nullptr};
};

TEST_CASE("methods other than forward train like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<AutoEncoder>();
    return Workload{.module = net,
                    .shard = shard_each({net->down.ptr(), net}),
                    .loss = [net](Inputs& in) {
                      auto x = in.normal({4, 6});
                      return (net->decode(net->encode(x)) - x).square().mean();
                    }};
  });
}

TEST_CASE("a module that runs twice in one forward trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<Blocks>();
    return Workload{.module = net,
                    .shard = shard_each(net->blocks, net),
                    .loss = [net](Inputs& in) {
                      auto first = net->blocks->ptr(0)->as<nn::Linear>();
                      auto x = torch::tanh(first->forward(in.normal({4, 6})));
                      return net->forward(torch::tanh(first->forward(x))).square().mean();
                    }};
  });
}

struct NormedBlock : nn::Module {
  NormedBlock() {
    before = register_module("before", nn::LayerNorm(nn::LayerNormOptions({6})));
    mlp = register_module("mlp", nn::Sequential(nn::Linear(6, 9), nn::GELU(), nn::Linear(9, 6)));
    after = register_module("after", nn::LayerNorm(nn::LayerNormOptions({6})));
  }
  Tensor forward(Tensor x) { return after->forward(x + mlp->forward(before->forward(x))); }
  nn::LayerNorm before{nullptr}, after{nullptr};
  nn::Sequential mlp{nullptr};
};

Workload normed_block() {
  auto net = std::make_shared<NormedBlock>();
  return {.module = net,
          .shard = shard_each({net->mlp.ptr(), net}),
          .loss = [net](Inputs& in) { return (net->forward(in.normal({4, 6})) * in.normal({4, 6})).mean(); }};
}

TEST_CASE("a block with its own norms around a sharded MLP trains like plain", "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3(normed_block);
  trains_in_worlds_of_2_and_3(normed_block, {.reshard_after_forward = true});
}

struct TwoWeights : nn::Module {
  TwoWeights() {
    a = register_module("a", nn::Linear(nn::LinearOptions(6, 4).bias(false)));
    b = register_module("b", nn::Linear(nn::LinearOptions(6, 4).bias(false)));
  }
  nn::Linear a{nullptr}, b{nullptr};
};

TEST_CASE("one operator over the weights of two groups trains like plain", "[runtime][unmodified_modules]") {
  auto over = [](std::function<Tensor(Tensor, Tensor)> join) {
    return [join] {
      auto net = std::make_shared<TwoWeights>();
      return Workload{.module = net,
                      .shard = shard_each({net->a.ptr(), net->b.ptr(), net}),
                      .loss = [net, join](Inputs& in) {
                        return F::linear(in.normal({3, 6}), join(net->a->weight, net->b->weight)).square().mean();
                      }};
    };
  };
  trains_in_worlds_of_2_and_3(over([](Tensor a, Tensor b) { return torch::cat({a, b}); }));
  trains_in_worlds_of_2_and_3(over([](Tensor a, Tensor b) { return a * b; }));
  trains_in_worlds_of_2_and_3(over([](Tensor a, Tensor b) { return torch::stack({a, b}).sum(0).t().contiguous().t(); }),
                              {.reshard_after_forward = true});
}

struct Lists : nn::Module {
  Lists() {
    // they register what they are given with its own requires_grad
    list->append((torch::randn({4, 6}) * 0.3).requires_grad_());
    list->append(torch::randn({4}).requires_grad_());
    dict->insert("gain", (torch::rand({4}) + 0.5).requires_grad_());
    dict->insert("mix", torch::randn({1, 4}).requires_grad_());
    register_module("list", list);
    register_module("dict", dict);
  }
  Tensor forward(Tensor x) {
    auto y = torch::tanh(torch::matmul(x, (*list)[0].t()) + (*list)[1]);
    return torch::matmul(y * (*dict)["gain"], (*dict)["mix"].t());
  }
  nn::ParameterList list;
  nn::ParameterDict dict;
};

TEST_CASE("ParameterList and ParameterDict, which hand out sharded parameters, train like plain",
          "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<Lists>();
    return Workload{.module = net,
                    .shard = [net](const FullyShardOptions& options) { fully_shard(*net, options); },
                    .loss = [net](Inputs& in) { return net->forward(in.normal({3, 6})).square().mean(); }};
  });
}

struct TiedHeadImpl : nn::Module {
  explicit TiedHeadImpl(Tensor tied) { weight = register_parameter("weight", tied); }
  Tensor forward(Tensor x) { return F::linear(x, weight); }
  Tensor weight;
};
TORCH_MODULE(TiedHead);

struct TiedModel : nn::Module {
  TiedModel() {
    words = register_module("words", nn::Embedding(7, 4));
    mixer = register_module("mixer", nn::Linear(4, 4));
    head = register_module("head", TiedHead(words->weight));
  }
  Tensor forward(Tensor x) { return head->forward(torch::tanh(mixer->forward(words->forward(x)))); }
  nn::Embedding words{nullptr};
  nn::Linear mixer{nullptr};
  TiedHead head{nullptr};
};

TEST_CASE("a weight that two modules of one group register trains like plain and is one parameter",
          "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    auto net = std::make_shared<TiedModel>();
    return Workload{.module = net,
                    .shard = shard_each({net->mixer.ptr(), net}),
                    .loss = [net](Inputs& in) {
                      return F::cross_entropy(net->forward(in.integers(7, {6})), in.integers(7, {6}));
                    }};
  });
  on_ranks(2, [](Rank& rank) {
    auto net = seeded(3, [] { return std::make_shared<TiedModel>(); });
    fully_shard(*net, {.mesh = rank.mesh()});
    std::vector<std::string> names;
    for (auto& item : net->named_parameters()) names.push_back(item.key());
    rank.check_equal(names, std::vector<std::string>{"words.weight", "mixer.weight", "mixer.bias", "head.weight"}, "names");
    rank.check(sharded(net->head->weight).is_same(sharded(net->words->weight)), "both members have one parameter");
  });
}

TEST_CASE("Linear without bias, which registers an undefined tensor, trains like plain",
          "[runtime][unmodified_modules]") {
  trains_in_worlds_of_2_and_3([] {
    nn::Sequential net(nn::Linear(nn::LinearOptions(5, 7).bias(false)), nn::Tanh(),
                       nn::Linear(nn::LinearOptions(7, 3).bias(false)));
    return Workload{.module = net.ptr(),
                    .shard = shard_each({net->ptr(0), net.ptr()}),
                    .loss = [net](Inputs& in) mutable { return net->forward(in.normal({4, 5})).square().mean(); }};
  });
}

template <class Holder, class Run>
void one_module_trains_like_plain(std::function<Holder()> make, Run run) {
  trains_in_worlds_of_2_and_3([make, run] {
    auto net = make();
    return Workload{.module = net.ptr(),
                    .shard = [net](const FullyShardOptions& options) { fully_shard(net, options); },
                    .loss = [net, run](Inputs& in) mutable { return run(net, in).square().mean(); }};
  });
}

TEST_CASE("recurrent, attention, convolution, norm and bilinear modules train like plain",
          "[runtime][unmodified_modules]") {
  one_module_trains_like_plain<nn::GRU>([] { return nn::GRU(3, 5); },
                                        [](auto& m, Inputs& in) { return std::get<0>(m->forward(in.normal({4, 2, 3}))); });
  one_module_trains_like_plain<nn::LSTMCell>([] { return nn::LSTMCell(3, 5); }, [](auto& m, Inputs& in) {
    auto state = m->forward(in.normal({2, 3}));
    return std::get<0>(m->forward(in.normal({2, 3}), state));
  });
  one_module_trains_like_plain<nn::MultiheadAttention>(
      [] { return nn::MultiheadAttention(4, 2); }, [](auto& m, Inputs& in) {
        auto x = in.normal({3, 2, 4});
        return std::get<0>(m->forward(x, x, x));
      });
  one_module_trains_like_plain<nn::ConvTranspose2d>([] { return nn::ConvTranspose2d(2, 3, 2); },
                                                    [](auto& m, Inputs& in) { return m->forward(in.normal({2, 2, 4, 4})); });
  one_module_trains_like_plain<nn::GroupNorm>(
      [] { return nn::GroupNorm(2, 4); },
      [](auto& m, Inputs& in) { return m->forward(in.normal({2, 4, 3})) + in.normal({2, 4, 3}); });
  one_module_trains_like_plain<nn::PReLU>([] { return nn::PReLU(); },
                                          [](auto& m, Inputs& in) { return m->forward(in.normal({4, 3})); });
  one_module_trains_like_plain<nn::Bilinear>(
      [] { return nn::Bilinear(3, 4, 2); },
      [](auto& m, Inputs& in) { return m->forward(in.normal({5, 3}), in.normal({5, 4})); });
  one_module_trains_like_plain<nn::EmbeddingBag>(
      [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(6, 3).mode(torch::kSum)); },
      [](auto& m, Inputs& in) { return m->forward(in.integers(6, {2, 4})); });
}

}  // namespace
}  // namespace fsdp::test
