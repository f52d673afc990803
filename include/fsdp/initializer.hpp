#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "fsdp/local_ranges.hpp"

namespace fsdp {

class InitRun;  // lib/api: one run over a module's parameters

/// The random numbers of one element of one parameter: they depend on the seed, the parameter's
/// name and the element's position in the whole parameter alone.
///
/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC
/// 2011), which needs no state: any element's numbers can be had at any time. At most 64 words an
/// element.
class ElementRandom {
 public:
  ElementRandom(uint64_t seed, uint64_t stream, int64_t element)
      : seed_(seed), stream_(stream), element_(element) {}
  uint32_t bits();
  double uniform();  ///< in [0, 1), of two words
  double normal();   ///< mean 0, standard deviation 1; of four words

 private:
  uint64_t seed_, stream_;
  int64_t element_;
  int used_ = 0;
  uint32_t words_[4];
};

/// How many inputs each output of a layer has, and outputs each input.
struct Fans {
  int64_t in, out;
};
/// By the sizes of the layer's whole weight, as torch::nn::init counts them. Throws UsageError below two dimensions.
Fans fans_of(c10::IntArrayRef sizes);

/// Gives parameters and buffers their first values, each rank its own part.
///
/// The functions of torch::nn::init, with the same rules: take what a module's member holds (or an
/// entry of its table), and read fans and shapes off the whole parameter. Instead of LibTorch's
/// generator, whose numbers depend on who draws first, they use `ElementRandom`: so the values are
/// the same, bit for bit, on any number of ranks and in any layout. Nothing is communicated.
///
/// An undefined tensor (`bias` of Linear(bias=false)) is passed over; so is one that has its values
/// already, when `materialize` runs. Throws UsageError for a tensor that is not the module's.
class Initializer {
 public:
  explicit Initializer(InitRun& run) : run_(run) {}

  // --- element by element: only this rank's elements are computed
  void constant_(const at::Tensor& tensor, double value);
  void zeros_(const at::Tensor& tensor) { constant_(tensor, 0); }
  void ones_(const at::Tensor& tensor) { constant_(tensor, 1); }
  void uniform_(const at::Tensor& tensor, double low = 0, double high = 1);
  void normal_(const at::Tensor& tensor, double mean = 0, double std = 1);
  /// A normal distribution cut to [low, high].
  void trunc_normal_(const at::Tensor& tensor, double mean = 0, double std = 1, double low = -2,
                     double high = 2);
  void kaiming_uniform_(const at::Tensor& tensor, double a = 0,
                        torch::nn::init::FanModeType mode = torch::kFanIn,
                        torch::nn::init::NonlinearityType nonlinearity = torch::kLeakyReLU);
  void kaiming_normal_(const at::Tensor& tensor, double a = 0,
                       torch::nn::init::FanModeType mode = torch::kFanIn,
                       torch::nn::init::NonlinearityType nonlinearity = torch::kLeakyReLU);
  void xavier_uniform_(const at::Tensor& tensor, double gain = 1);
  void xavier_normal_(const at::Tensor& tensor, double gain = 1);
  void eye_(const at::Tensor& matrix);
  void dirac_(const at::Tensor& tensor);
  /// These elements of the whole tensor, in row-major order, get `value`; the others stay. Row r of
  /// a matrix of n columns is {r * n, (r + 1) * n}.
  void fill_range_(const at::Tensor& tensor, ElementRange range, double value);
  /// function(element, random): the value of one element by its row-major position. Called from
  /// several threads.
  void elementwise_(const at::Tensor& tensor,
                    const std::function<double(int64_t element, ElementRandom& random)>& function);

  // --- one whole parameter at a time: every rank computes it and keeps its part
  void orthogonal_(const at::Tensor& tensor, double gain = 1);
  void sparse_(const at::Tensor& matrix, double sparsity, double std = 0.01);
  /// function(whole, generator): changes `whole`, zeros on the CPU of the whole parameter's sizes.
  /// It must draw from `generator` alone, which is seeded for this parameter.
  void whole_(const at::Tensor& tensor,
              const std::function<void(at::Tensor& whole, at::Generator generator)>& function);
  /// Known values, such as a table of frequencies; of the whole tensor's sizes.
  void copy_(const at::Tensor& tensor, const at::Tensor& whole);

  /// Of the whole parameter, whatever part this rank holds. For its fans: `fans_of`.
  c10::IntArrayRef sizes(const at::Tensor& tensor) const;

 private:
  InitRun& run_;
};

/// How the modules of one class get their first values.
struct ModuleInitializer {
  /// False if the module is not of that class.
  std::function<bool(torch::nn::Module& module, Initializer& init)> apply;
};

/// function(module, init): gives values to the parameters and buffers of a `Module` (or a class
/// derived from it; a holder such as torch::nn::Linear means its Impl), and to those of modules in
/// it if theirs are not to stay as their own classes have made them. With torch::nn::Module as the
/// class it is called for every module, like FSDP1's param_init_fn. It is called twice, first to
/// learn what it covers, and must use `init` alone to write.
///
///     fsdp::initializer<RMSNormImpl>(
///         [](RMSNormImpl& norm, fsdp::Initializer& init) { init.ones_(norm.weight); })
template <class Module, class Function>
ModuleInitializer initializer(Function function) {
  if constexpr (std::is_base_of_v<torch::nn::Module, Module>) {
    return {[function = std::move(function)](torch::nn::Module& module, Initializer& init) {
      auto* known = dynamic_cast<Module*>(&module);
      if (known != nullptr) function(*known, init);
      return known != nullptr;
    }};
  } else {
    return initializer<typename Module::ContainedType>(std::move(function));
  }
}

}  // namespace fsdp
