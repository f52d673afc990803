#pragma once

#include <ATen/core/Generator.h>
#include <torch/nn/init.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <cstdint>
#include <functional>
#include <type_traits>
#include <utility>

#include "fsdp/api.hpp"
#include "fsdp/local_ranges.hpp"

namespace fsdp {

class InitRun;  // lib/api: one run over a module's parameters

/// The random numbers of one element of a parameter. They depend only on the seed, the parameter's name and the element's
/// position in the whole parameter.
///
/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011). It has no state, so the
/// numbers of any element can be computed alone. At most 64 words for an element.
class FSDP_API ElementRandom {
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

/// A layer's fan-in and fan-out.
struct FSDP_API Fans {
  int64_t in, out;
};
/// The fans of a layer with a weight of these sizes, as torch::nn::init computes them. Throws UsageError for fewer than two
/// dimensions.
FSDP_API Fans fans_of(c10::IntArrayRef sizes);

/// Gives parameters and buffers their initial values, each rank its own part.
///
/// It has the functions of torch::nn::init, with the same formulas. A tensor is given as the module's member holds it, and its
/// fans and sizes are the whole parameter's. Random numbers come from `ElementRandom` in place of LibTorch's generator, so the
/// values are the same, bit for bit, on any number of ranks and in any layout. No communication.
///
/// Undefined tensors (`bias` of Linear(bias=false)) are skipped, and in `materialize` tensors that have values. Throws
/// UsageError for a tensor that is not the module's.
class FSDP_API Initializer {
 public:
  explicit Initializer(InitRun& run) : run_(run) {}

  // --- elementwise: each rank computes its own elements only
  void constant_(const at::Tensor& tensor, double value);
  void zeros_(const at::Tensor& tensor) { constant_(tensor, 0); }
  void ones_(const at::Tensor& tensor) { constant_(tensor, 1); }
  void uniform_(const at::Tensor& tensor, double low = 0, double high = 1);
  void normal_(const at::Tensor& tensor, double mean = 0, double std = 1);
  /// A normal distribution that is truncated to [low, high].
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
  /// Sets a range of the whole tensor's elements, in row-major order. Row r of a matrix with n columns is
  /// {r * n, (r + 1) * n}.
  void fill_range_(const at::Tensor& tensor, ElementRange range, double value);
  /// function(element, random): returns the value of the element at this row-major position. Called from several threads.
  void elementwise_(const at::Tensor& tensor,
                    const std::function<double(int64_t element, ElementRandom& random)>& function);

  // --- whole: every rank computes the whole parameter and keeps its part
  void orthogonal_(const at::Tensor& tensor, double gain = 1);
  void sparse_(const at::Tensor& matrix, double sparsity, double std = 0.01);
  /// function(whole, generator): writes the values to `whole`, a tensor of zeros on the CPU with the whole parameter's sizes.
  /// Random numbers have to come from `generator`, which is seeded for this parameter.
  void whole_(const at::Tensor& tensor,
              const std::function<void(at::Tensor& whole, at::Generator generator)>& function);
  /// Copies values, such as a table of frequencies, from `whole`, which has the whole tensor's sizes.
  void copy_(const at::Tensor& tensor, const at::Tensor& whole);

  /// The whole parameter's sizes, for `fans_of` for example.
  c10::IntArrayRef sizes(const at::Tensor& tensor) const;

 private:
  InitRun& run_;
};

/// Gives the modules of one class their initial values.
struct FSDP_API ModuleInitializer {
  /// Returns false if the module is not of that class.
  std::function<bool(torch::nn::Module& module, Initializer& init)> apply;
};

/// Makes an initializer of a class. `Module` is the class, or a holder of it such as torch::nn::Linear; derived classes count.
/// With torch::nn::Module it is called for every module, like FSDP1's param_init_fn.
///
/// function(module, init): gives values to the module's parameters and buffers, and, to overwrite what their own classes gave,
/// to those of modules in it. It is called twice, first to find what it covers. It may write through `init` only.
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
