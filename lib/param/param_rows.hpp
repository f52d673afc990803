#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "param/param_spec.hpp"

// This rank's rows of a parameter in its group's memory. A piece is 1-D bytes, spec.local_bytes() long or longer; whole
// parameters have spec.sizes() and spec.strides(). Where nothing else is said, on the current stream.
namespace fsdp {

/// Returns the strides that the unsharded parameter has from fully_shard on: its own if they leave no gaps or overlaps
/// (channels-last and transposed ones too), else row-major.
std::vector<int64_t> kept_strides(const at::Tensor& unsharded_param);

/// Returns the rows as a tensor on top of `piece`.
at::Tensor rows_in(const ParamSpec& spec, const at::Tensor& piece);

/// Copies the rows of `whole` to `piece`, then zeros.
void copy_rows(const ParamSpec& spec, const at::Tensor& whole, const at::Tensor& piece);

/// Returns the unsharded parameter's own memory as a piece, if it can serve as one (one rank, nothing to rearrange or to cast,
/// on `device`); else an undefined tensor.
at::Tensor own_memory(const ParamSpec& spec, const at::Tensor& unsharded_param, c10::Device device);

/// Casts a piece to what is gathered (1-D bytes, as many elements).
void cast_rows(const ParamSpec& spec, const at::Tensor& piece, const at::Tensor& gathered);

/// Takes the rows of the unsharded parameter (1-D bytes, spec.unsharded_bytes() long) over into `piece`.
/// shown: what all ranks saw of the piece (1-D, as long or longer, param_dtype), where that is not the piece itself or its
/// cast; elements that still show it keep their value.
void write_rows_back(const ParamSpec& spec, const at::Tensor& unsharded, const at::Tensor& piece, const at::Tensor& shown = {});

}  // namespace fsdp
