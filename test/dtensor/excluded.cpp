#include "excluded.hpp"

#include <set>
#include <sstream>
#include <string_view>
#include <vector>

#include "draw_call.hpp"
#include "dtensor/operator_info.hpp"

namespace fsdp::test {

namespace {

struct Group {
  std::string_view reason, names;
};
const std::vector<Group> kGroups = {
    {"is for sparse tensors, and a DTensor is dense",
     "ccol_indices ccol_indices_copy coalesce col_indices col_indices_copy copy_sparse_to_sparse crow_indices crow_indices_copy hspmm indices "
     "indices_copy is_coalesced resize_as_sparse row_indices row_indices_copy smm sparse_bsc_tensor sparse_bsr_tensor sparse_compressed_tensor "
     "sparse_coo_tensor sparse_csc_tensor sparse_csr_tensor sparse_mask sparse_resize sparse_resize_and_clear sparse_sampled_addmm sspaddmm values "
     "values_copy embedding_sparse_backward native_norm to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc to_sparse_csr"},
    {"is for quantized tensors, which nobody distributes",
     "empty_quantized fused_moving_avg_obs_fake_quant int_repr q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point "
     "qscheme quantize_per_channel quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm quantized_gru quantized_gru_cell "
     "quantized_lstm quantized_lstm_cell quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d quantized_rnn_relu_cell "
     "quantized_rnn_tanh_cell"},
    {"is for nested tensors", "nested_to_padded_tensor to_padded_tensor linear_backward matmul_backward"},
    {"has a kernel on another device or with another library only",
     "conv_depthwise3d batch_norm_backward_elemt batch_norm_backward_reduce batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts "
     "batch_norm_stats convolution_backward_overrideable convolution_overrideable cudnn_affine_grid_generator "
     "cudnn_affine_grid_generator_backward cudnn_batch_norm cudnn_batch_norm_backward cudnn_convolution cudnn_convolution_add_relu "
     "cudnn_convolution_relu cudnn_convolution_transpose cudnn_grid_sampler cudnn_grid_sampler_backward fbgemm_linear_fp16_weight "
     "fbgemm_linear_fp16_weight_fp32_activation fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation "
     "fbgemm_linear_quantize_weight fbgemm_pack_gemm_matrix_fp16 fbgemm_pack_quantized_matrix lstm_mps_backward max_pool2d_backward "
     "miopen_batch_norm miopen_batch_norm_backward miopen_convolution miopen_convolution_add_relu miopen_convolution_relu "
     "miopen_convolution_transpose miopen_ctc_loss miopen_depthwise_convolution miopen_rnn miopen_rnn_backward "
     "mkldnn_adaptive_avg_pool2d mkldnn_adaptive_avg_pool2d_backward mkldnn_convolution mkldnn_linear mkldnn_linear_backward "
     "mkldnn_linear_backward_input mkldnn_linear_backward_weights mkldnn_max_pool2d mkldnn_max_pool2d_backward mkldnn_max_pool3d "
     "mkldnn_max_pool3d_backward mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight mkldnn_rnn_layer mkldnn_rnn_layer_backward "
     "mps_convolution_backward mps_convolution_transpose_backward pin_memory record_stream to_mkldnn to_mkldnn_backward"},
    {"asks how a tensor lies in memory, and a DTensor says that it is not contiguous so that readers of memory copy it",
     "is_contiguous sym_is_contiguous is_set_to"},
    {"would change a tensor's sizes or memory, which a DTensor refuses: test_dtensor_errors.cpp", "resize resize_as set"},
    {"keeps a DTensor a DTensor: test_propagation.cpp", "set_data shallow_copy_data"},
    {"shows a sharded tensor's memory as another dtype, which a DTensor refuses", "real imag view_as_real view_as_complex"},
    {"reads beyond its operand's sizes", "slice_inverse"},
    {"reads a file", "from_file"},
    {"is for tensors with named dimensions, in torch 2.11 only", "align_to refine_names"},
    {"is only for tensors that autograd records", "requires_grad retain_grad"},
};

}  // namespace

const std::map<std::string, std::string>& excluded() {
  static const auto names = [] {
    std::map<std::string, std::string> by_name;
    for (const auto& group : kGroups) {
      std::istringstream words{std::string(group.names)};
      for (std::string name; words >> name;) by_name[name] = group.reason;
    }
    return by_name;
  }();
  return names;
}

bool leaves_values_open(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"};
  return names.count(base_name(op)) != 0;
}

bool shows_no_memory(const c10::OperatorHandle& op) {
  static const std::set<std::string> names{"contiguous", "ravel", "_conj", "_neg_view", "conj", "adjoint", "mH", "matrix_H"};
  return names.count(base_name(op)) != 0;
}

bool is_written_result(const c10::OperatorHandle& op, size_t tensor) {
  const auto& returns = op.schema().returns();
  return tensor < returns.size() && returns[tensor].alias_info() != nullptr && returns[tensor].alias_info()->isWrite();
}

bool is_skipped(const c10::OperatorHandle& op) {
  // Those of programs that LibTorch itself calls; most private ones check nothing and crash.
  static const std::set<std::string> private_names{
      "_softmax", "_log_softmax", "_to_copy", "_unsafe_view", "_conj", "_neg_view", "_conj_physical", "_is_all_true", "_is_any_true", "_aminmax",
      "_safe_softmax", "_shape_as_tensor", "_unique", "_unique2", "_local_scalar_dense", "_fused_adam", "_fused_adamw",
      "_amp_foreach_non_finite_check_and_unscale", "_amp_update_scale"};
  // Of packed sequences; what shows memory as another dtype; what LibTorch itself writes beside a transposed `out`.
  static const std::set<std::string> overloads{"aten::rnn_tanh.data", "aten::rnn_relu.data", "aten::gru.data",
                                               "aten::lstm.data",     "aten::view.dtype",    "aten::linalg_lu.out",
                                               "aten::lu_unpack.out"};
  const auto name = base_name(op);
  if (info_of(op).family == Family::kRefused || overloads.count(toString(op.operator_name())) != 0) return true;
  if (is_public(name) || name.starts_with("__") || name.starts_with("_foreach_")) return false;
  return private_names.count(name) == 0;
}

// A rank that gathers while it holds the generator would wait for one that waits for the generator.
bool needs_one_rank(const c10::OperatorHandle& op) {
  if (!is_random(op) || generator_argument(op)) return false;
  if (op.schema().overload_name() == "Tensor") return true;  // whose other tensor is gathered
  const auto family = info_of(op).family;
  return family != Family::kDraw && family != Family::kDrawLike;
}

}  // namespace fsdp::test
