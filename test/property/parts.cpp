#include "property/parts.hpp"

#include "property/parallel_parts.hpp"
#include "support/odd_model.hpp"

namespace fsdp::test {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;
using at::Tensor;

struct Mlp : Node {
  explicit Mlp(const Part& p) {
    up = register_module("up", nn::Linear(nn::LinearOptions(p.width, p.inner).bias(p.flag)));
    down = register_module("down", nn::Linear(nn::LinearOptions(p.inner, p.width).bias(!p.flag)));
  }
  Tensor run(Tensor x, Inputs&) override { return down->forward(torch::tanh(up->forward(x))); }
  nn::Linear up{nullptr}, down{nullptr};
};

struct Stack : Node {
  explicit Stack(const Part& p) {
    net = register_module("net", nn::Sequential(nn::Linear(p.width, p.inner), nn::GELU(),
                                                nn::Linear(nn::LinearOptions(p.inner, p.width).bias(false))));
  }
  Tensor run(Tensor x, Inputs&) override { return net->forward(x); }
  nn::Sequential net{nullptr};
};

struct Norm : Node {
  explicit Norm(const Part& p) { norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({p.width}))); }
  Tensor run(Tensor x, Inputs&) override { return norm->forward(x); }
  nn::LayerNorm norm{nullptr};
};

struct Lstm : Node {
  explicit Lstm(const Part& p) {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(p.width, p.inner).batch_first(true).bidirectional(p.flag)));
    out = register_module("out", nn::Linear(p.flag ? 2 * p.inner : p.inner, p.width));
  }
  Tensor run(Tensor x, Inputs&) override { return out->forward(std::get<0>(lstm->forward(x))); }
  nn::LSTM lstm{nullptr};
  nn::Linear out{nullptr};
};

struct Gru : Node {
  explicit Gru(const Part& p) {
    gru = register_module("gru", nn::GRU(nn::GRUOptions(p.width, p.width).batch_first(true).bias(p.flag)));
  }
  Tensor run(Tensor x, Inputs&) override { return std::get<0>(gru->forward(x)); }
  nn::GRU gru{nullptr};
};

struct Conv1 : Node {
  explicit Conv1(const Part& p) {
    conv = register_module("conv", nn::Conv1d(nn::Conv1dOptions(p.width, p.width, 3).padding(1).bias(p.flag)));
    norm = register_module("norm", nn::BatchNorm1d(p.width));
  }
  Tensor run(Tensor x, Inputs&) override { return norm->forward(conv->forward(x.transpose(1, 2))).transpose(1, 2); }
  nn::Conv1d conv{nullptr};
  nn::BatchNorm1d norm{nullptr};
};

struct Conv2 : Node {
  explicit Conv2(const Part& p) {
    net = register_module("net", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, p.inner, 3).padding(1)),
                                                nn::BatchNorm2d(p.inner), nn::Tanh(),
                                                nn::Conv2d(nn::Conv2dOptions(p.inner, 1, 1).bias(p.flag))));
  }
  Tensor run(Tensor x, Inputs&) override { return net->forward(x.unsqueeze(1)).squeeze(1); }
  nn::Sequential net{nullptr};
};

struct Lookup : Node {
  explicit Lookup(const Part& p) : rows(p.inner) {
    words = register_module("words", nn::Embedding(p.inner, p.width));
  }
  Tensor run(Tensor x, Inputs& in) override { return x + words->forward(in.integers(rows, {x.size(0), x.size(1)})); }
  int64_t rows;
  nn::Embedding words{nullptr};
};

struct Attention : Node {
  explicit Attention(const Part& p) {
    layer = register_module("layer", nn::TransformerEncoderLayer(nn::TransformerEncoderLayerOptions(p.width, 1)
                                                                     .dim_feedforward(p.inner)
                                                                     .dropout(0)
                                                                     .activation(torch::kGELU)));
  }
  Tensor run(Tensor x, Inputs&) override { return layer->forward(x.transpose(0, 1)).transpose(0, 1); }
  nn::TransformerEncoderLayer layer{nullptr};
};

struct Lists : Node {
  explicit Lists(const Part& p) {
    // they register what they are given with its own requires_grad
    list->append((torch::randn({p.width, p.width}) * 0.4).requires_grad_());
    list->append(torch::randn({p.width}).requires_grad_());
    dict->insert("gain", (torch::rand({1}) + 0.5).requires_grad_());
    register_module("list", list);
    register_module("dict", dict);
  }
  Tensor run(Tensor x, Inputs&) override { return (torch::matmul(x, (*list)[0]) + (*list)[1]) * (*dict)["gain"]; }
  nn::ParameterList list;
  nn::ParameterDict dict;
};

/// One tensor under two names of one module.
struct Tied : Node {
  explicit Tied(const Part& p) {
    into = register_parameter("into", torch::randn({p.inner, p.width}) * 0.4);
    back = register_parameter("back", into);
  }
  Tensor run(Tensor x, Inputs&) override { return torch::matmul(torch::tanh(F::linear(x, into)), back); }
  Tensor into, back;
};

/// One tensor that two modules hold.
struct Shared : Node {
  explicit Shared(const Part& p) {
    into = register_module("into", nn::Linear(nn::LinearOptions(p.width, p.width).bias(p.flag)));
    back = register_module("back", Head(nn::LinearOptions(p.width, p.width).bias(!p.flag)));
    back->tie(into->weight);
  }
  Tensor run(Tensor x, Inputs&) override { return back->forward(torch::tanh(into->forward(x))); }
  bool is_one_group() const override { return true; }
  nn::Linear into{nullptr};
  Head back{nullptr};
};

/// Parameters without dimensions.
struct Scalars : Node {
  explicit Scalars(const Part& p) : has_shift(p.flag) {
    gain = register_parameter("gain", torch::full({}, 0.8));
    if (has_shift) shift = register_parameter("shift", torch::full({}, 0.1));
  }
  Tensor run(Tensor x, Inputs&) override { return has_shift ? x * gain + shift : x * gain; }
  bool has_shift;
  Tensor gain, shift;
};

/// Parameters that are not contiguous: transposed, and with gaps between their elements.
struct Strided : Node {
  explicit Strided(const Part& p) {
    weight = register_parameter("weight", (torch::randn({p.width, p.inner}) * 0.4).t());
    with_gaps = register_parameter("with_gaps", (torch::randn({p.width, 2 * p.inner}) * 0.4).slice(1, 0, 2 * p.inner, 2));
    cube = register_parameter("cube", (torch::randn({2, p.width, 3}) * 0.4).permute({2, 0, 1}));
  }
  Tensor run(Tensor x, Inputs&) override {
    return torch::matmul(torch::tanh(F::linear(x, weight)), with_gaps.t()) * cube.sum(at::IntArrayRef({0, 1}));
  }
  Tensor weight, with_gaps, cube;
};

/// Operators whose operands belong to two modules, so maybe to two groups.
struct Cross : Node {
  explicit Cross(const Part& p) : product(p.flag) {
    a = register_module("a", nn::Linear(nn::LinearOptions(p.width, p.width).bias(false)));
    b = register_module("b", nn::Linear(p.width, p.width));
  }
  Tensor run(Tensor x, Inputs&) override {
    if (product) return F::linear(x, a->weight * b->weight, b->bias);
    auto halves = F::linear(x, torch::cat({a->weight, b->weight})).chunk(2, -1);
    return torch::tanh(halves[0]) * halves[1] + b->bias;
  }
  bool product;
  nn::Linear a{nullptr}, b{nullptr};
};

/// A weight that is used without its module.
struct Borrow : Node {
  explicit Borrow(const Part& p) { owner = register_module("owner", nn::Linear(p.width, p.inner)); }
  Tensor run(Tensor x, Inputs&) override {
    return F::linear(torch::tanh(owner->forward(x)), owner->weight.t());
  }
  nn::Linear owner{nullptr};
};

struct Viewed : Node {
  explicit Viewed(const Part& p) {
    into = register_parameter("into", torch::randn({p.inner, p.width}) * 0.4);
    back = register_parameter("back", torch::randn({p.width, p.inner}) * 0.4);
  }
  Tensor run(Tensor x, Inputs&) override { return torch::tanh(x.matmul(into.t())).matmul(back.t()); }
  Tensor into, back;
};

struct Widened : Node {
  explicit Widened(const Part& p) { gain = register_parameter(kWidenedWeight, torch::rand({p.width}) + 0.5); }
  Tensor run(Tensor x, Inputs&) override { return (x.to(wider(x.scalar_type())) * gain).to(x.scalar_type()); }
  Tensor gain;
};

/// One of two parameters of a group is used, `always` in any case. Ranks may differ in which, but
/// not in when the group is read: a gather is a collective, in backward too, so both branches are alike.
struct Choice : Node {
  explicit Choice(const Part& p) : differs_by_rank(p.differs_by_rank) {
    always = register_parameter("always", torch::randn({p.width}));
    odd = register_parameter("odd", torch::randn({p.width}));
    even = register_parameter("even", torch::randn({3, p.width}));
  }
  Tensor run(Tensor x, Inputs& in) override {
    bool is_odd = (in.step + in.micro_batch + (differs_by_rank ? in.rank : 0)) % 2;
    return x * always + x * (is_odd ? odd : even);
  }
  bool differs_by_rank;
  Tensor always, odd, even;
};

struct Sequence : Node {
  explicit Sequence(const Part& p) {
    for (auto& part : p.parts) {
      periods.push_back(part.skip_period);
      blocks->push_back(build_part(part));
    }
    register_module("blocks", blocks);
  }
  Tensor run(Tensor x, Inputs& in) override {
    size_t i = 0;
    for (auto& block : *blocks) {
      auto period = periods[i++];
      if (period > 0 && (in.step + in.micro_batch) % period == 0) continue;
      x = torch::tanh(x + std::static_pointer_cast<Node>(block)->run(x, in));
    }
    return x;
  }
  std::vector<int64_t> periods;
  nn::ModuleList blocks;
};

/// The block whose own norms enclose what may be a group of its own.
struct Around : Node {
  explicit Around(const Part& p) {
    before = register_module("before", nn::LayerNorm(nn::LayerNormOptions({p.width})));
    inner = register_module("inner", build_part(p.parts.at(0)));
    after = register_module("after", nn::Linear(p.width, p.width));
  }
  Tensor run(Tensor x, Inputs& in) override { return after->forward(inner->run(before->forward(x), in)) + x; }
  nn::LayerNorm before{nullptr};
  std::shared_ptr<Node> inner;
  nn::Linear after{nullptr};
};

struct Twice : Node {
  explicit Twice(const Part& p) {
    inner = register_module("inner", build_part(p.parts.at(0)));
    if (p.flag) register_module("again", inner);  // the same object under two names
  }
  Tensor run(Tensor x, Inputs& in) override { return inner->run(torch::tanh(inner->run(x, in)), in); }
  std::shared_ptr<Node> inner;
};

/// Inside it nothing is saved for backward; see use_checkpoints.
struct Checkpoint : Node {
  explicit Checkpoint(const Part& p) : early_stop(p.flag) { inner = register_module("inner", build_part(p.parts.at(0))); }
  Tensor run(Tensor x, Inputs& in) override {
    if (!is_used) return inner->run(x, in);
    const ActivationCheckpointOptions options{.preserve_rng_state = false,  // ranks that are threads share it
                                    .generators = {in.generator()},
                                    .buffers = inner->buffers(),
                                    .early_stop = early_stop};
    return activation_checkpoint(options, [inner = inner, &in](const Tensor& input) { return inner->run(input, in); }, x);
  }
  bool early_stop, is_used = false;
  std::shared_ptr<Node> inner;
};

template <class T>
std::shared_ptr<Node> make(const Part& part) {
  return std::make_shared<T>(part);
}

struct Entry {
  const char* kind;
  bool nests;
  std::shared_ptr<Node> (*build)(const Part&);
  bool is_extra = false;  // comes only where it is put
};

const std::vector<Entry>& entries() {
  static const std::vector<Entry> all = {
      {"mlp", false, make<Mlp>},       {"stack", false, make<Stack>},         {"norm", false, make<Norm>},
      {"lstm", false, make<Lstm>},     {"gru", false, make<Gru>},             {"conv1d", false, make<Conv1>},
      {"conv2d", false, make<Conv2>},  {"embedding", false, make<Lookup>},    {"attention", false, make<Attention>},
      {"lists", false, make<Lists>},   {"tied", false, make<Tied>},           {"cross", false, make<Cross>},
      {"shared", false, make<Shared>}, {"scalars", false, make<Scalars>},     {"strided", false, make<Strided>},
      {"borrow", false, make<Borrow>}, {"choice", false, make<Choice>},       {"sequence", true, make<Sequence>},
      {"around", true, make<Around>},  {"twice", true, make<Twice>},
      {"checkpoint", true, make<Checkpoint>}, {kViewed, false, make<Viewed>, true}, {kWidened, false, make<Widened>, true},
      {kColumns, false, build_columns, true}, {kExperts, false, build_experts, true},
  };
  return all;
}

std::vector<std::string> kinds_that(bool nest) {
  std::vector<std::string> kinds;
  for (auto& entry : entries())
    if (entry.nests == nest && !entry.is_extra) kinds.push_back(entry.kind);
  return kinds;
}

}  // namespace

at::ScalarType wider(at::ScalarType dtype) { return c10::elementSize(dtype) == 2 ? at::kFloat : at::kDouble; }

void use_checkpoints(nn::Module& module) {
  if (auto* node = dynamic_cast<Checkpoint*>(&module)) node->is_used = true;
  for (auto& child : module.children()) use_checkpoints(*child);
}

std::shared_ptr<Node> build_part(const Part& part) {
  for (auto& entry : entries())
    if (part.kind == entry.kind) return entry.build(part);
  throw std::logic_error("no such kind: " + part.kind);
}

const std::vector<std::string>& leaf_kinds() {
  static const auto kinds = kinds_that(false);
  return kinds;
}

const std::vector<std::string>& nesting_kinds() {
  static const auto kinds = kinds_that(true);
  return kinds;
}

}  // namespace fsdp::test
