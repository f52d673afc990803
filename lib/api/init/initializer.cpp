#include "fsdp/initializer.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>
#include <ATen/native/Math.h>

#include <cmath>
#include <numbers>

#include "api/init/init_run.hpp"
#include "api/params/find_param.hpp"
#include "base/require.hpp"

namespace fsdp {

uint32_t ElementRandom::bits() {
  constexpr int kBlocks = 16, kWords = 4;  // an element's own, before its neighbour's begin
  require(used_ < kBlocks * kWords, "ElementRandom: one element can draw at most {} words of 32 bits",
          kBlocks * kWords);
  if (used_ % kWords == 0) {
    at::Philox4_32 engine(seed_, stream_,
                          static_cast<uint64_t>(element_) * kBlocks + used_ / kWords);
    for (auto& word : words_) word = engine();
  }
  return words_[used_++ % kWords];
}

double ElementRandom::uniform() {
  const uint64_t high = bits();
  return static_cast<double>((high << 32 | bits()) >> 11) * 0x1p-53;
}

double ElementRandom::normal() {
  // Box and Muller's transform; 1 - u is never 0.
  const double radius = std::sqrt(-2 * std::log(1 - uniform()));
  return radius * std::cos(2 * std::numbers::pi * uniform());
}

namespace {

/// LAPACK cuts its work by the number of threads, and so rounds differently; a rank's share of the
/// cores depends on the number of ranks.
class OneThread {
 public:
  OneThread() : before_(at::get_num_threads()) { at::set_num_threads(1); }
  ~OneThread() { at::set_num_threads(before_); }

 private:
  int before_;
};

/// function(element, random), inlined into a loop.
template <class Function>
DrawRange by_element(Function function) {
  return [function](ElementRange range, uint64_t seed, uint64_t stream, double* values) {
    for (int64_t element = range.begin; element < range.end; ++element) {
      ElementRandom random(seed, stream, element);
      values[element - range.begin] = function(element, random);
    }
  };
}

DrawRange normals(double mean, double std) {
  return by_element([=](int64_t, ElementRandom& random) { return mean + std * random.normal(); });
}

DrawRange uniforms(double low, double high) {
  return by_element(
      [=](int64_t, ElementRandom& random) { return low + (high - low) * random.uniform(); });
}

void draw_local(InitRun& run, const at::Tensor& tensor, const DrawRange& function) {
  if (const auto* entry = run.target(tensor))
    run.write_local(*entry, run.draw(*entry, run.ranges(*entry), function));
}

at::Tensor orthogonal(const at::Tensor& normal, double gain) {
  OneThread one_thread;
  const bool is_wide = normal.size(0) < normal.size(1);
  auto [q, r] = at::linalg_qr(is_wide ? normal.t() : normal);
  // LAPACK leaves the signs open; with these the distribution is uniform.
  q = q * r.diagonal().sign();
  return (is_wide ? q.t() : q) * gain;
}

double kaiming_std(const Fans& fans, double a,
                   const torch::nn::init::FanModeType& mode,
                   const torch::nn::init::NonlinearityType& nonlinearity) {
  const bool in = std::holds_alternative<torch::enumtype::kFanIn>(mode);
  return torch::nn::init::calculate_gain(nonlinearity, a) /
         std::sqrt(static_cast<double>(in ? fans.in : fans.out));
}

double xavier_std(const Fans& fans, double gain) {
  return gain * std::sqrt(2.0 / static_cast<double>(fans.in + fans.out));
}

}  // namespace

c10::IntArrayRef Initializer::sizes(const at::Tensor& tensor) const { return run_.sizes(tensor); }

Fans fans_of(c10::IntArrayRef sizes) {
  require(sizes.size() >= 2,
          "initializer: fan_in and fan_out need a tensor of two dimensions or more, found sizes {}",
          fmt::join(sizes, "x"));
  int64_t field = 1;
  for (size_t dim = 2; dim < sizes.size(); ++dim) field *= sizes[dim];
  return {.in = sizes[1] * field, .out = sizes[0] * field};
}

void Initializer::elementwise_(const at::Tensor& tensor,
                               const std::function<double(int64_t, ElementRandom&)>& function) {
  draw_local(run_, tensor, by_element(function));
}

void Initializer::constant_(const at::Tensor& tensor, double value) {
  draw_local(run_, tensor, by_element([=](int64_t, ElementRandom&) { return value; }));
}

void Initializer::uniform_(const at::Tensor& tensor, double low, double high) {
  draw_local(run_, tensor, uniforms(low, high));
}

void Initializer::normal_(const at::Tensor& tensor, double mean, double std) {
  draw_local(run_, tensor, normals(mean, std));
}

void Initializer::trunc_normal_(const at::Tensor& tensor, double mean, double std, double low,
                                double high) {
  // The inverse of the distribution function, between its values at the two ends.
  const auto below = [&](double x) { return std::erf((x - mean) / (std * std::numbers::sqrt2)); };
  const double first = below(low), last = below(high);
  draw_local(run_, tensor, by_element([=](int64_t, ElementRandom& random) {
               const double x = calc_erfinv(first + (last - first) * random.uniform());
               return std::clamp(mean + std * std::numbers::sqrt2 * x, low, high);
             }));
}

void Initializer::kaiming_uniform_(const at::Tensor& tensor, double a,
                                   torch::nn::init::FanModeType mode,
                                   torch::nn::init::NonlinearityType nonlinearity) {
  if (!tensor.defined()) return;
  const double bound = std::sqrt(3.0) * kaiming_std(fans_of(sizes(tensor)), a, mode, nonlinearity);
  uniform_(tensor, -bound, bound);
}

void Initializer::kaiming_normal_(const at::Tensor& tensor, double a,
                                  torch::nn::init::FanModeType mode,
                                  torch::nn::init::NonlinearityType nonlinearity) {
  if (tensor.defined()) normal_(tensor, 0, kaiming_std(fans_of(sizes(tensor)), a, mode, nonlinearity));
}

void Initializer::xavier_uniform_(const at::Tensor& tensor, double gain) {
  if (!tensor.defined()) return;
  const double bound = std::sqrt(3.0) * xavier_std(fans_of(sizes(tensor)), gain);
  uniform_(tensor, -bound, bound);
}

void Initializer::xavier_normal_(const at::Tensor& tensor, double gain) {
  if (tensor.defined()) normal_(tensor, 0, xavier_std(fans_of(sizes(tensor)), gain));
}

void Initializer::eye_(const at::Tensor& matrix) {
  if (!matrix.defined()) return;
  const auto sizes = this->sizes(matrix);
  require(sizes.size() == 2, "initializer: eye_ needs a matrix, found sizes {}",
          fmt::join(sizes, "x"));
  elementwise_(matrix, [columns = sizes[1]](int64_t element, ElementRandom&) {
    return element / columns == element % columns ? 1.0 : 0.0;
  });
}

void Initializer::dirac_(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  const auto sizes = this->sizes(tensor).vec();
  require(sizes.size() >= 3 && sizes.size() <= 5,
          "initializer: dirac_ needs 3, 4 or 5 dimensions, found sizes {}", fmt::join(sizes, "x"));
  elementwise_(tensor, [sizes](int64_t element, ElementRandom&) {
    bool is_center = true;
    for (size_t dim = sizes.size(); dim-- > 2; element /= sizes[dim])
      is_center &= element % sizes[dim] == sizes[dim] / 2;
    return is_center && element / sizes[1] == element % sizes[1] ? 1.0 : 0.0;
  });
}

void Initializer::fill_range_(const at::Tensor& tensor, ElementRange range, double value) {
  if (!tensor.defined()) return;
  const int64_t numel = c10::multiply_integers(sizes(tensor));
  require(0 <= range.begin && range.begin <= range.end && range.end <= numel,
          "initializer: expected a range within {} elements, found [{}, {})", numel, range.begin,
          range.end);
  const auto* entry = run_.target(tensor);
  if (entry == nullptr) return;
  at::NoGradGuard no_grad;
  const auto own = entry->group ? plain_view(entry->tensor) : entry->tensor.detach();
  const auto present = own.reshape({-1}).to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
  int64_t done = 0;
  for (const auto& held : run_.ranges(*entry)) {
    const auto begin = std::max(range.begin, held.begin), end = std::min(range.end, held.end);
    if (begin < end) present.narrow(0, done + begin - held.begin, end - begin).fill_(value);
    done += held.count();
  }
  run_.write_local(*entry, present);
}

void Initializer::orthogonal_(const at::Tensor& tensor, double gain) {
  if (!tensor.defined()) return;
  const auto sizes = this->sizes(tensor);
  require(sizes.size() >= 2,
          "initializer: orthogonal_ needs two dimensions or more, found sizes {}",
          fmt::join(sizes, "x"));
  const auto* entry = run_.target(tensor);
  const auto numel = c10::multiply_integers(sizes);
  if (entry == nullptr || numel == 0) return;
  const auto normal = run_.draw(*entry, {{0, numel}}, normals(0, 1)).view({sizes[0], -1});
  run_.write_whole(*entry, orthogonal(normal, gain));
}

void Initializer::sparse_(const at::Tensor& matrix, double sparsity, double std) {
  if (!matrix.defined()) return;
  const auto sizes = this->sizes(matrix);
  require(sizes.size() == 2, "initializer: sparse_ needs a matrix, found sizes {}",
          fmt::join(sizes, "x"));
  const auto* entry = run_.target(matrix);
  if (entry == nullptr) return;
  constexpr uint64_t kOrder = 0x9e3779b97f4a7c15;  // other numbers than the values
  const std::vector<ElementRange> all{{0, c10::multiply_integers(sizes)}};
  const auto values = run_.draw(*entry, all, normals(0, std)).view(sizes);
  const auto order = run_.draw(*entry, all, uniforms(0, 1), kOrder)
                         .view(sizes)
                         .argsort(/*stable=*/true, /*dim=*/0, /*descending=*/false);
  const auto zeros = static_cast<int64_t>(std::ceil(sparsity * static_cast<double>(sizes[0])));
  run_.write_whole(*entry, values.scatter(0, order.narrow(0, 0, zeros), 0));
}

void Initializer::whole_(const at::Tensor& tensor,
                         const std::function<void(at::Tensor&, at::Generator)>& function) {
  const auto* entry = run_.target(tensor);
  if (entry == nullptr) return;
  const auto dtype = entry->tensor.scalar_type();
  const bool is_short = dtype == at::kHalf || dtype == at::kBFloat16;
  auto whole = at::zeros(sizes(tensor), at::TensorOptions().dtype(is_short ? at::kFloat : dtype));
  at::NoGradGuard no_grad;
  function(whole, at::make_generator<at::CPUGeneratorImpl>(run_.generator_seed(*entry)));
  require(whole.sizes() == sizes(tensor),
          "initializer: the function given to whole_ changed the sizes of '{}' to {}; expected {}", entry->name,
          fmt::join(whole.sizes(), "x"), fmt::join(sizes(tensor), "x"));
  run_.write_whole(*entry, whole);
}

void Initializer::copy_(const at::Tensor& tensor, const at::Tensor& whole) {
  if (!tensor.defined()) return;
  require(whole.sizes() == sizes(tensor), "initializer: copy_ needs a tensor of sizes {}, found {}",
          fmt::join(sizes(tensor), "x"), fmt::join(whole.sizes(), "x"));
  if (const auto* entry = run_.target(tensor)) run_.write_whole(*entry, whole.detach());
}

}  // namespace fsdp
